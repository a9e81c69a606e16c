"""Costs of changes of layout between all pairs of layouts equal those of `redistribute`, pair by pair."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from distgraph.ir.collective_registry import Space
from distgraph.ir.float_arrays import Floats
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.redistribution.planner import redistribute_cost, step_bytes, wire_price
from distgraph.passes.search.intra_op.redistribution_cost_table import step_graph
from distgraph.passes.search.intra_op.redistribution_steps import LayoutTable, goal_copies, permutes, steps

MESHES = [ProcessMesh.grid(a=a, b=b) for a, b in ((2, 3), (3, 2), (2, 8), (8, 2), (4, 4), (1, 6), (4, 6))]
ITEM = 4


def of_step(kind: str, axes: tuple[str, ...], sent: Floats) -> Floats:
    """Bytes, and the trace for a step of `wire_price`; what sends nothing is free."""
    return sent + wire_price(kind, 0.0, 1, MESHES[0], axes) if axes else np.zeros_like(sent)


def least_of(shape: tuple[int, ...], mesh: ProcessMesh) -> tuple[tuple[ShardSpec, ...], Floats]:
    """The layouts, and the cost of the change from each to each."""
    found = step_graph(shape, mesh)
    nbytes = np.array([ITEM * math.prod(shape)], dtype=np.float64)
    return found.states, found.seconds(nbytes, of_step)[0]


def assert_some_cost_what_redistribute_asks(
    shape: tuple[int, ...], mesh: ProcessMesh, pairs: int, rng: random.Random
) -> None:
    states, least = least_of(shape, mesh)
    for _ in range(pairs):
        i, j = rng.randrange(len(states)), rng.randrange(len(states))
        wanted = redistribute_cost(shape, ITEM, mesh, states[i], states[j])
        assert least[i, j] == pytest.approx(wanted, rel=1e-9), f"{shape}: {states[i]} to {states[j]}"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_step_graphs_are_those_of_redistribute(mesh: ProcessMesh) -> None:
    """Where every dim takes all axes."""
    for ndim in (1, 2, 3):
        assert_some_cost_what_redistribute_asks((mesh.size,) * ndim, mesh, 60, random.Random(0))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_step_graphs_of_uneven_blocks_are_those_of_redistribute(mesh: ProcessMesh) -> None:
    """Dims with a rest, dims shorter than the mesh, and two of one size, which may be exchanged."""
    for shape in ((3, 5), (5, mesh.size, 5), (7, 7, 2), (0, 3), (3, 3, mesh.size, 4)):
        assert_some_cost_what_redistribute_asks(shape, mesh, 40, random.Random(0))


def test_step_graphs_on_three_axes_are_those_of_redistribute() -> None:
    mesh = ProcessMesh.grid(c=2, a=3, b=2)
    for shape in ((12, 12), (5, 12), (6, 6)):
        assert_some_cost_what_redistribute_asks(shape, mesh, 60, random.Random(0))


def test_a_tensor_without_dims_has_the_reductions_alone() -> None:
    states, least = least_of((), MESHES[0])
    assert len(states) == 4  # every axis pending or not
    for (i, source), (j, target) in itertools.product(enumerate(states), repeat=2):
        assert least[i, j] == pytest.approx(redistribute_cost((), ITEM, MESHES[0], source, target), rel=1e-9)


@pytest.mark.parametrize("mesh", [*MESHES, ProcessMesh.grid(c=2, a=3, b=2)], ids=str)
def test_steps_to_every_goal_are_its_moves(mesh: ProcessMesh) -> None:
    """With the same bytes, for dims that divide by no axis, one of them, either, both."""
    rng = random.Random(0)
    sets = (some for k in range(len(mesh.axes)) for some in itertools.combinations(mesh.axes, k + 1))
    counts = {mesh.count(some) for some in sets}
    lengths = sorted({1, 2, 5, *mesh.shape, math.lcm(*mesh.shape), mesh.size})
    shapes: list[tuple[int, ...]] = [(n,) for n in lengths]
    if len(mesh.shape) == 2:
        pairs = list(itertools.combinations_with_replacement(lengths, 2))
        shapes = [*rng.sample(pairs, 6), (2, 3, mesh.size), ()]
    for shape in shapes:
        even = all(n % parts == 0 for n in shape for parts in counts if parts <= n)
        layouts = LayoutTable(shape, mesh, even=even)
        copies = goal_copies(layouts)
        found: list[set[tuple[object, ...]]] = [set() for _ in copies.goal]
        for part in (steps(layouts, copies), permutes(layouts, copies)):
            costs = [(kind, axes, share) for kind, axes, shares in part.kinds for share in shares]
            for copy, source, target, cost in zip(
                part.copy, part.source, part.target, part.cost_index, strict=True
            ):
                kind, axes, share = costs[cost]
                found[copy].add((source, target, kind, axes, round(share * math.prod(shape), 6)))
        for copy, own in enumerate(found):
            assert own == moves_in(
                layouts, mesh, shape, copies.goal[copy], copies.working[copy], copies.wide[copy]
            )


def moves_in(
    layouts: LayoutTable, mesh: ProcessMesh, shape: tuple[int, ...], goal: int, working: int, wide: bool
) -> set[tuple[object, ...]]:
    """What `Space.steps` finds between layouts that use axes in use alone."""
    states = layouts.states
    axes = tuple(axis for i, axis in enumerate(layouts.axes) if working >> i & 1)
    space = Space(shape, mesh, axes, states[goal], bool(wide))
    return {
        (
            at,
            states.index(step.target),
            step.kind,
            () if step.local else step.axes,
            round(step_bytes(step, shape, 1, mesh), 6),
        )
        for at, state in enumerate(states)
        if at != goal and set(state.axes) <= set(axes)
        for step in space.steps(state)
        if step.target in states
    }
