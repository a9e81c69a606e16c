"""From costs by layer to the best row of stages.

*In:* variants of an `Oracle`. *Out:* a `Proposal` with its estimate. *Invariant:* it fits memory by the
estimate; only a forecast says whether it really does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from distgraph.engine.search.candidate import Proposal, StageChoice
from distgraph.engine.search.layout_costs import Oracle, Variant
from distgraph.engine.search.load_balancing import shared_shapes
from distgraph.engine.search.restrictions import Restriction
from distgraph.engine.search.search_space import Shape, shapes_of
from distgraph.passes.search.inter_op.stage_costs import (
    Config,
    IntervalCosts,
    ProfileCosts,
    StageCosts,
    every_stage,
)
from distgraph.passes.search.inter_op.stages import StageProblem, Stages, find_stages
from distgraph.passes.search.inter_op.submesh_placement import SubMesh, place
from distgraph.plan.schedule_policies import schedule_policy

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]

_SAME = 1e-9  # relative difference below which two costs are one


@dataclass(frozen=True, eq=False)
class Front:
    """Variants for one number of micro-batches, by sub-mesh; `whole` where there was time for all of them."""

    micro_batches: int
    submeshes: tuple[SubMesh, ...]
    variants: tuple[tuple[Variant, ...], ...]
    whole: bool = True


Poor = Collection[tuple[SubMesh, Shape]]
"""Sub-meshes and shapes that no good row has."""


def front(
    oracle: Oracle,
    micro_batches: int,
    submeshes: Sequence[SubMesh],
    restriction: Restriction = "none",
    without: Poor = (),
) -> Front:
    """Solve every shape of some sub-meshes.

    Args:
        oracle: of the program.
        micro_batches: in a step.
        submeshes: each in one pool, or across several with a share of the samples for each device.
        restriction: what layouts may not be.
        without: shapes that are left out.
    """
    found: dict[SubMesh, list[Variant]] = {}
    whole = True
    near = sorted(submeshes, key=partial(_distance, oracle))
    pairs = [(submesh, shape) for submesh in near for shape in _shapes(oracle, micro_batches, submesh)]
    pairs = [pair for pair in pairs if pair not in without]
    oracle.look_up(micro_batches, pairs, restriction)
    for submesh, shape in pairs:
        if found and oracle.expired() and not oracle.known(micro_batches, submesh, shape, restriction):
            whole = False
            continue
        own = oracle.variants(micro_batches, submesh, shape, restriction)
        found[submesh] = [*found.get(submesh, ()), *own]
    kept = tuple(submesh for submesh in submeshes if submesh in found)
    return Front(micro_batches, kept, tuple(tuple(found[s]) for s in kept), whole)


def within(found: Front, pool: int) -> Front:
    """The part of a front that takes nothing of other pools."""
    return _part(found, lambda submesh: submesh.sizes[pool] == submesh.size)


def of_size(found: Front, size: int) -> Front:
    """The part of a front whose stages have so many devices."""
    return _part(found, lambda submesh: submesh.size == size)


def _part(found: Front, wanted: Callable[[SubMesh], bool]) -> Front:
    own = [n for n, submesh in enumerate(found.submeshes) if wanted(submesh)]
    submeshes = tuple(found.submeshes[n] for n in own)
    return replace(found, submeshes=submeshes, variants=tuple(found.variants[n] for n in own))


def undominated(found: Front) -> Front:
    """A front without variants that another one of their sub-mesh beats in every cost of every layer."""
    return replace(found, variants=tuple(_undominated(variants) for variants in found.variants))


def _undominated(variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
    rows = np.array([_costs(variant) for variant in variants])
    beats = np.array([(rows <= row * (1 + _SAME)).all(axis=1) for row in rows])  # [beaten, by]
    first = np.tri(len(rows), k=-1, dtype=bool)  # of equals the first stays
    return tuple(v for v, row in zip(variants, beats & (~beats.T | first), strict=True) if not row.any())


def _costs(variant: Variant) -> Floats:
    """Everything that stages are made of."""
    parts = [
        (p.forward + p.backward, p.border, p.step, p.fixed, p.activations, p.temporary)
        for p in (variant.profile, variant.recompute)
    ]
    return np.concatenate([array for arrays in parts for array in arrays])


def alone(oracle: Oracle, found: Front) -> dict[tuple[SubMesh, Shape], float]:
    """Seconds of a step were all layers on stages of one shape, without bubbles, borders and memory limits.

    That is m (sum_l t_l) + s on a share of the devices. A shape for which it is above the seconds of a whole
    row, bubbles and all, makes that row slower wherever it takes over some of the work; that it might free
    devices for stages that gain more is left out of account. Of a cluster with one pool; else nothing.
    """
    if len(oracle.pools) > 1:
        return {}
    devices = oracle.pools[0].size
    seconds: dict[tuple[SubMesh, Shape], float] = {}
    for submesh, variants in zip(found.submeshes, found.variants, strict=True):
        for variant in variants:
            key = submesh, variant.shape
            costs = variant.profile
            whole = found.micro_batches * (costs.forward + costs.backward).sum() + costs.step.sum()
            seconds[key] = min(float(whole) * submesh.size / devices, seconds.get(key, math.inf))
    return seconds


def _distance(oracle: Oracle, submesh: SubMesh) -> float:
    """How far from one machine: what lies near it comes first, what spans pools last, as time may run out."""
    sizes = [(pool.machine, size) for pool, size in zip(oracle.pools, submesh.sizes, strict=True) if size]
    return math.inf if len(sizes) > 1 else abs(math.log(sizes[0][1] / sizes[0][0]))


def _shapes(oracle: Oracle, micro_batches: int, submesh: SubMesh) -> tuple[Shape, ...]:
    pools = [p for p, size in zip(oracle.pools, submesh.sizes, strict=True) if size]
    return (
        shapes_of(pools[0], submesh.size)
        if len(pools) == 1
        else shared_shapes(oracle, micro_batches, submesh)
    )


def may_fit(oracle: Oracle, micro_batches: int, whole: SubMesh, larger: int = 1) -> bool:
    """Whether one stage on a whole pool could hold all layers with one micro-batch in flight.

    A pipeline needs no less: of p equal stages a device holds the layers of one, for p micro-batches, on
    1 / p of the devices. Always true where there are several pools.

    Args:
        oracle: of the program.
        micro_batches: in a step.
        whole: the pool.
        larger: so many times as many samples are asked about; what they hold is taken to grow with them.
    """
    if len(oracle.pools) > 1:
        return True
    (pool,) = oracle.pools
    shapes = shapes_of(pool, whole.size)
    oracle.look_up(micro_batches, [(whole, shape) for shape in shapes], "none")
    for shape in shapes:
        for variant in oracle.variants(micro_batches, whole, shape, "none"):
            for profile in (variant.profile, variant.recompute):
                once = profile.nbytes(1)
                grows = once - float(profile.fixed.sum())
                if once + (larger - 1) * grows <= oracle.memory(whole):
                    return True
    return False


@dataclass(frozen=True, slots=True, eq=False)
class Bordered:
    """Costs of stages with those of the border behind each, for a schedule that waits for it.

    1F1B keeps p - i micro-batches in flight on stage i of p, so that (Little's law) a micro-batch takes every
    stage behind i at least (sum of t_k + x_k over k >= i) / (p - i): with stages alike, t + x. The border is
    part of the period of a stage, however well it overlaps with other micro-batches.

    Attributes:
        costs: without.
        behind: seconds of the border [last layer, sub-mesh], to a stage of the same size.
    """

    costs: IntervalCosts
    behind: Floats

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, sub-meshes, configs."""
        return self.costs.shape

    def at(self, live: int) -> StageCosts:
        """Costs with `live` micro-batches in flight."""
        return every_stage(self, live)

    def seconds_of(self, stages: Numbers, live: int) -> Floats:
        """Seconds of one micro-batch, by numbers of stages, inf where one does not fit."""
        layers, submeshes, configs = self.shape
        last, submesh = np.divmod(stages // configs % (layers * submeshes), submeshes)
        return self.costs.seconds_of(stages, live) + self.behind[last, submesh]

    def step_of(self, stages: Numbers) -> Floats:
        """Seconds once a step, by numbers of stages."""
        return self.costs.step_of(stages)

    def recomputed(self, first: int, last: int, submesh: int, config: int, live: int) -> tuple[int, ...]:
        """Layers of a run that are computed again in the backward part."""
        return self.costs.recomputed(first, last, submesh, config, live)

    def missing(self, live: int) -> Floats:
        """Bytes above the memory of a device."""
        return self.costs.missing(live)


def borders(oracle: Oracle, micro_batches: int, submeshes: Sequence[SubMesh]) -> Floats:
    """Seconds [layers, sub-meshes] of the border behind a layer, to a stage of the same size.

    Of one micro-batch, both ways; 0 behind the last layer. Every rank sends its share to one of the next
    stage at the same time. Two stages lie in one machine where they fit there together.
    """
    crossing = np.append(oracle.traced(micro_batches).crossing, 0.0)
    found = np.zeros((len(crossing), len(submeshes)))
    sizes = np.unique(crossing[crossing > 0])
    for number, submesh in enumerate(submeshes):
        placed = place(oracle.pools, [submesh, submesh])
        if placed is None or not len(sizes):
            continue
        pairs = list(zip(*placed, strict=True))
        seconds = oracle.collective.times("send", pairs[0], sizes / len(pairs), tuple(pairs[1:]))
        at = np.minimum(np.searchsorted(sizes, crossing), len(sizes) - 1)
        found[:, number] = np.where(crossing > 0, seconds[at], 0.0)
    return found


def best_row(
    oracle: Oracle,
    found: Front,
    *,
    slack: float = 1.0,
    schedule: str = "1f1b",
    below: float = np.inf,
) -> tuple[Proposal, Stages]:
    """The best stages by dynamic programme.

    Args:
        oracle: of the program.
        found: costs.
        slack: share of a device's memory that may be used by the estimate.
        schedule: name.
        below: seconds; a row has to take less.

    Raises:
        InfeasibleError: nothing fits, or nothing takes less.
    """
    costs = ProfileCosts(
        [[Config(v.profile, v.recompute) for v in row] for row in found.variants],
        [slack * oracle.memory(submesh) for submesh in found.submeshes],
    )
    behind, policy = borders(oracle, found.micro_batches, found.submeshes), schedule_policy(schedule)
    count = len(found.submeshes)
    problem = StageProblem(
        Bordered(costs, behind) if policy.waits_for_transfers else costs,
        oracle.pools,
        found.submeshes,
        found.micro_batches,
        policy,
        None if policy.waits_for_transfers else np.repeat(behind[:-1, :, None], count, axis=2),
        whole=False,
    )
    stages = find_stages(problem, runner_up=False, below=below)
    return _proposal(oracle, found, stages, schedule), stages


def _proposal(oracle: Oracle, found: Front, stages: Stages, schedule: str) -> Proposal:
    choices: list[StageChoice] = []
    recompute: list[int] = []
    for stage in stages.stages:
        variant = found.variants[stage.submesh][stage.config]
        choices.append(
            StageChoice(stage.first, stage.stop, stage.devices, variant.shape, variant.memory_price)
        )
        recompute += stage.recomputed
    return Proposal(
        "search",
        found.micro_batches,
        schedule,
        tuple(choices),
        tuple(sorted(recompute)),
        "none",
        stages.seconds,
    )
