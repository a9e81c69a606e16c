"""Sums and maxima of values over intervals of consecutive layers, for many intervals at once.

*In:* values by layer; the last entry belongs to no layer and counts in every interval. *Out:* values by
interval. *Invariant:* an interval is given by its first and its last layer, both included; sums are
differences of prefix sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.float_arrays import Floats

Numbers = NDArray[np.int64]
Indices = Numbers | int
Intervals = tuple[Indices, Indices, Indices]
"""(index of the row of values, first layer, last layer), arrays of one length or single numbers."""


class IntervalSums:
    """Sums over intervals of layers, for several rows of values [layers + 1]."""

    def __init__(self, values: Sequence[Floats]) -> None:
        stacked = np.stack(values)
        self._no_layer = stacked[:, -1]
        self._total = np.zeros_like(stacked)
        np.cumsum(stacked[:, :-1], axis=1, out=self._total[:, 1:])

    def of(self, intervals: Intervals) -> Floats:
        """Sums that include the entry of no layer."""
        return np.asarray(self.of_layers(intervals) + self._no_layer[intervals[0]])

    def of_layers(self, intervals: Intervals) -> Floats:
        """Sums of the layers alone."""
        row, first, last = intervals
        return np.asarray(self._total[row, last + 1] - self._total[row, first])

    def without_last(self, intervals: Intervals) -> Floats:
        """Sums of all layers but the last, for values at the borders inside an interval."""
        row, first, last = intervals
        return np.asarray(self._total[row, last] - self._total[row, first])


def maxima(values: Floats) -> Floats:
    """Maxima [first, last] over all intervals, the last entry included; undefined where last < first."""
    layers = len(values) - 1
    spread = np.where(np.tri(layers, dtype=bool).T, values[None, :-1], -np.inf)
    return np.asarray(np.maximum(np.maximum.accumulate(spread, axis=1), values[-1]))
