"""The model of a pipeline schedule that the stage search uses: the makespan from the costs of stages.

With t_i the seconds of stage i for one micro-batch, forward and backward, and m micro-batches,

    makespan = sum_i t_i + (m - 1) max_i t_i

under both GPipe and 1F1B (Zheng et al., Alpa, OSDI 2022, equation 2; for p equal stages (m + p - 1) t). The
two schedules differ in the number of micro-batches in flight on a stage and in whether transfers are hidden:
see `in_flight`, `fill` and `waits_for_transfers` in `plan/schedule_policies.py`.
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
        >>> from distgraph.plan.schedule_policies import ONE_F_ONE_B
        >>> makespan(ONE_F_ONE_B, [1.0] * 4, [2.0] * 4, 8)
        33.0
    """
    times = [f + b for f, b in zip(forward, backward, strict=True)]
    once = step or [0.0] * len(times)
    rounds = micro_batches - schedule.fill
    last = max(rounds * t + s for t, s in zip(times, once, strict=True))
    return schedule.fill * (sum(times) + sum(transfer)) + max([last, *(rounds * x for x in transfer)])
