"""Probes of collectives: measured seconds of collectives and messages between the ranks of a job.

*In:* a transport with two ranks or more.
*Out:* seconds of every collective on every group of ranks along an axis of a mesh.
*Invariant:* all groups of a pattern communicate at the same time, as in training, and the slowest group
counts. The time of a pattern is the median over runs; on ranks that share cores it is the mean over runs
minus that of the computation before them (`shared_cores`). What no computation hides of a collective is the
time by which it lengthens products that are computed between its start and the wait for it. A pattern that
takes long is run less often in a round, so that the time suffices for several rounds, which are further apart
than runs.

The buffer that is sent is written right before each run, as in a step, because reading freshly written bytes
from the cache of another core takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from distgraph.ir.collectives import COLLECTIVES
from distgraph.ir.mesh import ProcessMesh
from distgraph.runtime.profile.shared_cores import (
    MOST_WORK_SECONDS,
    WORK_SECONDS,
    CoreSharing,
    RunTime,
    behind_work,
    message_work,
    runs_in_quota,
    under_work,
    write,
)
from distgraph.runtime.transport import collectives
from distgraph.runtime.transport.collectives import Handle
from distgraph.runtime.transport.transport import Group, Transport, even_counts

MESSAGE_WORK: Final = "attend"
"""Kind of the pattern that measures how long a rank is busy with a message."""
SIZES: Final = tuple(2**power for power in range(10, 29, 2))
"""Bytes of a message: 1 KiB to 256 MiB."""
_MOST_OVERLAPPED: Final = 2**24  # bytes of a message that is timed beside products
_RUN_SECONDS: Final = 0.1  # of all runs of a pattern in a round: more rounds are worth more than more runs
_ITEM: Final = 4  # bytes of an element, f32
ALONE: Final = CoreSharing()
"""Ranks that share no cores."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """One collective of one size on groups of ranks that use it at the same time.

    Attributes:
        kind: see `KINDS`.
        groups: disjoint groups of ranks, equally many in each.
        nbytes: as in `distgraph.resources.collective_cost.wire_bytes`.
        work: processor seconds for which each rank computes before every run; those of a faster machine
            compute as many times more, so that no rank comes later than others.
        overlapped: whether each rank computes between the start of the collective and the wait for it, and
            the time is that by which the collective lengthens this computation.
    """

    kind: str
    groups: tuple[Group, ...]
    nbytes: int
    work: float = 0.0
    overlapped: bool = False

    @property
    def name(self) -> str:
        """Unique name, such as all_reduce/0-1,2-3/1024."""
        groups = ",".join("-".join(map(str, group)) for group in self.groups)
        behind = f" behind {1e3 * self.work:g} ms" if self.work else ""
        beside = " beside products" if self.overlapped else ""
        return f"{self.kind}{behind}{beside}/{groups}/{self.nbytes}"


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


def patterns(
    ranks: int, limit: float = 2.0**28, *, shared: bool = False, machines: Sequence[int] = ()
) -> tuple[Pattern, ...]:
    """All patterns that a profile measures, in the order of `coarse_to_fine`.

    Collectives that a program can overlap with computation are measured a second time: between machines
    beside products, and inside a machine, where ranks share cores, without computation.

    Args:
        ranks: of the job.
        limit: bytes; no message is larger.
        shared: whether ranks share cores. Then all collectives are measured behind computation.
        machines: machine of every rank; by default all are on one.
    """
    work = WORK_SECONDS if shared else 0.0
    groups = axis_groups(ranks)
    chosen = [Pattern(MESSAGE_WORK, ((0, 1),), SIZES[0])]
    for nbytes in coarse_to_fine([size for size in SIZES if size <= limit]):
        for kind in KINDS:
            if kind == "send":  # from the first rank to every kind of place: next door and far away
                pairs = {(members[0][0], members[0][-1]) for members in groups} | {(0, 1)}
                chosen += [Pattern(kind, (pair,), nbytes, work) for pair in sorted(pairs)]
                continue
            chosen += [Pattern(kind, members, nbytes, work) for members in groups]
            for members in groups if _is_awaited_later(kind) else ():
                between = any(len({machines[rank] for rank in group}) > 1 for group in members if machines)
                if (between and nbytes <= _MOST_OVERLAPPED) or (shared and not between):
                    chosen.append(Pattern(kind, members, nbytes, overlapped=between))
    return tuple(chosen)


def coarse_to_fine(sizes: Sequence[int]) -> list[int]:
    """All sizes: first every other one, from the smallest, which tell how long larger ones take; then the
    rest, from the largest.

    Example:
        >>> coarse_to_fine([1, 2, 3, 4, 5, 6, 7])
        [1, 3, 5, 7, 6, 4, 2]
    """
    return [*sizes[::2], *sizes[1::2][::-1]]


def _is_awaited_later(kind: str) -> bool:
    """Whether a program computes between the start of the collective and the wait for it."""
    return COLLECTIVES[kind].steps is not None


def measure(transport: Transport, pattern: Pattern, repeats: int, cores: CoreSharing = ALONE) -> RunTime:
    """Some runs of a pattern on this rank; collective over all ranks of the job.

    Args:
        transport: of this rank.
        pattern: what is measured.
        repeats: most runs; fewer are made of a pattern that takes long.
        cores: how the ranks share cores.
    """
    group = next((members for members in pattern.groups if transport.rank in members), None)
    if pattern.kind == MESSAGE_WORK:
        elements = pattern.nbytes // _ITEM
        return RunTime(0.0 if group is None else message_work(transport, group, elements, repeats))
    start, sent = (None, None) if group is None else _prepare(transport, pattern, group)
    transport.barrier()
    begin = time.perf_counter()
    if start is not None:
        start().wait()  # first touch of the buffers, and of the way
    first = time.perf_counter() - begin
    transport.barrier()
    trips = 2 if pattern.kind == "send" else 1
    gathered = transport.broadcast_object(transport.gather_objects((first, cores.period), 0), 0)
    firsts, periods = zip(*gathered, strict=True)
    slowest, longest = max(firsts), max(periods)
    shortest = min((period for period in periods if period), default=0.0)
    share = max(cores.shares)
    faster = share / cores.shares[transport.rank] if cores.shared else 1.0  # all compute for equally long
    if pattern.overlapped:  # the products last for as long as the collective
        seconds = min(max(WORK_SECONDS, slowest / share), MOST_WORK_SECONDS)
        repeats = _runs(repeats, 2 * (share * seconds + longest))
        return under_work(start, sent, repeats, faster * seconds, transport.barrier, cores.period)
    if cores.shared:
        computing = 2 * share * pattern.work  # by itself, and before the collective
        repeats = runs_in_quota(_runs(repeats, slowest + computing), shortest, computing)
        seconds = faster * pattern.work
        return behind_work(start, sent, repeats, trips, seconds, transport.barrier, cores.period)
    repeats = _runs(repeats, slowest)
    if start is None:
        return RunTime(0.0)
    spans = []
    for _ in range(repeats):
        write(sent)
        begin = time.perf_counter()
        start().wait()
        spans.append(time.perf_counter() - begin)
    return RunTime(float(np.median(spans)) / trips)


def _runs(most: int, seconds: float) -> int:
    """Number of runs in a measurement, `most` at most, if one run takes `seconds`."""
    return max(1, min(most, int(_RUN_SECONDS / max(seconds, 1e-9))))


PreparedRun = tuple[Callable[[], Handle], Any]
Probe = Callable[[Transport, Group, int], PreparedRun]


def _prepare(transport: Transport, pattern: Pattern, group: Group) -> PreparedRun:
    """A function that starts the collective once, and the array that it sends."""
    return _PROBES[pattern.kind](transport, group, max(len(group), pattern.nbytes // _ITEM))


def _all_reduce(transport: Transport, group: Group, count: int) -> PreparedRun:
    whole = np.zeros(count, np.float32)
    return lambda: collectives.all_reduce_start(transport, whole, group, "sum", whole), whole


def _all_gather(transport: Transport, group: Group, count: int) -> PreparedRun:
    sizes, result = even_counts(count, len(group)), np.zeros(count, np.float32)
    part = np.zeros(sizes[group.index(transport.rank)], np.float32)
    return lambda: collectives.all_gather_start(transport, part, 0, sizes, group, result), part


def _reduce_scatter(transport: Transport, group: Group, count: int) -> PreparedRun:
    sizes, whole = even_counts(count, len(group)), np.zeros(count, np.float32)
    part = np.zeros(sizes[group.index(transport.rank)], np.float32)
    return lambda: collectives.reduce_scatter_start(transport, whole, 0, sizes, "sum", group, part), whole


def _all_to_all(transport: Transport, group: Group, count: int) -> PreparedRun:
    rows = len(group)
    square = np.zeros((rows, max(1, count // rows)), np.float32)
    result = np.zeros((1, square.shape[1] * rows), np.float32)
    ones, widths = [1] * rows, [square.shape[1]] * rows
    return lambda: collectives.all_to_all_start(transport, square, 0, ones, 1, widths, group, result), square


def _broadcast(transport: Transport, group: Group, count: int) -> PreparedRun:
    whole = np.zeros(count, np.float32)
    return lambda: collectives.broadcast_start(transport, whole, group[0], group, whole), whole


def _permute(transport: Transport, group: Group, count: int) -> PreparedRun:
    whole, result = np.zeros(count, np.float32), np.zeros(count, np.float32)
    position = group.index(transport.rank)
    sends = ((group[(position + 1) % len(group)], (slice(None),)),)
    recvs = ((group[position - 1], (slice(None),)),)
    return lambda: collectives.exchange_start(transport, whole, sends, recvs, result), whole


def _send(transport: Transport, group: Group, count: int) -> PreparedRun:
    whole = np.zeros(count, np.float32)
    run = _round_trip(transport, group, whole)
    return lambda: Handle([], whole, run), whole


def _round_trip(transport: Transport, group: Group, whole: Any) -> Callable[[], None]:
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
