"""Candidates that a search forecasts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations, product

from distgraph.engine.search_driver.candidate import Candidate, StageChoice
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.search_space import (
    Shape,
    shapes_of,
    submeshes_of,
)
from distgraph.passes.search.inter_op.submesh_placement import SubMesh, place


def rows(layout_costs: LayoutCosts, layers: int) -> Iterator[list[tuple[SubMesh, tuple[int, ...]]]]:
    """Every row of sub-meshes that the cluster has devices for, in every order, with those devices."""
    every = submeshes_of(layout_costs.pools)
    most = [len(pool.machines) * pool.machine for pool in layout_costs.pools]
    for count in range(1, min(layers, sum(most)) + 1):
        seen = set()
        repeated = [s for s in every for _ in range(count)]
        for row in permutations(range(len(repeated)), count):
            chosen = tuple(repeated[i] for i in row)
            if chosen in seen:
                continue
            seen.add(chosen)
            if all(sum(s.sizes[p] for s in chosen) <= most[p] for p in range(len(most))):
                devices = place(layout_costs.pools, chosen)
                if devices is not None:
                    yield list(zip(chosen, devices, strict=True))


def candidates(layout_costs: LayoutCosts, micro_batches: int) -> Iterator[Candidate]:
    """Every cut of the layers for every sequence of sub-meshes."""
    layers = len(layout_costs.layered_graph(micro_batches).layers)
    for row in rows(layout_costs, layers):
        for cuts in combinations(range(1, layers), len(row) - 1):
            for shapes in product(*(every_shape(layout_costs, micro_batches, submesh) for submesh, _ in row)):
                parts = zip(pairwise((0, *cuts, layers)), row, shapes, strict=True)
                stages = [
                    StageChoice(first, stop, devices, shape) for (first, stop), (_, devices), shape in parts
                ]
                yield Candidate("exhaustive", tuple(stages), "none", 0.0, micro_batches=micro_batches)


def every_shape(layout_costs: LayoutCosts, micro_batches: int, submesh: SubMesh) -> list[Shape]:
    """The one shape of a sub-mesh of these clusters; across both models, all shares of the samples."""
    own = [pool for pool, n in zip(layout_costs.pools, submesh.sizes, strict=True) if n]
    if len(own) == 1:
        (shape,) = shapes_of(own[0], submesh.size)
        return [shape]
    batch = layout_costs.request.size // micro_batches
    every = product(range(1, batch + 1), repeat=submesh.size)
    return [Shape((("dp", submesh.size),), samples) for samples in every if sum(samples) == batch]
