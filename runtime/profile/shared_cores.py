"""What a profile measures of the host: ranks that share CPU cores, messages beside products, its own work.

*In:* a transport whose ranks may share cores (`CoreBinding`), and probes of the host's work in a step.
*Out:* seconds of ops and messages of ranks that share cores; `HostTimes`.
*Invariant:* a rank computes as many times longer as ranks share its core, since all compute at the same time.
A message is measured behind computation that is longer than a time slice of the scheduler, and its time is
what it adds to the same computation without it, of the slowest rank of its group: ranks reach it one after
the other, do not get their core back at once, and wait for each other. All ranks begin both together, so that
no part of a message is on its way before a rank begins; since ranks of one core cannot begin at once, the
computation of a machine lasts from the first begin to the last end. Machines may compute at different speeds.
The time without computation before it is the work of the ranks themselves, which no overlap hides. Of a
message between machines, that is what it adds to products that are computed between its start and the wait
for it: the time by which it lengthens them, since the processor moves its bytes, and the wait after them of
the rank that comes last. The wait of a rank that comes earlier is also one for the other rank, so it does not
count: the speed of products varies from run to run, and the message is not to blame for it. Where a control
group limits a rank, runs begin when its quota for a period is used up, and are too few to use up half of the
next one: a rank that waits saves quota, and computes with it at full speed afterwards. Runs beside products
also end when it is used up.
`benchmarks/HISTORY.md` has the measurements behind these rules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, Final, Protocol

import numpy as np

from distgraph.resources.host_times import HostTimes
from distgraph.runtime.profile.robust_fitting import expected
from distgraph.runtime.transport import collectives
from distgraph.runtime.transport.core_binding import cpu_quota, quota_period
from distgraph.runtime.transport.mpi import MpiTransport
from distgraph.runtime.transport.transport import Group, Transport

WORK_SECONDS: Final = 0.002
"""Processor seconds of the computation before a collective of ranks that share cores."""
MOST_WORK_SECONDS: Final = 0.25
"""Processor seconds of the products beside a message, at most: longer than most ops."""
_WORK_EDGE: Final = 128  # rows and columns of the matrices that are multiplied as computation
_MOST_RUNS: Final = 10  # behind computation, or beside it
_INTERRUPTION: Final = 0.05  # of a period: a rank that is kept waiting for longer has used up its quota
_PERIODS: Final = 3  # of a quota: the most for which a rank computes until its quota is used up
_MINIMUM: Final = 1e-6  # seconds; lower bound of a difference of two noisy times


class HostProbe(Protocol):
    """A step whose tasks take almost no time, under a unique name: it measures the host work of a step."""

    @property
    def name(self) -> str: ...

    def run(self) -> tuple[int, float]:
        """Tasks that a rank runs in a step, and seconds of the step outside them. All ranks call it."""


HostProbes = Callable[[], Sequence[HostProbe]]
"""A function at module level, so that every rank can import it."""


@dataclass(frozen=True, slots=True)
class RunTime:
    """Time of one run of a pattern on one rank.

    Attributes:
        seconds: wall time including the computation before the collective or beside it; 0.0 on a rank outside
            all groups.
        alone: for each run, begin and end of that computation without the collective, on a clock that the
            ranks of a machine have in common; empty if `seconds` excludes it.
        behind: the same with the collective, on a rank outside all groups without one.
        trips: messages that follow one another in one run.
        beside: for each run beside products, the seconds by which the message lengthened them, and those of
            the wait for it after them.
    """

    seconds: float
    alone: tuple[tuple[float, float], ...] = ()
    behind: tuple[tuple[float, float], ...] = ()
    trips: int = 1
    beside: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CoreSharing:
    """How the ranks of a job share the cores of their machines.

    Attributes:
        shares: for each rank, the number of ranks on its core.
        bound: whether this rank is bound to one core.
        period: seconds in which the control group of this rank may use its quota once; 0.0 without a quota.
        machines: for each rank, the first rank of its machine; by default all are on one.
    """

    shares: tuple[float, ...] = (1.0,)
    bound: bool = False
    period: float = 0.0
    machines: tuple[int, ...] = ()

    @classmethod
    def of(cls, transport: MpiTransport | None) -> CoreSharing:
        """Of the ranks of a transport, or of one rank without a transport. All ranks call it."""
        if transport is None:
            return cls()
        own = transport.binding.share, min(transport.machine_ranks)
        shares, machines = zip(*transport.broadcast_object(transport.gather_objects(own, 0), 0), strict=True)
        group, _ = cpu_quota()
        period = quota_period(group) if group else 0.0
        return cls(shares, transport.binding.bound, period, machines)

    @property
    def shared(self) -> bool:
        """Whether any ranks share a core."""
        return max(self.shares) > 1

    def __str__(self) -> str:
        """Text on the cores of each machine, which is part of the header of a store; "" for one rank."""
        first = dict(zip(self.machines[::-1] or [0], self.shares[::-1], strict=False))
        shares = [f"{first[machine]:g}" for machine in sorted(first)]
        text = f"{', '.join(shares)} ranks a core" + ", each on one" * self.bound
        return text if len(self.shares) > 1 else ""

    def added_seconds(self, times: Sequence[RunTime], groups: Sequence[Group] = ()) -> float:
        """Seconds that a collective adds to a step, without the computation before it or beside it.

        The computation of a machine lasts until the last of its ranks has computed, and a collective begins
        when the last rank of its group has.

        Args:
            times: of every rank.
            groups: of the collective, of which the slowest counts; by default all ranks are one.
        """
        groups = groups or (tuple(range(len(times))),)
        if any(time.beside for time in times):
            return _beside_products([[times[rank].beside for rank in group] for group in groups])
        machines = self.machines or (0,) * len(times)
        if any(time.alone for time in times):
            return max(_MINIMUM, *(_behind_computation(times, group, machines) for group in groups))
        return max(_MINIMUM, *(max(times[rank].seconds for rank in group) for group in groups))


def _behind_computation(times: Sequence[RunTime], group: Group, machines: Sequence[int]) -> float:
    """Seconds that a collective of a group adds to the computation before it; the mean over runs."""
    of_machine = {machine: [r for r, m in enumerate(machines) if m == machine] for machine in machines}
    places = {machines[rank] for rank in group}
    added = []
    for run in range(len(times[group[0]].alone)):
        computing, ending = [], []
        for machine in places:
            alone = [times[rank].alone[run] for rank in of_machine[machine]]
            computing.append(max(end for _, end in alone) - min(begin for begin, _ in alone))
            begins = [times[rank].behind[run][0] for rank in of_machine[machine]]
            ends = [times[rank].behind[run][1] for rank in group if machines[rank] == machine]
            ending.append(max(ends) - min(begins))
        added.append(max(ending) - max(computing))
    return fmean(added) / times[group[0]].trips


def _beside_products(groups: Sequence[Sequence[tuple[tuple[float, float], ...]]]) -> float:
    """Seconds that a collective adds to products beside it, from `RunTime.beside` of the ranks of its groups.

    The mean over ranks of the time by which it lengthens the products, because the largest of noisy
    differences is larger than any of them is on average; and of the slowest group, the wait of that rank of
    each run that waits least. Of several runs the median counts.
    """
    lengthened: float = fmean(median(longer for longer, _ in runs) for group in groups for runs in group)
    wait: float = max(median(min(w for _, w in run) for run in zip(*group, strict=True)) for group in groups)
    return max(_MINIMUM, lengthened + wait)


def write(sent: Any) -> None:
    """Write an array, so that it is in the caches of this core as after the op that computes it."""
    np.add(sent, 0, out=sent)


class Started(Protocol):
    """A collective that has been started."""

    def wait(self) -> Any: ...


def behind_work(
    start: Callable[[], Started] | None,
    sent: Any,
    repeats: int,
    trips: int,
    seconds: float,
    meet: Callable[[], object],
    period: float = 0.0,
) -> RunTime:
    """Times of runs behind computation, and of the computation by itself, in turns.

    Ranks outside all groups compute, too.

    Args:
        start: starts the collective; None on a rank outside all groups.
        sent: array that is written before each run.
        repeats: number of runs, of which at most ten are made.
        trips: messages that follow one another in one run.
        seconds: processor seconds of the computation.
        meet: returns when all ranks of the job have called it.
        period: of the quota of this rank; see `CoreSharing`.
    """
    repeats, product = min(repeats, _MOST_RUNS), _product()
    alone: list[tuple[float, float]] = []
    behind: list[tuple[float, float]] = []

    def compute() -> float:
        """Compute and write what is sent; when that began."""
        meet()
        begin, begun = time.perf_counter(), time.thread_time()
        while time.thread_time() - begun < seconds:
            product()
        if sent is not None:
            write(sent)
        return begin

    _use_up_quota(product, period)
    for _ in range(repeats):
        begin = compute()
        alone.append((begin, time.perf_counter()))
        begin = compute()
        if start is not None:
            start().wait()
        behind.append((begin, time.perf_counter()))
    elapsed = 0.0 if start is None else fmean(end - begin for begin, end in behind) / trips
    return RunTime(elapsed, tuple(alone), tuple(behind), trips)


def runs_in_quota(most: int, period: float, seconds: float) -> int:
    """Number of runs, `most` at most, whose computation uses up no more than half of a quota.

    Args:
        most: runs without a quota.
        period: seconds of the quota; 0.0 without one.
        seconds: of the computation of a run, as long as it takes at the average speed of the quota.
    """
    return max(1, min(most, int(period / 2 / seconds))) if period and seconds else most


def under_work(
    start: Callable[[], Started] | None,
    sent: Any,
    repeats: int,
    seconds: float,
    meet: Callable[[], object],
    period: float = 0.0,
) -> RunTime:
    """Time of runs with products between the start of the collective and the wait for it.

    The same products are timed alone before each run, by the wall clock: how long a processor second takes
    depends on who else computes at the time, and that of products beside a message may include work of the
    kernel for the message. During the products the program calls nothing else, as during one op. All ranks
    begin both together, so that no part of the message is on its way before a rank begins.

    Args:
        start: starts the collective; None on a rank outside all groups.
        sent: array that is written before each run.
        repeats: number of runs, of which at most ten are made.
        seconds: processor seconds of the products.
        meet: returns when all ranks of the job have called it.
        period: of the quota of this rank; see `CoreSharing`.
    """
    repeats, product = min(repeats, _MOST_RUNS), _product()
    begun, count = time.thread_time(), 0
    while time.thread_time() - begun < min(seconds, WORK_SECONDS):
        product()
        count += 1
    count = max(1, round(count * seconds / (time.thread_time() - begun)))
    _use_up_quota(product, period)
    runs, elapsed = [], 0.0
    for _ in range(repeats):
        meet()
        begun = time.perf_counter()
        for _ in range(count):
            product()
        alone = time.perf_counter() - begun
        _use_up_quota(product, period)
        if sent is not None:
            write(sent)
        meet()
        begun = time.perf_counter()
        started = None if start is None else start()
        for _ in range(count):
            product()
        computed = time.perf_counter()
        if started is not None:
            started.wait()
        end = time.perf_counter()
        runs.append((computed - begun - alone, end - computed))
        elapsed += end - begun
        _use_up_quota(product, period)
    return RunTime(0.0) if start is None else RunTime(elapsed / repeats, beside=tuple(runs))


def _use_up_quota(product: Callable[[], Any], period: float) -> float:
    """Compute until the control group of this rank has used up its quota; processor seconds of it.

    A product that takes longer than its processor time was interrupted, which without other programs means
    that the rank had to wait for the next period.
    """
    if not period:
        return 0.0
    wall, processor = time.perf_counter(), time.thread_time()
    begun, end = processor, wall + _PERIODS * period
    while wall < end:
        product()
        now, used = time.perf_counter(), time.thread_time()
        if (now - wall) - (used - processor) > _INTERRUPTION * period:
            return used - begun
        wall, processor = now, used
    return processor - begun


def _product() -> Callable[[], Any]:
    factor = np.full((_WORK_EDGE, _WORK_EDGE), 0.5, np.float32)
    return partial(np.matmul, factor, factor, np.empty_like(factor))


def message_work(transport: Transport, group: Group, elements: int, repeats: int) -> float:
    """Seconds that a rank is busy at one end of a message, in the calls that start it and that end it.

    Both ranks send to each other. The time in transit does not count: ranks poll, and wait only once the
    message has arrived.
    """
    other = group[1 - group.index(transport.rank)]
    mine, theirs = (np.zeros(elements, np.float32) for _ in range(2))
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


def host_times(
    steps: Sequence[tuple[int, float]], message: float | None, network_busy: float | None = None
) -> HostTimes:
    """Times of the host that were measured.

    Args:
        steps: (number of tasks, seconds outside of tasks) of steps with different numbers of tasks; none if
            they were not measured.
        message: seconds for which a rank is busy at one end of a message.
        network_busy: part of a message between machines that no computation hides.
    """
    if not steps:
        return HostTimes(message=message, network_busy=network_busy)
    rows = np.array([[1.0, tasks] for tasks, _ in steps])
    step, task = expected(rows, np.array([seconds for _, seconds in steps]))
    return HostTimes(task=float(task), step=float(step), message=message, network_busy=network_busy)
