"""Loops under every layout: as the serial program, and as the program without loops, with gradients."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from support.loops.programs import PROGRAMS, annotated, arrays, graph_of
from support.programs.partitioned import run_partitioned

from distgraph import ops
from distgraph.array_api.trace import trace
from distgraph.errors import ShardingError
from distgraph.ir.graph import Graph
from distgraph.ir.loops import Loop
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.parser import parse_graph
from distgraph.ir.reference_interpreter import interpret
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.ir.verifier import verify
from distgraph.ops.control.loop_boundary import LEAVE
from distgraph.passes.complete import complete
from distgraph.passes.lower import lower
from distgraph.passes.reshard import reshard
from distgraph.passes.serial.backward import differentiate
from distgraph.passes.serial.loops.flatten import flatten, is_flat
from distgraph.passes.serial.loops.restore import restore
from distgraph.runtime.program.build import build
from distgraph.tracing.annotations import recompute
from distgraph.tracing.tracer import Trace

grid = ProcessMesh.grid
RECURRENT: dict[str, dict[str, list[Any]]] = {
    "data": {"xs": [None, "dp", None]},
    "tensor": {"xs": [None, "dp", None], "wx": [None, "tp"], "wh": [None, "tp"], "b": ["tp"]},
    "rows": {"xs": [None, "dp", "tp"], "wx": ["tp", None], "wh": ["tp", None]},
    "turns": {"xs": ["dp", None, None], "wh": ["tp", None]},
}
LAYERS: dict[str, dict[str, list[Any]]] = {
    "data": {"h": ["dp", None, None]},
    "tensor": {"h": ["dp", None, None], "wu": [None, None, "tp"], "wd": [None, "tp", None]},
    "rows": {"h": ["dp", None, "tp"]},
    "turns": {"h": [None, "tp", None], "wu": ["dp", None, "tp"]},
}
CASES = {
    "data": grid(dp=2), "tensor": grid(dp=2, tp=3), "rows": grid(dp=2, tp=2), "turns": grid(dp=3, tp=2)
}  # fmt: skip


@cache
def expected(name: str, reverse: bool = False) -> dict[str, Any]:
    """Results and gradients of the program without loops."""
    return interpret(graph_of(name, False, reverse=reverse), arrays(name))[0]


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for label, array in wanted.items():
        np.testing.assert_allclose(found[label], array, rtol=1e-11, atol=1e-12, err_msg=label)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"recompute": True}], ids=str)
def test_a_scan_is_the_repeated_body(name: str, options: dict[str, bool]) -> None:
    graph = graph_of(name, True, **options)
    verify(graph)
    assert parse_graph(str(graph)) == graph
    assert_same(interpret(graph, arrays(name))[0], expected(name, options.get("reverse", False)))


@pytest.mark.parametrize("layout", CASES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_scan_on_a_mesh_is_the_serial_one(name: str, layout: str) -> None:
    mesh = CASES[layout]
    recompute = layout == "rows"
    layouts = (LAYERS if name == "layers" else RECURRENT)[layout]
    completed = complete(annotated(graph_of(name, True, recompute=recompute), mesh, layouts))
    outputs, _, _ = run_partitioned(completed, [arrays(name)], {})
    assert_same({label: blocks[0] for label, blocks in outputs.items()}, expected(name))


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_stage_of_a_loop_is_verified_and_has_a_text(name: str) -> None:
    layouts = (LAYERS if name == "layers" else RECURRENT)["tensor"]
    graph = complete(annotated(graph_of(name, True), grid(dp=2, tp=3), layouts))
    for stage, change in (("completed", complete), ("resharded", reshard), ("lowered", lower)):
        graph = change(graph)
        assert parse_graph(str(verify(graph, stage))) == graph
        assert_same(interpret(graph, arrays(name))[0], expected(name))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_flat_program_leads_back_to_its_loops(name: str) -> None:
    graph = complete(annotated(graph_of(name, True), grid(dp=2, tp=3), {}), grid(dp=2, tp=3))
    flat = flatten(graph)
    assert is_flat(flat)
    assert restore(flat) == graph


def bodies(graph: Graph, kind: str = "scan") -> list[Loop]:
    return [Loop(op) for op in graph.ops if op.kind == kind]


def test_gradients_of_weights_are_summed_over_turns_and_reduced_once() -> None:
    """Data parallelism: no turn reduces a gradient of a weight, which leaves the loop as a partial sum."""
    graph = annotated(graph_of("rnn", True), grid(dp=2), RECURRENT["data"])
    lowered = build(complete(graph)).lowered
    _, backward = bodies(lowered)
    assert not [op.kind for op in backward.body.ops if op.kind.startswith("comm.")]
    sums = lowered.producers[backward.op.name].results[1:4]
    assert all(lowered.attrs[value.name].spec.partial == (("dp", "sum"),) for value in sums)


def test_a_carry_is_gathered_in_each_turn_and_weights_stay_where_they_are() -> None:
    """Tensor parallelism by columns: each turn gathers the state, and no turn moves a weight."""
    graph = annotated(graph_of("rnn", True), grid(tp=2), RECURRENT["tensor"])
    forward, _ = bodies(build(complete(graph)).lowered)
    moved = [op for op in forward.body.ops if op.kind.startswith("comm.")]
    assert [(op.kind, op.operands[0].name) for op in moved] == [("comm.all_gather", "carry0")]


def test_a_body_is_on_the_mesh_of_its_loop() -> None:
    first, second = grid(dp=2), grid(2, dp=2)

    def program(x: Any) -> Any:
        def turn(c: Any, v: Any) -> Any:
            c = c + v
            c.trace.annotate(c.value, DistAttr(second, ShardSpec.of(["dp"]), Origin("user", "body")))
            return c, None

        return ops.scan(turn, ops.zeros((4,), "f64"), x)[0]

    graph = trace(program, np.ones((3, 4)))
    graph = annotated(graph, first, {"x0": [None, "dp"]})
    with pytest.raises(ShardingError, match=r"is annotated .* a loop has one mesh, without pipeline stages"):
        complete(graph)


@pytest.mark.parametrize("mesh", [grid(tp=2), grid(dp=2, tp=3)], ids=str)
def test_a_while_loop_with_a_split_carry_ends_after_the_same_turns(mesh: ProcessMesh) -> None:
    def program(x: Any, w: Any) -> Any:
        def turn(x: Any, n: Any) -> Any:
            return ops.tanh(x @ w) * 1.2, n + 1

        x, n = ops.while_loop(
            lambda x, n: ops.reduce("sum", x * x, None) > 0.05, turn, (x, ops.zeros((), "i32"))
        )
        return x, n

    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((6, 12)), 0.2 * rng.standard_normal((12, 12))
    graph = trace(program, x, w)
    wanted = interpret(graph, {"x0": x, "x1": w})[0]
    turns = int(wanted["y1"])
    assert 3 < turns < 50
    graph = annotated(graph, mesh, {"x0": ["dp", "tp"], "x1": [None, "tp"]})
    completed = complete(graph)
    outputs, _, _ = run_partitioned(completed, [{"x0": x, "x1": w}], {})
    np.testing.assert_allclose(outputs["y0"][0], wanted["y0"], rtol=1e-12)
    assert int(outputs["y1"][0]) == turns
    lowered = build(completed).lowered
    assert parse_graph(str(verify(lowered, "lowered"))) == lowered


def test_all_of_a_recomputed_while_loop_is_in_the_backward_part() -> None:
    trace = Trace("recomputed")
    with trace.activate():
        x, w = (trace.source("input", name, (4,), "f64") for name in "xw")

        def block(x: Any) -> Any:
            (x,) = ops.while_loop(lambda x: ops.reduce("sum", x, None) > 1.0, lambda x: x * 0.5, (x,))
            return ops.sin(x * w)

        loss = ops.reduce("sum", recompute(block)(x), None)
        (gradient,) = differentiate(trace, loss, [w])
    flat = flatten(trace.finish({"dw": gradient}))
    roles = {op.name: op.role for op in flat.ops}
    first, second = (op.name for op in flat.ops if op.kind == LEAVE)
    for loop, role in ((first, "forward"), (second, "backward")):
        inside = {name for name in roles if name.startswith(f"{loop}/")}
        assert {roles[name] for name in inside} == {role}
        assert any(name.startswith(f"{loop}/condition/") for name in inside)
