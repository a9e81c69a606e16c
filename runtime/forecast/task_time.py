"""Times of one run of a task on one rank.

*In:* what `stream_model` simulates.
*Out:* `TaskTime`, with the spans of its streams for pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distgraph.runtime.forecast.in_flight import NOTHING_IN_FLIGHT, InFlight


@dataclass(frozen=True, slots=True)
class Span:
    """One op on a stream (compute, communicate or send): its start relative to its task, and its seconds."""

    stream: str
    op: str
    kind: str
    scope: str
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class TaskTime:
    """One run of a task on one rank, in seconds.

    Attributes:
        seconds: from start to end.
        compute: part of `seconds` that is computation. The part that is neither `compute` nor `exposed` is
            spent waiting for the host.
        exposed: part of `seconds` in which the device waits for communication or works for it.
        communication: sum over all collectives, overlapped or not.
        flops: floating point operations of the contractions.
        wire: kind of link -> bytes that all ranks of the task send over it.
        linked: kind of link -> seconds of collectives and messages over it, overlapped or not.
        sends: transfer op -> seconds from the start of the task until its bytes have arrived.
        late: value -> seconds from the end of the task until the collective that computes it ends.
        in_flight: collectives under way at the end of the task: those of load tasks, for which later tasks
            wait, and the links that sums of gradients still use.
        spans: ops by stream; empty unless requested.
    """

    seconds: float
    compute: float
    exposed: float
    communication: float
    flops: float
    wire: Mapping[str, float] = field(default_factory=dict)
    linked: Mapping[str, float] = field(default_factory=dict)
    sends: Mapping[str, float] = field(default_factory=dict)
    late: Mapping[str, float] = field(default_factory=dict)
    in_flight: InFlight = NOTHING_IN_FLIGHT
    spans: tuple[Span, ...] = ()


def repeated(times: Sequence[TaskTime], turns: int) -> TaskTime:
    """Times that follow one another, a number of times."""

    def total(of: Callable[[TaskTime], float]) -> float:
        return turns * sum(map(of, times))

    links = {link for time in times for link in (*time.wire, *time.linked)}
    return TaskTime(
        total(lambda time: time.seconds),
        total(lambda time: time.compute),
        total(lambda time: time.exposed),
        total(lambda time: time.communication),
        total(lambda time: time.flops),
        {link: turns * sum(time.wire.get(link, 0.0) for time in times) for link in links},
        {link: turns * sum(time.linked.get(link, 0.0) for time in times) for link in links},
    )
