"""What a run of layers costs on a sub-mesh, for any number of stages at once.

*In:* costs of every run, or of every layer. *Out:* seconds of stages, infinite where one does not fit into
memory with the micro-batches in flight. *Invariant:* seconds never fall when more are in flight.

A stage is a run of layers on a sub-mesh under a config. Its number is its place in an array [first, last,
sub-mesh, config], last included in the run. There are far more stages than matter, so that such arrays
are not kept for every number of micro-batches in flight: the search takes the stages that may be part of a
better pipeline.

`ProfileCosts` makes costs from profiles by layer: the costs of a run are differences of prefix sums.
With l the micro-batches in flight a stage of the layers R fits where

    sum_R fixed + max_R temporary + l sum_R activations <= memory.

Where it does not and layers can be recomputed, some are: layer r then takes e_r seconds more and keeps a_r
bytes less. That is a knapsack to be covered; layers are taken by rising e_r / a_r until the rest fits, which
is the least number of them, and the least time, where the layers of the stage are equal (others: above the
least time by less than the time of one layer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from distgraph.errors import GraphError
from distgraph.passes.search.inter_op.interval_sums import IntervalSums, Numbers, Runs, maxima
from distgraph.passes.search.intra_op.chosen_layouts import Profile

Floats = NDArray[np.float64]

_ROUNDING = 1e-12  # of the memory: differences of prefix sums are not exact


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Every stage, with a number of micro-batches in flight.

    Attributes:
        seconds: of one micro-batch, forward and backward, [first, last, sub-mesh, config]; inf where it does
            not fit, or last < first.
        step: seconds once a step, the same shape; 0 where last < first.
    """

    seconds: Floats
    step: Floats


class IntervalCosts(Protocol):
    """Costs of all stages."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, sub-meshes, configs."""

    def tabulate(self, in_flight: int) -> StageCosts:
        """Costs of every stage with `in_flight` micro-batches in flight."""

    def seconds_of(self, stages: Numbers, in_flight: int) -> Floats:
        """Seconds of one micro-batch, by numbers of stages, inf where one does not fit."""

    def step_of(self, stages: Numbers) -> Floats:
        """Seconds once a step, by numbers of stages."""

    def recomputed(self, first: int, last: int, submesh: int, config: int, in_flight: int) -> tuple[int, ...]:
        """Layers of a run that are recomputed in the backward part."""

    def missing(self, in_flight: int) -> Floats:
        """Bytes above the memory of a device, all layers recomputed that can be; the shape of `tabulate`."""


def stage_numbers(shape: tuple[int, int, int]) -> Numbers:
    """Numbers of all stages, rising.

    Args:
        shape: layers, sub-meshes, configs.

    Example:
        >>> stage_numbers((2, 1, 2))
        array([0, 1, 2, 3, 6, 7])
    """
    layers, submeshes, configs = shape
    first, last = np.triu_indices(layers)
    ways = submeshes * configs
    return np.asarray(((first * layers + last) * ways)[:, None] + np.arange(ways)).reshape(-1)


def every_stage(costs: IntervalCosts, in_flight: int) -> StageCosts:
    """Costs of all stages in arrays, from those by number."""
    layers, submeshes, configs = costs.shape
    stages = stage_numbers(costs.shape)
    seconds = np.full((layers, layers, submeshes, configs), np.inf)
    step = np.zeros_like(seconds)
    seconds.reshape(-1)[stages] = costs.seconds_of(stages, in_flight)
    step.reshape(-1)[stages] = costs.step_of(stages)
    return StageCosts(seconds, step)


@dataclass(frozen=True, slots=True, eq=False)
class RestrictedCosts:
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

    def tabulate(self, in_flight: int) -> StageCosts:
        """Costs of every stage with `in_flight` micro-batches in flight."""
        return every_stage(self, in_flight)

    def seconds_of(self, stages: Numbers, in_flight: int) -> Floats:
        """Seconds of one micro-batch, inf where a stage does not fit or may not be."""
        layers, submeshes, configs = self.shape
        forbidden = np.broadcast_to(self.forbidden, (layers, layers, submeshes))
        index = np.unravel_index(stages // configs, forbidden.shape)
        return np.where(forbidden[index], np.inf, self.costs.seconds_of(stages, in_flight))

    def step_of(self, stages: Numbers) -> Floats:
        """Seconds once a step."""
        return self.costs.step_of(stages)

    def recomputed(self, first: int, last: int, submesh: int, config: int, in_flight: int) -> tuple[int, ...]:
        """Layers of a run that are recomputed in the backward part."""
        return self.costs.recomputed(first, last, submesh, config, in_flight)

    def missing(self, in_flight: int) -> Floats:
        """Bytes above the memory of a device, all layers recomputed that can be."""
        return self.costs.missing(in_flight)


@dataclass(frozen=True, slots=True)
class Config:
    """One way to run layers on a sub-mesh.

    Attributes:
        profile: costs by layer.
        recompute: costs by layer where each is recomputed in the backward part; None where none can be.
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
        layers = sizes.pop() - 1
        self.shape = (layers, len(configs), max(map(len, configs)))
        self._memory = np.full(self.shape[1:], -np.inf)  # nothing fits where there is no config
        for submesh, row in enumerate(configs):
            self._memory[submesh, : len(row)] = np.inf if memory is None else memory[submesh]
        self._memory = self._memory.reshape(-1)
        some = next(c for row in configs for c in row)
        ways = [c for row in configs for c in (*row, *[some] * (self.shape[2] - len(row)))]
        profiles = [c.profile for c in ways]
        self._time = IntervalSums([p.forward + p.backward for p in profiles])
        self._border = IntervalSums([p.border for p in profiles])
        self._once = IntervalSums([p.step for p in profiles])
        self._fixed = IntervalSums([p.fixed for p in profiles])
        self._activations = IntervalSums([p.activations for p in profiles])
        self._temporary = np.stack([maxima(p.temporary) for p in profiles])
        again = np.stack([maxima((c.recompute or c.profile).temporary) for c in ways])
        self._scratch = np.maximum(self._temporary, again)
        self._kinds = [_kinds(c) for c in ways]
        self._ranks = _ranks(self._kinds, layers)

    def tabulate(self, in_flight: int) -> StageCosts:
        """Costs of every stage with `in_flight` micro-batches in flight."""
        return every_stage(self, in_flight)

    def step_of(self, stages: Numbers) -> Floats:
        """Seconds once a step."""
        return self._once.of(self._runs(stages))

    def seconds_of(self, stages: Numbers, in_flight: int) -> Floats:
        """Seconds of one micro-batch, inf where a stage does not fit."""
        way, first, last = runs = self._runs(stages)
        seconds = self._time.of(runs) + np.maximum(self._border.inside(runs), 0.0)
        held, allowed = self._held(runs, in_flight), self._allowed()[way]
        full = np.flatnonzero(held + self._temporary[runs] > allowed)
        if len(full):
            few = way[full], first[full], last[full]
            missing, extra = held[full] + self._scratch[few] - allowed[full], np.zeros(len(full))
            for more, less, counted in self._ranks:
                saved = less[few[0]]
                taken = np.clip(np.ceil(missing / (in_flight * saved)), 0, counted.between(few))
                missing -= taken * in_flight * saved
                extra += taken * more[few[0]]
            seconds[full] = np.where(missing <= 0, seconds[full] + extra, np.inf)
        return seconds

    def missing(self, in_flight: int) -> Floats:
        """Bytes above the memory, with all or no layers recomputed; the better."""
        layers, submeshes, configs = self.shape
        runs = self._runs(np.arange(layers * layers * submeshes * configs))
        held = self._held(runs, in_flight)
        saved = np.zeros_like(held)
        for _, less, counted in self._ranks:
            saved += in_flight * less[runs[0]] * counted.between(runs)
        least = np.minimum(held + self._temporary[runs], held - saved + self._scratch[runs])
        return np.asarray(least - self._memory[runs[0]]).reshape(layers, layers, submeshes, configs)

    def recomputed(self, first: int, last: int, submesh: int, config: int, in_flight: int) -> tuple[int, ...]:
        """Layers of a run that are recomputed in the backward part; of equal ones the first."""
        way = submesh * self.shape[2] + config
        held, allowed = self._held((way, first, last), in_flight), self._allowed()[way]
        if held + self._temporary[way, first, last] <= allowed:
            return ()
        missing, recomputed = held + self._scratch[way, first, last] - allowed, []
        for _, less, layers in self._kinds[way]:
            inside = layers[(layers >= first) & (layers <= last)]
            taken = int(np.clip(np.ceil(missing / (in_flight * less)), 0, len(inside)))
            missing -= taken * in_flight * less
            recomputed += [int(layer) for layer in inside[:taken]]
        return tuple(sorted(recomputed))

    def _runs(self, stages: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Way (sub-mesh and config), first and last layer of stages."""
        layers, submeshes, configs = self.shape
        run, way = np.divmod(stages, submeshes * configs)
        first, last = np.divmod(run, layers)
        return way, first, last

    def _held(self, runs: Runs, in_flight: int) -> Floats:
        """Bytes without scratch memory, nothing recomputed."""
        return self._fixed.of(runs) + in_flight * self._activations.of(runs)

    def _allowed(self) -> Floats:
        return self._memory * (1 + _ROUNDING)


def _kinds(config: Config) -> list[tuple[float, float, Numbers]]:
    """Groups of equal layers worth recomputing, best first: seconds more, bytes less, their numbers."""
    if config.recompute is None:
        return []
    p, q = config.profile, config.recompute
    more = np.maximum(q.forward + q.backward - p.forward - p.backward, 0.0)[:-1]
    less = (p.activations - q.activations)[:-1]
    equal: dict[tuple[float, float], list[int]] = {}
    for layer in np.flatnonzero(less > 0):
        equal.setdefault((float(more[layer]), float(less[layer])), []).append(int(layer))
    ordered = sorted(equal.items(), key=lambda item: item[0][0] / item[0][1])
    return [(e, a, np.asarray(layers)) for (e, a), layers in ordered]


def _ranks(
    kinds: Sequence[Sequence[tuple[float, float, Numbers]]], layers: int
) -> list[tuple[Floats, Floats, IntervalSums]]:
    """The best kinds of all ways, the second ones, and so on: seconds more, bytes less, which layers."""
    ranks = []
    for rank in range(max(map(len, kinds))):
        more, less = np.zeros(len(kinds)), np.ones(len(kinds))
        members = [np.zeros(layers + 1) for _ in kinds]
        for way, of_way in enumerate(kinds):
            if rank < len(of_way):
                more[way], less[way], numbers = of_way[rank]
                members[way][numbers] = 1
        ranks.append((more, less, IntervalSums(members)))
    return ranks
