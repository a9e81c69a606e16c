"""What the search of stages needs to know of a pipeline schedule: what is in flight, how a step adds up.

With t_i the seconds of stage i for one micro-batch, forward and backward, and m micro-batches,

    makespan = sum_i t_i + (m - 1) max_i t_i

under GPipe and 1F1B alike (Zheng et al., Alpa, OSDI 2022, equation 2; equal stages: (m + p - 1) t). They
differ in the micro-batches whose activations a stage holds: all of them under GPipe (Huang et al., 2019),
min(m, p - i) on stage i = 0..p - 1 of p under 1F1B (Narayanan et al., PipeDream-2BW, 2021). So few in flight
make a stage wait for what is on its way (`waits`); all of them hide it behind each other, for memory. A
schedule that fills the pipeline in smaller pieces has a `fill` below 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from distgraph.errors import InfeasibleError


class SchedulePolicy(Protocol):
    """A schedule, as far as stages depend on it.

    `live` may depend on the number of stages behind a stage alone, stages - stage, and must not fall with it.
    """

    @property
    def name(self) -> str:
        """As in `Strategy.schedule`."""

    @property
    def fill(self) -> float:
        """Share of the other stages' time that a step waits for: 1 where whole micro-batches fill it."""

    @property
    def waits(self) -> bool:
        """Whether the border behind a stage is part of its period: as many are in flight as stages follow."""

    def live(self, stage: int, stages: int, micro_batches: int) -> int:
        """Micro-batches whose activations stage number `stage` holds at most."""


@dataclass(frozen=True, slots=True)
class GPipe:
    """All micro-batches forward, then all backward."""

    name: str = "gpipe"
    fill: float = 1.0
    waits: bool = False

    def live(self, stage: int, stages: int, micro_batches: int) -> int:
        """All of them."""
        return micro_batches


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward:
    """Each stage turns to backward as soon as it can, so that few micro-batches are in flight."""

    name: str = "1f1b"
    fill: float = 1.0
    waits: bool = True

    def live(self, stage: int, stages: int, micro_batches: int) -> int:
        """One for each stage from this one to the last."""
        return min(micro_batches, stages - stage)


SCHEDULES: dict[str, SchedulePolicy] = {"1f1b": OneForwardOneBackward(), "gpipe": GPipe()}


def schedule_policy(name: str) -> SchedulePolicy:
    """A schedule by name. Raises InfeasibleError for an unknown one."""
    try:
        return SCHEDULES[name]
    except KeyError:
        raise InfeasibleError(
            f"schedule {name!r} cannot be searched for; the schedules are {', '.join(SCHEDULES)}"
        ) from None


def makespan(
    schedule: SchedulePolicy,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: Sequence[float] = (),
    step: Sequence[float] = (),
) -> float:
    """Seconds of one training step of a pipeline.

    A border between stages is like a stage of its own. What a stage does once a step, such as synchronising
    gradients, follows its last micro-batch:

        fill (sum_i t_i + sum_j x_j) + max(max_i (m - fill) t_i + s_i, max_j (m - fill) x_j)

    Args:
        schedule: see there.
        forward, backward: seconds of each stage for one micro-batch.
        micro_batches: m.
        transfer: x, seconds of each border for one micro-batch, both ways; none where they cost nothing.
        step: s, seconds of each stage once a step; none where there are none.

    Example:
        >>> makespan(OneForwardOneBackward(), [1.0] * 4, [2.0] * 4, 8)
        33.0
    """
    times = [f + b for f, b in zip(forward, backward, strict=True)]
    once = step or [0.0] * len(times)
    rounds = micro_batches - schedule.fill
    last = max(rounds * t + s for t, s in zip(times, once, strict=True))
    return schedule.fill * (sum(times) + sum(transfer)) + max([last, *(rounds * x for x in transfer)])
