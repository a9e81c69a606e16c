"""Uniform pipelines, which every answer is compared with: equal stages, dp x tp on each.

*In:* layout costs on a cluster of one kind, see `costs_of_equal_devices`. *Out:* `Candidate`s with their
estimates. *Invariant:* all devices are used; restrictions say what dp may split (see `restrictions`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from distgraph.engine.search_driver.candidate import Candidate, StageChoice
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.search_space import Shape
from distgraph.engine.search_driver.stage_search import ExcludedShapes, pipeline_estimate
from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.inter_op.submesh_placement import SubMesh, place
from distgraph.passes.search.intra_op.formulate import Profile
from distgraph.passes.search.intra_op.restrictions import RESTRICTION_NAMES, Restriction


@dataclass(frozen=True, slots=True)
class UniformPipeline:
    """Equal stages on all devices: how many micro-batches, on which devices, in which shape, and whether
    annotations name axes of it."""

    micro_batches: int
    submesh: SubMesh
    shape: Shape
    devices: tuple[tuple[int, ...], ...]
    named: bool = False

    @property
    def free(self) -> Shape:
        """The shape with its axis called dp, where it has one: only restrictions depend on its name."""
        one_axis = len(self.shape.axes) == 1 and not self.named
        return Shape((("dp", self.submesh.size),)) if one_axis else self.shape


def costs_of_equal_devices(layout_costs: LayoutCosts, micro_batches: int) -> LayoutCosts | str:
    """Layout costs for equal shares: where devices are of several kinds, as if all were as the slowest kind,
    with the memory of the smallest. Or why there are none.

    Args:
        layout_costs: of the program on the cluster.
        micro_batches: number in a step for which the kinds are compared; one device of the slowest kind takes
            longest for the whole program.
    """
    pools = layout_costs.pools
    if len(pools) == 1:
        return layout_costs
    devices = [layout_costs.cluster.devices[number] for number in layout_costs.devices]
    if len({device.type for device in devices}) > 1:
        return "devices are of several types"
    if len({pool.machine for pool in pools}) > 1:
        return "machines have unequal numbers of devices"
    if layout_costs.expired():
        return "the search had no time left"

    def seconds(pool: int) -> float:
        one = SubMesh(tuple(int(number == pool) for number in range(len(pools))))
        profile = layout_costs.fastest(micro_batches, one, Shape((("dp", 1),)), "none").profile
        return float((profile.forward + profile.backward).sum())

    slowest = devices[pools[max(range(len(pools)), key=seconds)].machines[0][0]]
    memory = min(device.memory for device in devices)
    equal = tuple(
        replace(
            slowest,
            index=device.index,
            node=device.node,
            machine=device.machine,
            local=device.local,
            memory=memory,
        )
        for device in layout_costs.cluster.devices
    )
    return layout_costs.for_cluster(replace(layout_costs.cluster, devices=equal))


def best_uniform(
    layout_costs: LayoutCosts, counts: Sequence[int], restriction: Restriction, excluded: ExcludedShapes = ()
) -> Candidate | None:
    """The dp x tp x pp with the least estimate, layers divided by their work; None where none fits.

    Pipelines are looked at in the order of what they would take without restriction and with memory enough. A
    restriction takes choices away, so once that is above the best estimate, no other pipeline can be better.
    Shapes that are `excluded` are looked at only where no pipeline of others fits.
    """
    pipelines = [pipeline for count in counts for pipeline in pipelines_of(layout_costs, count)]
    good = [pipeline for pipeline in pipelines if (pipeline.submesh, pipeline.free) not in excluded]
    best = _best(layout_costs, good, restriction)
    if best is None and len(good) < len(pipelines):
        best = _best(
            layout_costs,
            [pipeline for pipeline in pipelines if (pipeline.submesh, pipeline.free) in excluded],
            restriction,
        )
    return best


def _best(
    layout_costs: LayoutCosts, pipelines: Sequence[UniformPipeline], restriction: Restriction
) -> Candidate | None:
    best: Candidate | None = None
    for floor, pipeline in sorted(
        ((_floor(layout_costs, pipeline), pipeline) for pipeline in pipelines), key=lambda pair: pair[0]
    ):
        if layout_costs.expired() or (best is not None and floor >= best.estimate):
            break
        candidate = candidate_of(layout_costs, pipeline, restriction)
        if candidate is not None and (best is None or candidate.estimate < best.estimate):
            best = candidate
    return best


def pipelines_of(layout_costs: LayoutCosts, micro_batches: int) -> Iterator[UniformPipeline]:
    """Every dp x tp x pp on all devices; none on devices of several kinds (see `costs_of_equal_devices`)."""
    if len(layout_costs.pools) > 1:
        return
    (pool,) = layout_costs.pools
    layers, given = len(layout_costs.all_layers(micro_batches)), layout_costs.constraints.stage_count
    for count in range(1, min(layers, pool.size) + 1):
        if given not in (None, count):
            continue
        submesh = SubMesh((pool.size // count,))
        devices = place(layout_costs.pools, [submesh] * count) if pool.size % count == 0 else None
        if devices is not None:
            for shape in _shapes(layout_costs, micro_batches, submesh):
                named = bool(layout_costs.named_axes)
                yield UniformPipeline(micro_batches, submesh, shape, devices, named)


def interleaved(layout_costs: LayoutCosts, pipeline: Candidate, chunks: int) -> Candidate | None:
    """A pipeline of equal stages that reaches each of them several times, with about the same work each time.

    Returns:
        None where stages differ in size, shape, memory multiplier or limit, or layers are too few.
    """
    stages, count = pipeline.stages, pipeline.micro_batches
    submesh, model = layout_costs.submesh(stages[0].devices), stages[0]
    layouts = {(s.shape, s.memory_multiplier, s.memory_limit) for s in stages}
    if len(layouts) > 1 or len({layout_costs.submesh(s.devices) for s in stages}) > 1:
        return None
    if not layout_costs.has_variants(count, submesh, model.shape, pipeline.restriction):
        return None
    profile = layout_costs.fastest(count, submesh, model.shape, pipeline.restriction).profile
    work = profile.forward[:-1] + profile.backward[:-1]
    runs = chunks * len(stages)
    firsts = _divided(work, runs) if runs <= len(work) else None
    if firsts is None:
        return None
    parts = enumerate(pairwise((*firsts, len(work))))
    return replace(
        pipeline,
        stages=tuple(
            replace(stages[number % len(stages)], first=first, stop=stop) for number, (first, stop) in parts
        ),
    )


def _floor(layout_costs: LayoutCosts, pipeline: UniformPipeline) -> float:
    """Seconds of a step without restriction and with memory enough; of one axis, whatever its name is."""
    if layout_costs.expired():
        return 0.0
    costs = layout_costs.fastest(pipeline.micro_batches, pipeline.submesh, pipeline.free, "none")
    profile = costs.profile
    firsts = _firsts(layout_costs, profile, len(pipeline.devices))
    if firsts is None:
        return float("inf")
    free = replace(pipeline, shape=pipeline.free)
    candidate = Candidate(
        "", _choices(free, profile, firsts), "none", np.inf, micro_batches=pipeline.micro_batches
    )
    candidate = replace(candidate, schedule=layout_costs.constraints.start.schedule)
    return pipeline_estimate(layout_costs, candidate).seconds


def candidate_of(
    layout_costs: LayoutCosts, pipeline: UniformPipeline, restriction: Restriction
) -> Candidate | None:
    """A pipeline without recomputation, else of all layers; None where neither fits or a stage is empty."""
    variant = layout_costs.fastest(pipeline.micro_batches, pipeline.submesh, pipeline.shape, restriction)
    count, layers = len(pipeline.devices), len(variant.profile.forward) - 1
    firsts = _firsts(layout_costs, variant.profile, count)
    if firsts is None:
        return None
    choices = _choices(pipeline, variant.profile, firsts)
    stages = f"{count} stage{'s' * (count > 1)}"
    name = f"{RESTRICTION_NAMES[restriction]}: {pipeline.shape}, {stages}"
    candidate = Candidate(name, choices, restriction, np.inf, micro_batches=pipeline.micro_batches)
    candidate = replace(candidate, schedule=layout_costs.constraints.start.schedule)
    given = layout_costs.constraints.recomputed(layers)
    for recompute in ((), tuple(range(layers))) if given is None else (given,):
        estimate = pipeline_estimate(layout_costs, replace(candidate, recompute=recompute))
        if estimate.memory_ratio <= 1:
            return replace(candidate, recompute=recompute, estimate=estimate.seconds)
    return None


def _choices(pipeline: UniformPipeline, profile: Profile, firsts: tuple[int, ...]) -> tuple[StageChoice, ...]:
    layers = len(profile.forward) - 1
    return tuple(
        StageChoice(first, stop, devices, pipeline.shape)
        for (first, stop), devices in zip(pairwise((*firsts, layers)), pipeline.devices, strict=True)
    )


def _shapes(layout_costs: LayoutCosts, micro_batches: int, submesh: SubMesh) -> tuple[Shape, ...]:
    """dp x tp meshes: one axis for either, or both."""
    (pool,) = layout_costs.pools
    shapes = layout_costs.shapes(micro_batches, pool, submesh.size)
    inside = not layout_costs.named_axes and 1 < submesh.size <= pool.machine
    return (*shapes, Shape((("tp", submesh.size),))) if inside else shapes


def _firsts(layout_costs: LayoutCosts, profile: Profile, count: int) -> tuple[int, ...] | None:
    """First layer of each of `count` stages: those that are given, or of about the same work."""
    borders = layout_costs.constraints.borders
    if borders is not None:
        return (0, *borders)
    return _divided(profile.forward[:-1] + profile.backward[:-1], count)


def _divided(work: Floats, count: int) -> tuple[int, ...] | None:
    """First layer of each of `count` runs of about the same work; None where one would be empty."""
    total = np.cumsum(work)
    firsts = [0, *(int(np.searchsorted(total, total[-1] * k / count - 1e-12)) + 1 for k in range(1, count))]
    firsts = [min(first, len(work) - count + i) for i, first in enumerate(firsts)]
    return tuple(firsts) if all(a < b for a, b in pairwise(firsts)) else None
