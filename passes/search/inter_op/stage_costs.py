"""Costs of stages: intervals of layers on a sub-mesh, for arrays of stages at once.

*In:* costs of every interval, or of every layer. *Out:* seconds of stages, infinite if a stage does not fit
into memory with the micro-batches in flight. *Invariant:* seconds never decrease with the number in flight.

A stage is an interval of layers on a sub-mesh under a config. Its index is its position in an array [first,
last, sub-mesh, config], where the interval includes the last layer. Most stages cannot be part of a good
pipeline, so no such array is stored for every number of micro-batches in flight; the search asks for the
candidates only.

`ProfileCosts` computes costs from profiles by layer: the costs of an interval are differences of prefix sums.
With l micro-batches in flight, a stage of the layers R fits if

    sum_R fixed + max_R temporary + l sum_R activations <= memory.

If it does not fit, layers are recomputed where they can be: layer r then takes e_r more seconds and stores
a_r fewer bytes. This is a covering knapsack problem. Layers are chosen by ascending e_r / a_r until the stage
fits. If the layers of the stage are equal this gives the least time; otherwise it exceeds the least time by
less than the time of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distgraph.errors import GraphError
from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.inter_op.interval_sums import Intervals, IntervalSums, Numbers, maxima
from distgraph.passes.search.intra_op.chosen_layouts import Profile

_ROUNDING = 1e-12  # of the memory: differences of prefix sums are not exact


class IntervalCosts(Protocol):
    """Costs of all stages."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, sub-meshes, configs."""

    def seconds_of(self, stages: Numbers, in_flight: int) -> Floats:
        """Seconds of one micro-batch, by indices of stages; inf if a stage does not fit."""

    def step_of(self, stages: Numbers) -> Floats:
        """Seconds once a step, by indices of stages."""

    def recomputed(self, first: int, last: int, submesh: int, config: int, in_flight: int) -> tuple[int, ...]:
        """Layers of an interval that are recomputed in the backward part."""

    def missing(self, in_flight: int) -> Floats:
        """[first, last, sub-mesh, config] bytes that exceed the memory, with recomputation where it helps."""


def stage_indices(shape: tuple[int, int, int]) -> Numbers:
    """Indices of all stages, ascending, for numbers of layers, sub-meshes and configs.

    Example:
        >>> stage_indices((2, 1, 2))
        array([0, 1, 2, 3, 6, 7])
    """
    layers, submeshes, configs = shape
    first, last = np.triu_indices(layers)
    options = submeshes * configs
    return np.asarray(((first * layers + last) * options)[:, None] + np.arange(options)).reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class IncreasedCosts:
    """Costs with more seconds of a micro-batch; `more` broadcasts to [first, last, sub-mesh], inf forbids."""

    costs: IntervalCosts
    more: Floats

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, sub-meshes, configs."""
        return self.costs.shape

    def seconds_of(self, stages: Numbers, in_flight: int) -> Floats:
        """Seconds of one micro-batch; inf if a stage does not fit or is forbidden."""
        layers, submeshes, configs = self.shape
        more = np.broadcast_to(self.more, (layers, layers, submeshes))
        index = np.unravel_index(stages // configs, more.shape)
        return self.costs.seconds_of(stages, in_flight) + more[index]

    def step_of(self, stages: Numbers) -> Floats:
        """Seconds once a step."""
        return self.costs.step_of(stages)

    def recomputed(self, first: int, last: int, submesh: int, config: int, in_flight: int) -> tuple[int, ...]:
        """Layers of an interval that are recomputed in the backward part."""
        return self.costs.recomputed(first, last, submesh, config, in_flight)

    def missing(self, in_flight: int) -> Floats:
        """Bytes that exceed the memory of a device, with recomputation where it helps."""
        return self.costs.missing(in_flight)


@dataclass(frozen=True, slots=True)
class Config:
    """The costs of layers on a sub-mesh under one choice of layouts.

    Attributes:
        profile: costs by layer.
        recompute: costs by layer if every layer is recomputed in the backward part; None if none can be.
    """

    profile: Profile
    recompute: Profile | None = None


class ProfileCosts:
    """Costs of all intervals from profiles by layer.

    The last entry of a profile, which belongs to no layer, counts in every stage.

    Args:
        configs: for every sub-mesh its configs, any number of them.
        memory: bytes of one device of every sub-mesh; None if memory does not matter.

    Raises:
        GraphError: there is no config, profiles differ in length, or `memory` has another length than
            `configs`.
    """

    def __init__(self, configs: Sequence[Sequence[Config]], memory: Sequence[float] | None = None) -> None:
        sizes = {len(config.profile.forward) for of_submesh in configs for config in of_submesh}
        if len(sizes) != 1:
            raise GraphError(
                f"profiles of stages have {sorted(sizes)} entries; give all of them the same layers"
            )
        if memory is not None and len(memory) != len(configs):
            raise GraphError(f"{len(configs)} sub-meshes have {len(memory)} memories; give one a sub-mesh")
        layers = sizes.pop() - 1
        self.shape = (layers, len(configs), max(map(len, configs)))
        self._memory = np.full(self.shape[1:], -np.inf)  # a padding config never fits
        for submesh, of_submesh in enumerate(configs):
            self._memory[submesh, : len(of_submesh)] = np.inf if memory is None else memory[submesh]
        self._memory = self._memory.reshape(-1)
        padding = next(config for of_submesh in configs for config in of_submesh)
        rows = [
            config
            for of_submesh in configs
            for config in (*of_submesh, *[padding] * (self.shape[2] - len(of_submesh)))
        ]
        profiles = [config.profile for config in rows]
        self._time = IntervalSums([p.forward + p.backward for p in profiles])
        self._border = IntervalSums([p.border for p in profiles])
        self._once = IntervalSums([p.step for p in profiles])
        self._gradients = IntervalSums([p.gradients for p in profiles])
        self._backward = IntervalSums([p.backward for p in profiles])
        self._fixed = IntervalSums([p.fixed for p in profiles])
        self._activations = IntervalSums([p.activations for p in profiles])
        self._temporary = np.stack([maxima(p.temporary) for p in profiles])
        recomputing = np.stack([maxima((c.recompute or c.profile).temporary) for c in rows])
        self._scratch = np.maximum(self._temporary, recomputing)
        self._groups = [_layer_groups(config) for config in rows]
        self._preferences = _preferences(self._groups, layers)

    def step_of(self, stages: Numbers) -> Floats:
        """Seconds once a step: the last backward part hides the synchronisation of gradients."""
        intervals = self._intervals(stages)
        hidden = np.minimum(self._gradients.of(intervals), self._backward.of(intervals))
        return np.asarray(self._once.of(intervals) - hidden)

    def seconds_of(self, stages: Numbers, in_flight: int) -> Floats:
        """Seconds of one micro-batch; inf if a stage does not fit."""
        row, first, last = intervals = self._intervals(stages)
        seconds = self._time.of(intervals) + np.maximum(self._border.without_last(intervals), 0.0)
        persistent, allowed = self._persistent(intervals, in_flight), self._allowed()[row]
        full = np.flatnonzero(persistent + self._temporary[intervals] > allowed)
        if len(full):
            too_large = row[full], first[full], last[full]
            missing = persistent[full] + self._scratch[too_large] - allowed[full]
            extra = np.zeros(len(full))
            for extra_seconds, saved_bytes, layers in self._preferences:
                saved = saved_bytes[too_large[0]]
                needed = np.ceil(missing / (in_flight * saved))
                recomputed = np.clip(needed, 0, layers.of_layers(too_large))
                missing -= recomputed * in_flight * saved
                extra += recomputed * extra_seconds[too_large[0]]
            seconds[full] = np.where(missing <= 0, seconds[full] + extra, np.inf)
        return seconds

    def missing(self, in_flight: int) -> Floats:
        """Bytes that exceed the memory with all or no layers recomputed, whichever needs less."""
        layers, submeshes, configs = self.shape
        intervals = self._intervals(np.arange(layers * layers * submeshes * configs))
        persistent = self._persistent(intervals, in_flight)
        saved = np.zeros_like(persistent)
        for _, saved_bytes, members in self._preferences:
            saved += in_flight * saved_bytes[intervals[0]] * members.of_layers(intervals)
        least = np.minimum(
            persistent + self._temporary[intervals], persistent - saved + self._scratch[intervals]
        )
        return np.asarray(least - self._memory[intervals[0]]).reshape(layers, layers, submeshes, configs)

    def recomputed(self, first: int, last: int, submesh: int, config: int, in_flight: int) -> tuple[int, ...]:
        """Layers of an interval that are recomputed in the backward part; of equal layers the first ones."""
        row = submesh * self.shape[2] + config
        persistent, allowed = self._persistent((row, first, last), in_flight), self._allowed()[row]
        if persistent + self._temporary[row, first, last] <= allowed:
            return ()
        missing, recomputed = persistent + self._scratch[row, first, last] - allowed, []
        for _, saved_bytes, layers in self._groups[row]:
            inside = layers[(layers >= first) & (layers <= last)]
            count = int(np.clip(np.ceil(missing / (in_flight * saved_bytes)), 0, len(inside)))
            missing -= count * in_flight * saved_bytes
            recomputed += [int(layer) for layer in inside[:count]]
        return tuple(sorted(recomputed))

    def _intervals(self, stages: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Row (sub-mesh and config), first and last layer of stages."""
        layers, submeshes, configs = self.shape
        interval, row = np.divmod(stages, submeshes * configs)
        first, last = np.divmod(interval, layers)
        return row, first, last

    def _persistent(self, intervals: Intervals, in_flight: int) -> Floats:
        """Bytes without scratch memory and without recomputation."""
        return self._fixed.of(intervals) + in_flight * self._activations.of(intervals)

    def _allowed(self) -> Floats:
        return self._memory * (1 + _ROUNDING)


def _layer_groups(config: Config) -> list[tuple[float, float, Numbers]]:
    """Groups of equal layers that save memory if recomputed, the least seconds per byte first.

    Each group is (extra seconds, saved bytes, layers).
    """
    if config.recompute is None:
        return []
    p, q = config.profile, config.recompute
    extra_seconds = np.maximum(q.forward + q.backward - p.forward - p.backward, 0.0)[:-1]
    saved_bytes = (p.activations - q.activations)[:-1]
    equal: dict[tuple[float, float], list[int]] = {}
    for layer in np.flatnonzero(saved_bytes > 0):
        equal.setdefault((float(extra_seconds[layer]), float(saved_bytes[layer])), []).append(int(layer))
    ordered = sorted(equal.items(), key=lambda item: item[0][0] / item[0][1])
    return [(e, a, np.asarray(layers)) for (e, a), layers in ordered]


def _preferences(
    groups: Sequence[Sequence[tuple[float, float, Numbers]]], layers: int
) -> list[tuple[Floats, Floats, IntervalSums]]:
    """The first group of every row, the second group of every row, and so on, as arrays over rows.

    Each entry is (extra seconds, saved bytes, number of member layers by interval).
    """
    preferences = []
    for preference in range(max(map(len, groups))):
        extra_seconds, saved_bytes = np.zeros(len(groups)), np.ones(len(groups))
        members = [np.zeros(layers + 1) for _ in groups]
        for row, of_row in enumerate(groups):
            if preference < len(of_row):
                extra_seconds[row], saved_bytes[row], numbers = of_row[preference]
                members[row][numbers] = 1
        preferences.append((extra_seconds, saved_bytes, IntervalSums(members)))
    return preferences
