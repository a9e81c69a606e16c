"""From costs by layer to the best pipeline: a stage assignment with its estimate.

*In:* variants of layouts. *Out:* a `Candidate`. *Invariant:* it fits memory by the estimate; only a forecast
says whether it really does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from distgraph.engine.search_driver.candidate import Candidate, StageChoice
from distgraph.engine.search_driver.layout_costs import LayoutCosts, Variant
from distgraph.engine.search_driver.load_balancing import shared_shapes
from distgraph.engine.search_driver.search_space import Shape, shapes_of
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
class VariantTable:
    """The variants of layouts from which the stages of a pipeline are chosen.

    Attributes:
        micro_batches: in a step.
        submeshes: what a stage may take.
        variants: of each sub-mesh.
        complete: whether all were solved before the time limit.
    """

    micro_batches: int
    submeshes: tuple[SubMesh, ...]
    variants: tuple[tuple[Variant, ...], ...]
    complete: bool = True


ExcludedShapes = Collection[tuple[SubMesh, Shape]]
"""Sub-meshes and shapes that no good pipeline has."""


def variant_table(
    layout_costs: LayoutCosts,
    micro_batches: int,
    submeshes: Sequence[SubMesh],
    excluded: ExcludedShapes = (),
) -> VariantTable:
    """The variants of every shape of some sub-meshes.

    Args:
        layout_costs: of the program.
        micro_batches: in a step.
        submeshes: each in one pool, or across several with a share of the samples for each device.
        excluded: shapes that are left out.
    """
    table: dict[SubMesh, list[Variant]] = {}
    complete = True
    near = sorted(submeshes, key=partial(_distance, layout_costs))
    pairs = [(submesh, shape) for submesh in near for shape in _shapes(layout_costs, micro_batches, submesh)]
    pairs = [pair for pair in pairs if pair not in excluded]
    layout_costs.prepare_variants(micro_batches, pairs, "none")
    for submesh, shape in pairs:
        solved = layout_costs.has_variants(micro_batches, submesh, shape, "none")
        if table and layout_costs.expired() and not solved:
            complete = False
            continue
        variants = layout_costs.variants(micro_batches, submesh, shape, "none")
        table[submesh] = [*table.get(submesh, ()), *variants]
    present = tuple(submesh for submesh in submeshes if submesh in table)
    return VariantTable(micro_batches, present, tuple(tuple(table[s]) for s in present), complete)


def of_pool(table: VariantTable, pool: int) -> VariantTable:
    """The part of a table that takes devices of one pool alone."""
    return _part(table, lambda submesh: submesh.sizes[pool] == submesh.size)


def of_size(table: VariantTable, size: int) -> VariantTable:
    """The part of a table whose stages have `size` devices."""
    return _part(table, lambda submesh: submesh.size == size)


def _part(table: VariantTable, includes: Callable[[SubMesh], bool]) -> VariantTable:
    numbers = [n for n, submesh in enumerate(table.submeshes) if includes(submesh)]
    submeshes = tuple(table.submeshes[n] for n in numbers)
    return replace(table, submeshes=submeshes, variants=tuple(table.variants[n] for n in numbers))


def undominated(table: VariantTable) -> VariantTable:
    """A table without variants that another one of their sub-mesh beats in every cost of every layer."""
    return replace(table, variants=tuple(_undominated(variants) for variants in table.variants))


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


def single_shape_seconds(
    layout_costs: LayoutCosts, table: VariantTable
) -> dict[tuple[SubMesh, Shape], float]:
    """Seconds of a step were all layers on stages of one shape, without bubbles, borders and memory limits.

    That is m (sum_l t_l) + s on a share of the devices. A shape for which it is above the seconds of a whole
    pipeline, bubbles and all, makes that pipeline slower wherever it takes over some of the work; that it
    might free devices for stages that gain more is neglected. Empty for a cluster of several pools.
    """
    if len(layout_costs.pools) > 1:
        return {}
    devices = layout_costs.pools[0].size
    seconds: dict[tuple[SubMesh, Shape], float] = {}
    for submesh, variants in zip(table.submeshes, table.variants, strict=True):
        for variant in variants:
            key = submesh, variant.shape
            costs = variant.profile
            total = table.micro_batches * (costs.forward + costs.backward).sum() + costs.step.sum()
            seconds[key] = min(float(total) * submesh.size / devices, seconds.get(key, math.inf))
    return seconds


def _distance(layout_costs: LayoutCosts, submesh: SubMesh) -> float:
    """How far a size is from that of one machine: near ones are solved first, before the time limit."""
    sizes = [
        (pool.machine, size) for pool, size in zip(layout_costs.pools, submesh.sizes, strict=True) if size
    ]
    return math.inf if len(sizes) > 1 else abs(math.log(sizes[0][1] / sizes[0][0]))


def _shapes(layout_costs: LayoutCosts, micro_batches: int, submesh: SubMesh) -> tuple[Shape, ...]:
    pools = [p for p, size in zip(layout_costs.pools, submesh.sizes, strict=True) if size]
    return (
        shapes_of(pools[0], submesh.size)
        if len(pools) == 1
        else shared_shapes(layout_costs, micro_batches, submesh)
    )


def may_fit(layout_costs: LayoutCosts, micro_batches: int, whole: SubMesh, larger: int = 1) -> bool:
    """Whether one stage on a whole pool could hold all layers with one micro-batch in flight.

    A pipeline needs no less: of p equal stages a device holds the layers of one, for p micro-batches, on
    1 / p of the devices. Always true where there are several pools.

    Args:
        layout_costs: of the program.
        micro_batches: in a step.
        whole: the pool.
        larger: factor on the samples of a micro-batch; what depends on them is taken to grow with it.
    """
    if len(layout_costs.pools) > 1:
        return True
    (pool,) = layout_costs.pools
    shapes = shapes_of(pool, whole.size)
    layout_costs.prepare_variants(micro_batches, [(whole, shape) for shape in shapes], "none")
    for shape in shapes:
        for variant in layout_costs.variants(micro_batches, whole, shape, "none"):
            for profile in (variant.profile, variant.recompute):
                once = profile.nbytes(1)
                grows = once - float(profile.fixed.sum())
                if once + (larger - 1) * grows <= layout_costs.memory(whole):
                    return True
    return False


@dataclass(frozen=True, slots=True, eq=False)
class CostsWithBorders:
    """Costs of stages that include the transfer behind each stage, for a schedule that waits for it.

    1F1B keeps p - i micro-batches in flight on stage i of p, so that (Little's law) every stage behind i
    takes at least (sum of t_k + x_k over k >= i) / (p - i): with equal stages, t + x. The transfer is part of
    the period of a stage, however well it overlaps with other micro-batches.

    Attributes:
        costs: of stages without transfers.
        behind: seconds of the transfer [last layer, sub-mesh] to a stage of the same size.
    """

    costs: IntervalCosts
    behind: Floats

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, sub-meshes, configs."""
        return self.costs.shape

    def tabulate(self, in_flight: int) -> StageCosts:
        """Costs with `in_flight` micro-batches in flight."""
        return every_stage(self, in_flight)

    def seconds_of(self, stages: Numbers, in_flight: int) -> Floats:
        """Seconds of one micro-batch, by numbers of stages, inf where one does not fit."""
        layers, submeshes, configs = self.shape
        last, submesh = np.divmod(stages // configs % (layers * submeshes), submeshes)
        return self.costs.seconds_of(stages, in_flight) + self.behind[last, submesh]

    def step_of(self, stages: Numbers) -> Floats:
        """Seconds once a step, by numbers of stages."""
        return self.costs.step_of(stages)

    def recomputed(self, first: int, last: int, submesh: int, config: int, in_flight: int) -> tuple[int, ...]:
        """Layers of a run that are recomputed in the backward part."""
        return self.costs.recomputed(first, last, submesh, config, in_flight)

    def missing(self, in_flight: int) -> Floats:
        """Bytes above the memory of a device."""
        return self.costs.missing(in_flight)


def transfer_seconds(layout_costs: LayoutCosts, micro_batches: int, submeshes: Sequence[SubMesh]) -> Floats:
    """Seconds [layers, sub-meshes] of the transfer behind a layer, to a stage of the same size.

    Of one micro-batch, both ways; 0 behind the last layer. Every rank sends its share to one of the next
    stage at the same time. Two stages are in one machine where they fit there together.
    """
    crossing = np.append(layout_costs.layered_graph(micro_batches).crossing, 0.0)
    seconds = np.zeros((len(crossing), len(submeshes)))
    sizes = np.unique(crossing[crossing > 0])
    for number, submesh in enumerate(submeshes):
        devices = place(layout_costs.pools, [submesh, submesh])
        if devices is None or not len(sizes):
            continue
        pairs = list(zip(*devices, strict=True))
        times = layout_costs.collective.times("send", pairs[0], sizes / len(pairs), tuple(pairs[1:]))
        index = np.minimum(np.searchsorted(sizes, crossing), len(sizes) - 1)
        seconds[:, number] = np.where(crossing > 0, times[index], 0.0)
    return seconds


def best_pipeline(
    layout_costs: LayoutCosts,
    table: VariantTable,
    *,
    slack: float = 1.0,
    schedule: str = "1f1b",
    below: float = np.inf,
) -> tuple[Candidate, Stages]:
    """The best stages by dynamic programming.

    Args:
        layout_costs: of the program.
        table: the variants to choose from.
        slack: share of a device's memory that may be used by the estimate.
        schedule: name.
        below: seconds; a pipeline has to take less.

    Raises:
        InfeasibleError: nothing fits, or nothing takes less.
    """
    costs = ProfileCosts(
        [[Config(v.profile, v.recompute) for v in variants] for variants in table.variants],
        [slack * layout_costs.memory(submesh) for submesh in table.submeshes],
    )
    behind = transfer_seconds(layout_costs, table.micro_batches, table.submeshes)
    policy = schedule_policy(schedule)
    count = len(table.submeshes)
    problem = StageProblem(
        CostsWithBorders(costs, behind) if policy.waits_for_transfers else costs,
        layout_costs.pools,
        table.submeshes,
        table.micro_batches,
        policy,
        None if policy.waits_for_transfers else np.repeat(behind[:-1, :, None], count, axis=2),
        whole=False,
    )
    stages = find_stages(problem, below=below)
    return _candidate(table, stages, schedule), stages


def _candidate(table: VariantTable, stages: Stages, schedule: str) -> Candidate:
    choices: list[StageChoice] = []
    recompute: list[int] = []
    for stage in stages.stages:
        variant = table.variants[stage.submesh][stage.config]
        choices.append(
            StageChoice(stage.first, stage.stop, stage.devices, variant.shape, variant.memory_multiplier)
        )
        recompute += stage.recomputed
    return Candidate(
        "search",
        tuple(choices),
        "none",
        stages.seconds,
        micro_batches=table.micro_batches,
        schedule=schedule,
        recompute=tuple(sorted(recompute)),
    )
