"""Probes of collectives: measured seconds of collectives and messages between the ranks of a job.

*In:* a transport with two ranks or more.
*Out:* seconds of every collective on every group of ranks along an axis of a mesh.
*Invariant:* all groups of a pattern communicate at the same time, as in training, and the slowest rank
counts. The time of a pattern is the median over runs; on ranks that share cores it is the mean over runs
minus the computation before them.

The buffer that is sent is written right before each run, as in a step, because reading freshly written bytes
from the cache of another core takes longer.

Where ranks share cores, a collective is also measured behind computation that is longer than a time slice of
the scheduler. The result is the time that it adds to the computation: ranks reach it one after the other, do
not get their core back at once, and wait for each other. The time without computation before it is the work
of the ranks themselves, which no overlap hides. `benchmarks/HISTORY.md` has the measurements behind both
rules.
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

MESSAGE_WORK: Final = "attend"
"""Kind of the pattern that measures how long a rank is busy with a message."""
SIZES: Final = tuple(2**power for power in range(10, 29, 2))
"""Bytes of a message: 1 KiB to 256 MiB."""
_ITEM: Final = 4  # bytes of an element, f32
WORK_SECONDS: Final = 0.002
"""Processor seconds of the computation before a collective of ranks that share cores."""
_WORK_EDGE: Final = 128  # rows and columns of the matrices that are multiplied as computation
_RUNS_BEHIND_WORK: Final = 10  # limit on the runs behind computation
_MINIMUM: Final = 1e-6  # seconds; lower bound of a difference of two noisy times


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
    """Groups along every axis of all meshes of one or two axes over all ranks.

    Example:
        >>> axis_groups(4)
        (((0, 1, 2, 3),), ((0, 2), (1, 3)), ((0, 1), (2, 3)))
    """
    groups: dict[tuple[Group, ...], None] = {}
    for first in range(ranks, 1, -1):
        if ranks % first == 0:
            mesh = ProcessMesh(np.arange(ranks).reshape(first, ranks // first), ["x", "y"])
            for axis in mesh.axes:
                if mesh.axis_size(axis) > 1:
                    groups[mesh.groups([axis])] = None
    return tuple(groups)


def patterns(ranks: int, limit: float = 2.0**28, *, shared: bool = False) -> tuple[Pattern, ...]:
    """All patterns that a profile measures, small messages first.

    Args:
        ranks: of the job.
        limit: bytes; no message is larger.
        shared: whether ranks share cores. Then all collectives are measured behind computation, and those
            that a program can overlap with computation also without it.
    """
    work = WORK_SECONDS if shared else 0.0
    groups = axis_groups(ranks)
    chosen = [Pattern(MESSAGE_WORK, ((0, 1),), SIZES[0])]
    for nbytes in (size for size in SIZES if size <= limit):
        for kind in KINDS:
            if kind == "send":  # from the first rank to every kind of place: next door and far away
                pairs = {(members[0][0], members[0][-1]) for members in groups} | {(0, 1)}
                chosen += [Pattern(kind, (pair,), nbytes, work) for pair in sorted(pairs)]
                continue
            chosen += [Pattern(kind, members, nbytes, work) for members in groups]
            if shared and _is_awaited_later(kind):
                chosen += [Pattern(kind, members, nbytes) for members in groups]
    return tuple(chosen)


def _is_awaited_later(kind: str) -> bool:
    """Whether a program computes between the start of the collective and the wait for it."""
    return COLLECTIVES[kind].grouped and COLLECTIVES[kind].steps is not None


@dataclass(frozen=True, slots=True)
class RunTime:
    """Time of one run of a pattern on one rank.

    Attributes:
        seconds: wall time including the computation before the collective; 0.0 on a rank outside all groups.
        work: processor seconds of that computation and of writing the buffer; 0.0 if `seconds` excludes them.
    """

    seconds: float
    work: float = 0.0


def added_seconds(times: Sequence[RunTime], shares: Sequence[float]) -> float:
    """Seconds that a collective adds to a step on the slowest rank, without the computation on its core.

    Args:
        times: times of all ranks.
        shares: for each rank, the number of ranks that share its core.
    """
    work = fmean(time.work for time in times)
    return max(_MINIMUM, *(time.seconds - share * work for time, share in zip(times, shares, strict=True)))


def measure(transport: Transport, pattern: Pattern, repeats: int, shared: bool = False) -> RunTime:
    """One run on this rank; collective over all ranks of the job.

    Args:
        transport: of the job.
        pattern: what to run.
        repeats: runs.
        shared: whether ranks share cores.
    """
    group = next((members for members in pattern.groups if transport.rank in members), None)
    if pattern.kind == MESSAGE_WORK:
        return RunTime(0.0 if group is None else _message_work(transport, group, pattern.nbytes, repeats))
    run, sent = (None, None) if group is None else _prepare(transport, pattern, group)
    if run is not None:
        run()  # first touch of the buffers, and of the way
    transport.barrier()
    trips = 2 if pattern.kind == "send" else 1
    if shared:
        return _behind_work(run, sent, min(repeats, _RUNS_BEHIND_WORK), trips, pattern.work)
    if run is None:
        return RunTime(0.0)
    spans = []
    for _ in range(repeats):
        _write(sent)
        begin = time.perf_counter()
        run()
        spans.append(time.perf_counter() - begin)
    return RunTime(float(np.median(spans)) / trips)


def _write(sent: Any) -> None:
    """Write an array, so that it is in the caches of this core as after the op that computes it."""
    np.add(sent, 0, out=sent)


def _behind_work(
    run: Callable[[], None] | None, sent: Any, repeats: int, trips: int, seconds: float
) -> RunTime:
    """Mean time over runs, each behind computation. Ranks outside all groups compute, too."""
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
    elapsed = 0.0 if run is None else time.perf_counter() - begin
    return RunTime(elapsed / repeats / trips, work / repeats / trips)


def _message_work(transport: Transport, group: Group, nbytes: int, repeats: int) -> float:
    """Seconds that a rank is busy at one end of a message, in the calls that start it and that end it.

    Both ranks send to each other. The time in transit does not count: ranks poll, and wait only once the
    message has arrived.
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


PreparedRun = tuple[Callable[[], Any], Any]
Probe = Callable[[Transport, Group, int], PreparedRun]


def _prepare(transport: Transport, pattern: Pattern, group: Group) -> PreparedRun:
    """A function that runs the collective once, and the array that it sends."""
    return _PROBES[pattern.kind](transport, group, max(len(group), pattern.nbytes // _ITEM))


def _all_reduce(transport: Transport, group: Group, count: int) -> PreparedRun:
    whole = np.zeros(count, np.float32)
    return lambda: collectives.all_reduce(transport, whole, group, "sum", whole), whole


def _all_gather(transport: Transport, group: Group, count: int) -> PreparedRun:
    sizes, result = even_counts(count, len(group)), np.zeros(count, np.float32)
    part = np.zeros(sizes[group.index(transport.rank)], np.float32)
    return lambda: collectives.all_gather(transport, part, 0, sizes, group, result), part


def _reduce_scatter(transport: Transport, group: Group, count: int) -> PreparedRun:
    sizes, whole = even_counts(count, len(group)), np.zeros(count, np.float32)
    part = np.zeros(sizes[group.index(transport.rank)], np.float32)
    return lambda: collectives.reduce_scatter(transport, whole, 0, sizes, "sum", group, part), whole


def _all_to_all(transport: Transport, group: Group, count: int) -> PreparedRun:
    rows = len(group)
    square = np.zeros((rows, max(1, count // rows)), np.float32)
    result = np.zeros((1, square.shape[1] * rows), np.float32)
    ones, widths = [1] * rows, [square.shape[1]] * rows
    return lambda: collectives.all_to_all(transport, square, 0, ones, 1, widths, group, result), square


def _broadcast(transport: Transport, group: Group, count: int) -> PreparedRun:
    whole = np.zeros(count, np.float32)
    return lambda: collectives.broadcast(transport, whole, group[0], group, whole), whole


def _permute(transport: Transport, group: Group, count: int) -> PreparedRun:
    whole, result = np.zeros(count, np.float32), np.zeros(count, np.float32)
    position = group.index(transport.rank)
    sends = ((group[(position + 1) % len(group)], (slice(None),)),)
    recvs = ((group[position - 1], (slice(None),)),)
    return lambda: collectives.exchange(transport, whole, sends, recvs, result), whole


def _send(transport: Transport, group: Group, count: int) -> PreparedRun:
    whole = np.zeros(count, np.float32)
    return _round_trip(transport, group, whole), whole


def _round_trip(transport: Transport, group: Group, whole: Any) -> Any:
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
