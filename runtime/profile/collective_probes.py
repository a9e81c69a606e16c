"""Collectives and messages that are sent to see what they cost between the ranks of a job.

*In:* a transport with two ranks or more.
*Out:* seconds of every collective on every group of ranks that a mesh can ask for.
*Invariant:* all groups of a pattern communicate at the same time, as in training, and the slowest rank
counts. A run's time is the median over runs; on ranks that share cores the mean, less what they compute.

What is sent is written right before each run, as in a step: the caches of another core give up fresh bytes
more slowly than old ones. Two ranks on two cores, a reduce_scatter of 4 MiB: 0.21 to 0.30 ms of bytes sent
before, 0.27 to 0.50 ms of fresh ones (medians, two runs).

Where ranks share cores, a collective is also measured behind computation for longer than a time slice of the
scheduler, and what counts is by how much it lengthens that: ranks that come to it one after the other, and do
not get their core back at once, wait for each other. Four ranks on two cores, all_reduce of 1 KiB, medians of
9 rounds, one run after the other and behind 2 and 6 ms of computation: pairs 0.12, 0.20, 0.43 ms, all four
0.16, 0.24, 0.71 ms. What takes as long one after the other nothing hides: it is the work of the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import numpy as np

from distgraph.ir.collectives import COLLECTIVES
from distgraph.ir.mesh import ProcessMesh
from distgraph.runtime.transport import collectives
from distgraph.runtime.transport.transport import Group, Transport, even_counts

ATTEND: Final = "attend"
"""Kind of the pattern that measures how long a rank is busy with a message, not how long that takes."""
SIZES: Final = tuple(2**power for power in range(10, 29, 2))
"""Bytes of a message: 1 KiB to 256 MiB."""
_ITEM: Final = 4  # bytes of an element, f32
WORK_SECONDS: Final = 0.002
"""Of the processor, before a message of ranks that share cores."""
_WORK_EDGE: Final = 128  # of the square matrices that are multiplied meanwhile
_RUNS_BEHIND_WORK: Final = 10  # at most
_LEAST: Final = 1e-6  # seconds of a message, should the difference of two noisy times be less


@dataclass(frozen=True, slots=True)
class Pattern:
    """One collective of one size on groups of ranks that use it at the same time.

    Attributes:
        kind: see `KINDS`.
        groups: disjoint groups of ranks, equally many in each.
        nbytes: as in `distgraph.resources.collective_cost.wire_bytes`.
        work: seconds for which each rank computes before every run.
    """

    kind: str
    groups: tuple[Group, ...]
    nbytes: int
    work: float = 0.0

    @property
    def name(self) -> str:
        """Unique name, such as all_reduce/0-1,2-3/1024."""
        groups = ",".join("-".join(map(str, group)) for group in self.groups)
        behind = f" behind {1e3 * self.work:g} ms" if self.work else ""
        return f"{self.kind}{behind}/{groups}/{self.nbytes}"


def axis_groups(ranks: int) -> tuple[tuple[Group, ...], ...]:
    """Groups along every axis of every mesh of two axes that has all ranks, and of the mesh of one.

    Example:
        >>> axis_groups(4)
        (((0, 1, 2, 3),), ((0, 2), (1, 3)), ((0, 1), (2, 3)))
    """
    found: dict[tuple[Group, ...], None] = {}
    for first in range(ranks, 1, -1):
        if ranks % first == 0:
            mesh = ProcessMesh(np.arange(ranks).reshape(first, ranks // first), ["x", "y"])
            for axis in mesh.axes:
                if mesh.axis_size(axis) > 1:
                    found[mesh.groups([axis])] = None
    return tuple(found)


def patterns(ranks: int, limit: float = 2.0**28, *, shared: bool = False) -> tuple[Pattern, ...]:
    """Everything that a profile sends, small messages first.

    Args:
        ranks: of the job.
        limit: bytes; no message is larger.
        shared: whether ranks share cores; then everything behind work, and what a program can start before
            it computes also without.
    """
    work = WORK_SECONDS if shared else 0.0
    groups = axis_groups(ranks)
    found = []
    found.append(Pattern(ATTEND, ((0, 1),), SIZES[0]))
    for nbytes in (size for size in SIZES if size <= limit):
        for kind in KINDS:
            if kind == "send":  # from the first rank to every kind of place: next door and far away
                pairs = {(members[0][0], members[0][-1]) for members in groups} | {(0, 1)}
                found += [Pattern(kind, (pair,), nbytes, work) for pair in sorted(pairs)]
                continue
            found += [Pattern(kind, members, nbytes, work) for members in groups]
            if shared and _is_awaited_later(kind):
                found += [Pattern(kind, members, nbytes) for members in groups]
    return tuple(found)


def _is_awaited_later(kind: str) -> bool:
    """Whether a program computes between the start of the collective and the wait for it."""
    return COLLECTIVES[kind].grouped and COLLECTIVES[kind].steps is not None


@dataclass(frozen=True, slots=True)
class Taken:
    """What one run took on one rank.

    Attributes:
        seconds: with the work before it; 0.0 on a rank that has no part.
        work: seconds of the processor for that work and for writing what is sent; 0.0 where that does not
            count in `seconds`.
    """

    seconds: float
    work: float = 0.0


def lengthened(found: Sequence[Taken], shares: Sequence[float]) -> float:
    """Seconds by which a run lengthens a step: of the slowest rank, without the work of its core's ranks.

    Args:
        found: of all ranks.
        shares: of each, the ranks that its core computes in turns.
    """
    work = fmean(own.work for own in found)
    return max(_LEAST, *(own.seconds - share * work for own, share in zip(found, shares, strict=True)))


def measure(transport: Transport, pattern: Pattern, repeats: int, shared: bool = False) -> Taken:
    """One run on this rank; collective over all ranks of the job.

    Args:
        transport: of the job.
        pattern: what to run.
        repeats: runs.
        shared: whether ranks share cores.
    """
    group = next((members for members in pattern.groups if transport.rank in members), None)
    if pattern.kind == ATTEND:
        return Taken(0.0 if group is None else _attended(transport, group, pattern.nbytes, repeats))
    run, sent = (None, None) if group is None else _prepared(transport, pattern, group)
    if run is not None:
        run()  # first touch of the buffers, and of the way
    transport.barrier()
    trips = 2 if pattern.kind == "send" else 1
    if shared:
        return _behind_work(run, sent, min(repeats, _RUNS_BEHIND_WORK), trips, pattern.work)
    if run is None:
        return Taken(0.0)
    spans = []
    for _ in range(repeats):
        _write(sent)
        begin = time.perf_counter()
        run()
        spans.append(time.perf_counter() - begin)
    return Taken(float(np.median(spans)) / trips)


def _write(sent: Any) -> None:
    """Leave an array in the caches of this core, as an op does that computes it."""
    np.add(sent, 0, out=sent)


def _behind_work(
    run: Callable[[], None] | None, sent: Any, repeats: int, trips: int, seconds: float
) -> Taken:
    """Means over runs, each behind some work; the others work, too, while a rank has no part."""
    factor = np.full((_WORK_EDGE, _WORK_EDGE), 0.5, np.float32)
    product = np.empty_like(factor)
    begin, work = time.perf_counter(), 0.0
    for _ in range(repeats):
        start = time.thread_time()
        while time.thread_time() - start < seconds:
            np.matmul(factor, factor, product)
        if sent is not None:
            _write(sent)
        work += time.thread_time() - start
        if run is not None:
            run()
    taken = 0.0 if run is None else time.perf_counter() - begin
    return Taken(taken / repeats / trips, work / repeats / trips)


def _attended(transport: Transport, group: Group, nbytes: int, repeats: int) -> float:
    """Seconds that a rank spends on one end of a message: in the calls that start it and that end it.

    Both ranks send to each other. The time in which a message is under way does not count: ranks ask for it,
    and wait for it when it is there.
    """
    other = group[1 - group.index(transport.rank)]
    mine, theirs = (np.zeros(max(1, nbytes // _ITEM), np.float32) for _ in range(2))
    whole = ((slice(0, mine.size),),)
    spans = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        received = collectives.exchange_start(transport, None, (), ((other, *whole),), theirs)
        sent = collectives.exchange_start(transport, mine, ((other, *whole),), (), None)
        busy = time.perf_counter() - begin
        while not (received.done() and sent.done()):
            pass
        begin = time.perf_counter()
        received.wait()
        sent.wait()
        spans.append((busy + time.perf_counter() - begin) / 2)
    return float(np.median(spans[1:]))


Prepared = tuple[Callable[[], Any], Any]
Probe = Callable[[Transport, Group, int], Prepared]


def _prepared(transport: Transport, pattern: Pattern, group: Group) -> Prepared:
    """A function that runs the collective once, and the array that it sends."""
    return _PROBES[pattern.kind](transport, group, max(len(group), pattern.nbytes // _ITEM))


def _all_reduce(transport: Transport, group: Group, count: int) -> Prepared:
    whole = np.zeros(count, np.float32)
    return lambda: collectives.all_reduce(transport, whole, group, "sum", whole), whole


def _all_gather(transport: Transport, group: Group, count: int) -> Prepared:
    sizes, result = even_counts(count, len(group)), np.zeros(count, np.float32)
    part = np.zeros(sizes[group.index(transport.rank)], np.float32)
    return lambda: collectives.all_gather(transport, part, 0, sizes, group, result), part


def _reduce_scatter(transport: Transport, group: Group, count: int) -> Prepared:
    sizes, whole = even_counts(count, len(group)), np.zeros(count, np.float32)
    part = np.zeros(sizes[group.index(transport.rank)], np.float32)
    return lambda: collectives.reduce_scatter(transport, whole, 0, sizes, "sum", group, part), whole


def _all_to_all(transport: Transport, group: Group, count: int) -> Prepared:
    rows = len(group)
    square = np.zeros((rows, max(1, count // rows)), np.float32)
    result = np.zeros((1, square.shape[1] * rows), np.float32)
    ones, widths = [1] * rows, [square.shape[1]] * rows
    return lambda: collectives.all_to_all(transport, square, 0, ones, 1, widths, group, result), square


def _broadcast(transport: Transport, group: Group, count: int) -> Prepared:
    whole = np.zeros(count, np.float32)
    return lambda: collectives.broadcast(transport, whole, group[0], group, whole), whole


def _permute(transport: Transport, group: Group, count: int) -> Prepared:
    whole, result = np.zeros(count, np.float32), np.zeros(count, np.float32)
    position = group.index(transport.rank)
    after, before = group[(position + 1) % len(group)], group[position - 1]
    return lambda: collectives.permute(transport, whole, after, before, whole.shape, result), whole


def _send(transport: Transport, group: Group, count: int) -> Prepared:
    whole = np.zeros(count, np.float32)
    return _there_and_back(transport, group, whole), whole


def _there_and_back(transport: Transport, group: Group, whole: Any) -> Any:
    """A round trip: half of it is what one message takes."""
    first, second = group

    def run() -> None:
        if transport.rank == first:
            transport.send(whole, second, 0).wait()
            transport.recv(whole, second, 0).wait()
        else:
            transport.recv(whole, first, 0).wait()
            transport.send(whole, first, 0).wait()

    return run


_PROBES: Final[dict[str, Probe]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "permute": _permute,
    "send": _send,
}
KINDS: Final = tuple(_PROBES)
"""Collectives that a profile measures; all others cost what their algorithms say."""
