"""Sharding propagation and double recursion: published cases, hand-computed layouts, training as serial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from support.programs.search_cases import SEED, task, train

from distgraph import ops, optim
from distgraph.array_api.trace import trace
from distgraph.engine.compile.train_graph import train_graph
from distgraph.errors import ShardingError
from distgraph.ir.graph import Graph
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import rule_of
from distgraph.ir.reference_interpreter import interpret
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.ir.step_phases import multiplicity
from distgraph.ir.verifier import verify
from distgraph.kernels.random import random_key
from distgraph.models import GPT, GPTConfig, annotate
from distgraph.nn.initializers import materialize
from distgraph.passes.redistribution.planner import redistribute_cost, wire_price
from distgraph.passes.search.intra_op.apply_layouts import assign
from distgraph.passes.search.intra_op.chosen_layouts import Layouts
from distgraph.passes.search.modes.propagation import laid_out, propagate, spread
from distgraph.passes.search.modes.recursive import cut_costs, prime_factors, prime_mesh, recursive

TOKENS = (((4, 8), "i32"), ((4, 8), "i32"))


def pinned(graph: Graph, mesh: ProcessMesh, **specs: str) -> Graph:
    attrs = {n: DistAttr(mesh, ShardSpec.parse(s), Origin("user", "test")) for n, s in specs.items()}
    return replace(graph, attrs={**graph.attrs, **attrs})


def spec(layouts: Layouts, name: str) -> str:
    return str(layouts.values[name].spec)


def completed(graph: Graph, mesh: ProcessMesh, layouts: Layouts) -> Graph:
    found = assign(graph, {op.name: mesh for op in graph.ops}, layouts)
    verify(found, "completed")
    return found


# ------------------------------------------------------------------ propagation


def configured(graph: Graph, mesh: ProcessMesh, layouts: Mapping[str, OpLayout]) -> Layouts:
    """Layouts of a graph from those of some ops."""
    return laid_out(graph, mesh, spread(graph, mesh, wire_price, layouts), wire_price, "test")


def test_the_published_example_of_propagation() -> None:
    """ReLU is [2, 4]; of a product's strategies [[2, 4], [4, 1]] moves nothing."""
    graph = trace(lambda x, w: ops.relu(x) @ w, ((16, 32), "f32"), ((32, 8), "f32"), names=("x", "w"))
    relu, product = (op.name for op in graph.ops[-2:])
    mesh = ProcessMesh.grid(x=2, y=4)
    found = configured(graph, mesh, {relu: OpLayout(mesh, (("i0", ("x",)), ("i1", ("y",))))})
    assert found.ops[product] == OpLayout(mesh, (("k", ("y",)), ("m", ("x",))))
    assert spec(found, "x") == "[x, y]"
    assert spec(found, "w") == "[y, _]"


def test_least_redistribution_by_hand() -> None:
    """A product between an operand split by columns and a result wanted by rows moves the smaller of the two.

    tanh is decided first, as its result is annotated, and reads rows. Then the product: split by k it would
    read a as it lies, but its sum is whole where rows are wanted, and the gradient is gathered; split by m it
    moves a, which has half the elements of the result.
    """
    mesh = ProcessMesh.grid(x=4)
    for width, index in ((16, "m"), (2, "k")):
        graph = trace(lambda a, b: ops.tanh(a @ b), ((64, 8), "f32"), ((8, width), "f32"), names=("a", "b"))
        product, result = graph.ops[-2].name, graph.ops[-1].name
        found = propagate(pinned(graph, mesh, a="[_, x]", **{result: "[x, _]"}), mesh)

        def price(shape: tuple[int, int], *specs: str) -> float:
            """There, and the gradient back."""
            ends = [ShardSpec.parse(s) for s in specs]
            return sum(redistribute_cost(shape, 4, mesh, *pair) for pair in (ends, ends[::-1]))

        by_rows = price((64, 8), "[_, x]", "[x, _]")
        by_sums = price((64, width), "[_, _]", "[x, _]")
        assert (by_rows < by_sums) == (index == "m")
        assert found.ops[product].of(index) == ("x",)
        assert spec(found, result) == "[x, _]"


def test_a_configured_op_stops_the_search() -> None:
    mesh = ProcessMesh.grid(x=2)
    graph = trace(lambda a: ops.tanh(ops.relu(ops.tanh(a))), ((8, 8), "f32"), names=("a",))
    first, middle, last = (op.name for op in graph.ops[1:])
    rows, columns = (OpLayout(mesh, ((index, ("x",)),)) for index in ("i0", "i1"))
    found = configured(graph, mesh, {first: rows, last: columns})
    assert found.ops[first] == rows
    assert found.ops[last] == columns
    assert found.ops[middle] == rows  # reached from the first in the order of the search
    assert spec(found, "a") == "[x, _]"


def test_annotated_weights_give_megatron() -> None:
    mesh = ProcessMesh.grid(dp=2, tp=2)
    model = GPT(GPTConfig(hidden=16, layers=2, heads=2, vocabulary=40, sequence=8))
    annotate(model, mesh)
    graph = train_graph(model, TOKENS)
    found = propagate(graph, mesh)
    result = completed(graph, mesh, found)
    for op in graph.ops:
        if op.kind == "matmul" and op.scope.endswith(("attn.out", "mlp.down")):
            assert dict(found.ops[op.name].axes) == {"k": ("tp",), "z0": ("dp",)}
        if op.kind == "matmul" and op.scope.endswith(("attn.q", "mlp.up")):
            assert dict(found.ops[op.name].axes) == {"n": ("tp",), "z0": ("dp",)}
        if op.kind == "layer_norm":
            assert found.ops[op.name].axes == (("z0", ("dp",)),)
        if op.kind == "adam":
            assert len({str(found.values[v.name].spec) for v in (op.operands[0], *op.operands[2:4])}) == 1
    # gradients wait for the end of the step: no sum over dp in the micro-batch part
    times = multiplicity(replace(result, micro_batches=2))
    for op in result.ops:
        for value in op.results:
            before = result.attrs[value.name].spec.partial
            if op.kind == "accumulate" and op.link in graph.producers:
                assert ("dp", "sum") in before
                assert times[value.name] == 1


def test_propagation_needs_something_to_start_from() -> None:
    graph = trace(ops.tanh, ((8, 8), "f32"), names=("a",))
    mesh = ProcessMesh.grid(x=2)
    with pytest.raises(ShardingError, match="no op with a layout on mesh\\(x=2\\) to propagate from"):
        propagate(graph, mesh)
    other = pinned(graph, ProcessMesh.grid(y=2), a="[y, _]")
    with pytest.raises(ShardingError, match=r"%a \(test\): splits over y=2 but is to be laid out on"):
        propagate(other, mesh)
    with pytest.raises(ShardingError, match="cannot be computed as"):
        configured(graph, mesh, {graph.ops[-1].name: OpLayout(mesh, (("k", ("x",)),))})


# ------------------------------------------------------------------ double recursion


def product(rows: int, inner: int, columns: int) -> Graph:
    return trace(lambda a, b: a @ b, ((rows, inner), "f32"), ((inner, columns), "f32"), names=("a", "b"))


def test_the_published_costs_of_a_product() -> None:
    i, k, j = 3000, 1000, 4000
    op = product(i, k, j).ops[-1]
    costs = cut_costs(op, rule_of(op).sizes, 2)
    assert costs == {"m": j * k / 2 * 0.25, "n": i * k / 2, "k": i * j / 2, None: (i * k + k * j + i * j) / 2}
    thirds = cut_costs(op, rule_of(op).sizes, 5)
    assert thirds["n"] == pytest.approx(i * k * 4 / 5)
    assert set(cut_costs(op, rule_of(op).sizes, 3)) == {"m", None}  # 1000 and 4000 have no third


def test_a_product_is_halved_by_rows() -> None:
    graph = product(3000, 1000, 4000)
    mesh, found = recursive(graph, ProcessMesh.grid(x=2))
    assert found.ops[graph.ops[-1].name] == OpLayout(mesh, (("m", ("x",)),))


def test_two_products_on_sixteen_devices_are_data_parallel() -> None:
    graph = trace(
        lambda x, y, b: x @ y @ b,
        ((128, 32), "f32"),
        ((32, 64), "f32"),
        ((64, 64), "f32"),
        names=("x", "y", "b"),
    )
    mesh, found = recursive(graph, ProcessMesh.grid(d=16))
    assert mesh == ProcessMesh.grid(d=16)
    assert [spec(found, name) for name in ("x", "y", "b")] == ["[d, _]", "[_, _]", "[_, _]"]
    assert [found.ops[op.name].axes for op in graph.ops[-2:]] == [(("m", ("d",)),)] * 2
    with pytest.raises(ShardingError, match=r"cuts .*d=16.* along more axes than the 0 between"):
        recursive(graph, ProcessMesh.grid(d=16), most_axes=0)


def test_large_weights_are_cut_and_axes_divided() -> None:
    """On 6 = 3 * 2 devices 9 rows give the factor 3, and the columns of a large matrix the factor 2."""
    graph = product(9, 64, 4096)
    mesh, found = recursive(graph, ProcessMesh.grid(d=6))
    assert mesh == ProcessMesh.grid(d_0=3, d_1=2)
    # thirds: only rows divide; halves: columns cost 3 * 64 / 2, the other index 3 * 4096 / 2
    assert found.ops[graph.ops[-1].name].axes == (("m", ("d_0",)), ("n", ("d_1",)))
    assert spec(found, "b") == "[_, d_1]"


def test_factors() -> None:
    assert prime_factors(360) == (5, 3, 3, 2, 2, 2)
    assert prime_mesh(ProcessMesh.grid(a=6, b=1, c=5)).sizes == {"a_0": 3, "a_1": 2, "b": 1, "c": 5}


def test_annotations_hold_on_divided_axes() -> None:
    graph = product(9, 64, 4096)
    mesh, found = recursive(pinned(graph, ProcessMesh.grid(d=6), b="[_, d]"), ProcessMesh.grid(d=6))
    assert found.values["b"].spec == ShardSpec.of([None, mesh.axes])


# ------------------------------------------------------------------ both train as serial


def serial(graph: Graph, batches, optimizer) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses, and parameters and states at the end, of some steps of the serial graph of a whole batch."""
    state = {
        op.attrs["name"]: materialize(
            op.attrs["init"], op.attrs["name"], SEED, op.result.shape, dtype=op.result.dtype
        )
        for op in graph.sources("param", "state")
    }
    inputs = {op.attrs["name"]: op.result.shape for op in graph.sources("input")}
    losses = []
    for number, batch in enumerate(batches):
        whole = dict(zip([name for name, shape in inputs.items() if shape], batch, strict=True))
        scalars = {"key": np.uint64(random_key(SEED, 0, number)), **optimizer.inputs(number)}
        outputs, updates = interpret(graph, {n: (whole | scalars)[n] for n in inputs}, state)
        losses.append(float(outputs["loss"]))
        state = {**state, **updates}
    return losses, state


@pytest.mark.parametrize("grid", [{"x": 4}, {"x": 2, "y": 2}], ids=["4", "2x2"])
@pytest.mark.parametrize("mode", ["sharding_propagation", "recursive"])
@pytest.mark.parametrize(("name", "micro"), [("mlp", 2), ("gpt", 2), ("conv", 1), ("moe", 1)])
def test_training_is_serial_training(name: str, micro: int, mode: str, grid: dict[str, int]) -> None:
    case, optimizer = task(name), optim.Adam(lr=0.01, eps=1e-6)
    graph, mesh = case.graph(micro, optimizer), ProcessMesh.grid(**grid)
    if mode == "recursive":
        mesh, layouts = recursive(graph, mesh)
    else:
        shapes = {op.name: op.result.shape for op in graph.sources("input") if op.result.shape}
        inputs = {name: str(ShardSpec.of(["x", *[None] * (len(s) - 1)])) for name, s in shapes.items()}
        layouts = propagate(pinned(graph, mesh, **inputs), mesh)
        assert all(spec(layouts, name) == text for name, text in inputs.items())
    assert any(layout.axes for layout in layouts.ops.values())
    result = completed(graph, mesh, layouts)
    expected, state = serial(case.graph(1, optimizer), case.batches, optimizer)
    losses, found = train(result, case.batches, optimizer)
    np.testing.assert_allclose(losses, expected, rtol=1e-8)
    for key, array in state.items():
        np.testing.assert_allclose(found[key], array, rtol=1e-6, atol=1e-7, err_msg=key)
