"""How the step of a pipeline adds up from its stages, as far as the search of stages assumes.

With t_i the seconds of stage i for one micro-batch, forward and backward, and m micro-batches,

    makespan = sum_i t_i + (m - 1) max_i t_i

under GPipe and 1F1B alike (Zheng et al., Alpa, OSDI 2022, equation 2; equal stages: (m + p - 1) t). The two
differ in the micro-batches that a stage holds and in whether transfers are hidden: see `in_flight`, `fill`
and `waits_for_transfers` of `plan/schedule_policies.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from distgraph.plan.schedule_policies import SchedulePolicy


def makespan(
    schedule: SchedulePolicy,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: Sequence[float] = (),
    step: Sequence[float] = (),
) -> float:
    """Seconds of one training step of a pipeline.

    The transfer between two stages is counted like a stage of its own. What a stage does once a step, such as
    synchronising gradients, follows its last micro-batch:

        fill (sum_i t_i + sum_j x_j) + max(max_i (m - fill) t_i + s_i, max_j (m - fill) x_j)

    Args:
        schedule: its `fill` counts.
        forward, backward: seconds of each stage for one micro-batch.
        micro_batches: m.
        transfer: x, seconds of the transfer behind each stage but the last for one micro-batch, both ways;
            empty where transfers cost nothing.
        step: s, seconds of each stage once a step; empty where there are none.

    Example:
        >>> from distgraph.plan.schedule_policies import ONE_F_ONE_B
        >>> makespan(ONE_F_ONE_B, [1.0] * 4, [2.0] * 4, 8)
        33.0
    """
    times = [f + b for f, b in zip(forward, backward, strict=True)]
    once = step or [0.0] * len(times)
    rounds = micro_batches - schedule.fill
    last = max(rounds * t + s for t, s in zip(times, once, strict=True))
    return schedule.fill * (sum(times) + sum(transfer)) + max([last, *(rounds * x for x in transfer)])
