"""Stages that may be part of a better row, with a number of micro-batches in flight.

*In:* costs of stages, the seconds of the best row so far. *Out:* tables [first, last, sub-mesh] of the
fastest config under a limit. *Invariant:* numbers of stages rise, so that the configs of a run on a sub-mesh
lie together.

Few stages matter with many micro-batches in flight: seconds never fall with them, so what does not fit, or
alone takes as long as the best row, needs no second look; and p - 1 stages behind a stage have as many
layers. So those with more in flight are made from those with fewer.
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
class Candidates:
    """Stages and what they cost.

    Attributes:
        shape: layers, sub-meshes, configs.
        stages: their numbers, see `costs`.
        seconds: of one micro-batch.
        step: seconds once a step.
        slowest: what the maximum of the objective is at least with one in the row.
    """

    shape: tuple[int, int, int]
    stages: Numbers
    seconds: Floats
    step: Floats
    slowest: Floats

    @staticmethod
    def of(costs: IntervalCosts, live: int, rounds: float) -> Candidates:
        """All stages that fit.

        Args:
            costs: of them.
            live: micro-batches in flight.
            rounds: what seconds count in the maximum of the objective.
        """
        stages = stage_numbers(costs.shape)
        free = np.zeros(len(stages))
        return Candidates(costs.shape, stages, free, costs.step_of(stages), free).fitting(costs, live, rounds)

    def fitting(self, costs: IntervalCosts, live: int, rounds: float) -> Candidates:
        """Those that fit with so many micro-batches in flight; arguments as of `of`."""
        seconds = costs.seconds_of(self.stages, live)
        fits = np.isfinite(seconds)
        seconds, step = seconds[fits], self.step[fits]
        return Candidates(self.shape, self.stages[fits], seconds, step, rounds * seconds + step)

    def ahead(self, layers: int) -> Candidates:
        """Those with at least so many layers behind them."""
        count, submeshes, configs = self.shape
        return self._where(self.stages // (submeshes * configs) % count < count - layers)

    def below(self, seconds: float) -> Candidates:
        """Those with which the maximum of the objective can be below some seconds."""
        return self._where(self.slowest < seconds)

    def within(self, limit: float) -> Floats:
        """Seconds of the fastest configs, [first, last, sub-mesh], inf where none keeps the limit."""
        return self._least(np.where(self.slowest <= limit, self.seconds, np.inf))

    def maxima(self) -> Floats:
        """What the maximum of the objective is at least with a run on a sub-mesh, [first, last, sub-mesh]."""
        return self._least(self.slowest)

    def _where(self, kept: NDArray[np.bool_]) -> Candidates:
        if kept.all():
            return self
        return Candidates(
            self.shape, self.stages[kept], self.seconds[kept], self.step[kept], self.slowest[kept]
        )

    @cached_property
    def _groups(self) -> tuple[Numbers, Numbers]:
        """Where the configs of a run on a sub-mesh start, and the number of that run."""
        runs = self.stages // self.shape[2]
        starts = np.flatnonzero(np.diff(runs, prepend=-1))
        return starts, runs[starts]

    def _least(self, values: Floats) -> Floats:
        layers, submeshes, _ = self.shape
        found = np.full((layers, layers, submeshes), np.inf)
        starts, runs = self._groups
        if len(starts):
            found.reshape(-1)[runs] = np.minimum.reduceat(values, starts)
        return found


@dataclass(frozen=True, slots=True)
class Ways:
    """All configs of one run of layers on one sub-mesh.

    Attributes:
        seconds, step, slowest: as of `Candidates`, [config]; inf where one does not fit.
    """

    seconds: Floats
    step: Floats
    slowest: Floats

    @staticmethod
    def of(costs: IntervalCosts, run: tuple[int, int, int], live: int, rounds: float) -> Ways:
        """Those of first layer, stop and sub-mesh."""
        layers, submeshes, configs = costs.shape
        first, stop, submesh = run
        at = ((first * layers + stop - 1) * submeshes + submesh) * configs + np.arange(configs)
        seconds, step = costs.seconds_of(at, live), costs.step_of(at)
        fits = np.isfinite(seconds)
        slowest = np.full(configs, np.inf)
        slowest[fits] = rounds * seconds[fits] + step[fits]
        return Ways(seconds, step, slowest)

    def within(self, limit: float) -> Floats:
        """Seconds of those that keep a limit, inf for others."""
        return np.where(self.slowest <= limit, self.seconds, np.inf)
