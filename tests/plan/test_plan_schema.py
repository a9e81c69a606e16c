"""Plans as files: what is written is read again, stays small, and what is malformed is told by path."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import distgraph as dg
from distgraph.errors import GraphError, ShardingError
from distgraph.ir.range_notation import fold, parse_spans, spans, unfold
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.plan.plan import (
    Computed,
    Decision,
    Estimate,
    Found,
    Layer,
    LayerOps,
    Plan,
    Program,
    Rest,
    Stage,
    Stored,
)
from distgraph.plan.plan_diff import changed, difference

AXES = st.lists(st.sampled_from(["dp", "tp", "ep"]), unique=True, min_size=1, max_size=2).map(tuple)
SPECS = st.builds(
    lambda dims, pending: ShardSpec(tuple(dims), pending),
    st.sampled_from([[], [()], [("dp",), ()], [(), ("tp", "dp")]]),
    st.sampled_from([(), (("ep", "sum"),), (("ep", "max"),)]),
)


@st.composite
def computed(draw: st.DrawFn) -> Computed:
    """Any line of a plan."""
    splits = st.tuples(st.sampled_from("mnk"), AXES)
    results = tuple(draw(st.lists(SPECS, min_size=1, max_size=3)))
    stage = st.none() | st.integers(0, 20)
    stored = tuple(draw(st.lists(stage, min_size=len(results), max_size=len(results))))
    return Computed(
        draw(st.sampled_from(["matmul", "add", "comm.slice"])),
        tuple(draw(st.lists(splits, max_size=2))),
        tuple(draw(st.lists(st.tuples(st.sampled_from(["tp", "ep"]), st.integers(0, 2)), max_size=1))),
        results,
        draw(stage),
        stored if any(kept is not None for kept in stored) else (),
    )


def plan_of(layers: int = 6, **changes: Any) -> Plan:
    """Two stages, every layer with the same ops and two parameters."""
    half = layers // 2
    mesh = dg.ProcessMesh.grid(dp=2, tp=2)
    ops = LayerOps(
        ("1", "1.3"),
        (("1.2", 0), ("4", 1)),
        (
            Computed("matmul", (("m", ("dp",)), ("n", ("tp",))), (), (ShardSpec.of(["dp", "tp"]),)),
            Computed("add", (), (("tp", 0),), (ShardSpec.of([None], {"tp": "sum"}),), 1, (0,)),
        ),
    )
    tensors = {"x": Stored("input", 0, ShardSpec.of(["dp", None]))}
    for i in range(layers):
        tensors[f"blocks.{i}.weight"] = Stored("param", int(i >= half), ShardSpec.of([None, "tp"]))
        tensors[f"blocks.{i}.weight.m"] = Stored("state", int(i >= half), ShardSpec.of([("dp", "tp"), None]))
    made = Plan(
        program=Program(name="Net", fingerprint="0af3", parameters=100, inputs={"x": "f32[4, 8]"}),
        cluster="pod",
        batch=16,
        micro_batches=4,
        schedule="1f1b",
        layers=tuple(Layer(first=str(10 * i), scope=f"blocks.{i}") for i in range(layers)),
        stages=(
            Stage(mesh=mesh, first=0, last=half, devices=(3, 2, 1, 0)),
            Stage(mesh=dg.ProcessMesh.grid(4, dp=2, tp=2), first=half, last=layers, devices=(4, 5, 6, 7)),
        ),
        recompute=(0, 1, 4),
        tensors=tensors,
        ops=(ops,) * layers,
        rest=Rest(("9",), (("8", 0),), (("7", Computed("constant", results=(ShardSpec(()),), stage=1)),)),
        forecast=Estimate(seconds=0.25, memory=(1 << 30, 1 << 29)),
        baselines={"dp=8": 0.5, "tp=8": "too large"},
        search=Found(
            mode="auto", status="feasible", bound=0.2, gap=0.25, seconds=3.0, settings={"seconds": 30.0}
        ),
        decisions={
            f"blocks.{{0..{layers - 1}}}.weight": Decision(
                chosen="[_, tp]",
                terms={"compute": 0.1, "all_reduce": 0.02},
                runner_up="[tp, _]",
                runner_up_seconds=0.3,
                note="a note",
            ),
            "micro_batches": Decision(chosen="4", runner_up="8", note="not forecast: out of time"),
        },
    )
    return replace(made, **changes)


def saved(tmp_path: Path, change: Any = None) -> Path:
    """A plan file, changed by `change(document)`."""
    path = tmp_path / "plan.json"
    document = json.loads(plan_of().text())
    if change is not None:
        change(document)
    path.write_text(json.dumps(document))
    return path


def test_round_trip(tmp_path: Path) -> None:
    plan = plan_of()
    plan.save(tmp_path / "plan.json")
    again = dg.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert list(again.tensors) == [
        "x", *(f"blocks.{i}.weight" for i in range(6)), *(f"blocks.{i}.weight.m" for i in range(6))
    ]  # fmt: skip
    assert again.text() == plan.text() == (tmp_path / "plan.json").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]  # nothing temporary is left


@given(computed())
def test_ops_read_as_they_print(op: Computed) -> None:
    assert Computed.parse(str(op)) == op


PLACED = st.lists(st.tuples(st.sampled_from(["3", "12.1"]), st.integers(0, 20)), max_size=2).map(tuple)
DECOMPOSED = st.lists(st.sampled_from(["3", "12.1"]), max_size=2).map(tuple)


@given(DECOMPOSED, PLACED, st.lists(computed(), max_size=3))
def test_sections_read_as_they_print(
    decomposed: tuple[str, ...], placed: tuple[tuple[str, int], ...], ops: list[Computed]
) -> None:
    layer = LayerOps(decomposed, placed, tuple(ops))
    rest = Rest(decomposed, placed, tuple((f"57.{number}", op) for number, op in enumerate(ops)))
    assert LayerOps.parse(str(layer)) == layer
    assert Rest.parse(str(rest)) == rest


@given(st.lists(st.integers(0, 30)))
def test_spans_are_read_as_written(numbers: list[int]) -> None:
    assert parse_spans(spans(numbers)) == tuple(numbers)


@given(
    st.dictionaries(
        st.from_regex(r"(a|b\.[0-3]|b\.[0-9]{1,2}\.c\.[0-2]|[0-2]\.w|12)", fullmatch=True), st.integers(0, 2)
    )
)
def test_folded_names_unfold(table: dict[str, int]) -> None:
    folded = fold(table)
    assert {name: item for pattern, item in folded.items() for name in unfold(pattern)} == table
    assert sum(len(unfold(pattern)) for pattern in folded) == len(table)


def test_more_layers_are_not_more_lines_of_ops() -> None:
    """Only the list of layers grows with them."""
    few, many = plan_of(6).text().splitlines(), plan_of(96).text().splitlines()
    assert len(many) - len(few) == 90


def test_one_changed_layout_is_one_changed_line() -> None:
    plan = plan_of()
    tensors = {**plan.tensors, "x": Stored("input", 0, ShardSpec.of([None, None]))}
    before, after = plan.text().splitlines(), replace(plan, tensors=tensors).text().splitlines()
    assert [(a, b) for a, b in zip(before, after, strict=True) if a != b] == [
        ('   "x": "[dp, _] @0"', '   "x": "[_, _] @0"')
    ]


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
        "layer 4 (from 40 in blocks.4) on stage 1, computed again in the backward part",
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
    assert "at most 25.00% above the bound" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="x"), "expected a plan"),
        (
            lambda d: d.update(version=99),
            r"plan has version 99 but this distgraph reads version 1; search again",
        ),
        (lambda d: d.pop("batch"), r"plan.json: batch: missing; add the field, see docs/plan.md"),
        (lambda d: d.update(batch=0), r"plan.json: batch: expected a number from 1 up, got 0"),
        (lambda d: d.update(batch="many"), r'batch: expected a whole number, got "many"'),
        (
            lambda d: d.update(colour=1),
            "plan.json: colour: unknown field; check its spelling against",
        ),
        (
            lambda d: d["stages"][1].update(layers="4-5"),
            r"stages\[1\].layers: expected consecutive layers from 3 on",
        ),
        (lambda d: d["stages"].pop(), r"stages: expected stages that compute all 6 layers"),
        (
            lambda d: d["stages"][0].update(mesh="dp=two"),
            r'stages\[0\].mesh: expected a mesh such as "dp=2, tp=4"',
        ),
        (lambda d: d["stages"][0].update(ranks="0-2"), r"stages\[0\].ranks: expected 4 ranks"),
        (lambda d: d["stages"][0].update(ranks="0, 0, 1, 2"), r"stages\[0\].ranks: expected distinct ranks"),
        (lambda d: d["stages"][0].update(devices="1"), r"stages\[0\].devices: expected 4 devices"),
        (
            lambda d: d.update(recompute="0-6"),
            r'recompute: expected numbers such as "0-7", at most 6',
        ),
        (lambda d: d["tensors"]["input"].update(x="dp"), r"tensors.input.x: expected a layout such as"),
        (
            lambda d: d["tensors"]["input"].update(x="[dp] @2"),
            r"tensors.input.x: expected a stage below 2",
        ),
        (lambda d: d["ops"][0]["ops"].append("matmul"), r"ops\[0\].ops\[2\]: expected an op such as"),
        (
            lambda d: d["ops"][0]["ops"].append("add @7 {} -> []"),
            r"ops\[0\].ops\[2\]: expected stages below 2",
        ),
        (lambda d: d["rest"].update(placed="8@2"), r"rest.placed: expected stages below 2"),
        (lambda d: d["ops"][0].update(layers="0-3"), r"ops: expected the ops of all 6 layers"),
        (
            lambda d: d.update(forecast={"seconds": "fast", "memory": []}),
            r"forecast.seconds: expected a number",
        ),
        (
            lambda d: d["stages"][0].update(layers="0-999999999"),
            r"layers: expected numbers .*, at most 6 layers",
        ),
        (
            lambda d: d["stages"][0].update(ranks="0-999999999"),
            r"ranks: expected numbers .*, at most 1048576",
        ),
        (lambda d: d["stages"][0].update(ranks="0, 1, 2, 99999999"), r"ranks: expected ranks below 1048576"),
        (lambda d: d["stages"][0].update(ranks="3-0"), r"stages\[0\].ranks: expected numbers such as"),
        (lambda d: d["stages"][0].update(mesh="dp=2, dp=2"), r"stages\[0\].mesh: expected a mesh"),
        (
            lambda d: d["stages"][0].update(mesh=f"a={2**32}, b={2**32}"),
            r"stages\[0\].mesh: expected a mesh such as",
        ),
        (
            lambda d: d["stages"][0].update(mesh=", ".join(f"a{i}=1" for i in range(65))),
            r"stages\[0\].mesh: expected a mesh such as",
        ),
        (
            lambda d: d["stages"][0].update(devices="1, 1, 2, 3"),
            r"stages\[0\].devices: expected 4 devices, as many as ranks",
        ),
        (
            lambda d: d["tensors"]["param"].update({"w.{0..999999999}": "[] @0"}),
            r"tensors.param\['w.\{0..999999999\}'\]: expected at most 1048576 names in all",
        ),
        (
            lambda d: d["tensors"]["param"].update({"w.{3..2}": "[] @0"}),
            r"tensors.param\['w.\{3..2\}'\]: expected at most",
        ),
        (
            lambda d: d["tensors"]["param"].update(x="[] @0"),
            r"tensors.param.x: expected names that are given once",
        ),
        (
            lambda d: d["tensors"]["input"].update(x="[ep] @0"),
            r"tensors.input.x: expected axes of stage 0, dp, tp",
        ),
        (
            lambda d: d["tensors"]["input"].update(x="[dp] @" + "9" * 5000),
            r"tensors.input.x: expected a layout such as",
        ),
        (
            lambda d: d["ops"].append(d["ops"][0]),
            r"ops\[1\].layers: expected numbers .*, at most 0 layers that",
        ),
        (
            lambda d: d["ops"][0].update(placed="4@1, 4@0"),
            r"ops\[0\].placed: expected ops that are given once",
        ),
        (lambda d: d.update(schedule="zigzag"), "schedule: expected one of 1f1b, gpipe"),
        (lambda d: d["forecast"].update(memory=[1]), r"forecast.memory: expected 2 numbers, one a stage"),
        (lambda d: d["forecast"].update(seconds=0), r"forecast.seconds: expected a number greater than 0"),
        (
            lambda d: d["baselines"].update({"dp=8": -1}),
            r"baselines\['dp=8'\]: expected a number greater than 0",
        ),
        (
            lambda d: d["search"]["settings"].update(seconds=[]),
            r"search.settings.seconds: expected a text, a num",
        ),
        (
            lambda d: d.update(surface={"tensors": {}, "modules": {"": "@0 in: out: "}}),
            r"surface.modules\[''\]: expected a path that is not empty",
        ),
        (
            lambda d: d.update(surface={"tensors": {"y": "f32[2] as [_] by add 0"}, "modules": {}}),
            r"surface.tensors.y: expected names of inputs and parameters among tensors",
        ),
        (lambda d: d.update(version=True), r"plan.json: version: expected a whole number, got true"),
        (lambda d: d["program"].update(inputs=[]), r"program.inputs: expected a mapping"),
    ],
)
def test_malformed_files_are_told_by_path(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Plan.load(saved(tmp_path, change))


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"nowhere.json: cannot be read"):
        Plan.load(tmp_path / "nowhere.json")
    (tmp_path / "half.json").write_text(plan_of().text()[:200])
    with pytest.raises(GraphError, match=r"half.json:\d+:\d+: not JSON"):
        Plan.load(tmp_path / "half.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(GraphError, match=r"list.json: expected a plan"):
        Plan.load(tmp_path / "list.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GraphError, match=r"binary.json: cannot be read"):
        Plan.load(tmp_path / "binary.json")


def test_a_plan_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="cannot be written"):
        plan_of().save(tmp_path / "missing" / "plan.json")


@pytest.mark.parametrize(
    "text", ["[_,, tp]", "[,]", "[dp,] partial(tp)", "[dp] partial()", "[dp] partial(tp:)"]
)
def test_a_layout_with_an_empty_part_is_none(text: str) -> None:
    """What was left out between two commas was passed over in silence."""
    with pytest.raises(ShardingError):
        ShardSpec.parse(text)


def test_a_pattern_of_a_user_that_stands_for_too_much_is_told() -> None:
    with pytest.raises(
        GraphError, match=r"'blocks.\{0..999999999\}.weight' stands for no name, or for more than"
    ):
        plan_of().explain("blocks.{0..999999999}.weight")


def test_long_lines_of_a_plan_are_parsed_in_linear_time() -> None:
    """Patterns with two gaps took time that grows with the square of a line."""
    from distgraph.plan.export.module_interface import Part, Read

    lines = (
        (Read.parse, "f32[2] as [" + "] by " * 30_000),
        (Part.parse, "@0 in: " + "out: " * 30_000 + "\n"),
        (Computed.parse, "matmul {} -> " + "[]; " * 30_000),
        (ShardSpec.parse, "[" + ", ".join(f"a{i}" for i in range(30_000)) + "] x"),
    )
    for parse, line in lines:
        with pytest.raises((ValueError, ShardingError)):
            parse(line)
    assert len(ShardSpec.parse("[" + ", ".join(f"a{i}" for i in range(30_000)) + "]").dims) == 30_000


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
