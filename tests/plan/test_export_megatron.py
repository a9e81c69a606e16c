"""What exports say in the arguments of Megatron-LM, and what has none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.plans.exported import grid, plan_of
from support.plans.exported_plans import arguments, changed, moe, pair

from distgraph.errors import ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.plan.plan import Plan


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
            "blocks.0.mlp.up.weight is sharded [_, _] but blocks.1.mlp.up.weight [dp, _]",
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
