"""What exports say: layouts in the terms of JAX, PyTorch and Megatron-LM, and what has none."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from support.programs.exported import CASES, CONFIG, grid, plan_of
from typer.testing import CliRunner

import distgraph as dg
from distgraph import nn, ops
from distgraph.cli import application
from distgraph.engine.compile.train_graph import train_graph
from distgraph.errors import GraphError, ShardingError
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.models import GPT, GShardMoE, MoEConfig, stages
from distgraph.passes.complete import complete
from distgraph.plan.export import Surface, surface_of
from distgraph.plan.export.module_interface import Flow, Part, Read
from distgraph.plan.plan import Plan, Program, Stage, Stored


def plan_from(completed: Graph, *meshes: ProcessMesh, batch: int = 8, schedule: str = "1f1b") -> Plan:
    """A plan with what exports read."""
    tensors = {
        str(op.attrs["name"]): Stored(
            op.kind, meshes.index(completed.attrs[op.name].mesh), completed.attrs[op.name].spec
        )
        for op in completed.sources("input", "param", "state")
        if op.result.shape
    }
    return Plan(
        program=Program(name="model", fingerprint="", parameters=0, inputs={}),
        batch=batch,
        micro_batches=completed.micro_batches,
        schedule=schedule,
        layers=(),
        stages=tuple(Stage(mesh=mesh, first=0, last=0) for mesh in meshes),
        tensors=tensors,
        ops=(),
        surface=surface_of(completed, meshes),
    )


class Pair(nn.Module):
    """Column, then row; the activation between them belongs to the module itself."""

    def __init__(self, mesh: ProcessMesh, inner: int, sum_later: bool = False) -> None:
        self.up, self.down = nn.Linear(6, inner), nn.Linear(inner, 4, bias=False)
        dg.shard_tensor(self.up.weight, mesh, [None, "tp"])
        dg.shard_tensor(self.down.weight, mesh, ["tp", None])
        self.mesh = mesh

    def forward(self, x: object) -> object:
        return self.down(ops.relu(self.up(x)))


def pair(inner: int = 8, **sizes: int) -> Plan:
    mesh = grid(**(sizes or {"tp": 2}))
    graph = train_graph(
        Pair(mesh, inner), (((8, 6), "f32"), ((8, 4), "f32")), nn.MeanSquaredError(), dg.optim.Adam()
    )
    return plan_from(complete(graph, mesh), mesh)


def changed(plan: Plan, specs: dict[str, str]) -> Plan:
    """A plan with other layouts of some tensors."""
    tensors = {
        name: replace(at, spec=ShardSpec.parse(specs[name])) if name in specs else at
        for name, at in plan.tensors.items()
    }
    return replace(plan, tensors=tensors)


# The surface


def test_borders_of_modules_are_found_through_the_code_around_them() -> None:
    surface = plan_of("dp_tp").surface
    assert surface is not None
    attention = surface.modules["blocks.1.attn"]
    whole, split = ShardSpec.parse("[dp, _, _]"), ShardSpec.parse("[dp, _, tp]")
    assert attention.enters == (Flow((8, 8, 16), whole, whole),)
    assert surface.modules["blocks.1.attn.k"].enters == (Flow((8, 8, 16), whole, whole, inherited=True),)
    assert surface.modules["blocks.1.attn.k"].leaves == (Flow((8, 8, 16), split, split, loose=True),)
    assert surface.modules["tokens"].leaves[0].joined, "the positions are added by code of no module"
    assert surface.tensors["head.weight"] == Read("f32", (16, 24), ShardSpec.parse("[_, tp]"), "matmul", 1)
    assert not any(part.again for part in surface.modules.values())


def test_modules_that_are_computed_again_are_the_outermost_ones() -> None:
    surface = plan_of("recompute").surface
    assert surface is not None
    assert [path for path, part in surface.modules.items() if part.again] == ["blocks.0", "blocks.1"]


def test_a_module_inside_may_be_computed_again_alone() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            self.first, self.second, self.last = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

        def forward(self, x: object) -> object:
            return self.last(dg.recompute(self.second)(self.first(x)))

    mesh = grid(dp=2)
    graph = train_graph(Twice(), (((8, 4), "f32"), ((8, 4), "f32")), nn.MeanSquaredError())
    surface = surface_of(complete(graph, mesh), [mesh])
    again = [path for path, part in surface.modules.items() if part.again]
    assert again
    assert all(path.startswith("second") for path in again)


@pytest.mark.parametrize("name", ["dp_tp_zero1_sequence", "pp"])
def test_a_surface_survives_the_plan_file(name: str, tmp_path: Path) -> None:
    plan = plan_of(name)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.surface == plan.surface
    for framework in ("jax", "torch"):
        assert loaded.export(framework) == plan.export(framework)


def test_equal_layers_share_a_line_of_the_file() -> None:
    surface = json.loads(plan_of("tp").text())["surface"]
    assert "blocks.{0..1}.mlp.up.weight" in surface["tensors"]
    assert "blocks.{0..1}.attn.q" in surface["modules"]


@pytest.mark.parametrize("text", ["", "f32[4", "@1 in out", "[2] [dp as [_]"])
def test_malformed_texts_are_refused(text: str) -> None:
    for kind in (Read, Flow, Part):
        with pytest.raises((ValueError, ShardingError)):
            kind.parse(text)


def test_a_graph_without_layouts_has_no_surface() -> None:
    graph = train_graph(nn.Linear(4, 4), (((8, 4), "f32"), ((8, 4), "f32")), nn.MeanSquaredError())
    with pytest.raises(GraphError, match="only a completed graph has a surface"):
        surface_of(graph, [grid(dp=2)])


def test_the_plan_of_an_engine_is_exported_too() -> None:
    engine = dg.Engine(nn.Linear(4, 2), nn.MeanSquaredError(), dg.optim.Adam())
    plan = engine.prepare((np.zeros((8, 4), "f4"), np.zeros((8, 2), "f4")))
    assert plan.export("jax") == plan.portable.export("jax")


def test_bad_requests_say_the_way_out() -> None:
    with pytest.raises(GraphError, match=r"'keras' is unknown; .* jax, torch, megatron"):
        plan_of("dp").export("keras")
    with pytest.raises(GraphError, match="plan of GPT has no surface"):
        replace(plan_of("dp"), surface=None).export("jax")


# JAX


def test_jax_gets_a_spec_for_every_tensor_and_module() -> None:
    data = plan_of("dp_tp").export("jax").data
    (stage,) = data["stages"]
    assert stage["mesh"] == {"axes": ["dp", "tp"], "shape": [2, 2], "ranks": [[0, 1], [2, 3]]}
    assert stage["parameters"]["blocks.0.mlp.down.weight"] == ["tp", None]
    assert stage["states"]["blocks.0.attn.q.bias.adam_v"] == ["tp"]
    assert stage["inputs"] == {"ids": ["dp", None], "target": ["dp", None]}
    assert stage["activations"]["blocks.1.mlp.up"] == ["dp", None, "tp"]
    assert stage["activations"]["blocks.1"] == ["dp", None, None]
    json.dumps(data)


def test_a_dim_split_over_two_axes_is_a_tuple() -> None:
    plan = changed(pair(dp=2, tp=2), {"down.weight": "[tp*dp, _]"})
    export = plan.export("jax")
    assert export.data["stages"][0]["parameters"]["down.weight"] == [["tp", "dp"], None]
    assert '"down.weight": P(("tp", "dp"), None)' in export.source


def test_a_dim_that_does_not_divide_is_kept_whole_and_said() -> None:
    export = pair(inner=9).export("jax")
    assert export.data["stages"][0]["parameters"]["up.weight"] == [None, None]
    assert export.data["stages"][0]["states"]["up.weight.adam_m"] == [None, None]
    (note,) = (note for note in export.notes if note.startswith("dim 1 of length 9"))
    assert "does not divide into 2 equal parts over tp" in note
    assert "up.weight, up.weight.adam_m" in note


def test_partial_activations_are_left_out_and_said() -> None:
    plan = pair()
    assert plan.surface is not None
    down = plan.surface.modules["down"]
    partial = replace(down.leaves[0], spec=ShardSpec.parse("[_, _] partial(tp)"))
    modules = {**plan.surface.modules, "down": replace(down, leaves=(partial,))}
    export = replace(plan, surface=Surface(plan.surface.tensors, modules)).export("jax")
    assert set(export.data["stages"][0]["activations"]) == {"up"}
    assert any("partial sums" in note and "down" in note for note in export.notes)


def test_constrain_refuses_names_that_the_plan_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = pair()
    assert plan.surface is not None
    down = plan.surface.modules["down"]
    partial = replace(down.leaves[0], spec=ShardSpec.parse("[_, _] partial(tp)"))
    modules = {**plan.surface.modules, "down": replace(down, leaves=(partial,))}
    source = replace(plan, surface=Surface(plan.surface.tensors, modules)).export("jax").source
    jax = MagicMock()
    jax.devices.return_value = list(range(8))
    jax.lax.with_sharding_constraint.side_effect = lambda x, sharding: ("laid out", x)
    for name in ("jax", "jax.sharding"):
        monkeypatch.setitem(sys.modules, name, jax)
    module: dict[str, Any] = {}
    exec(source, module)
    assert module["constrain"]("up", 3) == ("laid out", 3)
    assert module["constrain"]("down", 3) == 3  # left to XLA
    with pytest.raises(KeyError, match=r"plan has no activation 'upp'; it has up"):
        module["constrain"]("upp", 3)


def test_every_stage_has_its_own_specs() -> None:
    export = plan_of("dp_pp").export("jax")
    first, second = export.data["stages"]
    assert second["mesh"]["ranks"] == [2, 3]
    assert "tokens.weight" in first["parameters"]
    assert "tokens.weight" not in second["parameters"]
    assert "blocks.1" in second["activations"]
    assert "stages = (" in export.source
    assert "JAX has no pipeline" in export.notes[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_sources_are_python(name: str, framework: str, tmp_path: Path) -> None:
    export = plan_of(name).export(framework)
    ast.parse(export.source)
    export.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["notes"] == list(export.notes)
    export.save(tmp_path / "plan.py")
    assert (tmp_path / "plan.py").read_text() == str(export)


# PyTorch


def test_columns_and_rows_become_styles() -> None:
    (stage,) = plan_of("tp").export("torch").data["stages"]
    assert stage["parallelize"] == {
        "tokens": "RowwiseParallel(input_layouts=Replicate())",
        "head": "ColwiseParallel(use_local_output=False)",
        **{f"blocks.{i}.attn.{part}": "ColwiseParallel()" for i in range(2) for part in "qkv"},
        **{f"blocks.{i}.attn.out": "RowwiseParallel()" for i in range(2)},
        **{f"blocks.{i}.mlp.up": "ColwiseParallel()" for i in range(2)},
        **{f"blocks.{i}.mlp.down": "RowwiseParallel()" for i in range(2)},
    }
    assert stage["fully_shard"] is None


def test_a_split_sequence_is_gathered_once_for_queries_keys_and_values() -> None:
    (stage,) = plan_of("sequence").export("torch").data["stages"]
    styles = stage["parallelize"]
    gathered = "PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())"
    assert styles["blocks.0.attn"] == styles["blocks.1.mlp"] == gathered
    assert styles["blocks.1.attn.k"] == "ColwiseParallel()"
    assert styles["blocks.1.attn.out"] == "RowwiseParallel(output_layouts=Shard(1))"
    assert styles["blocks.0.norm1"] == "SequenceParallel(sequence_dim=1, use_local_output=True)"
    assert styles["head"] == "ColwiseParallel(input_layouts=Shard(1), use_local_output=False)"


@pytest.mark.parametrize(
    ("name", "shape", "reshard"),
    [
        ("dp", (2, 1, 1), False),
        ("zero1", (1, 2, 1), False),
        ("zero3", (1, 2, 1), True),
        ("dp_tp", (2, 1, 2), False),
    ],
)
def test_data_axes_become_replicate_and_shard(name: str, shape: tuple[int, ...], reshard: bool) -> None:
    (stage,) = plan_of(name).export("torch").data["stages"]
    assert np.shape(stage["ranks"]) == shape
    assert stage["fully_shard"] == {"modules": ["blocks.0", "blocks.1"], "reshard_after_forward": reshard}


def test_ranks_go_data_axes_first() -> None:
    mesh = ProcessMesh(np.array([[0, 2], [1, 3]]), ["tp", "dp"])
    plan = pair(tp=2, dp=2)
    plan = replace(plan, stages=(replace(plan.stages[0], mesh=mesh),))
    plan = changed(plan, {name: "[dp, _]" for name, at in plan.tensors.items() if at.kind == "input"})
    (stage,) = plan.export("torch").data["stages"]
    assert stage["ranks"] == [[[0, 1]], [[2, 3]]]


def test_placements_are_those_of_the_transposed_matrix() -> None:
    (stage,) = plan_of("dp_tp").export("torch").data["stages"]
    assert stage["placements"]["blocks.0.mlp.up.weight"] == ["Replicate()", "Shard(0)"]
    assert stage["placements"]["blocks.0.mlp.down.weight"] == ["Replicate()", "Shard(1)"]
    assert stage["placements"]["tokens.weight"] == ["Replicate()", "Shard(0)"]


def test_a_pipeline_is_cut_before_the_first_module_of_a_stage() -> None:
    data = plan_of("gpipe").export("torch").data
    assert data["split_points"] == ["blocks.1"]
    assert (data["schedule"], data["micro_batches"]) == ("ScheduleGPipe", 4)
    assert "positions" in data["stages"][0]["parameters"]
    assert "head.weight" in data["stages"][1]["parameters"]


def test_a_parameter_of_no_style_is_said() -> None:
    export = changed(plan_of("tp"), {"positions": "[_, tp]"}).export("torch")
    assert any("no style" in note and "positions" in note for note in export.notes)


def test_what_a_module_does_with_its_own_code_needs_one_layout() -> None:
    class Middle(nn.Module):
        def forward(self, x: object) -> object:
            return ops.softmax(x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            self.up, self.middle, self.down = nn.Linear(6, 8), Middle(), nn.Linear(8, 4)
            dg.shard_tensor(self.up.weight, mesh, [None, "tp"])

        def forward(self, x: object) -> object:
            return self.down(self.middle(self.up(x)))

    mesh = grid(tp=2)
    graph = train_graph(Whole(), (((8, 6), "f32"), ((8, 4), "f32")), nn.MeanSquaredError())
    with pytest.raises(
        ShardingError, match=r"middle: its own code has \[8, 1\] in \[_, _\] partial\(tp:max\)"
    ):
        plan_from(complete(graph, mesh), mesh).export("torch")


def test_a_sequence_that_own_code_would_split_is_kept_whole() -> None:
    """The residual connection is split along the sequence, what enters the block is not."""
    plan = plan_of("tp")
    assert plan.surface is not None
    block = plan.surface.modules["blocks.0"]
    split = Flow((8, 8, 16), ShardSpec.parse("[_, _, _]"), ShardSpec.parse("[_, tp, _]"))
    modules = {**plan.surface.modules, "blocks.0": replace(block, moved=(split,))}
    export = replace(plan, surface=Surface(plan.surface.tensors, modules)).export("torch")
    assert export.data["stages"] == plan.export("torch").data["stages"]
    assert any("kept whole along the sequence, for blocks.0: its own code" in note for note in export.notes)


def test_heads_that_do_not_divide_are_gathered_before_they_are_cut() -> None:
    model, mesh = GPT(replace(CONFIG, hidden=18, heads=3)), grid(tp=2)
    stages(model, [mesh])
    graph = train_graph(model, (((4, 8), "i32"), ((4, 8), "i32")))
    (stage,) = plan_from(complete(graph, mesh), mesh, batch=4).export("torch").data["stages"]
    assert stage["parallelize"]["blocks.0.attn.q"] == "ColwiseParallel(output_layouts=Replicate())"
    assert stage["parallelize"]["blocks.0.attn.out"] == "RowwiseParallel(input_layouts=Replicate())"


def tied() -> Plan:
    config = replace(CONFIG, tied=True)
    model, mesh = GPT(config), grid(tp=2)
    stages(model, [mesh])
    graph = train_graph(model, (((4, 8), "i32"), ((4, 8), "i32")))
    return plan_from(complete(graph, mesh), mesh, batch=4)


def test_a_table_that_is_the_matrix_of_the_logits_too_is_said() -> None:
    plan = tied()
    assert plan.surface is not None
    assert [name for name, read in plan.surface.tensors.items() if read.shared] == ["tokens.weight"]
    assert any(
        note.startswith("tokens.weight is read by code of several") for note in plan.export("torch").notes
    )
    assert "untie-embeddings-and-output-weights" not in arguments(plan)


def test_stages_of_other_shapes_are_said() -> None:
    meshes = grid(0, one=1), grid(1, dp=3)
    plan = plan_of("pp")
    other = replace(plan, stages=tuple(replace(s, mesh=m) for s, m in zip(plan.stages, meshes, strict=True)))
    assert any("different shape" in note for note in other.export("torch").notes)


def moe() -> Plan:
    config = MoEConfig(hidden=8, layers=2, heads=2, experts=4, vocabulary=16, sequence=4, group=4)
    model, mesh = GShardMoE(config), grid(dp=2, tp=2)
    stages(model, [mesh])
    graph = train_graph(model, (((4, 4), "i32"), ((4, 4), "i32")))
    return plan_from(complete(graph, mesh), mesh, batch=4)


def test_experts_on_the_axis_of_the_batch_have_no_torch_plan() -> None:
    with pytest.raises(
        ShardingError, match=r"mlp\.down \(66% of its parameters\) are computed split over dp"
    ):
        moe().export("torch")


def stray() -> Plan:
    """Positions, a small part of all parameters, are computed split over the axis of the batch."""
    plan = plan_of("dp")
    assert plan.surface is not None
    read = replace(plan.surface.tensors["positions"], used=ShardSpec.parse("[_, dp]"))
    tensors = {**plan.surface.tensors, "positions": read}
    moved = changed(plan, {"positions": "[_, dp]", "positions.adam_m": "[_, dp]"})
    return replace(moved, surface=Surface(tensors, plan.surface.modules))


@pytest.mark.parametrize("framework", ["torch", "megatron"])
def test_a_small_part_on_the_axis_of_the_batch_is_a_note(framework: str) -> None:
    export, usual = stray().export(framework), plan_of("dp").export(framework)
    assert any("positions (2% of its parameters) are computed split over dp" in n for n in export.notes)
    if framework == "megatron":
        assert export.data == usual.data
    else:
        (stage,), (expected,) = export.data["stages"], usual.data["stages"]
        assert (stage["ranks"], stage["fully_shard"]) == (expected["ranks"], expected["fully_shard"])


def test_two_axes_for_matrices_have_no_torch_plan() -> None:
    plan = changed(pair(sp=2, tp=2), {"up.weight": "[_, tp*sp]"})
    with pytest.raises(ShardingError, match="parallelize_module takes a mesh of one dim"):
        plan.export("torch")


# Megatron-LM


def arguments(plan: Plan) -> dict[str, object]:
    return dict(plan.export("megatron").data["arguments"])


def test_sizes_of_a_uniform_plan() -> None:
    assert arguments(plan_of("dp_tp_zero1_sequence")) == {
        "tensor-model-parallel-size": 2,
        "pipeline-model-parallel-size": 1,
        "micro-batch-size": 4,
        "global-batch-size": 8,
        "num-layers": 2,
        "untie-embeddings-and-output-weights": True,
        "sequence-parallel": True,
        "use-distributed-optimizer": True,
        "recompute-granularity": "full",
        "recompute-method": "uniform",
        "recompute-num-layers": 1,
    }
    source = plan_of("dp_pp").export("megatron").source
    assert "--pipeline-model-parallel-size 2 \\\n--micro-batch-size 2 \\\n" in source
    assert "recompute" not in source


def test_parameters_split_over_data_ranks_are_megatron_fsdp() -> None:
    found = arguments(plan_of("zero3"))
    assert found["use-megatron-fsdp"] is True
    assert found["data-parallel-sharding-strategy"] == "optim_grads_params"


def test_experts_have_a_size_of_their_own() -> None:
    assert arguments(moe())["expert-model-parallel-size"] == 2


def test_stages_of_different_length_have_a_layout() -> None:
    plan = plan_of("pp")
    moved = {n: replace(t, stage=1) if n.startswith("blocks.0.") else t for n, t in plan.tensors.items()}
    found = arguments(replace(plan, tensors=moved))
    assert found["pipeline-model-parallel-layout"] == "E|t*2L"


def test_ranks_are_told_where_megatron_numbers_them_otherwise() -> None:
    plan = plan_of("dp_tp")
    mesh = ProcessMesh(np.array([[0, 2], [1, 3]]), ["dp", "tp"])
    export = replace(plan, stages=(replace(plan.stages[0], mesh=mesh),)).export("megatron")
    assert export.data["ranks"] == [0, 2, 1, 3]
    assert any("numbers ranks otherwise" in note for note in export.notes)


def weighted(plan: Plan) -> Plan:
    """The plan with the first stage's samples shared 3 to 1."""
    first, *others = plan.stages
    return replace(plan, stages=(replace(first, mesh=first.mesh.weighted(dp=(3, 1))), *others))


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_shares_by_weights_are_said(framework: str) -> None:
    plan = plan_of("dp_pp")
    assert not any("uneven" in note for note in plan.export(framework).notes)
    assert any("uneven" in note and "dp=3:1" in note for note in weighted(plan).export(framework).notes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda p: replace(p, schedule="gpipe"), "schedule gpipe"),
        (weighted, "stage 0 shares samples or weights unevenly (mesh dp=3:1)"),
        (lambda p: replace(p, batch=7), "batch 7 in 2 micro-batches over 2 data-parallel ranks is uneven"),
        (
            lambda p: replace(p, stages=(p.stages[0], replace(p.stages[1], mesh=grid(2, dp=4)))),
            "stage 0 has dp=2 x tp=1 but stage 1 dp=4 x tp=1",
        ),
        (
            lambda p: replace(p, stages=(p.stages[0], replace(p.stages[1], mesh=p.stages[0].mesh))),
            "stages share ranks",
        ),
        (
            lambda p: changed(p, {"blocks.1.mlp.up.weight": "[dp, _]"}),
            "blocks.0.mlp.up.weight lies [_, _] but blocks.1.mlp.up.weight [dp, _]",
        ),
    ],
)
def test_what_megatron_cannot_say_is_listed(change: object, reason: str) -> None:
    plan = change(plan_of("dp_pp"))  # type: ignore[operator]
    with pytest.raises(ShardingError) as error:
        plan.export("megatron")
    assert reason in str(error.value)


def test_all_reasons_are_given_at_once() -> None:
    plan = replace(plan_of("dp_pp"), schedule="gpipe", batch=7)
    with pytest.raises(ShardingError, match=r"(?s)uneven.*schedule gpipe"):
        plan.export("megatron")


def test_whole_matrices_beside_tensor_ranks_are_refused() -> None:
    whole = {f"blocks.{i}.mlp.{part}.weight": "[_, _]" for i in range(2) for part in ("up", "down")}
    with pytest.raises(
        ShardingError, match=r"blocks\.0\.mlp\.up\.weight.* are whole on every tensor-parallel rank"
    ):
        changed(plan_of("tp"), whole).export("megatron")


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ShardingError, match="there are no numbered layers"):
        pair().export("megatron")


# The command line


def test_the_command_line_writes_an_export(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "shardings.py"
    plan_of("dp_pp").save(plan)
    done = CliRunner().invoke(application.app, ["export", str(plan), "jax", "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert out.read_text() == plan_of("dp_pp").export("jax").source
    assert "not expressed: JAX has no pipeline" in done.stderr
    shown = CliRunner().invoke(application.app, ["export", str(plan), "megatron"])
    assert shown.stdout == plan_of("dp_pp").export("megatron").source


def test_the_command_line_says_what_is_wrong(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan_of("gpipe").save(plan)
    done = CliRunner().invoke(application.app, ["export", str(plan), "megatron"])
    assert done.exit_code != 0
    assert isinstance(done.exception, ShardingError)
