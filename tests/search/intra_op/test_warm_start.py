"""Choices carried over to other micro-batches and to layers that are computed again mean the same layouts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.programs.searched import Program, gpt, two_by_two

from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.layout_variants import LayoutQuery
from distgraph.engine.search_driver.search_space import Shape, pools_of
from distgraph.passes.search.intra_op.formulate import Formulation
from distgraph.passes.search.intra_op.solution_cache import VARIABLE
from distgraph.passes.search.intra_op.warm_start import corresponding_ops, transfer_choice
from distgraph.passes.search.layering.layered_graph import LayeredGraph
from distgraph.passes.search.solver import solve

DEVICES = (0, 1, 2, 3)
SHAPES = [Shape((("dp", 2), ("tp", 2))), Shape((("dp", 4),))]


@pytest.fixture(scope="module")
def layout_costs() -> Iterator[LayoutCosts]:
    """Of two blocks of a GPT and 16 sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "off")
        cluster = two_by_two()
        program = Program(gpt, (6,), (6,), tokens=True, batch=16)
        yield LayoutCosts(program.compile_request(), cluster, pools_of(cluster))


def carried(
    layout_costs: LayoutCosts, shape: Shape, source: LayeredGraph, target: LayeredGraph
) -> tuple[Formulation, tuple[int, ...], Formulation, tuple[int, ...] | None]:
    """The best choice for one graph, and what it is for another."""
    found, choice, _ = layout_costs.solve(source, LayoutQuery(DEVICES, shape, 0.0, "none"))
    other = layout_costs.formulation(target, DEVICES, shape)
    corresponding = corresponding_ops(target.fold, source.fold)
    assert corresponding is not None
    return found, choice, other, transfer_choice(found, choice, other, corresponding)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_micro_batches_lie_alike(layout_costs: LayoutCosts, shape: Shape) -> None:
    source, choice, target, found = carried(
        layout_costs, shape, layout_costs.layered_graph(2), layout_costs.layered_graph(4)
    )
    assert found is not None
    wanted, got = source.decode(choice), target.decode(found)
    assert got.values == wanted.values
    axes = {name: layout.axes for name, layout in wanted.ops.items()}
    assert {name: layout.axes for name, layout in got.ops.items()} == axes
    objective = target.problem.objective(found)
    assert target.profile(found).seconds(4) == pytest.approx(objective, rel=1e-9)
    assert solve(target.problem).objective <= objective < float("inf")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_computed_again_lies_as_the_first_time(layout_costs: LayoutCosts, shape: Shape) -> None:
    plain, again = layout_costs.layered_graph(2), layout_costs.layered_graph(2, layout_costs.all_layers(2))
    source, choice, target, found = carried(layout_costs, shape, plain, again)
    assert found is not None
    wanted, got = source.decode(choice), target.decode(found)
    forward = {op.name for op in plain.graph.ops if op.role == "forward" and op.kind != "accumulate"}
    assert {name: got.ops[name] for name in forward} == {name: wanted.ops[name] for name in forward}
    kinds = {op.name: op.kind for op in again.graph.ops}
    copies = [
        op
        for op in again.graph.ops
        if op.role == "backward" and op.kind == kinds.get(op.link) and op.kind == "layer_norm"
    ]
    assert copies
    assert all(got.ops[op.name] == wanted.ops[op.link] for op in copies)
    first, second = source.profile(choice), target.profile(found)
    assert second.activations.sum() < first.activations.sum()
    assert second.backward.sum() > first.backward.sum()
    assert second.forward.sum() <= first.forward.sum() * (1 + 1e-9)  # some moves are for the backward part
    assert target.problem.objective(found) < float("inf")


def test_other_options_are_not_guessed(layout_costs: LayoutCosts) -> None:
    """One sequence cannot be split over the batch, where two can."""
    *_, found = carried(
        layout_costs, SHAPES[0], layout_costs.layered_graph(8), layout_costs.layered_graph(16)
    )
    assert found is None
