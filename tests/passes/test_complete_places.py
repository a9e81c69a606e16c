"""Where completion computes ops, and axes that split nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs.partitioned import assert_same, run_partitioned, run_serial
from support.programs.random_programs import MESHES, Program, programs

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine import Engine
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.complete import complete
from distgraph.passes.lower import lower
from distgraph.passes.reshard import reshard
from distgraph.passes.search.modes.propagation import pins
from distgraph.passes.serial.backward import differentiate
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy
from distgraph.tracing.tensor import Tensor, emit_one
from distgraph.tracing.tracer import Trace

A, B = ProcessMesh.grid(0, dp=2, tp=2), ProcessMesh.grid(4, tp=2)
FUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda x, w: ops.softmax(x, -1) * w,
    "log_softmax": lambda x, w: ops.log_softmax(x, -1) * w,
    "rms_norm": ops.rms_norm,
    "layer_norm": lambda x, w: ops.layer_norm(x, w, w),
    "cross_entropy": lambda x, w: ops.cross_entropy(x * w, ops.argmax(ops.identity(w) + ops.sin(x), -1)),
}


def on_the_second(name: str) -> Graph:
    """A fused op on one mesh whose input lies split over another; trained."""
    trace = Trace(name)
    with trace.activate():
        x, v = trace.source("input", "x", (6, 5), "f64"), trace.source("param", "v", (5, 8), "f64")
        w = trace.source("param", "w", (8,), "f64")
        trace.annotate(v.value, DistAttr(A, ShardSpec(((), ("tp",))), Origin("user", "v")))
        with trace.on(A):
            h = x @ v
        with trace.on(B):
            y = FUSED[name](h, w)
            loss = ops.mean(ops.square(y))
        for p, g in zip((v, w), differentiate(trace, loss, [v, w]), strict=True):
            trace.updates.append((p.value.name, (p - emit_one("accumulate", g)).value))
    return trace.finish({"loss": loss})


@pytest.mark.parametrize("name", FUSED)
def test_the_parts_of_a_fused_op_are_computed_where_it_was_put(name: str, rng: np.random.Generator) -> None:
    graph = on_the_second(name)
    completed = complete(graph)
    assert graph.placements
    fused = [op for op in graph.ops if op.name in graph.placements and op.name not in completed.producers]
    broken = [op for op in graph.ops if op.kind != completed.producers.get(op.name, op).kind]
    assert fused or broken, "the split dim was to be one that the op needs whole"
    placed = {op.name: op for op in graph.ops}
    for op in completed.ops:
        base = op.name
        while base not in placed and "." in base:
            base = base.rpartition(".")[0]
        mesh = graph.placements.get(placed[base].link or base) if base in placed else None
        if mesh is not None and op.operands and placed[base].role != "optimize":
            assert op.layout is not None
            assert op.layout.mesh == mesh, str(op)
    feeds = [{"x": rng.normal(size=(6, 5))}]
    params = {"v": rng.normal(size=(5, 8)), "w": rng.normal(size=8)}
    outputs, updates, built = run_partitioned(completed, feeds, params)
    serial, changed = run_serial(graph, feeds, params)
    assert_same(outputs, serial, 1e-12)
    for each, array in changed.items():
        np.testing.assert_allclose(updates[each], array, rtol=1e-10, atol=1e-12)
    crossing = [op for op in built.lowered.ops if op.kind == "comm.transfer"]
    assert len(crossing) <= 3, "the input, its gradient and nothing else"


class Head(nn.Module):
    """A column-parallel layer on one mesh, a norm and another layer on the next."""

    def __init__(self) -> None:
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.RMSNorm(8), nn.Linear(8, 4)
        dg.shard_tensor(self.up.weight, A, [None, "tp"])
        dg.shard_tensor(self.down.weight, B, ["tp", None])

    def forward(self, x: Any) -> Any:
        with dg.on(A):
            h = self.up(x)
        with dg.on(B):
            return self.down(self.norm(h))


def test_a_plan_puts_the_parts_where_the_program_did(rng: np.random.Generator) -> None:
    batch = rng.normal(size=(8, 6)).astype("f4"), rng.normal(size=(8, 4)).astype("f4")

    def losses(**options: Any) -> tuple[Plan, list[float]]:
        engine = Engine(Head(), nn.MeanSquaredError(), optim.Adam(lr=0.1), seed=2, **options)
        with closing(engine):
            plan: Plan = engine.prepare(batch).portable
            return plan, [engine.run(batch)["loss"] for _ in range(3)]

    plan, found = losses(strategy=Strategy(micro_batches=2))
    again, planned = losses(plan=Plan.parse(plan.text()))
    assert again == plan
    assert planned == found
    assert any("." not in at for layer in plan.ops for at in layer.decomposed)


def with_unit_axis(program: Program, places: list[int]) -> Graph:
    """Every annotation over one more axis, of one rank."""
    attrs, place = {}, iter(places * len(program.graph.attrs))
    for name, attr in program.graph.attrs.items():
        mesh = ProcessMesh(attr.mesh.ranks[..., None], (*attr.mesh.axes, "unit"))
        dims = [*attr.spec.dims]
        if dims:
            at = next(place) % len(dims)
            dims[at] = (*dims[at], "unit")
        attrs[name] = replace(attr, mesh=mesh, spec=ShardSpec(tuple(dims)))
    return replace(program.graph, attrs=attrs)


def kinds(graph: Graph) -> list[tuple[str, str, tuple[Any, ...]]]:
    """Ops of a lowered graph with their layouts."""
    return [
        (op.name, op.kind, tuple(str(graph.attrs[value.name].spec) for value in op.results))
        for op in graph.ops
    ]


@given(programs(tuple((mesh,) for mesh in MESHES), train=True), st.lists(st.integers(0, 5), min_size=4))
def test_an_axis_of_one_rank_splits_nothing(program: Program, places: list[int]) -> None:
    if not program.graph.attrs:
        return
    plain = lower(reshard(complete(program.graph)))
    unit = lower(reshard(complete(with_unit_axis(program, places))))
    assert kinds(unit) == kinds(plain)


@pytest.mark.parametrize("name", FUSED)
def test_no_fused_op_is_decomposed_for_an_axis_of_one_rank(name: str) -> None:
    mesh, trace = ProcessMesh.grid(dp=2, one=1), Trace(name)
    with trace.activate():
        x, w = trace.source("input", "x", (6, 8), "f64"), trace.source("param", "w", (8,), "f64")
        trace.annotate(x.value, DistAttr(mesh, ShardSpec((("dp",), ("one",))), Origin("user", "x")))
        graph = trace.finish({"y": FUSED[name](x, w)})
    completed = complete(graph)
    assert [op.kind for op in completed.ops] == [op.kind for op in graph.ops]
    assert not completed.lost
    assert not [op for op in lower(reshard(completed)).ops if op.kind.startswith("comm.")]


def test_a_search_of_another_mesh_takes_no_note_of_an_axis_of_one_rank() -> None:
    mesh, trace = ProcessMesh.grid(dp=2, one=1), Trace("search")
    with trace.activate():
        x = trace.source("input", "x", (6, 8), "f64")
        trace.annotate(x.value, DistAttr(mesh, ShardSpec((("dp",), ("one",))), Origin("user", "x")))
        graph = trace.finish({"y": ops.tanh(x)})
    assert pins(graph, ProcessMesh.grid(dp=2, tp=2)) == {"x": ShardSpec((("dp",), ()))}


def test_a_claim_over_one_rank_travels_to_a_longer_axis() -> None:
    first, second = ProcessMesh.grid(dp=1), ProcessMesh.grid(1, dp=3)
    trace = Trace("stages")
    with trace.activate():
        x = trace.source("input", "x", (12, 8), "f32")
        trace.annotate(x.value, DistAttr(first, ShardSpec((("dp",), ())), Origin("user", "x")))
        with trace.on(first):
            h = ops.tanh(x)
        with trace.on(second):
            y = ops.sin(h)
        graph = complete(trace.finish({"y": y}))
    assert str(graph.attrs[h.value.name].spec) == "[_, _]"
    assert str(graph.attrs[y.value.name].spec) == "[dp, _]"
