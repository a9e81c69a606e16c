"""Memory in use over the time of a step, by category.

*In:* a rank program, its storage, a timeline.
*Out:* step functions of time: bytes of values that are alive.
*Invariant:* never more than what the worker allocates for the whole step (`rank_memory`).

Parameters, states, inputs and scratch memory count all the time; the largest workspace of the kernels of a
task counts while the task runs. A persistent value counts from the first task that writes it to the end of
the last task that reads it; a value with a ring does so for each micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from distgraph.passes.partition import RankProgram
from distgraph.runtime.forecast.memory_forecast import categories, rank_memory
from distgraph.runtime.program.storage import Storage, nbytes
from distgraph.runtime.schedule.timeline import Interval, Timeline


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Bytes in use on one rank.

    Attributes:
        rank: the rank.
        times: seconds at which the memory in use changes, ascending from 0.
        bytes: category -> bytes in use from each of these times on.
    """

    rank: int
    times: tuple[float, ...]
    bytes: dict[str, tuple[int, ...]]

    @property
    def peak(self) -> int:
        """Most bytes in use at once."""
        return max(map(sum, zip(*self.bytes.values(), strict=True)), default=0)


Lifetime = tuple[str, frozenset[str], bool]
"""Task that writes a value, tasks that read it ("" is the end of the step), and whether it has a ring."""


def occupancy(
    program: RankProgram,
    storage: Storage,
    timeline: Timeline,
    workspaces: Mapping[str, int] | None = None,
) -> Occupancy:
    """Bytes in use on one rank over a step; `workspaces` has those that the kernels of a task allocate."""
    workspaces = workspaces or {}
    memory = rank_memory(program, storage, workspaces)
    lifetimes = _lifetimes(program, storage)
    constant = {name: size for name, size in memory.categories.items() if size}
    if workspaces:
        constant["temporary"] -= max(workspaces.values())
    sizes: dict[tuple[str, Lifetime], int] = defaultdict(int)
    for name, category in categories(program, storage).items():
        if name in lifetimes:
            size = nbytes(program, name)
            sizes[category, lifetimes[name]] += size
            constant[category] -= size * storage.rings.get(name, 1)
    changes: dict[float, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    constant.setdefault("temporary", 0)
    runs: dict[str, list[Interval]] = defaultdict(list)
    for run in timeline.of_rank(program.rank):
        runs[run.task].append(run)
        changes[run.start]["temporary"] += workspaces.get(run.task, 0)
        changes[run.end]["temporary"] -= workspaces.get(run.task, 0)
    for (category, lifetime), size in sizes.items():
        for start, end in _spans(lifetime, runs, timeline.makespan):
            changes[start][category] += size
            changes[end][category] -= size
    times = tuple(sorted({0.0, *changes}))
    in_use: dict[str, tuple[int, ...]] = {}
    for category, size in constant.items():
        levels = []
        for time in times:
            size += changes[time][category] if time in changes else 0
            levels.append(size)
        in_use[category] = tuple(levels)
    return Occupancy(program.rank, times, in_use)


def _lifetimes(program: RankProgram, storage: Storage) -> dict[str, Lifetime]:
    """Root of every persistent or ring value -> the tasks that write and read its memory."""
    makers: dict[str, str] = {}
    readers: dict[str, set[str]] = defaultdict(set)
    for task in program.tasks:
        for local in task.ops:
            if local.mode != "send":
                for value in local.op.results:
                    makers.setdefault(storage.slots[value.name].root, task.name)
            for value in local.op.operands:
                if value.name in storage.slots:
                    readers[storage.slots[value.name].root].add(task.name)
    for name in program.graph.live_out:
        if name in storage.slots:
            readers[storage.slots[name].root].add("")
    return {
        name: (maker, frozenset(readers[name]), storage.slots[name].kind == "ring")
        for name, maker in makers.items()
        if storage.slots[name].kind in ("persistent", "ring")
    }


def _spans(lifetime: Lifetime, runs: dict[str, list[Interval]], makespan: float) -> list[tuple[float, float]]:
    """(start, end) of the lifetime of a value: one a micro-batch for a ring."""
    maker, readers, ring = lifetime
    if not ring:
        end = max((run.end for name in (maker, *readers) for run in runs[name]), default=0.0)
        return [(min(run.start for run in runs[maker]), makespan if "" in readers else end)]
    spans = []
    for made in runs[maker]:
        ends = [made.end]
        for name in readers:
            ends += [run.end for run in runs[name] if run.micro == made.micro]
        spans.append((made.start, makespan if "" in readers else max(ends)))
    return spans
