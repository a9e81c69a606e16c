"""Ranks that share the cores of a machine: each computes faster while others wait.

*In:* tasks whose times hold while all devices of a machine compute, and the timeline that follows from them.
*Out:* the tasks and the timeline in which a rank has the part of the cores that others leave.
*Invariant:* ranks that run a task together compute and wait together, so they leave each other nothing.
Devices with cores of their own keep their times.

With r devices on C cores, of which k compute, a device is

    max(1, r / C) / max(1, k / C)

times as fast as the resource file says. A rank of another task counts for the part of its time in which it
computes. How long others compute depends on how fast they are, so times and timeline are computed in turns.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from distgraph.resources import Cluster
from distgraph.runtime.forecast.stream_model import TaskTime
from distgraph.runtime.forecast.task_forecast import TaskForecast
from distgraph.runtime.schedule.timeline import Timeline

_TURNS: Final = 6
_SETTLED: Final = 1e-3  # relative change of the step below which no further turn is made


@dataclass(frozen=True, slots=True)
class CoreGroup:
    """Ranks on the cores that they share.

    Attributes:
        ranks: of the job.
        devices: of the machine, or of the part of it, whose numbers hold while all of them compute.
        cores: that these devices share.
    """

    ranks: tuple[int, ...]
    devices: int
    cores: float

    def speed(self, computing: float) -> float:
        """How many times as fast as stated a rank is while some ranks compute, itself among them; linear
        between whole numbers of ranks."""
        few = math.floor(computing)
        part = computing - few
        slow, fast = (1 / max(1.0, ranks / self.cores) for ranks in (few + 1, few))
        return max(1.0, self.devices / self.cores) * (part * slow + (1 - part) * fast)


def core_groups(cluster: Cluster, devices: Sequence[int]) -> dict[int, CoreGroup]:
    """Rank -> the group whose cores it shares; only ranks of machines with more devices than cores.

    Where equally many devices share each of a whole number of cores, neighbours share one, since ranks are
    then bound to cores (`CoreBinding.bind`).

    Args:
        cluster: states the cores.
        devices: device of every rank.
    """
    counts: dict[int, int] = {}
    for device in cluster.devices:
        counts[device.machine] = counts.get(device.machine, 0) + 1
    members: dict[tuple[int, int], list[int]] = {}
    sizes: dict[tuple[int, int], tuple[int, float]] = {}
    for rank, number in enumerate(devices):
        device = cluster.devices[number]
        count, cores = counts[device.machine], device.compute.cores
        if cores is None or count <= cores:
            continue
        key, size = (device.machine, 0), (count, cores)
        if cores == int(cores) and count % int(cores) == 0:
            each = count // int(cores)
            key, size = (device.machine, device.local // each), (each, 1.0)
        members.setdefault(key, []).append(rank)
        sizes[key] = size
    return {rank: CoreGroup(tuple(ranks), *sizes[key]) for key, ranks in members.items() for rank in ranks}


def with_shared_cores(
    tasks: Mapping[str, TaskForecast],
    simulated: Callable[[Mapping[str, TaskForecast]], Timeline],
    groups: Mapping[int, CoreGroup],
) -> tuple[dict[str, TaskForecast], Timeline]:
    """Tasks and timeline of ranks that share cores.

    Args:
        tasks: with the times that hold while all devices compute.
        simulated: the timeline of tasks.
        groups: see `core_groups`.
    """
    faster, timeline = dict(tasks), simulated(tasks)
    for _ in range(_TURNS):
        speeds = _speeds(faster, timeline, groups)
        faster = {name: _at_speed(task, speeds.get(name, 1.0)) for name, task in tasks.items()}
        before, timeline = timeline.makespan, simulated(faster)
        if abs(timeline.makespan - before) <= _SETTLED * before:
            break
    return faster, timeline


def _at_speed(task: TaskForecast, speed: float) -> TaskForecast:
    """A task whose ranks compute some times as fast."""

    def at_speed(time: TaskTime) -> TaskTime:
        compute = time.compute / speed
        return replace(time, seconds=time.seconds - time.compute + compute, compute=compute)

    return replace(task, body=at_speed(task.body), last=at_speed(task.last))


def _speeds(
    tasks: Mapping[str, TaskForecast], timeline: Timeline, groups: Mapping[int, CoreGroup]
) -> dict[str, float]:
    """Task -> how many times as fast as stated its slowest rank computes, on average over its runs."""
    column_of = {rank: column for column, ranks in enumerate(timeline.columns) for rank in ranks}
    ranks_of = {task.name: task.ranks for task in timeline.graph.tasks}
    newest = timeline.graph.micro_batches - 1
    runs: dict[int, list[tuple[float, float, float]]] = {}  # column -> start, end, part that computes
    instances: dict[str, list[tuple[float, float]]] = {}
    for run in timeline.intervals:
        instances.setdefault(run.task, []).append((run.start, run.end))
        times = tasks[run.task]
        time = times.last if run.micro == newest else times.body
        part = time.compute / time.seconds if time.seconds else 0.0
        for column in {column_of[rank] for rank in ranks_of[run.task]}:
            runs.setdefault(column, []).append((run.start, run.end, part))
    for of_column in runs.values():
        of_column.sort()
    speeds = {}
    for name, spans in instances.items():
        rank = tasks[name].rank
        if (group := groups.get(rank)) is None:
            continue
        others = [column_of[other] for other in group.ranks if other not in ranks_of[name]]
        together = len(group.ranks) - len(others)
        seconds = sum(end - start for start, end in spans)
        if seconds:
            alone = [runs.get(column, []) for column in others if column in runs]
            done = sum(_work(group, together, alone, start, end) for start, end in spans)
            speeds[name] = done / seconds
    return speeds


def _work(
    group: CoreGroup,
    together: int,
    others: Sequence[Sequence[tuple[float, float, float]]],
    start: float,
    end: float,
) -> float:
    """The integral of the speed of a rank from `start` to `end`.

    Args:
        group: of the rank.
        together: ranks of the group that run the task.
        others: for each other rank of the group its runs: start, end, part that computes.
        start, end: seconds of the timeline.
    """
    beside = [_between(runs, start, end) for runs in others]
    times = sorted({start, end, *(time for runs in beside for run in runs for time in run[:2])})
    times = [time for time in times if start <= time <= end]
    total = 0.0
    for begin, stop in pairwise(times):
        middle = (begin + stop) / 2
        computing = sum(part for runs in beside for first, last, part in runs if first <= middle < last)
        total += (stop - begin) * group.speed(together + computing)
    return total


def _between(
    runs: Sequence[tuple[float, float, float]], start: float, end: float
) -> Sequence[tuple[float, float, float]]:
    """The runs that overlap with a span of time; runs of one rank do not overlap each other."""
    first = max(0, bisect_left(runs, (start,)) - 1)
    return runs[first : bisect_left(runs, (end,))]
