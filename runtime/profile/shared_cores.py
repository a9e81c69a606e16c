"""What a profile measures of the host: ranks that share CPU cores, and the work of the host itself.

*In:* a transport whose ranks may share cores (`CoreBinding`), and probes of the host's work in a step.
*Out:* seconds of ops and messages of ranks that share cores; `HostTimes`.
*Invariant:* a rank computes as many times longer as ranks share its core, since all compute at the same time.
A message is measured behind computation that is longer than a time slice of the scheduler, and its time is
what it adds to the computation: ranks reach it one after the other, do not get their core back at once, and
wait for each other. The time without computation before it is the work of the ranks themselves, which no
overlap hides. `benchmarks/HISTORY.md` has the measurements behind both rules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final, Protocol

import numpy as np

from distgraph.resources.host_times import HostTimes
from distgraph.runtime.profile.cost_fitting import expected
from distgraph.runtime.transport import collectives
from distgraph.runtime.transport.mpi import MpiTransport
from distgraph.runtime.transport.transport import Group, Transport

WORK_SECONDS: Final = 0.002
"""Processor seconds of the computation before a collective of ranks that share cores."""
_WORK_EDGE: Final = 128  # rows and columns of the matrices that are multiplied as computation
_RUNS_BEHIND_WORK: Final = 10  # limit on the runs behind computation
_MINIMUM: Final = 1e-6  # seconds; lower bound of a difference of two noisy times


class HostProbe(Protocol):
    """A step whose tasks take almost no time, which measures the host work of a step.

    Attributes:
        name: unique name among all measured items.
    """

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
        seconds: wall time including the computation before the collective; 0.0 on a rank outside all groups.
        work: processor seconds of that computation and of writing the buffer; 0.0 if `seconds` excludes them.
    """

    seconds: float
    work: float = 0.0


@dataclass(frozen=True, slots=True)
class CoreSharing:
    """How the ranks of a job share the cores of their machines.

    Attributes:
        shares: for each rank, the number of ranks on its core.
        bound: whether this rank is bound to one core.
    """

    shares: tuple[float, ...] = (1.0,)
    bound: bool = False

    @classmethod
    def of(cls, transport: MpiTransport | None) -> CoreSharing:
        """Of the ranks of a transport, or of one rank without a transport. All ranks call it."""
        if transport is None:
            return cls()
        shares = transport.broadcast_object(transport.gather_objects(transport.binding.share, 0), 0)
        return cls(tuple(shares), transport.binding.bound)

    @property
    def shared(self) -> bool:
        """Whether any ranks share a core."""
        return max(self.shares) > 1

    def __str__(self) -> str:
        """Text on the core of the first rank, which is part of the header of a store; "" for one rank."""
        text = f"{self.shares[0]:g} ranks a core" + ", each on one" * self.bound
        return text if len(self.shares) > 1 else ""

    def added_seconds(self, times: Sequence[RunTime]) -> float:
        """Seconds that a collective adds to a step on the slowest rank, without computation on its core.

        Args:
            times: times of all ranks.
        """
        work = fmean(time.work for time in times)
        pairs = zip(times, self.shares, strict=True)
        return max(_MINIMUM, *(time.seconds - share * work for time, share in pairs))


def write(sent: Any) -> None:
    """Write an array, so that it is in the caches of this core as after the op that computes it."""
    np.add(sent, 0, out=sent)


def behind_work(
    run: Callable[[], None] | None, sent: Any, repeats: int, trips: int, seconds: float
) -> RunTime:
    """Mean time over runs, each behind computation. Ranks outside all groups compute, too.

    Args:
        run: runs the collective; None on a rank outside all groups.
        sent: array that is written before each run.
        repeats: number of runs, of which at most ten are made.
        trips: messages that follow one another in one run.
        seconds: processor seconds of the computation.
    """
    repeats = min(repeats, _RUNS_BEHIND_WORK)
    factor = np.full((_WORK_EDGE, _WORK_EDGE), 0.5, np.float32)
    product = np.empty_like(factor)
    begin, work = time.perf_counter(), 0.0
    for _ in range(repeats):
        start = time.thread_time()
        while time.thread_time() - start < seconds:
            np.matmul(factor, factor, product)
        if sent is not None:
            write(sent)
        work += time.thread_time() - start
        if run is not None:
            run()
    elapsed = 0.0 if run is None else time.perf_counter() - begin
    return RunTime(elapsed / repeats / trips, work / repeats / trips)


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


def host_times(steps: Sequence[tuple[int, float]], message: float | None) -> HostTimes:
    """Times of the host that were measured.

    Args:
        steps: (number of tasks, seconds outside of tasks) of steps with different numbers of tasks; none if
            they were not measured.
        message: seconds for which a rank is busy at one end of a message.
    """
    if not steps:
        return HostTimes(message=message)
    rows = np.array([[1.0, tasks] for tasks, _ in steps])
    step, task = expected(rows, np.array([seconds for _, seconds in steps]))
    return HostTimes(task=float(task), step=float(step), message=message)
