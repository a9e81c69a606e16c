"""The default completion: the cheapest policy, refined where annotations compete, alone elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from support.programs.seeded_programs import CUBE, seeded_program

from distgraph import ops
from distgraph.array_api.trace import trace
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.step_phases import multiplicity
from distgraph.passes import choose_completion as completion_module
from distgraph.passes.analysis.conflicts import explain
from distgraph.passes.analysis.layout_space import LayoutSpace
from distgraph.passes.choose_completion import choose_completion, operations, sent
from distgraph.passes.complete import complete
from distgraph.passes.propagate_shardings import POLICIES
from distgraph.passes.redistribution.planner import latency_price
from distgraph.tracing.annotations import shard_tensor

MESH = ProcessMesh.grid(x=4)
WIDTH = 24


def layers(count: int) -> Graph:
    """Residual layers of two products; inputs and the first weight of each claim the same axis."""

    def forward(a: Any, *weights: Any) -> Any:
        a = shard_tensor(a, MESH, ["x", None])
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            a = a + ops.tanh(a @ shard_tensor(up, MESH, [None, "x"])) @ down
        return a

    shapes = [((WIDTH, 4 * WIDTH), "f32"), ((4 * WIDTH, WIDTH), "f32")] * count
    names = [f"{name}{number}" for number in range(count) for name in ("up", "down")]
    return trace(forward, ((8, WIDTH), "f32"), *shapes, names=["a", *names])


def unary(function: Any, shape: tuple[int, ...] = (12, 8)) -> Graph:
    """A function of an input that is split along its first dim."""
    return trace(lambda a: function(shard_tensor(a, MESH, ["x", None])), (shape, "f32"), names=["a"])


def test_a_border_that_no_policy_places_well_is_moved() -> None:
    """The policies gather the first weight, or the input for a sum on all ranks; the sum may be scattered."""

    def products(a: Any, up: Any, down: Any) -> Any:
        a, up = shard_tensor(a, MESH, ["x", None]), shard_tensor(up, MESH, [None, "x"])
        return a @ up @ down

    shapes = [((8, WIDTH), "f32"), ((WIDTH, 4 * WIDTH), "f32"), ((4 * WIDTH, WIDTH), "f32")]
    serial = trace(products, *shapes, names=["a", "up", "down"])
    least = min(sent(complete(serial, None, policy)) for policy in POLICIES)
    chosen = choose_completion(serial, search=False)
    assert sent(chosen) < least
    searched = [name for name, attr in chosen.attrs.items() if attr.origin.kind == "search"]
    assert "decided by search" in explain(chosen, searched[0])
    assert all(chosen.attrs[name] == attr for name, attr in serial.attrs.items())


@pytest.mark.parametrize(
    ("function", "most"),
    [(lambda a: ops.flip(a, 0), 0.0), (lambda a: ops.sort(a, 0), 3 * 8 * 4 * 3 / 4)],
    ids=["reversal", "sort"],
)
def test_what_an_op_cannot_keep_is_refined_without_competing_annotations(function: Any, most: float) -> None:
    """A reversal is computed on the ranks in reverse order; a sort of a split dim is one exchange."""
    serial = unary(function)
    assert sent(complete(serial)) > most
    assert sent(choose_completion(serial, search=False)) <= most


def test_without_conflicts_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_module, "refined", None)
    serial = unary(lambda a: ops.softmax(a, 1).sum(axis=0))
    plain, chosen = complete(serial), choose_completion(serial, search=False)
    assert chosen.attrs == plain.attrs
    assert [op.layout for op in chosen.ops] == [op.layout for op in plain.ops]


def test_repeated_layers_have_equal_layouts_and_share_their_options() -> None:
    """The budget grows with the program, so that its last layer is refined as its second."""
    chosen = choose_completion(layers(24), search=False)
    by_layer = [[chosen.attrs[f"{name}{number}"].spec for name in ("up", "down")] for number in range(24)]
    assert by_layer[1:-1] == by_layer[1:2] * 22
    products = [op.layout for op in chosen.ops if op.kind == "matmul"]
    assert products[2:-2] == products[2:4] * 22
    options = []
    for count in (3, 24):
        completed = complete(layers(count))
        nodes = LayoutSpace(completed, multiplicity(completed)).nodes
        options.append(len({id(node.options) for node in nodes}))
    assert options[0] == options[1]


@pytest.mark.parametrize("seed", [1, 8, 11, 2003, 2004])
def test_refined_completions_send_no_more_and_compute_in_no_fewer_parts(seed: int) -> None:
    serial = seeded_program(seed, most=45)
    first = complete(serial, CUBE)
    chosen = choose_completion(serial, CUBE, price=latency_price, search=False)
    assert sent(chosen) <= sent(first)
    assert operations(chosen) <= 1.01 * operations(first)
    assert all(chosen.attrs[name] == attr for name, attr in serial.attrs.items())


def test_a_loop_reads_and_leaves_values_in_the_layouts_of_its_body() -> None:
    """A search that takes them for replicated gathers the split carries around the loop."""

    def products(a: Any, up: Any, down: Any, z: Any) -> Any:
        carry, turns = ops.scan(lambda c, x: (ops.tanh(c + x), c), z, ops.stack([z, z]))
        return a @ up @ down, carry, ops.exp(turns)

    mesh = ProcessMesh.grid(x=4)
    shapes = ((8, 24), (24, 96), (96, 24), (4096, 24))
    dims = (["x", None], [None, "x"], None, ["x", None])

    def annotated(*arrays: Any) -> Any:
        pairs = zip(arrays, dims, strict=True)
        return products(*(each if axes is None else shard_tensor(each, mesh, axes) for each, axes in pairs))

    graph = trace(annotated, *((shape, "f32") for shape in shapes))
    assert sent(choose_completion(graph)) <= sent(choose_completion(graph, search=False)) <= 1728
