"""Stages that may be part of a better pipeline, with a number of micro-batches in flight.

*In:* costs of stages, the seconds of the best pipeline so far. *Out:* tables [first, last, sub-mesh] of the
fastest config under a limit. *Invariant:* numbers of stages rise, so that the configs of a run on a sub-mesh
are consecutive.

Few stages matter with many micro-batches in flight: seconds never fall with them, so what does not fit, or
alone takes as long as the best pipeline, is dropped for all larger numbers; and p - 1 stages behind a stage
have as many layers. So the stages for more in flight are made from those for fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distgraph.passes.search.inter_op.stage_costs import IntervalCosts, stage_numbers

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StageCandidates:
    """Stages and what they cost.

    Attributes:
        shape: layers, sub-meshes, configs.
        stages: their numbers, see `costs`.
        seconds: of one micro-batch.
        step: seconds once a step.
        slowest: the least maximum of the objective of a pipeline with the stage.
    """

    shape: tuple[int, int, int]
    stages: Numbers
    seconds: Floats
    step: Floats
    slowest: Floats

    @staticmethod
    def of(costs: IntervalCosts, in_flight: int, rounds: float) -> StageCandidates:
        """All stages that fit.

        Args:
            costs: of them.
            in_flight: micro-batches in flight.
            rounds: what seconds count in the maximum of the objective.
        """
        stages = stage_numbers(costs.shape)
        free = np.zeros(len(stages))
        return StageCandidates(costs.shape, stages, free, costs.step_of(stages), free).fitting(
            costs, in_flight, rounds
        )

    def fitting(self, costs: IntervalCosts, in_flight: int, rounds: float) -> StageCandidates:
        """The stages that fit with `in_flight` micro-batches in flight; arguments as of `of`."""
        seconds = costs.seconds_of(self.stages, in_flight)
        fits = np.isfinite(seconds)
        seconds, step = seconds[fits], self.step[fits]
        return StageCandidates(self.shape, self.stages[fits], seconds, step, rounds * seconds + step)

    def ahead(self, layers: int) -> StageCandidates:
        """The stages with at least `layers` layers behind them."""
        count, submeshes, configs = self.shape
        return self._where(self.stages // (submeshes * configs) % count < count - layers)

    def below(self, seconds: float) -> StageCandidates:
        """The stages with which the maximum of the objective can be below some seconds."""
        return self._where(self.slowest < seconds)

    def within(self, limit: float) -> Floats:
        """Seconds of the fastest configs, [first, last, sub-mesh], inf where none keeps the limit."""
        return self._least(np.where(self.slowest <= limit, self.seconds, np.inf))

    def maxima(self) -> Floats:
        """The least maximum of the objective with a run on a sub-mesh, [first, last, sub-mesh]."""
        return self._least(self.slowest)

    def _where(self, mask: NDArray[np.bool_]) -> StageCandidates:
        if mask.all():
            return self
        return StageCandidates(
            self.shape, self.stages[mask], self.seconds[mask], self.step[mask], self.slowest[mask]
        )

    @cached_property
    def _groups(self) -> tuple[Numbers, Numbers]:
        """Where the configs of a run on a sub-mesh start, and the number of that run."""
        runs = self.stages // self.shape[2]
        starts = np.flatnonzero(np.diff(runs, prepend=-1))
        return starts, runs[starts]

    def _least(self, values: Floats) -> Floats:
        layers, submeshes, _ = self.shape
        least = np.full((layers, layers, submeshes), np.inf)
        starts, runs = self._groups
        if len(starts):
            least.reshape(-1)[runs] = np.minimum.reduceat(values, starts)
        return least


@dataclass(frozen=True, slots=True)
class ConfigCosts:
    """All configs of one run of layers on one sub-mesh.

    Attributes:
        seconds, step, slowest: as of `StageCandidates`, [config]; inf where one does not fit.
    """

    seconds: Floats
    step: Floats
    slowest: Floats

    @staticmethod
    def of(costs: IntervalCosts, run: tuple[int, int, int], in_flight: int, rounds: float) -> ConfigCosts:
        """The configs of a run: first layer, stop and sub-mesh."""
        layers, submeshes, configs = costs.shape
        first, stop, submesh = run
        stages = ((first * layers + stop - 1) * submeshes + submesh) * configs + np.arange(configs)
        seconds, step = costs.seconds_of(stages, in_flight), costs.step_of(stages)
        fits = np.isfinite(seconds)
        slowest = np.full(configs, np.inf)
        slowest[fits] = rounds * seconds[fits] + step[fits]
        return ConfigCosts(seconds, step, slowest)

    def within(self, limit: float) -> Floats:
        """Seconds of the configs that keep a limit, inf for others."""
        return np.where(self.slowest <= limit, self.seconds, np.inf)
