"""What a plan prints: its stages, explanations, comparisons, and what an edited plan says of itself."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.plans.plan_files import plan_of

import distgraph as dg
from distgraph.errors import GraphError
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.plan.plan import (
    Computed,
    Decision,
    Estimate,
    LayerOps,
    Plan,
    Rest,
    Stored,
)
from distgraph.plan.plan_diff import changed, difference


def test_explain_names_choice_terms_and_runner_up() -> None:
    text = plan_of().explain("blocks.4.weight").splitlines()
    assert text == [
        "blocks.4.weight (param): [_, tp] on stage 1, mesh(dp=2, tp=2; 4..7)",
        "  chosen: [_, tp] (compute 100 ms, all_reduce 20 ms)",
        "  runner-up: [tp, _], a step of 300 ms in place of 250 ms (+20.00%)",
        "  a note",
    ]
    assert plan_of().explain("blocks.{0..5}.weight.m").splitlines()[:2] == [
        "blocks.{0..2}.weight.m (state): [dp*tp, _] on stage 0, mesh(dp=2, tp=2)",
        "blocks.{3..5}.weight.m (state): [dp*tp, _] on stage 1, mesh(dp=2, tp=2; 4..7)",
    ]
    with pytest.raises(GraphError, match=r"compares with plans, not with a str; read a file with"):
        plan_of().compare("other.json")  # type: ignore[arg-type]
    assert "not forecast: out of time" in plan_of().explain("micro_batches")
    assert "weighed none" in plan_of().explain("x")
    assert plan_of().explain("stage 1").splitlines()[0] == (
        "stage 1: layers 3-5, mesh(dp=2, tp=2; 4..7), devices 4-7, 512 MiB"
    )
    assert plan_of().explain("layer 4").splitlines()[:3] == [
        "layer 4 (from 40 in blocks.4) on stage 1, recomputed in the backward part",
        "  matmul {m:dp, n:tp} -> [dp, tp]",
        "  add @1 {partial tp:0} -> [_] partial(tp) @0",
    ]
    there = "stage 0 to 1, layer 0 to 5$"
    for unknown in ("stage 2", "layer 6", "layer -1", "layer x"):
        with pytest.raises(GraphError, match=f"has nothing named '{unknown}'; it has {there}"):
            plan_of().explain(unknown)
    with pytest.raises(GraphError, match=r"nothing named 'blocks.0.wieght'; it has blocks.0.weight, "):
        plan_of().explain("blocks.0.wieght")
    with pytest.raises(GraphError, match=r"nothing named 'nowhere'; it has .*blocks.\{0..5\}.weight"):
        plan_of().explain("nowhere")


def moved() -> Plan:
    """The plan with layer 3 on the first stage, layer 1 computed once, and less for layers 0 and 5 to do."""
    plan = plan_of()
    tensors = {
        name: replace(at, stage=0) if name.startswith("blocks.3.") else at
        for name, at in plan.tensors.items()
    }
    less = LayerOps((), (("2", 1),), plan.ops[0].ops[1:])
    return replace(
        plan,
        stages=(replace(plan.stages[0], last=4), replace(plan.stages[1], first=4)),
        recompute=(0, 4),
        tensors={**tensors, "x": Stored("input", 1, ShardSpec.of([None, "tp"]))},
        ops=(less, *plan.ops[1:5], less),
        rest=Rest(
            (), (("8", 1),), (*plan.rest.ops, ("8.1", Computed("add", results=(ShardSpec(()),), stage=0)))
        ),
    )


def test_the_lines_that_differ_make_one_plan_of_the_other() -> None:
    plan, other = plan_of(), moved()
    lines = difference(plan, other)
    assert lines["layers of stages"] == "0-3 | 4-5"
    assert lines["layers computed again"] == "0, 4"
    assert lines["blocks.3.weight"] == "[_, tp] @0"
    assert changed(plan, lines) == other
    assert changed(other, difference(other, plan)) == plan
    assert difference(plan, plan) == {}


def test_instead_of_a_layer() -> None:
    lines = difference(plan_of(), moved())
    decision = Decision(chosen="stage 1", runner_up="stage 0", runner_up_seconds=0.3, instead=lines)
    plan = Plan.parse(plan_of(decisions={"layer {2..3}": decision}).text())
    for layer in ("layer 2", "layer 3"):
        told = plan.explain(layer).splitlines()
        assert told[-1] == "  runner-up: stage 0, a step of 300 ms in place of 250 ms (+20.00%)"
        assert plan.instead(layer).stages == moved().stages
        assert plan.instead(layer).ops == moved().ops
    assert "weighed none" in plan.explain("layer 4")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("layers of stages", "0-3 | 5"),
        ("layers of stages", "0-3 | 4"),
        ("layers of stages", "0-5"),
        ("layers computed again", "two"),
        ("layers computed again", "99"),
        ("layers computed again", "2, 2"),
        ("ops of layers 9", " | "),
        ("ops of layers 1", "nothing"),
        ("ops of no layer", " | 8 | "),
        ("blocks.1.weight", "[_, tp] @one"),
        ("blocks.9.weight", "[_, tp]"),
    ],
)
def test_lines_that_make_no_sense_are_told(line: str, text: str) -> None:
    with pytest.raises(GraphError, match=rf"it cannot have the line {re.escape(line)}: "):
        changed(plan_of(), {line: text})


def test_compare_lists_what_differs_and_nothing_else() -> None:
    plan = plan_of()
    assert not plan.compare(plan_of())
    assert str(plan.compare(plan_of())) == "no difference"
    swapped = replace(plan.ops[0], ops=plan.ops[0].ops[::-1])
    other = replace(
        plan,
        micro_batches=8,
        stages=(replace(plan.stages[0], last=2), replace(plan.stages[1], first=2)),
        tensors={**plan.tensors, "blocks.1.weight": Stored("param", 0, ShardSpec.of(["tp", None]))},
        ops=(swapped, *plan.ops[1:]),
        forecast=Estimate(seconds=0.2, memory=(1 << 30, 1 << 28)),
    )
    assert plan.compare(other).rows == (
        ("micro_batches", "4", "8"),
        ("stage 0", "layers 0-2 on (dp=2, tp=2) ranks 0-3", "layers 0-1 on (dp=2, tp=2) ranks 0-3"),
        ("stage 1", "layers 3-5 on (dp=2, tp=2) ranks 4-7", "layers 2-5 on (dp=2, tp=2) ranks 4-7"),
        ("blocks.1.weight", "[_, tp] @0", "[tp, _] @0"),
        ("ops of layers 0, first of 2", str(plan.ops[0].ops[0]), str(plan.ops[0].ops[1])),
        ("forecast", "250 ms", "200 ms"),
        ("memory of stage 1", "512 MiB", "256 MiB"),
    )


def test_print_shows_stages_tensors_and_baselines() -> None:
    text = str(plan_of())
    assert "plan of Net on pod: 8 ranks, batch 16 in 4 micro-batches, 1f1b" in text
    assert re.search(r"0  layers 0-2  mesh\(dp=2, tp=2\) +devices 3, 2, 1, 0  1 GiB", text)
    assert re.search(r"\n  x +\[dp, _\]  stage 0\n", text)
    assert re.search(r"\n  blocks\.\{0\.\.5\}\.weight  \[_, tp\]  stages 0-1\n", text)
    assert re.search(r"dp=8 +500 ms", text)
    assert "; no plan can take less than 200 ms" in text


def forecast_plan() -> Plan:
    plan = plan_of()
    return replace(plan, forecast=Estimate(seconds=0.25, memory=(1 << 30, 1 << 29), plan=plan.digest))


def test_a_plan_as_it_was_forecast_is_not_marked(tmp_path: Path) -> None:
    plan = forecast_plan()
    plan.save(tmp_path / "plan.json")
    for each in (plan, dg.Plan.load(tmp_path / "plan.json"), plan_of()):
        assert not each.is_changed
        assert "change" not in f"{each}{each.explain('blocks.0.weight')}{each.explain('micro_batches')}"


@pytest.mark.parametrize("names", [("blocks.0.weight",), tuple(f"blocks.{i}.weight" for i in range(6))])
def test_an_edited_plan_says_what_is_of_the_plan_before(names: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = forecast_plan()
    tensors = {
        n: replace(at, spec=ShardSpec.of(["tp", None])) if n in names else at
        for n, at in plan.tensors.items()
    }
    path.write_text(replace(plan, tensors=tensors).text())
    edited = dg.Plan.load(path)
    assert edited.is_changed
    assert edited.explain("blocks.0.weight").splitlines()[:3] == [
        "blocks.0.weight (param): [tp, _] on stage 0, mesh(dp=2, tp=2)",
        "  the plan was changed after it was forecast: what follows is of the plan before",
        "  chosen: [_, tp] (compute 100 ms, all_reduce 20 ms)",
    ]
    assert "changed after it was forecast" in edited.explain("micro_batches")
    page = str(edited)
    assert "the plan was changed after it was forecast: the forecast is of the plan before" in page
    assert re.search(r"this plan before the change +250 ms", page)
    assert "1 GiB before the change" in page
    assert "250 ms before the change" in str(plan.compare(edited))
    again = dg.Plan.parse(edited.text())
    assert again == edited
    assert again.is_changed


def test_an_edited_layout_is_told_without_a_note_of_what_was_forecast() -> None:
    plan = plan_of()
    tensors = {**plan.tensors, "blocks.2.weight": Stored("param", 0, ShardSpec.of([None, "dp"]))}
    told = replace(plan, tensors=tensors).explain("blocks.2.weight").splitlines()
    assert told[1] == "  the plan was changed after it was forecast: what follows is of the plan before"


def test_near_names_are_told_once() -> None:
    plan = plan_of()
    tensors = {**plan.tensors, "head.weight": Stored("param", 1, ShardSpec.of([None, None]))}
    with pytest.raises(GraphError) as caught:
        replace(plan, tensors=tensors).explain("head")
    named = str(caught.value).partition("it has ")[2].split(", ")
    assert len(named) == len(set(named))
    with pytest.raises(GraphError) as caught:
        replace(plan, tensors=tensors).explain("head.weigth")
    assert str(caught.value).count("head.weight") == 1
