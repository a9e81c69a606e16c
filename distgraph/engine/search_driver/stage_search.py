"""From costs by layer to the best pipeline: a stage assignment with its estimate.

*In:* variants of layouts. *Out:* a `Candidate`. *Invariant:* it fits memory by the estimate; only a forecast
says whether it really does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise

import numpy as np

from distgraph.engine.search_driver.candidate import Candidate, StageChoice
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.layout_variants import Variant
from distgraph.engine.search_driver.load_balancing import shared_shapes
from distgraph.engine.search_driver.search_space import Shape
from distgraph.ir.float_arrays import Floats
from distgraph.passes.analysis.link_contention import link_totals
from distgraph.passes.search.inter_op.schedule_costs import Border, simulated_makespan
from distgraph.passes.search.inter_op.stage_costs import (
    Config,
    IncreasedCosts,
    IntervalCosts,
    ProfileCosts,
)
from distgraph.passes.search.inter_op.stages import StageProblem, Stages, find_stages
from distgraph.passes.search.inter_op.submesh_placement import Pool, SubMesh, place
from distgraph.passes.search.intra_op.chosen_layouts import Profile
from distgraph.plan.pipeline_schedules import schedule_policy

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
    """The variants of every shape of some sub-meshes, without `excluded` ones."""
    table: dict[SubMesh, list[Variant]] = {}
    complete = True
    pairs = [pair for pair in _pairs(layout_costs, micro_batches, submeshes) if pair not in excluded]
    restriction = layout_costs.restriction
    layout_costs.prepare_variants(micro_batches, pairs, restriction)
    for submesh, shape in pairs:
        layouts = micro_batches, submesh, shape, restriction
        solved = all(layout_costs.has_variants(*layouts, kind) for kind in ("multipliers", "within memory"))
        if table and layout_costs.expired() and not solved:
            complete = False
            continue
        table.setdefault(submesh, []).extend(layout_costs.variants(*layouts))
        table[submesh].extend(layout_costs.variants_within_memory(*layouts))
    present = tuple(submesh for submesh in submeshes if submesh in table)
    return VariantTable(micro_batches, present, tuple(tuple(table[s]) for s in present), complete)


def fastest_table(
    layout_costs: LayoutCosts, micro_batches: int, submeshes: Sequence[SubMesh]
) -> VariantTable:
    """The fastest variants of some sub-meshes: of the first shape, of others while there is time."""
    pairs, restriction = _pairs(layout_costs, micro_batches, submeshes), layout_costs.restriction
    layout_costs.prepare_variants(micro_batches, pairs, restriction, ("fastest",))
    table: dict[SubMesh, tuple[Variant, ...]] = dict.fromkeys(submeshes, ())
    for number, (submesh, shape) in enumerate(pairs):
        layouts = micro_batches, submesh, shape, restriction
        if number == 0 or not layout_costs.expired() or layout_costs.has_variants(*layouts):
            table[submesh] += (layout_costs.fastest(*layouts),)
    complete = sum(map(len, table.values())) == len(pairs)
    return VariantTable(micro_batches, tuple(table), tuple(table.values()), complete)


def nearest_to_machine(layout_costs: LayoutCosts, submeshes: Sequence[SubMesh]) -> list[SubMesh]:
    """Sub-meshes in the order in which they are solved: those of the size of a machine are first."""
    return sorted(submeshes, key=partial(_distance, layout_costs))


def _pairs(
    layout_costs: LayoutCosts, micro_batches: int, submeshes: Sequence[SubMesh]
) -> list[tuple[SubMesh, Shape]]:
    near = nearest_to_machine(layout_costs, submeshes)
    return [
        (submesh, shape) for submesh in near for shape in shapes_for(layout_costs, micro_batches, submesh)
    ]


def with_limits(
    layout_costs: LayoutCosts, table: VariantTable, pipeline: Candidate, slack: float
) -> VariantTable:
    """A table with the fastest layouts in the shapes of a pipeline within a share of a device's memory."""
    shapes = {(layout_costs.submesh(stage.devices), stage.shape) for stage in pipeline.stages}
    more: dict[SubMesh, tuple[Variant, ...]] = {}
    for submesh, shape in sorted(shapes, key=str):
        limit = layout_costs.memory_limit(table.micro_batches, submesh, slack)
        given = table.micro_batches, submesh, shape, layout_costs.restriction, limit
        more[submesh] = (*more.get(submesh, ()), *layout_costs.limited_variants(*given))
    pairs = zip(table.submeshes, table.variants, strict=True)
    return replace(table, variants=tuple((*variants, *more.get(s, ())) for s, variants in pairs))


def of_pool(table: VariantTable, pool: int) -> VariantTable:
    """The part of a table that takes devices of one pool alone."""
    return _part(table, lambda submesh: submesh.sizes[pool] == submesh.size)


def of_size(table: VariantTable, size: int) -> VariantTable:
    """The part of a table whose stages have `size` devices."""
    return _part(table, lambda submesh: submesh.size == size)


def of_equal_shapes(table: VariantTable) -> Iterator[VariantTable]:
    """The parts of a table from which stages of equal size and shape are made."""
    for submesh, variants in zip(table.submeshes, table.variants, strict=True):
        for shape in dict.fromkeys(variant.shape for variant in variants):
            equal = tuple(variant for variant in variants if variant.shape == shape)
            yield replace(table, submeshes=(submesh,), variants=(equal,))


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

    That is m (sum_l t_l) + s on a share of the devices, without the synchronisation of gradients that the
    backward part hides. A shape for which it is above the seconds of a whole pipeline, bubbles and all, makes
    that pipeline slower wherever it takes over some of the work; that it might free devices for stages that
    gain more is neglected. Empty for a cluster of several pools.
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
            total -= min(costs.gradients.sum(), costs.backward.sum())
            seconds[key] = min(float(total) * submesh.size / devices, seconds.get(key, math.inf))
    return seconds


def _distance(layout_costs: LayoutCosts, submesh: SubMesh) -> float:
    """How far a size is from that of one machine."""
    sizes = [
        (pool.machine, size) for pool, size in zip(layout_costs.pools, submesh.sizes, strict=True) if size
    ]
    return math.inf if len(sizes) > 1 else abs(math.log(sizes[0][1] / sizes[0][0]))


def shapes_for(layout_costs: LayoutCosts, micro_batches: int, submesh: SubMesh) -> tuple[Shape, ...]:
    """Logical meshes of a sub-mesh, in one pool or across several."""
    pools = [p for p, size in zip(layout_costs.pools, submesh.sizes, strict=True) if size]
    if len(pools) > 1:
        shapes = shared_shapes(layout_costs, micro_batches, submesh)
        return tuple(shape for shape in shapes if layout_costs.allows(micro_batches, shape))
    shapes = layout_costs.shapes(micro_batches, pools[0], submesh.size)
    if (
        layout_costs.named_axes
        or layout_costs.restriction == "none"
        or not 1 < submesh.size <= pools[0].machine
    ):
        return shapes
    return (*shapes, Shape((("tp", submesh.size),)))  # under a restriction axes differ by their names


def transfer_seconds(
    layout_costs: LayoutCosts, micro_batches: int, submeshes: Sequence[SubMesh], apart: bool = False
) -> tuple[Floats, Floats]:
    """Seconds [layers, sub-meshes] of the transfer behind a layer, to a stage of the same size, and seconds
    for which it occupies its most occupied link.

    Of one micro-batch, both ways; 0 behind the last layer. The stages are in different machines if they are
    to be `apart`, else in one where they fit there together.
    """
    crossing = np.append(layout_costs.layered_graph(micro_batches).crossing, 0.0)
    seconds, occupied = (np.zeros((len(crossing), len(submeshes))) for _ in range(2))
    for number, submesh in enumerate(submeshes):
        devices = place(layout_costs.pools, [submesh, submesh])
        if apart:
            devices = _in_two_machines(layout_costs.pools, submesh) or devices
        if devices is not None:
            seconds[:, number] = _message_seconds(layout_costs, devices, crossing)
            messages = dict(enumerate(_link_seconds(layout_costs, devices, 0.5)))
            occupied[:, number] = max(link_totals(messages).values(), default=0.0) * crossing
    return seconds, np.minimum(occupied, seconds)


def _in_two_machines(pools: Sequence[Pool], submesh: SubMesh) -> tuple[tuple[int, ...], ...] | None:
    """Two stages in the first two machines of a pool, where each is smaller than a machine."""
    ((pool, size), *more) = [(pool, size) for pool, size in zip(pools, submesh.sizes, strict=True) if size]
    if more or size >= pool.machine or len(pool.machines) < 2:
        return None
    return pool.machines[0][:size], pool.machines[1][:size]


def _message_seconds(layout_costs: LayoutCosts, devices: Sequence[tuple[int, ...]], nbytes: Floats) -> Floats:
    """Seconds in which some bytes pass between two stages: every rank sends its share to one of the next."""
    pairs = list(zip(*devices, strict=False))
    sizes = np.unique(nbytes[nbytes > 0])
    if not len(sizes):
        return np.zeros(len(nbytes))
    times = layout_costs.collective.times("send", pairs[0], sizes / len(pairs), tuple(pairs[1:]))
    index = np.minimum(np.searchsorted(sizes, nbytes), len(sizes) - 1)
    return np.asarray(np.where(nbytes > 0, times[index], 0.0))


def _link_seconds(layout_costs: LayoutCosts, devices: Sequence[tuple[int, ...]], nbytes: float) -> Border:
    """Seconds for which some bytes from one stage to the next occupy links, and as many back."""
    pairs = list(zip(*devices, strict=False))
    share = nbytes / len(pairs)
    there = layout_costs.collective.link_seconds(dict.fromkeys(pairs, share))
    back = layout_costs.collective.link_seconds(dict.fromkeys([(b, a) for a, b in pairs], share))
    return there, back


def _transfer(
    layout_costs: LayoutCosts, before: tuple[int, ...], behind: tuple[int, ...], nbytes: float
) -> tuple[float, Border]:
    """Seconds of the transfer of one micro-batch one way, of `nbytes` there and back, and seconds for which
    it occupies links."""
    key = before, behind, nbytes
    if key not in layout_costs.transfers:
        devices = before, behind
        seconds = float(_message_seconds(layout_costs, devices, np.array([nbytes / 2]))[0])
        layout_costs.transfers[key] = seconds, _link_seconds(layout_costs, devices, nbytes / 2)
    return layout_costs.transfers[key]


@dataclass(frozen=True, slots=True)
class PipelineEstimate:
    """What a candidate takes by the costs of its layers.

    Attributes:
        seconds: of a step.
        memory_ratio: bytes that the fullest device needs over those that it has.
    """

    seconds: float
    memory_ratio: float


def pipeline_estimate(layout_costs: LayoutCosts, candidate: Candidate) -> PipelineEstimate:
    """The estimate of a candidate: its pipeline simulated, with transfers between the devices it has.

    Layouts of shapes that were not solved yet are solved.
    """
    stages, m = candidate.stages, candidate.micro_batches
    policy = schedule_policy(candidate.schedule)
    parts = [_stage_parts(layout_costs, candidate, position) for position in range(len(stages))]
    crossing = layout_costs.layered_graph(m).crossing
    transfers = [
        _transfer(layout_costs, a.devices, b.devices, crossing[a.stop - 1]) for a, b in pairwise(stages)
    ]
    forward, backward, step, memory = zip(*parts, strict=True)
    transfer, links = zip(*transfers, strict=True) if transfers else ((), ())
    seconds = simulated_makespan(policy, forward, backward, m, transfer, step, links)
    return PipelineEstimate(seconds, max(memory))


def _difference(variant: Variant, stage: StageChoice) -> tuple[bool, float]:
    """How far the layouts of a variant are from those of a stage."""
    other = variant.memory_limit != stage.memory_limit
    return other, abs(variant.memory_multiplier - stage.memory_multiplier)


def _stage_parts(
    layout_costs: LayoutCosts, candidate: Candidate, position: int
) -> tuple[float, float, float, float]:
    """Seconds forward, backward and once a step of a stage, and the share of the memory that it needs."""
    stage, m = candidate.stages[position], candidate.micro_batches
    submesh = layout_costs.submesh(stage.devices)
    layouts = m, submesh, stage.shape, candidate.restriction
    variants: tuple[Variant, ...] = ()
    if stage.memory_limit is not None:
        variants = layout_costs.variants_within_memory(*layouts)
        if all(each.memory_limit != stage.memory_limit for each in variants):
            variants = layout_costs.limited_variants(*layouts, stage.memory_limit)
    elif not stage.memory_multiplier:
        variants = (layout_costs.fastest(*layouts),)
    variants = variants or layout_costs.variants(*layouts)
    variant = min(variants, key=lambda v: _difference(v, stage))
    plain, again = variant.profile, variant.recompute
    layers = np.append(np.arange(stage.first, stage.stop), len(plain.forward) - 1)
    recomputed = np.isin(layers, candidate.recompute)

    def total(name: str) -> Floats:
        return np.asarray(np.where(recomputed, getattr(again, name)[layers], getattr(plain, name)[layers]))

    border = max(0.0, float(plain.border[stage.first : stage.stop - 1].sum())) / 2
    forward, backward = (float(total(name).sum()) + border for name in ("forward", "backward"))
    hidden = min(float(plain.gradients[layers].sum()), backward)
    policy = schedule_policy(candidate.schedule)
    held = policy.in_flight(position, len(candidate.stages), m) * float(total("activations").sum())
    nbytes = float(plain.fixed[layers].sum()) + held + float(total("temporary").max())
    return forward, backward, float(plain.step[layers].sum()) - hidden, nbytes / layout_costs.memory(submesh)


def best_pipeline(
    layout_costs: LayoutCosts,
    table: VariantTable,
    *,
    slack: float = 1.0,
    schedule: str = "1f1b",
    hidden: bool = False,
    below: float = np.inf,
) -> tuple[Candidate, Stages]:
    """The best stages by dynamic programming.

    Where a schedule waits for transfers, the one behind a stage is part of its period, however well it
    overlaps with other micro-batches: 1F1B keeps p - i micro-batches in flight on stage i of p, so that
    (Little's law) every stage behind i takes at least (sum of t_k + x_k over k >= i) / (p - i): with equal
    stages, t + x.

    Args:
        layout_costs: of the program.
        table: the variants to choose from.
        slack: share of a device's memory that may be used by the estimate.
        schedule: name.
        hidden: transfers overlap under any schedule but are between machines; else they are part of the
            period of a stage where the schedule waits for them, and inside machines where stages fit there.
            The first is too low for equal stages, the second too high for others: a pipeline of either may
            have the better estimate (`pipeline_estimate`).
        below: seconds; a pipeline has to take less.

    Returns:
        The pipeline with its estimate, and with the objective of the dynamic programme.

    Raises:
        InfeasibleError: nothing fits, or nothing takes less.
    """
    costs = _interval_costs(layout_costs, table, slack)
    behind, occupied = transfer_seconds(layout_costs, table.micro_batches, table.submeshes, apart=hidden)
    policy = schedule_policy(schedule)
    count, waits = len(table.submeshes), policy.waits_for_transfers and not hidden
    problem = StageProblem(
        IncreasedCosts(costs, behind) if waits else costs,
        layout_costs.pools,
        table.submeshes,
        table.micro_batches,
        policy,
        None if waits else _for_each_next(behind, count),
        whole=False,
        most=layout_costs.constraints.stage_count,
        exact=layout_costs.constraints.stage_count is not None,
        occupied=None if waits else _for_each_next(occupied, count),
    )
    stages = find_stages(problem, below=below)
    candidate = _candidate(layout_costs, table, stages, schedule)
    estimate = pipeline_estimate(layout_costs, candidate)
    return replace(candidate, estimate=estimate.seconds), stages


def _for_each_next(behind: Floats, count: int) -> Floats:
    """Seconds [layers - 1, sub-mesh before, sub-mesh after] that are the same for every sub-mesh after."""
    return np.repeat(behind[:-1, :, None], count, axis=2)


def _interval_costs(layout_costs: LayoutCosts, table: VariantTable, slack: float) -> IntervalCosts:
    """Costs of stages by the variants of a table, with the recomputation and the borders of constraints."""
    constraints, layers = layout_costs.constraints, len(layout_costs.all_layers(table.micro_batches))
    recomputed = constraints.recomputed(layers)
    costs = ProfileCosts(
        [[_config(variant, recomputed) for variant in variants] for variants in table.variants],
        [slack * layout_costs.memory(submesh) for submesh in table.submeshes],
    )
    if constraints.borders is None:
        return costs
    stages = set(pairwise((0, *constraints.borders, layers)))
    forbidden = [[(first, last + 1) not in stages for last in range(layers)] for first in range(layers)]
    return IncreasedCosts(costs, np.where(forbidden, np.inf, 0.0)[:, :, None])


def _config(variant: Variant, recomputed: tuple[int, ...] | None) -> Config:
    """The costs of a variant with the choice of recomputation, or with given layers recomputed."""
    if recomputed is None:
        return Config(variant.profile, variant.recompute)
    once, again = variant.profile, variant.recompute
    is_again = np.isin(np.arange(len(once.forward)), recomputed)
    costs = {f.name: np.where(is_again, getattr(again, f.name), getattr(once, f.name)) for f in fields(once)}
    return Config(Profile(**costs))


def _candidate(layout_costs: LayoutCosts, table: VariantTable, stages: Stages, schedule: str) -> Candidate:
    given = layout_costs.constraints.recomputed(len(layout_costs.all_layers(table.micro_batches)))
    choices: list[StageChoice] = []
    recompute: list[int] = []
    for stage in stages.stages:
        variant = table.variants[stage.submesh][stage.config]
        choices.append(
            StageChoice(
                stage.first,
                stage.stop,
                stage.devices,
                variant.shape,
                variant.memory_multiplier,
                variant.memory_limit,
            )
        )
        recompute += stage.recomputed
    return Candidate(
        "search",
        tuple(choices),
        layout_costs.restriction,
        stages.seconds,
        micro_batches=table.micro_batches,
        schedule=schedule,
        recompute=tuple(sorted(recompute)) if given is None else given,
    )
