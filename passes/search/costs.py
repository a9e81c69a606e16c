"""What a run of layers costs on a sub-mesh, for every run at once.

*In:* costs of every run, or of every layer. *Out:* arrays [first, last, sub-mesh, config] of seconds,
infinite where the run does not fit into memory with so many micro-batches in flight. *Invariant:* seconds
never fall when more are in flight.

`DenseCosts` holds the arrays. `ProfileCosts` makes them from profiles by layer: the costs of a run are
differences of prefix sums. With l the micro-batches in flight a stage of the layers R fits where

    sum_R fixed + max_R temporary + l sum_R activations <= memory.

Where it does not and layers can be recomputed, some are: layer r then takes e_r seconds more and keeps a_r
bytes less. That is a knapsack to be covered; layers are taken by rising e_r / a_r until the rest fits, which
is the least number of them, and the least time, where the layers of the stage are equal (others: above the
least time by less than the time of one layer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from distgraph.errors import GraphError
from distgraph.passes.search.layouts import Profile

__all__ = ["Config", "DenseCosts", "IntervalCosts", "ProfileCosts", "Restricted", "StageCosts"]

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]

_ROUNDING = 1e-12  # of the memory: differences of prefix sums are not exact


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Every run of layers on every sub-mesh under every config, with a number of micro-batches in flight.

    Attributes:
        seconds: of one micro-batch, forward and backward, [first, last, sub-mesh, config]; inf where it does
            not fit, or last < first.
        step: seconds once a step, the same shape.
    """

    seconds: Floats
    step: Floats


class IntervalCosts(Protocol):
    """Costs of all runs of layers."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, sub-meshes, configs."""

    def at(self, live: int) -> StageCosts:
        """Costs with `live` micro-batches in flight."""

    def recomputed(self, first: int, last: int, submesh: int, config: int, live: int) -> tuple[int, ...]:
        """Layers of a run that are computed again in the backward part."""

    def missing(self, live: int) -> Floats:
        """Bytes above the memory of a device, all layers recomputed that can be; the shape of `at`."""


@dataclass(frozen=True, eq=False)
class DenseCosts:
    """Costs that somebody has measured or made up for every run.

    Attributes:
        seconds: [first, last, sub-mesh, config], last included in the run.
        step: the same shape, or None for none.
        fixed, activations: bytes of the same shape that a stage holds always, and for each micro-batch in
            flight; None for none.
        memory: bytes of one device of every sub-mesh; None where memory is no matter.

    Raises:
        GraphError: shapes differ.
    """

    seconds: Floats
    step: Floats | None = None
    fixed: Floats | None = None
    activations: Floats | None = None
    memory: Sequence[float] | None = None
    _known: dict[int, StageCosts] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        shape = self.seconds.shape
        if len(shape) != 4 or shape[0] != shape[1]:
            raise GraphError(
                f"costs of stages have shape {shape} but need [layers, layers, sub-meshes, configs]"
            )
        for name in ("step", "fixed", "activations"):
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise GraphError(f"{name} of stages has shape {array.shape} but their seconds {shape}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, sub-meshes, configs."""
        _, layers, submeshes, configs = self.seconds.shape
        return layers, submeshes, configs

    def at(self, live: int) -> StageCosts:
        """Costs with `live` micro-batches in flight."""
        if self.memory is None:
            live = 0
        if live not in self._known:
            self._known[live] = self._at(live)
        return self._known[live]

    def _at(self, live: int) -> StageCosts:
        runs = np.tri(self.seconds.shape[0], dtype=bool).T[:, :, None, None]
        step = np.zeros_like(self.seconds) if self.step is None else self.step
        fits = self.missing(live) <= 0
        return StageCosts(np.where(runs & fits, self.seconds, np.inf), step)

    def missing(self, live: int) -> Floats:
        """Bytes above the memory of a device."""
        held = np.zeros_like(self.seconds)
        if self.memory is None:
            return held
        if self.fixed is not None:
            held += self.fixed
        if self.activations is not None:
            held += live * self.activations
        return np.asarray(held - np.asarray(self.memory)[:, None] * (1 + _ROUNDING))

    def recomputed(self, first: int, last: int, submesh: int, config: int, live: int) -> tuple[int, ...]:
        """None: what a config does is in its costs."""
        return ()


@dataclass(frozen=True, slots=True, eq=False)
class Restricted:
    """Costs without some stages.

    Attributes:
        costs: of all of them.
        forbidden: broadcasts to [first, last, sub-mesh].
    """

    costs: IntervalCosts
    forbidden: NDArray[np.bool_]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, sub-meshes, configs."""
        return self.costs.shape

    def at(self, live: int) -> StageCosts:
        """Costs with `live` micro-batches in flight."""
        found = self.costs.at(live)
        return StageCosts(np.where(self.forbidden[..., None], np.inf, found.seconds), found.step)

    def recomputed(self, first: int, last: int, submesh: int, config: int, live: int) -> tuple[int, ...]:
        """Layers of a run that are computed again in the backward part."""
        return self.costs.recomputed(first, last, submesh, config, live)

    def missing(self, live: int) -> Floats:
        """Bytes above the memory of a device, all layers recomputed that can be."""
        return self.costs.missing(live)


@dataclass(frozen=True, slots=True)
class Config:
    """One way to run layers on a sub-mesh.

    Attributes:
        profile: costs by layer.
        recompute: costs by layer where each is computed again in the backward part; None where that is no
            choice.
    """

    profile: Profile
    recompute: Profile | None = None


class ProfileCosts:
    """Costs of all runs from profiles by layer.

    What belongs to no layer, the last entry of a profile, is part of every stage.

    Args:
        configs: for every sub-mesh the ways to run layers on it, any number of them.
        memory: bytes of one device of every sub-mesh; None where memory is no matter.

    Raises:
        GraphError: no config at all, profiles of different length, or one memory a sub-mesh is not given.
    """

    def __init__(self, configs: Sequence[Sequence[Config]], memory: Sequence[float] | None = None) -> None:
        sizes = {len(c.profile.forward) for row in configs for c in row}
        if len(sizes) != 1:
            raise GraphError(
                f"profiles of stages have {sorted(sizes)} entries; give all of them the same layers"
            )
        if memory is not None and len(memory) != len(configs):
            raise GraphError(f"{len(configs)} sub-meshes have {len(memory)} memories; give one a sub-mesh")
        self._runs = [[_Runs(c) for c in row] for row in configs]
        self._memory = [float("inf")] * len(configs) if memory is None else [float(m) for m in memory]
        self._known: dict[int, StageCosts] = {}
        self.shape = (sizes.pop() - 1, len(configs), max(map(len, configs)))

    def at(self, live: int) -> StageCosts:
        """Costs with `live` micro-batches in flight."""
        if live not in self._known:
            layers, submeshes, configs = self.shape
            seconds = np.full((layers, layers, submeshes, configs), np.inf)
            step = np.zeros_like(seconds)
            for submesh, row in enumerate(self._runs):
                for config, runs in enumerate(row):
                    seconds[:, :, submesh, config] = runs.seconds(live, self._memory[submesh])
                    step[:, :, submesh, config] = runs.step
            self._known[live] = StageCosts(seconds, step)
        return self._known[live]

    def recomputed(self, first: int, last: int, submesh: int, config: int, live: int) -> tuple[int, ...]:
        """Layers of a run that are computed again in the backward part; of equal ones the first."""
        return self._runs[submesh][config].recomputed(first, last, live, self._memory[submesh])

    def missing(self, live: int) -> Floats:
        """Bytes above the memory of a device, all layers recomputed that can be."""
        layers, submeshes, configs = self.shape
        found = np.full((layers, layers, submeshes, configs), np.inf)
        for submesh, row in enumerate(self._runs):
            for config, runs in enumerate(row):
                found[:, :, submesh, config] = runs.missing(live, self._memory[submesh])
        return found


class _Runs:
    """All runs of layers under one config; arrays are [first, last]."""

    def __init__(self, config: Config) -> None:
        self.profile, self.again = config.profile, config.recompute
        self.layers = len(self.profile.forward) - 1
        self.inside = np.tri(self.layers, dtype=bool).T
        p = self.profile
        self.step = _sums(p.step) + p.step[-1]
        self.plain = _sums(p.forward + p.backward) + (p.forward + p.backward)[-1] + _borders(p.border)
        self.fixed = _sums(p.fixed) + p.fixed[-1]
        self.activations = _sums(p.activations) + p.activations[-1]

    @cached_property
    def temporary(self) -> Floats:
        """Bytes of scratch memory where nothing is recomputed."""
        return _maxima(self.profile.temporary)

    @cached_property
    def scratch(self) -> Floats:
        """Bytes of scratch memory where something is."""
        again = self.profile if self.again is None else self.again
        return np.maximum(self.temporary, _maxima(again.temporary))

    @cached_property
    def kinds(self) -> tuple[tuple[float, float, Numbers, Floats], ...]:
        """Layers worth recomputing, those alike together, best first.

        Seconds more, bytes less, their numbers, and how many of them each run has.
        """
        if self.again is None:
            return ()
        p, q = self.profile, self.again
        more = np.maximum(q.forward + q.backward - p.forward - p.backward, 0.0)[:-1]
        less = (p.activations - q.activations)[:-1]
        alike: dict[tuple[float, float], list[int]] = {}
        for layer in np.flatnonzero(less > 0):
            alike.setdefault((float(more[layer]), float(less[layer])), []).append(int(layer))
        ordered = sorted(alike.items(), key=lambda item: item[0][0] / item[0][1])
        return tuple((e, a, np.asarray(own), _counts(own, self.layers)) for (e, a), own in ordered)

    def missing(self, live: int, memory: float) -> Floats:
        """Bytes above the memory, with all or no layers recomputed."""
        held = self.fixed + live * self.activations
        saved = sum((live * less * count for _, less, _, count in self.kinds), start=0.0)
        return np.asarray(np.minimum(held + self.temporary, held - saved + self.scratch) - memory)

    def seconds(self, live: int, memory: float) -> Floats:
        """Of one micro-batch, inf where the run does not fit."""
        allowed = memory * (1 + _ROUNDING) if np.isfinite(memory) else memory
        held = self.fixed + live * self.activations
        fits = held + self.temporary <= allowed
        found = np.where(self.inside & fits, self.plain, np.inf)
        if self.again is None or bool((fits | ~self.inside).all()):
            return found
        missing, extra = held + self.scratch - allowed, np.zeros_like(held)
        for more, less, _, count in self.kinds:
            taken = np.clip(np.ceil(missing / (live * less)), 0, count)
            missing -= taken * live * less
            extra += taken * more
        return np.where(self.inside & ~fits & (missing <= 0), self.plain + extra, found)

    def recomputed(self, first: int, last: int, live: int, memory: float) -> tuple[int, ...]:
        """Layers of one run that are recomputed."""
        allowed = memory * (1 + _ROUNDING) if np.isfinite(memory) else memory
        held = self.fixed[first, last] + live * self.activations[first, last]
        if held + self.temporary[first, last] <= allowed:
            return ()
        missing, found = held + self.scratch[first, last] - allowed, []
        for _, less, layers, _ in self.kinds:
            inside = layers[(layers >= first) & (layers <= last)]
            taken = int(np.clip(np.ceil(missing / (live * less)), 0, len(inside)))
            missing -= taken * live * less
            found += [int(layer) for layer in inside[:taken]]
        return tuple(sorted(found))


def _sums(values: Floats) -> Floats:
    """Sums of all runs of layers, without the last entry."""
    total = np.concatenate([[0.0], np.cumsum(values[:-1])])
    return np.asarray(total[None, 1:] - total[:-1, None])


def _borders(values: Floats) -> Floats:
    """Sums of the borders inside all runs: those of every layer but the last."""
    total = np.concatenate([[0.0], np.cumsum(values[:-1])])
    return np.asarray(np.maximum(total[None, :-1] - total[:-1, None], 0.0))


def _maxima(values: Floats) -> Floats:
    """Maxima of all runs, and of what belongs to no layer."""
    layers = len(values) - 1
    spread = np.where(np.tri(layers, dtype=bool).T, values[None, :-1], -np.inf)
    return np.asarray(np.maximum(np.maximum.accumulate(spread, axis=1), values[-1]))


def _counts(members: Sequence[int], layers: int) -> Floats:
    """How many of some layers lie in each run."""
    total = np.zeros(layers + 1)
    total[np.asarray(members) + 1] = 1
    total = np.cumsum(total)
    return np.asarray(total[None, 1:] - total[:-1, None])
