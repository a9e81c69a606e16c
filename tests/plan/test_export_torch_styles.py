"""What exports say in the terms of PyTorch: styles, placements, stages, and what has none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.plans.exported import CONFIG, grid, plan_of
from support.plans.exported_plans import arguments, changed, moe, pair, plan_from

import distgraph as dg
from distgraph import nn, ops
from distgraph.engine.compile.train_graph import train_graph
from distgraph.errors import ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.models import GPT, stages
from distgraph.passes.complete import complete
from distgraph.plan.export.module_interface import Flow, Surface
from distgraph.plan.plan import Plan


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
