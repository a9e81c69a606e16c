"""Collectives and messages that are sent to see what they cost between the ranks of a job.

*In:* a transport with two ranks or more.
*Out:* seconds of every collective on every group of ranks that a mesh can ask for.
*Invariant:* all groups of a pattern communicate at the same time, as in training, and the slowest rank
counts. Runs follow one another without a pause; the median of their times is a run's time.

Where ranks share cores, each of them computes for longer than a time slice of the scheduler before every
run, as in a step, and what counts is by how much a run lengthens that: ranks that come to a collective one
after the other, and do not get their core back at once, wait for each other. Four ranks on two cores,
all_reduce of 1 KiB, medians of 8 rounds, one run after the other and behind 0.5 and 1.5 ms of computation:
pairs 0.08 to 0.11, 0.20 to 0.24, 0.34 to 0.37 ms, all four 0.20, 0.24, 0.47 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import numpy as np

from distgraph.mesh import ProcessMesh
from distgraph.runtime import collectives
from distgraph.runtime.transport import Group, Transport, even_counts

ATTEND: Final = "attend"
"""Kind of the pattern that measures how long a rank is busy with a message, not how long that takes."""
KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute", "send")
SIZES: Final = tuple(2**power for power in range(10, 29, 2))
"""Bytes of a message: 1 KiB to 256 MiB."""
_ITEM: Final = 4  # bytes of an element, f32
_WORK_SECONDS: Final = 0.002  # of the processor, before a message of ranks that share cores
_WORK_EDGE: Final = 128  # of the square matrices that are multiplied meanwhile
_RUNS_BEHIND_WORK: Final = 10  # at most
_LEAST: Final = 1e-6  # seconds of a message, should the difference of two noisy times be less


@dataclass(frozen=True, slots=True)
class Pattern:
    """One collective of one size on groups of ranks that use it at the same time.

    Attributes:
        kind: see `KINDS`.
        groups: disjoint groups of ranks, equally many in each.
        nbytes: as in `distgraph.resources.collective.wire_bytes`.
    """

    kind: str
    groups: tuple[Group, ...]
    nbytes: int

    @property
    def name(self) -> str:
        """Unique name, such as all_reduce/0-1,2-3/1024."""
        groups = ",".join("-".join(map(str, group)) for group in self.groups)
        return f"{self.kind}/{groups}/{self.nbytes}"


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


def patterns(ranks: int, limit: float = 2.0**28) -> tuple[Pattern, ...]:
    """Everything that a profile sends, small messages first.

    Args:
        ranks: of the job.
        limit: bytes; no message is larger.
    """
    groups = axis_groups(ranks)
    found = []
    found.append(Pattern(ATTEND, ((0, 1),), SIZES[0]))
    for nbytes in (size for size in SIZES if size <= limit):
        for kind in KINDS:
            if kind == "send":  # from the first rank to every kind of place: next door and far away
                pairs = {(members[0][0], members[0][-1]) for members in groups} | {(0, 1)}
                found += [Pattern(kind, (pair,), nbytes) for pair in sorted(pairs)]
            else:
                found += [Pattern(kind, members, nbytes) for members in groups]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Taken:
    """What one run took on one rank.

    Attributes:
        seconds: with the work before it; 0.0 on a rank that has no part.
        work: seconds of the processor for that work; 0.0 without any.
    """

    seconds: float
    work: float = 0.0


def lengthened(found: Sequence[Taken], share: float) -> float:
    """Seconds by which a run lengthens a step: of the slowest rank, without the work.

    Args:
        found: of all ranks.
        share: ranks that a core computes in turns.
    """
    return max(_LEAST, max(own.seconds for own in found) - share * fmean(own.work for own in found))


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
    run = None if group is None else _prepared(transport, pattern, group)
    if run is not None:
        run()  # first touch of the buffers, and of the way
    transport.barrier()
    trips = 2 if pattern.kind == "send" else 1
    if shared:
        return _behind_work(run, min(repeats, _RUNS_BEHIND_WORK), trips)
    if run is None:
        return Taken(0.0)
    marks = [time.perf_counter()]
    for _ in range(repeats):
        run()
        marks.append(time.perf_counter())
    return Taken(float(np.median(np.diff(marks))) / trips)


def _behind_work(run: Callable[[], None] | None, repeats: int, trips: int) -> Taken:
    """Means over runs, each behind some work; the others work, too, while a rank has no part."""
    factor = np.full((_WORK_EDGE, _WORK_EDGE), 0.5, np.float32)
    product = np.empty_like(factor)
    begin, work = time.perf_counter(), 0.0
    for _ in range(repeats):
        start = time.thread_time()
        while time.thread_time() - start < _WORK_SECONDS:
            np.matmul(factor, factor, product)
        work += time.thread_time() - start
        if run is not None:
            run()
    seconds = 0.0 if run is None else time.perf_counter() - begin
    return Taken(seconds / repeats / trips, work / repeats / trips)


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


def _prepared(transport: Transport, pattern: Pattern, group: Group) -> Any:
    """A function that runs the collective once."""
    count, kind, rank = max(len(group), pattern.nbytes // _ITEM), pattern.kind, transport.rank
    shares = even_counts(count, len(group))
    at = group.index(rank)
    whole = np.zeros(count, np.float32)
    if kind == "all_reduce":
        return lambda: collectives.all_reduce(transport, whole, group, "sum", whole)
    if kind == "broadcast":
        return lambda: collectives.broadcast(transport, whole, group[0], group, whole)
    if kind == "send":
        return _there_and_back(transport, group, whole)
    result = np.zeros(count, np.float32)
    if kind == "permute":
        after, before = group[(at + 1) % len(group)], group[at - 1]
        return lambda: collectives.permute(transport, whole, after, before, whole.shape, result)
    part = np.zeros(shares[at], np.float32)
    if kind == "all_gather":
        return lambda: collectives.all_gather(transport, part, 0, shares, group, result)
    if kind == "reduce_scatter":
        return lambda: collectives.reduce_scatter(transport, whole, 0, shares, "sum", group, part)
    rows = len(group)
    square = np.zeros((rows, max(1, count // rows)), np.float32)
    landed = np.zeros((1, square.shape[1] * rows), np.float32)
    ones, widths = [1] * rows, [square.shape[1]] * rows
    return lambda: collectives.all_to_all(transport, square, 0, ones, 1, widths, group, landed)


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
