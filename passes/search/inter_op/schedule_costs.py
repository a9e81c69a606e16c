"""The model of a pipeline schedule that the stage search uses: the makespan from the costs of stages.

With t_i the seconds of stage i for one micro-batch, forward and backward, and m micro-batches,

    makespan = sum_i t_i + (m - 1) max_i t_i

under both GPipe and 1F1B (Zheng et al., Alpa, OSDI 2022, equation 2; for p equal stages (m + p - 1) t). The
two schedules differ in the number of micro-batches in flight on a stage and in whether transfers are hidden:
see `in_flight`, `fill` and `waits_for_transfers` in `plan/pipeline_schedules.py`.

The closed form is what a dynamic programme can minimise. Of a pipeline whose stages are all known,
`simulated_makespan` follows every micro-batch instead.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distgraph.passes.analysis.link_contention import LinkQueues, LinkSeconds, link_totals
from distgraph.plan.pipeline_schedules import SchedulePolicy

_SIDES = ("forward", "backward")

Border = tuple[LinkSeconds, LinkSeconds]
"""What a message from a stage to the next one occupies, and one back."""


def makespan(
    schedule: SchedulePolicy,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: Sequence[float] = (),
    step: Sequence[float] = (),
    occupied: Sequence[float] | None = None,
) -> float:
    """Seconds of one training step of a pipeline.

    A transfer between two stages counts like a stage: a micro-batch waits for it both ways, and the most
    occupied link cannot begin the next one earlier. Messages of both directions use different links where
    these are full duplex. Work of a stage that runs once a step, such as the synchronisation of gradients,
    follows its last micro-batch:

        fill (sum_i t_i + sum_j x_j) + max(max_i (m - fill) t_i + s_i, max_j (m - fill) y_j)

    Args:
        schedule: the schedule, of which `fill` is used.
        forward, backward: seconds of each stage for one micro-batch.
        micro_batches: m.
        transfer: x, seconds of the transfers (forward and backward) after each stage but the last, for one
            micro-batch; empty if transfers cost nothing.
        step: s, seconds of each stage once a step; empty if there are none.
        occupied: y, seconds for which a transfer occupies its most occupied link; None for those of the
            transfers.

    Example:
        >>> from distgraph.plan.pipeline_schedules import ONE_F_ONE_B
        >>> makespan(ONE_F_ONE_B, [1.0] * 4, [2.0] * 4, 8)
        33.0
    """
    times = [f + b for f, b in zip(forward, backward, strict=True)]
    once = step or [0.0] * len(times)
    rounds = micro_batches - schedule.fill
    last = max(rounds * t + s for t, s in zip(times, once, strict=True))
    longest = max(transfer if occupied is None else occupied, default=0.0)
    return schedule.fill * (sum(times) + sum(transfer)) + max(last, rounds * longest)


_FOLLOWED = 256
"""Forward parts of all stages that are followed before the rest is extrapolated."""
_CYCLES = 2
"""Micro-batches for each stage of the pipeline that are followed, at least."""
_MOST_FOLLOWED = 1024
"""Forward parts that are followed, at most."""


def simulated_makespan(
    schedule: SchedulePolicy,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: Sequence[float] = (),
    step: Sequence[float] = (),
    links: Sequence[Border] = (),
) -> float:
    """Seconds of one training step of a pipeline, by following its micro-batches from stage to stage.

    A stage computes forward parts while fewer micro-batches are in flight on it than the schedule allows, and
    of the parts that may begin the one that the schedule prefers. A result is on its way to the next stage
    while both stages compute; results that need the same link follow one another, as in the forecast. Of many
    micro-batches the first few are followed; the others take as long each as the second half of these.
    Pipelines of very many stages are not followed: once filled, every micro-batch takes the longest period of
    a stage or link, which is its own seconds or (Little's law) those from a stage to the last one and back
    over the number in flight.

    Args:
        schedule: the schedule; of one with a table, its credits are followed, and what a step takes beyond
            the work of its busiest stage is multiplied by `fill`.
        forward, backward: seconds of each stage for one micro-batch.
        micro_batches: m.
        transfer: seconds of the transfer after each stage but the last, in one direction; empty if transfers
            cost nothing.
        step: seconds of each stage once a step, after its last backward part; empty if there are none.
        links: seconds for which the transfers after each stage but the last occupy links; empty if transfers
            do not wait for each other.

    Example:
        >>> from distgraph.plan.pipeline_schedules import ONE_F_ONE_B
        >>> simulated_makespan(ONE_F_ONE_B, [1.0] * 4, [2.0] * 4, 8)
        33.0
        >>> simulated_makespan(ONE_F_ONE_B, [1.0, 1.0], [2.0, 1.0], 8, [0.5], [5.0, 0.0])
        37.0
    """
    count = len(forward)
    once = step or [0.0] * count
    messages = {(side, after): border[side] for after, border in enumerate(links) for side in (0, 1)}
    work = max(micro_batches * (f + b) + s for f, b, s in zip(forward, backward, once, strict=True))
    pipeline = _Pipeline(schedule, forward, backward, transfer or [0.0] * (count - 1), messages)
    ends = _ends(pipeline, micro_batches)
    seconds = max(end + more for end, more in zip(ends, once, strict=True))
    return seconds if schedule.fill == 1 else work + schedule.fill * (seconds - work)


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """A pipeline to follow; messages by direction (0 forward, 1 backward) and stage before the border."""

    schedule: SchedulePolicy
    forward: Sequence[float]
    backward: Sequence[float]
    transfer: Sequence[float]
    messages: Mapping[tuple[int, int], LinkSeconds]


def _ends(pipeline: _Pipeline, micro_batches: int) -> list[float]:
    """End of the last backward part of every stage: followed, extrapolated or, of very many, in the steady
    state."""
    count = len(pipeline.forward)
    if _CYCLES * count**2 > _MOST_FOLLOWED:
        return _steady_ends(pipeline, micro_batches)
    followed = min(micro_batches, max(_CYCLES * count, _FOLLOWED // count))
    ends = _Simulation(pipeline, followed).last_ends()
    if followed < micro_batches:
        later = followed // 2 // count * count  # whole cycles of the pipeline
        before = _Simulation(pipeline, followed - later).last_ends()
        rounds = (micro_batches - followed) / later
        ends = [end + rounds * (end - earlier) for end, earlier in zip(ends, before, strict=True)]
    return ends


def _steady_ends(pipeline: _Pipeline, micro_batches: int) -> list[float]:
    """End of the last backward part of every stage, were the period of all the longest of any stage."""
    forward, backward, transfer = pipeline.forward, pipeline.backward, pipeline.transfer
    count, turn = len(forward), 0.0  # turn: from a stage and back to it
    period = max(link_totals(pipeline.messages).values(), default=0.0)
    for stage in reversed(range(count)):
        busy = forward[stage] + backward[stage]
        turn += busy + (2 * transfer[stage] if stage + 1 < count else 0.0)
        period = max(period, busy, turn / pipeline.schedule.in_flight(stage, count, micro_batches))
    ends = [turn + (micro_batches - 1) * period]
    for stage in range(count - 1):
        ends.append(ends[-1] - backward[stage] - transfer[stage])
    return ends


class _Simulation:
    """A pipeline that is followed by events in the order of time.

    Attributes:
        ready: times of the inputs that every stage has, by side (0 forward, 1 backward).
        begun: number of forward and backward parts that every stage has begun.
        running: the side of the last part of every stage.
        free: when every stage has done with its last part.
        events: (time, stage that may begin, -1, 0); or a message that is handed over to a link: (time, stage
            that receives it, side, earliest arrival).
    """

    def __init__(self, pipeline: _Pipeline, micro_batches: int) -> None:
        count = len(pipeline.forward)
        self.pipeline, self.micro_batches, self.count = pipeline, micro_batches, count
        self.queues = LinkQueues(pipeline.messages)
        self.limits = _buffer_limits(pipeline.schedule, count)
        self.ready: tuple[list[list[float]], list[list[float]]] = (
            [[0.0] * micro_batches, *([] for _ in range(count - 1))],
            [[] for _ in range(count)],
        )
        self.begun = [0] * count, [0] * count
        self.running, self.free = [0] * count, [0.0] * count
        self.events = [(0.0, stage, -1, 0.0) for stage in range(count)]

    def last_ends(self) -> list[float]:
        """End of the last backward part of every stage."""
        events = self.events
        while events:
            time, stage, side, earliest = heapq.heappop(events)
            if side >= 0:
                arrival = max(self.queues.send((side, stage - 1 + side), time), earliest)
                self.deliver(stage, side, arrival)
            elif self.free[stage] <= time:
                which = self.next_part(stage, time)
                if which is not None:
                    self.begin(stage, which, time)
        return self.free

    def next_part(self, stage: int, time: float) -> int | None:
        """What a stage begins: 0 a forward part, 1 a backward part; None if neither can begin."""
        schedule, begun = self.pipeline.schedule, self.begun
        turned = begun[0][stage] == self.micro_batches or not schedule.forward_is_done_first
        candidates = [
            (schedule.priority(phase, begun[which][stage], 0), which)
            for which, phase in enumerate(_SIDES)
            if (turned or which == 0)
            and time >= _entry(self.ready[which][stage], begun[which][stage])
            and self.has_room(which, stage, time)
        ]
        return min(candidates)[1] if candidates else None

    def has_room(self, which: int, stage: int, time: float) -> bool:
        """Whether those who read the results of a part have done with enough of them."""
        begun = self.begun
        for reader, target, limit in self.limits[which][stage]:
            ended = begun[reader][target] - (self.running[target] == reader and self.free[target] > time)
            if begun[which][stage] - ended >= limit:
                return False
        return True

    def begin(self, stage: int, which: int, time: float) -> None:
        """Compute a part of a stage, and send its result on."""
        pipeline = self.pipeline
        self.begun[which][stage] += 1
        self.running[stage] = which
        self.free[stage] = end = time + (pipeline.backward if which else pipeline.forward)[stage]
        heapq.heappush(self.events, (end, stage, -1, 0.0))
        target, source = (stage - 1, stage + 1) if which else (stage + 1, stage - 1)
        if 0 <= source < self.count:  # it may reuse the buffer of what this part reads
            heapq.heappush(self.events, (end, source, -1, 0.0))
        if target == self.count:
            self.ready[1][stage].append(end)
        elif target >= 0:
            self.send(target, (which, min(stage, target)), time, end)

    def send(self, target: int, border: tuple[int, int], time: float, end: float) -> None:
        """Send the result of a part that began at `time` to a stage."""
        longest, earliest = self.queues.longest, end + self.pipeline.transfer[border[1]]
        if border in longest:
            handed_over = max(time, earliest - longest[border])
            heapq.heappush(self.events, (handed_over, target, border[0], earliest))
        else:
            self.deliver(target, border[0], earliest)

    def deliver(self, stage: int, side: int, arrival: float) -> None:
        """A message arrives at a stage, which may begin a part then."""
        self.ready[side][stage].append(arrival)
        heapq.heappush(self.events, (arrival, stage, -1, 0.0))


@dataclass(frozen=True, slots=True)
class _Part:
    kind: str
    stage: int


def _buffer_limits(
    schedule: SchedulePolicy, count: int
) -> tuple[list[list[tuple[int, int, int]]], list[list[tuple[int, int, int]]]]:
    """Of the forward and backward part of every stage who reads its results: (side, stage, most alive)."""
    limits: tuple[list[list[tuple[int, int, int]]], list[list[tuple[int, int, int]]]]
    limits = [[] for _ in range(count)], [[] for _ in range(count)]
    for stage in range(count):
        for which, reader, target in ((0, 0, stage + 1), (0, 1, stage), (1, 1, stage - 1)):
            if 0 <= target < count:
                source, target_part = _Part(_SIDES[which], stage), _Part(_SIDES[reader], target)
                most = schedule.credits(source, target_part, count, which != reader)
                if most is not None:
                    limits[which][stage].append((reader, target, most))
    return limits


def _entry(times: Sequence[float], number: int) -> float:
    """The time of a result; infinite where it has not been computed yet."""
    return times[number] if number < len(times) else math.inf
