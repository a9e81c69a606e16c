"""The dynamic programme over stages: the shortest pipeline under a limit on its slowest stage.

Let F(s, k, d) be the least sum of seconds when layers k to K form s stages on d devices and no stage exceeds
the limit (Zheng et al., Alpa, OSDI 2022, section 5.2):

    F(0, K, 0) = 0
    F(s, k, d) = min over i > k and sub-meshes n of
                     t(k..i - 1 on n, s) + x(i, n, sub-mesh of the next stage) + F(s - 1, i, d - size(n)),

where t is the time of the best config that fits into memory at position s from the end and is within the
limit, and x is the time of the transfer between the stages. d counts the devices of every pool. If x depends
on both sub-meshes, the sub-mesh of the next stage is part of the state.

A state is dropped if another state of the same layer takes no more time with no more stages (and, where fewer
devices may be used, with no more devices): t never decreases with s, so any stages before the one could also
be before the other.

The number of stages s matters only because of memory. Therefore a table without s is computed first, with t
as on the last stage. Its result is a lower bound, and it is the answer if its stages fit at their positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from distgraph.ir.float_arrays import Floats

_CACHED = 1 << 16
"""Numbers that are added in one piece: their 512 KiB fit into the second-level cache of a core."""

Times = Callable[[int], Floats]
"""Position from the end (1: the last stage) -> seconds [first, stop - 1, sub-mesh]; inf above the limit."""

Index = tuple[int | slice, ...]
StageAssignment = tuple[tuple[int, int, int], ...]
"""The stages of a pipeline, from the first to the last: (first layer, stop, sub-mesh)."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Numbers of devices in units that divide the sizes of all sub-meshes.

    Attributes:
        shape: units of each pool, plus one.
        sizes: for each sub-mesh the units of each pool that it uses.
        whole: whether all devices must be used.
    """

    shape: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    whole: bool

    @staticmethod
    def of(pools: tuple[int, ...], sizes: tuple[tuple[int, ...], ...], whole: bool) -> Devices | None:
        """From numbers of devices; None if all devices must be used but the units do not divide them."""
        units = [math.gcd(*column) or 1 for column in zip(*sizes, strict=True)]
        if whole and any(n % unit for n, unit in zip(pools, units, strict=True)):
            return None
        shape = tuple(n // unit + 1 for n, unit in zip(pools, units, strict=True))
        scaled = tuple(tuple(n // unit for n, unit in zip(sizes_, units, strict=True)) for sizes_ in sizes)
        return Devices(shape, scaled, whole)

    def states_after(self, submesh: int) -> tuple[slice, ...]:
        """The states that result from `states_before` when the sub-mesh is added, in the same order."""
        return tuple(slice(n, None) for n in self.sizes[submesh])

    def states_before(self, submesh: int) -> tuple[slice, ...]:
        """The states to which a sub-mesh can be added."""
        return tuple(slice(0, max(0, m - n)) for m, n in zip(self.shape, self.sizes[submesh], strict=True))


class StageTable:
    """The table of the dynamic programme under one limit.

    Args:
        layers: K.
        devices: numbers of devices of pools and sub-meshes.
        borders: x, [layers - 1, sub-mesh before, sub-mesh after], inf above the limit; None if transfers cost
            nothing.
    """

    def __init__(self, layers: int, devices: Devices, borders: Floats | None) -> None:
        self.layers, self.devices = layers, devices
        self.count = len(devices.sizes)
        self.borders, self.behind = None if borders is None or not borders.size else borders, None
        if self.borders is not None and not (self.borders != self.borders[:, :, :1]).any():
            # x is the same for every sub-mesh of the next stage, so that it is part of the stage before it
            behind = np.append(self.borders[:, :, 0], np.zeros((1, self.count)), axis=0)
            self.borders, self.behind = None, behind
        self.neighbours = 1 if self.borders is None else self.count  # of a stage, by which states differ
        self.states_before = [devices.states_before(n) for n in range(self.count)]
        self.states_after = [devices.states_after(n) for n in range(self.count)]
        self.usable = [n for n, room in enumerate(self.states_before) if all(part.stop for part in room)]

    def shortest(self, times: Times, budget: float) -> tuple[float, StageAssignment] | None:
        """The assignment of any number of stages with the least sum, with t of the last stage for all stages.

        Args:
            times: see `Times`.
            budget: only assignments with at most this sum are searched for.

        Returns:
            The sum and the assignment; None if there is none.
        """
        table = self._with_behind(times(1))
        best, reach = self._suffixes(table, budget)
        end = self._best_end(best[0])
        if end is None:
            return None
        return end[0], self._trace_back(lambda _: table, lambda _: reach, end[1], 0)

    def counted(
        self, times: Times, most: int, budget: float, exact: bool = False
    ) -> tuple[float, StageAssignment] | None:
        """The assignment of at most `most` stages with the least sum, or of exactly as many if `exact`; other
        arguments as for `shortest`."""

        def with_transfers(position: int) -> Floats:
            return self._with_behind(times(position))

        before_bound = self._prefixes(with_transfers(1), budget)
        reach = self._empty()
        self._start(reach)
        levels, least = [reach], reach
        best: tuple[float, tuple[int, ...], int] | None = None
        for position in range(1, most + 1):
            totals = self._extend_all(with_transfers(position), levels[-1])
            totals[totals + before_bound[..., None] > budget] = np.inf
            end = self._best_end(totals[0].min(axis=-1))
            if end is not None and (best is None or end[0] < best[0]) and (not exact or position == most):
                best = end[0], end[1], position
            reach = self._with_borders(totals)
            if exact:  # an assignment of fewer stages is no substitute
                reach[reach > self._least_on_fewer(reach)] = np.inf
            else:
                before, least = least, self._least_on_fewer(np.minimum(reach, least))
                reach[(reach > least) | (reach >= before)] = np.inf
            if not np.isfinite(reach).any():
                break
            levels.append(reach)
        if best is None:
            return None
        return best[0], self._trace_back(
            with_transfers, lambda position: levels[position - 1], best[1], best[2]
        )

    def _with_behind(self, table: Floats) -> Floats:
        """Seconds of stages, with those of the transfer behind each where they depend on that stage alone."""
        return table if self.behind is None else table + self.behind

    def _suffixes(self, table: Floats, budget: float) -> tuple[Floats, Floats]:
        """Least sums [layer, units] of assignments from a layer to the end, and with the border before."""
        reach = self._empty()
        self._start(reach)
        best = np.full((self.layers, *self.devices.shape), np.inf)
        fits = np.isfinite(table)
        lows, highs = fits.argmax(axis=1), self.layers - fits[:, ::-1].argmax(axis=1)
        for first in range(self.layers - 1, -1, -1):
            low, high = lows[first], highs[first]
            ends = {n: (low[n], high[n]) for n in self.usable if fits[first, low[n], n]}
            totals = self._extend(table, reach, first, ends, budget)
            best[first] = totals.min(axis=-1)
            self._set_with_border(reach, first, totals)
        return best, reach

    def _prefixes(self, table: Floats, budget: float) -> Floats:
        """Lower bounds [layer, units] of the sum of the stages before a layer, given the units for the rest.

        They are the suffixes of the reversed pipeline.
        """
        borders = None if self.borders is None else self.borders[::-1].transpose(0, 2, 1)
        reversed_table = StageTable(self.layers, self.devices, borders)
        reversed_times = reversed_table._with_behind(table[::-1, ::-1].transpose(1, 0, 2))
        best, _ = reversed_table._suffixes(reversed_times, budget)
        axes = tuple(range(1, best.ndim))
        if not self.devices.whole:
            for axis in axes:
                best = np.minimum.accumulate(best, axis=axis)
        before = np.full_like(best, np.inf)
        before[1:] = np.flip(best[1:], axis=(0, *axes))
        all_units: Index = (0, *(n - 1 for n in self.devices.shape))
        before[all_units] = 0.0
        if not self.devices.whole:
            before[0] = 0.0
        return before

    def _empty(self) -> Floats:
        """[sub-mesh before, layer, units] least sum from a border on, the border included; all inf."""
        return np.full((self.neighbours, self.layers + 1, *self.devices.shape), np.inf)

    def _state_of(self, submesh: int) -> int:
        """Where states of a neighbouring stage on a sub-mesh are."""
        return submesh if self.neighbours > 1 else 0

    def _start(self, reach: Floats) -> None:
        end: Index = (slice(None), self.layers, *(0,) * len(self.devices.shape))
        reach[end] = 0.0

    def _extend(
        self, table: Floats, reach: Floats, first: int, ends: Mapping[int, tuple[int, int]], budget: float
    ) -> Floats:
        """Least sums [units, first sub-mesh] of the assignments that start at a layer.

        Args:
            table: seconds of stages.
            reach: least sums from later layers on.
            first: the layer.
            ends: sub-mesh -> range of the last layers that a stage on it may have.
            budget: larger sums become inf.
        """
        totals = np.full((*self.devices.shape, self.neighbours), np.inf)
        for submesh, (low, high) in ends.items():
            room = self.states_before[submesh]
            rest: Index = (self._state_of(submesh), slice(low + 1, high + 1), *room)
            sums = reach[rest] + table[first, low:high, submesh].reshape(-1, *[1] * len(room))
            least = sums.min(axis=0)
            index: Index = (*self.states_after[submesh], self._state_of(submesh))
            totals[index] = np.minimum(totals[index], least)
        totals[totals > budget] = np.inf
        return totals

    def _extend_all(self, table: Floats, reach: Floats) -> Floats:
        """Least sums [layer, units, first sub-mesh] of the assignments that start at every layer."""
        totals = np.full((self.layers, *self.devices.shape, self.neighbours), np.inf)
        for submesh in self.usable:
            index: Index = (self._state_of(submesh), slice(1, None), *self.states_before[submesh])
            rest = reach[index]
            flat = rest.reshape(self.layers, -1)
            finite = np.isfinite(flat)
            stops, units = np.flatnonzero(finite.any(axis=1)), np.flatnonzero(finite.any(axis=0))
            seconds = table[:, stops, submesh]
            firsts = np.flatnonzero(np.isfinite(seconds).any(axis=1))
            if not len(stops) or not len(firsts):
                continue
            least = np.full((self.layers, flat.shape[1]), np.inf)
            least[np.ix_(firsts, units)] = _least_sums(seconds[firsts], flat[np.ix_(stops, units)])
            least = least.reshape(self.layers, *rest.shape[1:])
            target: Index = (slice(None), *self.states_after[submesh], self._state_of(submesh))
            totals[target] = np.minimum(totals[target], least)
        return totals

    def _least_on_fewer(self, reach: Floats) -> Floats:
        """Least sums on at most as many devices, where fewer may be used."""
        for axis in range(2, reach.ndim) if not self.devices.whole else ():
            reach = np.minimum.accumulate(reach, axis=axis)
        return reach

    def _with_borders(self, totals: Floats) -> Floats:
        """Least sums from every layer on, plus the border before the layer."""
        reach = self._empty()
        if self.borders is None:
            reach[0, 1 : self.layers] = totals[1:].min(axis=-1)
            return reach
        ones = (1,) * len(self.devices.shape)
        for before in range(self.count):
            border = self.borders[:, before].reshape(-1, *ones, self.neighbours)
            reach[before, 1 : self.layers] = (totals[1:] + border).min(axis=-1)
        return reach

    def _set_with_border(self, reach: Floats, first: int, totals: Floats) -> None:
        """Set the least sums from one layer on, plus the border before the layer."""
        if self.borders is None:
            reach[0, first] = totals.min(axis=-1)
            return
        if first:
            for before in range(self.count):
                reach[before, first] = (totals + self.borders[first - 1, before]).min(axis=-1)

    def _best_end(self, sums: Floats) -> tuple[float, tuple[int, ...]] | None:
        """The sum and the state of the best assignment of all layers."""
        if self.devices.whole:
            state = tuple(n - 1 for n in self.devices.shape)
        else:
            state = tuple(int(i) for i in np.unravel_index(int(sums.argmin()), sums.shape))
        return (float(sums[state]), state) if np.isfinite(sums[state]) else None

    def _trace_back(
        self, times: Times, reach: Callable[[int], Floats], units: tuple[int, ...], position: int
    ) -> StageAssignment:
        """The best assignment, traced back through the table."""
        assignment: list[tuple[int, int, int]] = []
        first = 0
        while first < self.layers:
            stop, submesh = self._best_stage(times(position), reach(position), assignment, first, units)
            assignment.append((first, stop, submesh))
            units = tuple(a - b for a, b in zip(units, self.devices.sizes[submesh], strict=True))
            first, position = stop, position - 1
        return tuple(assignment)

    def _best_stage(
        self,
        table: Floats,
        reach: Floats,
        assignment: list[tuple[int, int, int]],
        first: int,
        units: tuple[int, ...],
    ) -> tuple[int, int]:
        """Stop and sub-mesh of the best stage that starts at a layer when some units are left."""
        best, choice = np.inf, (0, 0)
        for submesh, sizes in enumerate(self.devices.sizes):
            left = tuple(a - b for a, b in zip(units, sizes, strict=True))
            if min(left) < 0:
                continue
            rest: Index = (self._state_of(submesh), slice(first + 1, None), *left)
            sums = table[first, first:, submesh] + reach[rest]
            if assignment and self.borders is not None:
                sums = sums + self.borders[first - 1, assignment[-1][2], submesh]
            index = int(sums.argmin())
            if sums[index] < best:
                best, choice = float(sums[index]), (first + 1 + index, submesh)
        return choice


def _least_sums(seconds: Floats, rest: Floats) -> Floats:
    """min over stops of seconds [first, stop] + rest [stop, units], in pieces that stay in the cache."""
    totals = np.empty((len(seconds), rest.shape[1]))
    piece = max(1, _CACHED // rest.size)
    for start in range(0, len(seconds), piece):
        stop = start + piece
        np.min(seconds[start:stop, :, None] + rest[None], axis=1, out=totals[start:stop])
    return totals
