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
from collections.abc import Sequence

from distgraph.plan.pipeline_schedules import SchedulePolicy


def makespan(
    schedule: SchedulePolicy,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: Sequence[float] = (),
    step: Sequence[float] = (),
) -> float:
    """Seconds of one training step of a pipeline.

    A transfer between two stages counts like a stage. Work of a stage that runs once a step, such as the
    synchronisation of gradients, follows its last micro-batch:

        fill (sum_i t_i + sum_j x_j) + max(max_i (m - fill) t_i + s_i, max_j (m - fill) x_j)

    Args:
        schedule: the schedule, of which `fill` is used.
        forward, backward: seconds of each stage for one micro-batch.
        micro_batches: m.
        transfer: x, seconds of the transfers (forward and backward) after each stage but the last, for one
            micro-batch; empty if transfers cost nothing.
        step: s, seconds of each stage once a step; empty if there are none.

    Example:
        >>> from distgraph.plan.pipeline_schedules import ONE_F_ONE_B
        >>> makespan(ONE_F_ONE_B, [1.0] * 4, [2.0] * 4, 8)
        33.0
    """
    times = [f + b for f, b in zip(forward, backward, strict=True)]
    once = step or [0.0] * len(times)
    rounds = micro_batches - schedule.fill
    last = max(rounds * t + s for t, s in zip(times, once, strict=True))
    return schedule.fill * (sum(times) + sum(transfer)) + max([last, *(rounds * x for x in transfer)])


_FOLLOWED = 128
"""Forward parts of all stages that are followed before the rest is extrapolated."""
_CYCLES = 4
"""Micro-batches for each stage of the pipeline that are followed, at least."""
_BUFFERS = 2
"""Results of a stage that wait for the next one or are in use there, at most."""


def simulated_makespan(
    schedule: SchedulePolicy,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: Sequence[float] = (),
    step: Sequence[float] = (),
) -> float:
    """Seconds of one training step of a pipeline, by following its micro-batches from stage to stage.

    A stage computes forward parts while fewer micro-batches are in flight on it than the schedule allows, and
    of the parts that may begin the one that the schedule prefers. A result is on its way to the next stage
    while both stages compute; results of several micro-batches may be, as in the forecast. Of many
    micro-batches the first few are followed; the others take as long each as the last of these. Pipelines of
    many stages are not followed: once filled, every micro-batch takes the longest period of a stage, which is
    its own seconds or (Little's law) those from it to the last stage and back over the number in flight.

    Args:
        schedule: the schedule, of which `in_flight`, `priority` and `forward_is_done_first` are used.
        forward, backward: seconds of each stage for one micro-batch.
        micro_batches: m.
        transfer: seconds of the transfer after each stage but the last, in one direction; empty if transfers
            cost nothing.
        step: seconds of each stage once a step, after its last backward part; empty if there are none.

    Example:
        >>> from distgraph.plan.pipeline_schedules import ONE_F_ONE_B
        >>> simulated_makespan(ONE_F_ONE_B, [1.0] * 4, [2.0] * 4, 8)
        33.0
        >>> simulated_makespan(ONE_F_ONE_B, [1.0, 1.0], [2.0, 1.0], 8, [0.5], [5.0, 0.0])
        37.0
    """
    count = len(forward)
    transfer, once = transfer or [0.0] * (count - 1), step or [0.0] * count
    if _CYCLES * count**2 > _FOLLOWED:
        ends = _steady_ends(schedule, forward, backward, micro_batches, transfer)
        return max(end + more for end, more in zip(ends, once, strict=True))
    followed = min(micro_batches, max(_CYCLES * count, _FOLLOWED // count))
    followed += (micro_batches - followed) % count  # the others are whole cycles of the pipeline
    ends = _last_ends(schedule, forward, backward, followed, transfer)
    if followed < micro_batches:
        before = _last_ends(schedule, forward, backward, followed - count, transfer)
        cycles = (micro_batches - followed) // count
        ends = [end + cycles * (end - earlier) for end, earlier in zip(ends, before, strict=True)]
    return max(end + more for end, more in zip(ends, once, strict=True))


def _steady_ends(
    schedule: SchedulePolicy,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: Sequence[float],
) -> list[float]:
    """End of the last backward part of every stage, were the period of all the longest of any stage."""
    count = len(forward)
    period = turn = 0.0  # turn: from a stage to the last one and back
    for stage in reversed(range(count)):
        own = forward[stage] + backward[stage]
        turn += own + (2 * transfer[stage] if stage + 1 < count else 0.0)
        period = max(period, own, turn / schedule.in_flight(stage, count, micro_batches))
    ends = [turn + (micro_batches - 1) * period]
    for stage in range(count - 1):
        ends.append(ends[-1] - backward[stage] - transfer[stage])
    return ends


def _last_ends(
    schedule: SchedulePolicy,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: Sequence[float],
) -> list[float]:
    """End of the last backward part of every stage, by events in the order of time."""
    count = len(forward)
    allowed = [schedule.in_flight(stage, count, micro_batches) for stage in range(count)]
    ready: tuple[list[list[float]], list[list[float]]]
    ready = [[0.0] * micro_batches, *([] for _ in range(count - 1))], [[] for _ in range(count)]
    begun = [0] * count, [0] * count  # forward and backward parts of every stage
    free = [0.0] * count
    events = [(0.0, stage) for stage in range(count)]

    def part(stage: int, time: float) -> int | None:
        """What a stage begins: 0 a forward part, 1 a backward part; None if neither can begin."""
        first, second = begun[0][stage], begun[1][stage]
        room = first - second < allowed[stage]
        if room and stage + 1 < count:  # one result is in use on the next stage while the next one is made
            room = first - begun[0][stage + 1] < _BUFFERS
        turned = first == micro_batches or not schedule.forward_is_done_first
        found = [
            (schedule.priority(phase, number, 0), which)
            for which, phase, number in ((0, "forward", first), (1, "backward", second))
            if (turned if which else room) and time >= _entry(ready[which][stage], number)
        ]
        return min(found)[1] if found else None

    while events:
        time, stage = heapq.heappop(events)
        which = part(stage, time) if free[stage] <= time else None
        if which is None:
            continue
        begun[which][stage] += 1
        free[stage] = end = time + (backward if which else forward)[stage]
        heapq.heappush(events, (end, stage))
        target = stage + (-1 if which else 1)
        if which == 0 and stage:
            heapq.heappush(events, (time, stage - 1))
        if target == count:
            ready[1][stage].append(end)
        elif target >= 0:
            delay = transfer[min(stage, target)]
            ready[which][target].append(end + delay)
            heapq.heappush(events, (end + delay, target))
    return free


def _entry(times: Sequence[float], number: int) -> float:
    """The time of a result; infinite where it has not been computed yet."""
    return times[number] if number < len(times) else math.inf
