"""Sums and maxima of runs of layers, for many runs at once.

*In:* values by layer; a last entry belongs to no layer and is part of every run. *Out:* values by run.
*Invariant:* a run is its first and its last layer, the last included; sums are differences of prefix sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
Some = Numbers | int
Runs = tuple[Some, Some, Some]
"""Ways to run layers, first and last layers."""


class IntervalSums:
    """Sums of runs of layers, each in one of several ways.

    Args:
        values: of each way, [layers + 1].
    """

    def __init__(self, values: Sequence[Floats]) -> None:
        stacked = np.stack(values)
        self._always = stacked[:, -1]
        self._total = np.zeros_like(stacked)
        np.cumsum(stacked[:, :-1], axis=1, out=self._total[:, 1:])

    def of(self, runs: Runs) -> Floats:
        """Sums with the entry that belongs to no layer."""
        return np.asarray(self.between(runs) + self._always[runs[0]])

    def between(self, runs: Runs) -> Floats:
        """Sums of the layers alone."""
        way, first, last = runs
        return np.asarray(self._total[way, last + 1] - self._total[way, first])

    def inside(self, runs: Runs) -> Floats:
        """Sums of all layers but the last, as for the borders inside a run."""
        way, first, last = runs
        return np.asarray(self._total[way, last] - self._total[way, first])


def maxima(values: Floats) -> Floats:
    """Maxima of all runs, the last entry included, [first, last]; no meaning where last < first."""
    layers = len(values) - 1
    spread = np.where(np.tri(layers, dtype=bool).T, values[None, :-1], -np.inf)
    return np.asarray(np.maximum(np.maximum.accumulate(spread, axis=1), values[-1]))
