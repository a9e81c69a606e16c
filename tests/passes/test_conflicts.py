"""Conflict report: both claims, the moves that follow with their bytes, the annotation to change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.programs.small_graphs import mlp

import distgraph as dg
from distgraph.errors import GraphError
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.analysis.conflicts import conflicts, explain, traffic
from distgraph.passes.complete import complete
from distgraph.passes.redistribution.planner import wire_price
from distgraph.tracing.tracer import Trace

MESH = dg.ProcessMesh.grid(dp=2, tp=3)


def chain(*specs: str | None, mesh: dg.ProcessMesh = MESH):
    """y = (x @ w1) @ w2 with annotations at the lines t:1, t:2, ... on x, w1, w2."""
    trace = Trace("chain")
    shapes = {"x": (12, 8), "w1": (8, 30), "w2": (30, 6)}
    with trace.activate(), trace.on_behalf_of("", "", "model.py:1"):
        tensors = [trace.source("input", name, shape, "f32") for name, shape in shapes.items()]
        for line, (tensor, spec) in enumerate(zip(tensors, specs, strict=True), 1):
            if spec is not None:
                attr = DistAttr(mesh, ShardSpec.parse(spec), Origin("user", f"t:{line}"))
                trace.annotate(tensor.value, attr)
        x, w1, w2 = tensors
        return trace.finish({"y": (x @ w1) @ w2})


def test_annotations_that_agree_have_no_conflict():
    completed = complete(chain("[dp, _]", "[_, tp]", "[tp, _]"))
    assert conflicts(completed) == ()


def test_two_claims_on_one_axis_are_reported_with_bytes_and_fix():
    """x wants rows over tp, w1 columns over tp: w1 is gathered, 2/3 of it reaches each rank."""
    completed = complete(chain("[tp, _]", "[_, tp]", None))
    found = conflicts(completed)
    first = found[0]
    assert (first.kind, first.lost.source, first.lost.axis) == ("matmul", "model.py:1", "tp")
    assert {first.lost.claimed.where, first.lost.held.where} == {"t:1", "t:2"}
    (move,) = first.moves
    assert move.value == "w1"
    assert move.collectives == ("all_gather",)
    assert move.nbytes == 8 * 30 * 4 * 2 / 3
    assert first.nbytes == move.nbytes
    assert first.fix is not None
    assert first.fix.where in ("t:1", "t:2")
    assert first.fix.before == traffic(completed)
    assert first.fix.after == 0.0
    text = str(first)
    assert "axis tp is wanted for index n by t:2 but held by t:1" in text
    assert "%w1 [_, tp] -> [_, _]: all_gather, 640 B a rank and step" in text
    assert f"the annotation at {first.fix.where}; a step then moves 0 B a rank instead of 640 B" in text


def test_the_fix_keeps_what_it_promises():
    completed = complete(chain("[tp, _]", "[_, tp]", "[tp, dp]"))
    fix = conflicts(completed)[0].fix
    line = int(fix.where[2:])
    specs = ["[tp, _]", "[_, tp]", "[tp, dp]"]
    changed = specs[line - 1].replace(fix.axis, "_") if fix.axis else None
    specs = [changed if i == line - 1 else spec for i, spec in enumerate(specs)]
    assert traffic(complete(chain(*specs))) == pytest.approx(fix.after)
    assert fix.after < fix.before == pytest.approx(traffic(completed))


def test_seconds_come_from_the_price_of_the_cluster():
    def seconds(kind, sent, group, mesh, axes):
        return 2e-6 + sent / 1e9

    completed = complete(chain("[tp, _]", "[_, tp]", None))
    (move,) = conflicts(completed, seconds=seconds)[0].moves
    assert move.seconds == pytest.approx(2e-6 + 640 / 1e9)
    assert "2.64 us" in str(move)
    assert conflicts(completed)[0].moves[0].seconds is None


def test_worst_conflicts_come_first_and_nothing_changes():
    completed = complete(chain("[tp, _]", "[_, tp]", "[tp, dp]"))
    before = str(completed)
    found = conflicts(completed)
    assert [c.nbytes for c in found] == sorted((c.nbytes for c in found), reverse=True)
    assert len(found) >= 2
    assert str(completed) == before


def test_traffic_counts_micro_batches():
    """The rows of activations move once a micro-batch, gradients once a step."""
    completed = complete(mlp())
    once, thrice = traffic(completed), traffic(replace(completed, micro_batches=3))
    assert once < thrice < 3 * once
    assert wire_price("all_reduce", 8.0, 2, MESH, ("dp",)) == pytest.approx(8.0, abs=0.01)


def test_explain_tells_who_decided_and_what_follows():
    completed = complete(chain("[tp, _]", "[_, tp]", None))
    x, w1 = explain(completed, "x"), explain(completed, "%w1")
    assert x.startswith("%x : f32[12, 8] [tp, _] on mesh(dp=2, tp=3), decided by user t:1")
    assert "%w1 [_, tp] -> [_, _]: all_gather" in w1
    assert "lost: " in w1
    product = completed.ops[3].name
    text = explain(completed, product)
    assert "tp: %x is annotated at t:1, through matmul to %" in text
    last = explain(completed, completed.outputs[0][1].name)
    assert last.count("through matmul") == 2


def test_explain_of_nothing_and_of_a_serial_graph():
    graph = chain("[tp, _]", None, None)
    assert "has no layout yet" in explain(graph, "w1")
    with pytest.raises(GraphError, match="has no value %ghost"):
        explain(graph, "ghost")
