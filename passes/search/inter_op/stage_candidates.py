"""Stage candidates: the stages that may be part of a better pipeline, by micro-batches in flight.

*In:* costs of stages, the seconds of the best pipeline so far. *Out:* tables [first, last, sub-mesh] of the
fastest config under a limit. *Invariant:* indices of stages ascend, so that the configs of an interval of
layers on a sub-mesh are consecutive.

With many micro-batches in flight few stages are candidates. Seconds never decrease with the number in flight,
so a stage that does not fit, or that alone takes as long as the best pipeline, is dropped for all larger
numbers. A stage that is followed by p - 1 stages is followed by at least p - 1 layers. The candidates for a
larger number in flight are therefore computed from those for a smaller one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.inter_op.stage_costs import IntervalCosts, stage_indices

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StageCandidates:
    """Stages with their costs.

    Attributes:
        shape: numbers of layers, sub-meshes, configs.
        stages: indices of the stages, see `stage_costs`.
        seconds: seconds of one micro-batch.
        step: seconds once a step.
        slowest: lower bound of the maximum in the objective of any pipeline with the stage.
    """

    shape: tuple[int, int, int]
    stages: Numbers
    seconds: Floats
    step: Floats
    slowest: Floats

    @staticmethod
    def of(costs: IntervalCosts, in_flight: int, rounds: float) -> StageCandidates:
        """All stages that fit into memory.

        Args:
            costs: costs of all stages.
            in_flight: micro-batches in flight.
            rounds: factor of a stage's seconds in the maximum of the objective.
        """
        stages = stage_indices(costs.shape)
        unknown = np.zeros(len(stages))
        return StageCandidates(costs.shape, stages, unknown, costs.step_of(stages), unknown).fitting(
            costs, in_flight, rounds
        )

    def fitting(self, costs: IntervalCosts, in_flight: int, rounds: float) -> StageCandidates:
        """The stages that fit with `in_flight` micro-batches in flight; arguments as for `of`."""
        seconds = costs.seconds_of(self.stages, in_flight)
        fits = np.isfinite(seconds)
        seconds, step = seconds[fits], self.step[fits]
        return StageCandidates(self.shape, self.stages[fits], seconds, step, rounds * seconds + step)

    def followed_by(self, layers: int) -> StageCandidates:
        """The stages that are followed by at least `layers` layers."""
        count, submeshes, configs = self.shape
        return self._where(self.stages // (submeshes * configs) % count < count - layers)

    def below(self, seconds: float) -> StageCandidates:
        """The stages with which the maximum in the objective can be below `seconds`."""
        return self._where(self.slowest < seconds)

    def within(self, limit: float) -> Floats:
        """Seconds [first, last, sub-mesh] of the fastest configs; inf if all exceed the limit."""
        return self._least(np.where(self.slowest <= limit, self.seconds, np.inf))

    def maxima(self) -> Floats:
        """Lower bound [first, last, sub-mesh] of the maximum in the objective with a stage."""
        return self._least(self.slowest)

    def _where(self, mask: NDArray[np.bool_]) -> StageCandidates:
        if mask.all():
            return self
        return StageCandidates(
            self.shape, self.stages[mask], self.seconds[mask], self.step[mask], self.slowest[mask]
        )

    @cached_property
    def _groups(self) -> tuple[Numbers, Numbers]:
        """Position of the first config of every interval on a sub-mesh, and the index of the interval."""
        intervals = self.stages // self.shape[2]
        starts = np.flatnonzero(np.diff(intervals, prepend=-1))
        return starts, intervals[starts]

    def _least(self, values: Floats) -> Floats:
        layers, submeshes, _ = self.shape
        least = np.full((layers, layers, submeshes), np.inf)
        starts, intervals = self._groups
        if len(starts):
            least.reshape(-1)[intervals] = np.minimum.reduceat(values, starts)
        return least


@dataclass(frozen=True, slots=True)
class ConfigCosts:
    """All configs of one interval of layers on one sub-mesh.

    Attributes:
        seconds, step, slowest: [config], as in `StageCandidates`; inf if a config does not fit.
    """

    seconds: Floats
    step: Floats
    slowest: Floats

    @staticmethod
    def of(
        costs: IntervalCosts, interval: tuple[int, int, int], in_flight: int, rounds: float
    ) -> ConfigCosts:
        """The configs of an interval: (first layer, stop, sub-mesh)."""
        layers, submeshes, configs = costs.shape
        first, stop, submesh = interval
        stages = ((first * layers + stop - 1) * submeshes + submesh) * configs + np.arange(configs)
        seconds, step = costs.seconds_of(stages, in_flight), costs.step_of(stages)
        fits = np.isfinite(seconds)
        slowest = np.full(configs, np.inf)
        slowest[fits] = rounds * seconds[fits] + step[fits]
        return ConfigCosts(seconds, step, slowest)

    def within(self, limit: float) -> Floats:
        """Seconds of the configs within a limit, inf for the others."""
        return np.where(self.slowest <= limit, self.seconds, np.inf)
