"""Plans of programs, and programs of plans: one is the inverse of the other, and the numbers stay."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs.forecasts import machines
from support.programs.plan_cases import CASES, Case, classifier, gpt, replace_spec

import distgraph as dg
from distgraph import nn, optim
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.fingerprint import program_of
from distgraph.engine.compile.op_positions import layers_by_first_ops
from distgraph.engine.compile.plan_extract import plan_of_graph
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.engine.data import whole
from distgraph.errors import DistGraphError, GraphError, ResourceError, ShardingError
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.ir.verifier import verify
from distgraph.passes.complete import complete
from distgraph.passes.search.intra_op.apply_layouts import assign
from distgraph.passes.search.intra_op.cost_model import CostModel
from distgraph.passes.search.intra_op.formulate import formulate
from distgraph.passes.search.layering.layer_sequence import cluster_layers, layering
from distgraph.passes.search.solver import solve
from distgraph.plan.decisions import Decisions
from distgraph.plan.plan import Plan, Stored


def plan_of(case: Case, **given: Any) -> tuple[dg.Engine, Plan]:
    """A prepared engine, and its plan as it comes back from its text."""
    engine = case.engine(**given)
    engine.prepare(case.first())
    return engine, Plan.parse(engine.plan.portable.text())


def bare(graph: Graph) -> tuple[Any, ...]:
    """A graph without where its ops were written, and without reshards that only annotations have."""
    ops = [replace(op, source="") for op in graph.ops]
    return ops, dict(graph.attrs), graph.outputs, graph.updates, graph.micro_batches


@pytest.mark.parametrize("name", CASES)
def test_a_program_is_made_from_its_plan(name: str) -> None:
    """Extract, write, read, apply: the lowered program is the same, op by op, without one annotation."""
    case = CASES[name]
    annotated, plan = plan_of(case)
    planned = case.engine(plan)
    planned.prepare(case.first())
    before, after = annotated.plan.build, planned.plan.build
    assert bare(after.lowered) == bare(before.lowered)
    assert (after.policy, after.ranks) == (before.policy, before.ranks)
    verify(after.completed, "completed")
    assert planned.plan.portable == plan  # and the plan of that is the plan
    assert not planned.plan.compare(plan)


def test_ops_on_their_ranks_in_another_order_are_planned_so() -> None:
    """A mesh of the same ranks is a stage without layers; the ops say that they are computed on it."""
    _, plan = plan_of(CASES["mirrored"])
    assert [(stage.mesh.members, stage.first, stage.last) for stage in plan.stages] == [
        ((0, 1, 2, 3), 0, len(plan.layers)),
        ((3, 2, 1, 0), len(plan.layers), len(plan.layers)),
    ]
    assert any(op.stage == 1 for layer in plan.ops for op in layer.ops)


@pytest.mark.parametrize("name", ["dp x tp, refined", "pipeline, tied", "clipped", "mirrored", "gpt"])
def test_losses_are_those_of_one_rank(name: str) -> None:
    """Training, evaluation and prediction, with short last batches, against the serial engine."""
    case = CASES[name]
    _, plan = plan_of(case)
    x, y = case.data(22)
    serial = dg.Engine(case.make(False), nn.CrossEntropy(), replace_spec(case.optimizer), seed=3)
    planned = case.engine(plan)
    before = planned.predict(x[:3])  # before training: the plan alone says where parameters lie
    np.testing.assert_allclose(before, serial.predict(x[:3]), rtol=1e-10)
    for engine in (serial, planned):
        engine.fit((x, y), epochs=2, batch_size=case.batch, valid_data=(x[:5], y[:5]), progress=False)
    np.testing.assert_allclose(planned.history.losses, serial.history.losses, rtol=1e-10)
    np.testing.assert_allclose(planned.history["valid_loss"], serial.history["valid_loss"], rtol=1e-10)
    np.testing.assert_allclose(planned.predict(x), serial.predict(x), rtol=1e-10)


def test_other_programs_follow_the_plan() -> None:
    """Prediction runs on the stages of the plan, each value laid out as in training."""
    case = CASES["gpt"]
    _, plan = plan_of(case)
    engine = case.engine(plan)
    x, y = case.data()
    engine.fit((x[:8], y[:8]), batch_size=8, progress=False)
    engine.predict(x[:8])
    trained = engine.plan.build.completed
    (predicted,) = [c.build.completed for c in engine._session.programs.values() if c.mode == "predict"]
    assert set(predicted.meshes) == set(trained.meshes)

    def laid_out(graph: Graph) -> dict[str, Any]:
        return {
            f"{op.scope} {op.kind}": graph.attrs[op.name].spec.dims
            for op in graph.ops
            if op.role == "forward" and op.kind in ("matmul", "attention", "layer_norm")
        }

    found, wanted = laid_out(predicted), laid_out(trained)
    assert len(found) > 10
    assert found == {key: wanted[key] for key in found}


def test_an_engine_that_cannot_train_follows_the_plan() -> None:
    """Inputs and parameters lie where the plan says; fields may go by name, though the plan's did not."""
    case = CASES["pipeline, tied"]
    _, plan = plan_of(case)
    x, _ = case.data(5)
    alone = dg.Engine(case.make(False), seed=3)
    found = dg.Engine(case.make(False), seed=3, plan=plan)
    np.testing.assert_allclose(found.predict(x), alone.predict(x), rtol=1e-10)
    np.testing.assert_allclose(case.engine(plan).predict({"x": x}), alone.predict(x), rtol=1e-10)
    assert found.plan.build.ranks == (0, 1, 2, 3)
    placed = {line.name: (line.layout, line.mesh) for line in found.plan.tensors}
    assert placed["x"] == ("[dp, _]", "mesh(dp=2)")
    assert placed["up.weight"] == ("[_, tp]", "mesh(dp=1, tp=2; 2..3)")


def test_checkpoints_move_between_plans(tmp_path: Path) -> None:
    x, y = CASES["dp"].data()
    losses = {}
    plans = {name: plan_of(CASES[name])[1] for name in ("dp", "tp", "pipeline")}
    first = CASES["dp"].engine(plans["dp"])
    first.fit((x, y), batch_size=8, progress=False)
    first.save(tmp_path)
    for name, plan in plans.items():
        engine = CASES[name].engine(plan)
        engine.load(tmp_path)
        engine.fit((x, y), batch_size=8, progress=False)
        losses[name] = engine.history.losses
    assert len(losses["dp"]) == 4
    np.testing.assert_allclose(losses["tp"], losses["dp"], rtol=1e-10)
    np.testing.assert_allclose(losses["pipeline"], losses["dp"], rtol=1e-10)


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_searched_program_is_made_from_its_plan(sizes: dict[str, int]) -> None:
    """Layouts of the intra-operator solver on two stages: the plan gives the graph that `assign` gives."""
    model = gpt(False, dtype="f32")
    training_spec = TrainingSpec(
        model, nn.CrossEntropy(), optim.Adam(lr=0.01), {}, dg.Strategy(micro_batches=2)
    )
    x, y = CASES["gpt"].data()
    request = CompileRequest(training_spec, "train", 8, whole((x, y)).fields(), {})
    serial = request.trace()
    found = layering(serial, cluster_layers(serial))
    first = ProcessMesh.grid(**sizes)
    meshes = (first, ProcessMesh.grid(first.size, **sizes))
    formulation = formulate(serial, first, CostModel(machines(8)), found)
    choice = solve(formulation.problem, seconds=1.0, gap=0.01).choice
    assert choice is not None
    half = len(found.layers) // 2
    placements = {op.name: meshes[found.of[op.name] >= half] for op in serial.ops}
    completed = replace(assign(serial, placements, formulation.decode(choice)), micro_batches=2)
    plan = plan_of_graph(
        serial, completed, found.layers, program=program_of(model, serial), batch=8,
        decisions=Decisions(micro_batches=2), placements=placements,
    )  # fmt: skip
    assert [(stage.mesh, stage.first, stage.last) for stage in plan.stages] == [
        (meshes[0], 0, half), (meshes[1], half, len(found.layers))
    ]  # fmt: skip
    planned = dg.Engine(
        gpt(False, dtype="f32"),
        nn.CrossEntropy(),
        training_spec.optimizer,
        plan=Plan.parse(plan.text()),
        seed=3,
    )
    planned.prepare((x[:8], y[:8]))
    after = planned.plan.build.completed
    assert [replace(op, source="") for op in after.ops] == [replace(op, source="") for op in completed.ops]
    assert after.attrs == completed.attrs
    alone = dg.Engine(gpt(False, dtype="f32"), nn.CrossEntropy(), training_spec.optimizer, seed=3)
    for engine in (planned, alone):
        engine.fit((x, y), batch_size=8, progress=False)
    np.testing.assert_allclose(planned.history.losses, alone.history.losses, rtol=1e-5)


def test_layers_are_recomputed_as_planned() -> None:
    """The same losses; of the chosen layers only what they read is kept for the backward part."""
    case = CASES["gpt"]
    annotated, plan = plan_of(case)
    request = annotated._session.program("train", whole(case.first())).request
    plain = request.trace()
    firsts = [layer.first for layer in plan.layers]
    layers = layers_by_first_ops(plain, firsts)
    chosen = tuple(
        i for i, layer in enumerate(plan.layers) if layer.scope.startswith(("blocks.1", "blocks.2"))
    )
    fields = request.blocks(request.micro_batches)
    marked = request.training_spec.trace("train", fields, {}, recompute=[layers[i].ops for i in chosen])
    again = plan_of_graph(
        marked,
        replace(complete(marked), micro_batches=request.micro_batches),
        layers_by_first_ops(marked, firsts),
        program=program_of(request.training_spec.model, plain),
        batch=case.batch,
        decisions=Decisions(micro_batches=request.micro_batches, recompute=chosen),
    )
    planned = case.engine(Plan.parse(again.text()))
    x, y = case.data()
    for engine in (annotated, planned):
        engine.fit((x, y), batch_size=case.batch, progress=False)
    np.testing.assert_allclose(planned.history.losses, annotated.history.losses, rtol=1e-10)
    assert {scope.split(".")[1] for scope in crossing(annotated) if "attn" in scope} == {"0", "1", "2", "3"}
    assert {scope.split(".")[1] for scope in crossing(planned) if "attn" in scope} == {"0", "3"}


def crossing(engine: dg.Engine) -> set[str]:
    """Modules whose forward results the backward part reads."""
    parts = engine.plan.build.parts
    made = {v.name: op for t in parts.tasks if t.kind == "forward" for op in t.body for v in op.results}
    read = {v.name for t in parts.tasks if t.kind == "backward" for op in t.body for v in op.operands}
    return {made[name].scope for name in read & set(made)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"batch": 4},
            GraphError,
            r"plan of Classifier is for batches of 8 samples but a batch has 4; take 8",
        ),
        ({"hidden": 9}, GraphError, r"its number of parameters is .* but that of the engine is"),
        (
            {"length": 5},
            GraphError,
            r"its inputs is x i32\[4, 6\], target i32\[4, 6\] but that of the engine",
        ),
        (
            {"optimizer": optim.SGD(lr=0.1)},
            GraphError,
            r"its fingerprint is [0-9a-f]{64} but that of the eng",
        ),
    ],
)
def test_another_program_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    _, plan = plan_of(CASES["dp"])
    model = classifier()(False)
    if "hidden" in change:
        model.up, model.down = nn.Linear(8, 9, dtype="f64"), nn.Linear(9, 8, dtype="f64")
    engine = dg.Engine(model, nn.CrossEntropy(), change.get("optimizer", optim.Adam(lr=0.01)), plan=plan)
    x, y = CASES["dp"].data()
    batch, length = change.get("batch", 8), change.get("length", 6)
    with pytest.raises(error, match=message):
        engine.fit((x[:, :length], y[:, :length]), batch_size=batch, progress=False)
    with pytest.raises(error, match=message):
        engine.run((x[:batch, :length], y[:batch, :length]))


def test_another_model_is_refused_by_name() -> None:
    _, plan = plan_of(CASES["dp"])
    x, y = CASES["dp"].data()
    with pytest.raises(
        GraphError, match=r"its model is Classifier but that of the engine is GPT; give the eng"
    ):
        CASES["gpt"].engine(plan).fit((x, y), batch_size=8, progress=False)


def test_a_batch_larger_or_first_and_shorter_is_refused() -> None:
    _, plan = plan_of(CASES["dp"])
    engine = CASES["dp"].engine(plan)
    x, y = CASES["dp"].data()
    for count in (5, 16):
        with pytest.raises(GraphError, match=f"batches of 8 samples but a batch has {count}"):
            engine.run((x[:count], y[:count]))
    engine.run((x[:8], y[:8]))
    engine.run((x[:5], y[:5]))  # the end of an epoch
    with pytest.raises(GraphError, match="batches of 8 samples but a batch has 16"):
        engine.run((x, y))


def test_annotations_that_agree_stay_and_others_are_refused() -> None:
    case = CASES["tp"]
    _, plan = plan_of(case)
    x, y = case.data()
    agreeing = case.engine(plan, annotated=True)
    agreeing.prepare((x[:8], y[:8]))
    assert "decided by user plan_cases.py:" in agreeing.plan.explain("up.weight")
    assert "plan of Classifier" in agreeing.plan.explain("down.weight")
    moved = replace(
        plan, tensors={**plan.tensors, "up.weight": Stored("param", 0, ShardSpec.of([None, None]))}
    )
    with pytest.raises(
        ShardingError,
        match=r"%up.weight is annotated \[_, tp\] on mesh\(tp=2\) \(plan_cases.py:\d+\) but plan of "
        r"Classifier has it \[_, _\] on mesh\(tp=2\); remove the annotation",
    ):
        case.engine(moved, annotated=True).prepare((x[:8], y[:8]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: replace(p, layers=(replace(p.layers[0], first="nowhere"), *p.layers[1:])),
            "no forward ops %nowhere",
        ),
        (
            lambda p: replace(p, ops=(replace(p.ops[0], ops=p.ops[0].ops[1:]), *p.ops[1:])),
            r"plan of Classifier, layer 0, op \d+: .* but the line",
        ),
        (
            lambda p: replace(p, ops=(replace(p.ops[0], ops=(*p.ops[0].ops, p.ops[0].ops[0])), *p.ops[1:])),
            "plan of Classifier has more ops than the program",
        ),
        (
            lambda p: replace(p, ops=(replace(p.ops[0], decomposed=("999",)), *p.ops[1:])),
            "has op 999 in layer 0 but the program does not",
        ),
        (lambda p: replace(p, tensors={k: v for k, v in p.tensors.items() if k != "x"}), "has no input x"),
        (
            lambda p: replace(p, tensors={**p.tensors, "x": Stored("input", 0, ShardSpec.of(["q", None]))}),
            r"axis 'q'",
        ),
        (
            lambda p: replace(p, tensors={**p.tensors, "x": Stored("input", 0, ShardSpec.of(["dp"]))}),
            r"plan of Classifier: input x i32\[4, 6\]: spec \[dp\] has 1 dims but shape",
        ),
        (
            lambda p: replace(p, tensors={**p.tensors, "up.weigth": p.tensors["up.weight"]}),
            "has param up.weigth but the program has not; up.weight is near",
        ),
        (lambda p: with_line(p, "matmul", axes=(("q", ("dp",)),)), r"index q"),
        (lambda p: with_line(p, "matmul", axes=(("m", ("dp",)), ("n", ("dp",)))), r"dp"),
        (lambda p: with_line(p, "matmul", results=(ShardSpec.of([None]),)), r"spec \[_\] has 1 dims"),
    ],
)  # fmt: skip
def test_an_edited_plan_is_told(change: Any, message: str) -> None:
    case = CASES["dp"]
    _, plan = plan_of(case)
    x, y = case.data()
    with pytest.raises((GraphError, ShardingError), match=message):
        case.engine(change(plan)).prepare((x[:8], y[:8]))


def test_no_edit_of_a_file_ends_in_an_exception_of_python() -> None:
    """Random fields set, deleted, doubled, or a character changed: a program comes out, or a house error."""
    case, draw = CASES["tp"], random.Random(7)
    _, plan = plan_of(case)
    told = 0
    for _ in range(150):
        document = json.loads(plan.text())
        edit(document, draw)
        try:
            edited = Plan.parse(json.dumps(document))
            str(edited.compare(plan))
            case.engine(edited).prepare(case.first())
        except DistGraphError:
            told += 1
    assert 50 < told < 150


def edit(document: Any, draw: random.Random) -> None:
    """Change one place of a document."""
    places = list(walk(document))
    node, key = draw.choice(places)
    what = draw.choice(["set", "delete", "double", "change"])
    if what == "set":
        node[key] = draw.choice(
            [None, 0, -1, 3, 1.5, "", [], {}, "x", "[tp] @0", "0-3", "1@0", "add {} -> []"]
        )
    elif what == "delete":
        del node[key]
    elif what == "double" and isinstance(node, list):
        node.insert(key, node[key])
    elif isinstance(node[key], str) and node[key]:
        at = draw.randrange(len(node[key]))
        node[key] = (
            node[key][:at] + draw.choice("0123@{}[],*:_-> dpt") + node[key][at + draw.choice((0, 1)) :]
        )


def walk(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    keys = range(len(node)) if isinstance(node, list) else node if isinstance(node, dict) else ()
    for key in keys:
        yield node, key
        yield from walk(node[key])


def with_line(plan: Plan, kind: str, **changes: Any) -> Plan:
    """A plan with the first op of a kind changed."""
    layer = next(i for i, ops in enumerate(plan.ops) if any(op.kind == kind for op in ops.ops))
    ops = list(plan.ops[layer].ops)
    at = next(i for i, op in enumerate(ops) if op.kind == kind)
    ops[at] = replace(ops[at], **changes)
    changed = replace(plan.ops[layer], ops=tuple(ops))
    return replace(plan, ops=(*plan.ops[:layer], changed, *plan.ops[layer + 1 :]))


def test_devices_are_those_of_the_plan_on_its_cluster() -> None:
    case, cluster = CASES["narrow"], machines(2, 2)
    annotated, plan = plan_of(case, cluster=cluster)
    turned = replace(plan, stages=tuple(replace(s, devices=s.devices[::-1]) for s in plan.stages))
    planned = case.engine(turned, cluster=cluster)
    x, y = case.data()
    planned.prepare((x[:8], y[:8]))
    assert plan.cluster == "boxes"
    assert planned.plan.mapping is not None
    assert planned.plan.mapping.devices == annotated.plan.mapping.devices[::-1]
    assert "(given)" in planned.plan.mapping.table()
    same = case.engine(plan, cluster=cluster)
    same.prepare((x[:8], y[:8]))
    assert bare(same.plan.build.lowered) == bare(annotated.plan.build.lowered)
    assert same.forecast().step_seconds == annotated.forecast().step_seconds
    with pytest.raises(ResourceError, match=r"mesh dp=2 x tp=2 needs 4 devices but cluster boxes has 2"):
        case.engine(plan, cluster=machines(2)).prepare((x[:8], y[:8]))


def test_plan_argument_is_checked(tmp_path: Path) -> None:
    _, plan = plan_of(CASES["dp"])
    plan.save(tmp_path / "plan.json")
    engine = CASES["dp"].engine(str(tmp_path / "plan.json"))
    assert engine.training_spec.strategy.micro_batches == 2
    with pytest.raises(
        GraphError, match=r"plan is 3 but must be a distgraph.Plan, or the path of a plan file"
    ):
        dg.Engine(nn.ReLU(), plan=3)
    with pytest.raises(GraphError, match=r"nowhere.json: cannot be read"):
        dg.Engine(nn.ReLU(), plan="nowhere.json")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"micro_batches": 4}, "micro_batches=4 of Strategy has no effect.* decides it, as 2; leave one of"),
        ({"schedule": "gpipe"}, "schedule=gpipe of Strategy has no effect.* decides it, as 1f1b"),
        ({"zero": 3}, "zero=3 of Strategy has no effect.* decides it, as 0"),
        ({"recompute": True}, "recompute=True of Strategy has no effect"),
        ({"mode": "auto", "stages": 3}, "stages=3 of Strategy has no effect.* decides it, as 1"),
        ({"mode": "auto", "memory": "1 KiB"}, "memory='1 KiB' of Strategy has no effect"),
        ({"refine": "always"}, "refine='always' of Strategy has no effect"),
        ({"mesh": ProcessMesh.grid(dp=4)}, r"mesh=mesh\(dp=4\) of Strategy has no effect.*, as mesh\(dp=2\)"),
    ],
)
def test_a_setting_that_the_plan_overrules_is_named(given: dict[str, Any], message: str) -> None:
    _, plan = plan_of(CASES["dp"])
    with pytest.warns(UserWarning, match=message):
        dg.Engine(nn.ReLU(), plan=plan, strategy=dg.Strategy(**given))


def test_a_batch_axis_that_the_plan_overrules_is_named() -> None:
    _, plan = plan_of(CASES["dp x tp, refined"])
    strategy = dg.Strategy(mesh=plan.stages[0].mesh, batch_axis="tp")
    with pytest.warns(UserWarning, match="batch_axis='tp' of Strategy has no effect: the plan"):
        dg.Engine(nn.ReLU(), plan=plan, strategy=strategy)


def test_settings_that_agree_with_the_plan_are_taken_without_a_warning(recwarn: Any) -> None:
    _, plan = plan_of(CASES["dp"])
    mesh = plan.stages[0].mesh
    dg.Engine(nn.ReLU(), plan=plan, strategy=dg.Strategy(mesh=mesh, batch_axis="dp", micro_batches=2))
    assert not recwarn.list


def test_the_plan_of_a_program_that_does_not_train() -> None:
    engine = dg.Engine(nn.Linear(6, 3))
    engine.predict(np.zeros((4, 6), "f4"))
    with pytest.raises(GraphError, match="program is one to predict but a plan is for training"):
        _ = engine.plan.portable


@pytest.mark.parametrize("name", ["x", "weight", "weight.momentum"])
def test_what_is_stored_cannot_be_partial(name: str) -> None:
    strategy = dg.Strategy(mesh=ProcessMesh.grid(dp=2), batch_axis="dp")
    parts = nn.Linear(6, 3), nn.MeanSquaredError(), optim.SGD(lr=0.1, momentum=0.9)
    batch = np.ones((4, 6), "f4"), np.ones((4, 3), "f4")
    plan = dg.Engine(*parts, strategy=strategy).prepare(batch).portable
    spec = ShardSpec.of([None, None], {"dp": "sum"})
    edited = replace(plan, tensors=dict(plan.tensors) | {name: replace(plan.tensors[name], spec=spec)})
    with pytest.raises(ShardingError, match=rf"{name} f32.* has the layout .* but is stored and cannot be"):
        dg.Engine(*parts, plan=edited).prepare(batch)


def test_a_level_of_zero_that_the_layouts_lack() -> None:
    _, plan = plan_of(CASES["dp"])
    with pytest.raises(GraphError, match="has zero 3 but splits no parameter and no state over the axes of"):
        CASES["dp"].engine(replace(plan, zero=3)).prepare(CASES["dp"].first())
