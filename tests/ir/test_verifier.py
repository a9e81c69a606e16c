"""The verifier: good graphs pass at every stage, each mutant is caught and drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support.programs.random_programs import MESHES, OVERLAPPING, PIPELINES, programs
from support.programs.small_graphs import MESH, mlp

from distgraph.errors import GraphError
from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.ir.verifier import STAGES, verify
from distgraph.passes.pass_pipeline import run_passes

ALL_MESHES = tuple((mesh,) for mesh in MESHES) + PIPELINES + OVERLAPPING
NAMES = {"serial": [], "completed": ["complete"], "resharded": ["complete", "reshard"]}
NAMES["lowered"] = [*NAMES["resharded"], "lower"]


@pytest.fixture(scope="module")
def stages() -> dict[str, Graph]:
    return {stage: run_passes(mlp(), names) for stage, names in NAMES.items()}


def test_every_stage_of_a_good_graph_passes(stages):
    for number, stage in enumerate(STAGES):
        for earlier in STAGES[: number + 1]:
            assert verify(stages[stage], earlier) is stages[stage]


def test_an_earlier_stage_is_not_a_later_one(stages):
    for earlier, later in pairwise(STAGES):
        with pytest.raises(GraphError, match="run the pass"):
            verify(stages[earlier], later)


@given(programs(ALL_MESHES, train=True))
def test_random_programs_are_well_formed_at_every_stage(program):
    run_passes(program.graph, ["complete", "reshard", "lower"])


def change(graph: Graph, name: str, **fields: Any) -> Graph:
    assert name in graph.producers
    return graph.with_ops(replace(op, **fields) if op.name == name else op for op in graph.ops)


def find(graph: Graph, kind: str) -> Op:
    return next(op for op in graph.ops if op.kind == kind)


def spec_of(graph: Graph, name: str, spec: str) -> Graph:
    attr = graph.attrs[name]
    return replace(graph, attrs={**graph.attrs, name: DistAttr(attr.mesh, ShardSpec.parse(spec))})


def moved_up(graph: Graph) -> Graph:
    op = find(graph, "matmul")
    return graph.with_ops([op, *(each for each in graph.ops if each is not op)])


def other_operand(graph: Graph, **fields: Any) -> Graph:
    op = find(graph, "matmul")
    first, *rest = op.operands
    return change(graph, op.name, operands=(replace(first, **fields), *rest))


def other_result(graph: Graph, kind: str = "matmul", **fields: Any) -> Graph:
    op = find(graph, kind)
    return change(graph, op.name, results=(replace(op.results[0], **fields), *op.results[1:]))


def layout(graph: Graph, kind: str, *axes: tuple[str, tuple[str, ...]], partial: Any = ()) -> Graph:
    op = find(graph, kind)
    return change(graph, op.name, layout=OpLayout(MESH, tuple(axes), tuple(partial)))


def attrs(graph: Graph, kind: str, **fields: Any) -> Graph:
    op = find(graph, kind)
    return change(graph, op.name, attrs={**op.attrs, **fields})


def twice(graph: Graph) -> Graph:
    return graph.with_ops([*graph.ops, replace(graph.ops[-1])])


def renamed(pairs: Any, position: int, label: str) -> Any:
    return tuple((label, v) if i == position else (n, v) for i, (n, v) in enumerate(pairs))


X = Value("nowhere", (), "f32")
SERIAL: dict[str, tuple[Callable[[Graph], Graph], str, str]] = {
    "used before it is made": (moved_up, "is made only further down", "%x"),
    "operand unknown": (lambda g: other_operand(g, name="ghost"), "%ghost is made nowhere", "%ghost"),
    "operand of another shape": (
        lambda g: other_operand(g, shape=(6, 12)),
        "read as f32[6, 12] but made",
        "f32[6, 12]",
    ),
    "operand of another dtype": (lambda g: other_operand(g, dtype="f16"), "read as f16[12, 6]", "f16[12, 6]"),
    "made twice": (twice, "is made twice", "%"),
    "result of another shape": (
        lambda g: other_result(g, shape=(12, 11)),
        "its operands make f32[12, 10]",
        "f32[12, 11]",
    ),
    "result of another dtype": (
        lambda g: other_result(g, "gelu", dtype="f64"),
        "its operands make f32",
        "f64[12, 10]",
    ),
    "too few results": (
        lambda g: change(g, find(g, "cross_entropy").name, results=find(g, "cross_entropy").results[:1]),
        "op has 1 results but its operands make 2",
        "%",
    ),
    "unknown op": (
        lambda g: change(g, find(g, "gelu").name, kind="gelo"),
        "'gelo' is not in the registry",
        "gelo",
    ),
    "unknown role": (
        lambda g: change(g, find(g, "gelu").name, role="sideways"),
        "role 'sideways'",
        "sideways",
    ),
    "attribute missing": (
        lambda g: change(g, find(g, "reduce_sum").name, attrs={}),
        "attributes do not fit the op",
        "= reduce_sum",
    ),
    "source without name": (lambda g: change(g, "x", attrs={}), "has no name", "= input"),
    "source with operand": (lambda g: change(g, "y", operands=(g.value("x"),)), "has no operand", "= input"),
    "constant of another shape": (
        lambda g: attrs(g, "constant", value=np.ones(3, "f4")),
        "no value of shape",
        "= constant",
    ),
    "link to nothing": (
        lambda g: change(g, find(g, "gelu_grad").name, link="ghost"),
        "%ghost, which is made nowhere",
        "of %ghost",
    ),
    "annotation of another rank": (lambda g: spec_of(g, "x", "[dp]"), "has 1 dims", "[dp]"),
    "annotation with unknown axis": (lambda g: spec_of(g, "x", "[pp, _]"), "names axis 'pp'", "[pp, _]"),
    "output unknown": (
        lambda g: replace(g, outputs=(("loss", X),)),
        "%nowhere is made nowhere",
        "= %nowhere",
    ),
    "output of another type": (
        lambda g: replace(g, outputs=(("loss", replace(g.outputs[0][1], shape=(2,))),)),
        "f32[2] here but made as f32[]",
        "f32[2]",
    ),
    "label twice": (lambda g: replace(g, outputs=g.outputs * 2), "label is used twice", "'loss'"),
    "update of a value": (
        lambda g: replace(g, updates=renamed(g.updates, 0, "x")),
        "only a param or state",
        "%x",
    ),
    "update of nothing": (
        lambda g: replace(g, updates=renamed(g.updates, 0, "ghost")),
        "made nowhere",
        "%ghost",
    ),
    "updated twice": (
        lambda g: replace(g, updates=g.updates + g.updates[:1]),
        "updated twice",
        "%fc1.weight",
    ),
    "update of another type": (
        lambda g: replace(g, updates=((g.updates[0][0], g.value("x")),)),
        "but its new value f32[12, 6]",
        "f32[12, 6]",
    ),
    "placement of nothing": (
        lambda g: replace(g, placements={"ghost": MESH}),
        "%ghost is made nowhere",
        "%ghost",
    ),
}
COMPLETED: dict[str, tuple[Callable[[Graph], Graph], str, str]] = {
    "value without layout": (
        lambda g: replace(g, attrs={n: a for n, a in g.attrs.items() if n != "y"}),
        "%y has no layout",
        "%y",
    ),
    "op without layout": (
        lambda g: change(g, find(g, "gelu").name, layout=None),
        "op has no layout",
        "= gelu",
    ),
    "index unknown": (lambda g: layout(g, "matmul", ("q", ("dp",))), "index q is not in its rule", "q:dp"),
    "axis unknown": (lambda g: layout(g, "matmul", ("n", ("pp",))), "axis 'pp' is not in", "pp"),
    "axis twice": (lambda g: layout(g, "matmul", ("k", ("dp",)), ("n", ("dp",))), "'dp' is used twice", "dp"),
    "axis split and partial": (
        lambda g: layout(g, "matmul", ("k", ("dp",)), partial=[("dp", 0)]),
        "'dp' is used twice",
        "dp",
    ),
    "whole index split": (
        lambda g: layout(g, "cross_entropy_grad", ("v", ("tp",))),
        "must be whole",
        "v:tp",
    ),
    "group unknown": (lambda g: layout(g, "matmul", partial=[("dp", 7)]), "linear group 7", "partial dp:7"),
}
RESHARDED: dict[str, tuple[Callable[[Graph], Graph], str, str]] = {
    "operand stored otherwise": (lambda g: spec_of(g, "x", "[tp, _]"), "is stored as [tp, _]", "%x"),
    "update stored otherwise": (
        lambda g: spec_of(g, dict(g.updates)["fc1.weight"].name, "[dp, _]"),
        "stored as [_, tp]",
        "[dp, _]",
    ),
    "computed otherwise": (lambda g: layout(g, "gelu"), "but read as [_, _]", "%"),
}
LOWERED: dict[str, tuple[Callable[[Graph], Graph], str, str]] = {
    "all_reduce over the wrong axis": (
        lambda g: attrs(
            g,
            "comm.all_reduce",
            axes=("tp",) if find(g, "comm.all_reduce").attrs["axes"] == ("dp",) else ("dp",),
        ),
        "all_reduce over",
        "[",
    ),
    "all_reduce of the wrong kind": (
        lambda g: attrs(g, "comm.all_reduce", reduction="max"),
        "is not possible from",
        "[",
    ),
    "axis of another mesh": (
        lambda g: attrs(g, "comm.all_reduce", axes=("pp",)),
        "axis 'pp' is not in",
        '"pp"',
    ),
    "another collective": (
        lambda g: change(g, find(g, "comm.all_reduce").name, kind="comm.all_gather"),
        "all_gather over",
        "[",
    ),
    "reshard left": (
        lambda g: change(g, find(g, "comm.all_reduce").name, kind="reshard", attrs={}),
        "is not lowered",
        "reshard",
    ),
}
ALL = {"serial": SERIAL, "completed": COMPLETED, "resharded": RESHARDED, "lowered": LOWERED}
CASES = [(stage, name) for stage, mutants in ALL.items() for name in mutants]


@pytest.mark.parametrize(("stage", "name"), CASES, ids=[f"{s}-{n}".replace(" ", "_") for s, n in CASES])
def test_a_mutant_is_caught_and_drawn(stage, name, stages):
    mutate, message, part = ALL[stage][name]
    with pytest.raises(GraphError) as raised:
        verify(mutate(stages[stage]), stage)
    *first, line, carets = str(raised.value).split("\n")
    assert message in "\n".join(first)
    start, width = carets.index("^"), carets.count("^")
    assert line[start : start + width].startswith(part)


def test_unknown_stages_and_passes_are_named(stages):
    with pytest.raises(GraphError, match="stage 'done' does not exist; the stages are serial"):
        verify(stages["serial"], "done")
    with pytest.raises(GraphError, match=r"pass 'fuse' does not exist; the passes are .*decompose"):
        run_passes(stages["serial"], ["complete", "fuse"])


def test_passes_in_the_wrong_order_are_refused(stages):
    with pytest.raises(GraphError, match="run the pass complete"):
        run_passes(stages["serial"], ["reshard"])


def test_the_runner_shows_each_pass(stages):
    seen = []
    names = ["decompose", "complete", "layout_local_search", "reshard", "lower"]
    final = run_passes(stages["serial"], names, watch=seen.append)
    assert [run.name for run in seen] == names
    assert seen[-1].after is final
    assert all(left.after is right.before for left, right in pairwise(seen))
    assert str(seen[0]).startswith(f"decompose: {len(stages['serial'].ops)} -> ")


def test_a_long_line_is_cut_around_the_fault(stages):
    op = find(stages["serial"], "matmul")
    long = change(stages["serial"], op.name, scope="s" * 300, role="sideways")
    with pytest.raises(GraphError) as raised:
        verify(long)
    assert max(map(len, str(raised.value).split("\n")[1:])) < 260
