"""Alpa's published runs: the tables as data, plans as meshes, the count of FLOP, the forecast of a plan."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from benchmarks import alpa_tables
from benchmarks.support.alpa import plan_forecast as af
from benchmarks.support.alpa import published_formulas as published
from benchmarks.support.alpa.published_rows import MOE_TERA, Row, read_rows
from benchmarks.support.alpa.recorded_plans import GPUS, Plan, Stage, blocks_of, plans_of
from distgraph import optim
from distgraph.engine.compile.train_graph import train_graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import flops, lookup
from distgraph.models import GPT_PRESETS, GPTConfig, MoEConfig, WideResNetConfig
from distgraph.resources import CollectiveCost
from distgraph.resources.load import load_cluster
from distgraph.resources.runtimes.load_runtime import load_runtime
from distgraph.resources.runtimes.runtime_model import Gradients
from distgraph.runtime.forecast.forecast import forecast

ROWS = {row.name: row for row in read_rows()}
TINY = GPTConfig(
    hidden=64, layers=8, heads=4, vocabulary=128, sequence=32, packed=True, fused=False, dtype="f16"
)


def test_all_published_numbers_are_read() -> None:
    rows = list(ROWS.values())
    assert len(rows) == 12 * 7 + 15 * 4 + 6 * 3
    assert sum(row.published is None for row in rows) == 18
    assert sum(row.projected for row in rows) == 7
    assert ROWS["gpt alpa 64"].published == 57.0
    assert ROWS["moe deepspeed 64"].published is None
    assert ROWS["wresnet intra_only 64"].published == 0.70
    assert ROWS["intra_moe zero3 8"].published == 10.36
    assert ROWS["inter_wresnet_8_16_32 equal_layer 32"].published == 4.1


def test_every_row_has_a_plan_on_its_gpus_but_cuts_inside_blocks() -> None:
    without = {row.name for row in ROWS.values() if not row.plans}
    assert without == {name for name in ROWS if "equal_operator" in name}
    for row in ROWS.values():
        for plan in row.plans:
            # Pipelines of one GPU a stage have no more stages than blocks.
            most = (
                min(row.gpus, blocks_of(plan.config)) if all(s.gpus == 1 for s in plan.stages) else row.gpus
            )
            assert plan.gpus == most or (row.table == "wresnet" and plan.gpus <= row.gpus), row.name
            assert sum(stage.blocks for stage in plan.stages) == blocks_of(plan.config), row.name
            assert plan.batch % plan.micro == 0, row.name


def test_recorded_plans_become_the_recorded_meshes() -> None:
    def shapes(name: str) -> list[tuple[tuple[int, ...], dict[str, int]]]:
        (plan,) = ROWS[name].plans
        return [(tuple(mesh.members), dict(mesh.sizes)) for mesh in af.meshes_of(plan)]

    assert shapes("gpt alpa 8") == [
        ((0, 1), {"dp": 2}),
        ((2, 3), {"dp": 2}),
        ((4, 5, 6, 7), {"dp": 4}),
    ]
    assert shapes("gpt alpa 16") == [
        (tuple(range(8)), {"dp": 2, "tp": 4}),
        (tuple(range(8, 16)), {"dp": 2, "tp": 4}),
    ]
    assert shapes("moe alpa 32")[7] == ((28, 29, 30, 31), {"ep": 4})
    assert shapes("moe deepspeed 16") == [(tuple(range(16)), {"dp": 2, "ep": 8})]
    assert shapes("wresnet alpa 8") == [((0, 1, 2, 3), {"dp": 4}), ((4, 5, 6, 7), {"tp": 4})]
    halves = [(tuple(range(8)), {"dp": 2, "tp": 4}), (tuple(range(8, 16)), {"tp": 8})]
    assert shapes("inter_wresnet_8_16_32 equal_layer 16") == halves
    assert shapes("intra_gpt ilp 8") == [(tuple(range(8)), {"tp": 8})]
    assert [s.blocks for s in ROWS["wresnet pp_dp 8"].plans[0].stages] == [9, 2, 3, 2]


@pytest.mark.parametrize("gpus", GPUS)
def test_flop_of_gpt_and_moe_are_the_published_ones(gpus: int) -> None:
    gpt = ROWS[f"gpt alpa {gpus}"]
    c = gpt.plans[0].config
    assert isinstance(c, GPTConfig)
    formula = 96 * 1024 * c.layers * c.hidden**2 * (1 + 1024 / (6 * c.hidden)) + 6 * 1024 * c.hidden * 51200
    assert gpt.sample == pytest.approx(formula, rel=1e-9)
    config = ROWS[f"moe alpa {gpus}"].plans[0].config
    assert isinstance(config, MoEConfig)
    # The printed count has the products of the gates with one number a place more, 0.01 %.
    assert published.flops(config, 1024) / 1e12 == pytest.approx(MOE_TERA[gpus], rel=1e-3)


def contractions(plan: Plan) -> float:
    """FLOP of all matrix products of a step, on the graph as built."""
    whole = replace(plan, stages=(Stage(blocks_of(plan.config), 1),), zero=0)
    graph = train_graph(af.model_of(whole), af.batch_of(plan), optimizer=af.optimizer_of(whole), pruned=False)
    matmuls = [op for op in graph.ops if lookup(op.kind).cost == "matmul" and len(op.operands) > 1]
    return float(sum(flops(op) for op in matmuls)) * plan.micro


def test_the_graph_of_megatron_spends_the_flop_that_its_row_counts() -> None:
    (plan,) = ROWS["gpt megatron 1"].plans
    assert contractions(plan) == pytest.approx(ROWS["gpt megatron 1"].flop(plan), rel=0.01)


def test_the_graph_of_alpa_spends_one_hot_embeddings_more() -> None:
    row = ROWS["intra_gpt zero2 1"]
    (plan,) = row.plans
    one_hot = 4 * 8 * 1024 * 25600 * 2048  # product with one-hot rows, and the gradient of the table
    assert contractions(plan) - one_hot == pytest.approx(row.flop(plan), rel=0.01)


def test_moe_rows_of_the_ablation_count_their_compiled_programs() -> None:
    """The artifact counts contractions in HLO there: with one-hot embeddings, not the formula."""
    row = ROWS["intra_moe zero2 1"]
    (plan,) = row.plans
    assert row.flop(plan) == pytest.approx(22.66e12, rel=0.005)  # 45.45 TFLOPS x 0.4987 s
    formula = published.flops(plan.config, 8)
    assert formula == pytest.approx(20.17e12, rel=0.001)
    assert contractions(plan) == pytest.approx(row.flop(plan), rel=0.05)


def test_wide_resnet_counts_forward_three_times_or_four() -> None:
    for name, times in (("wresnet alpa 1", 4), ("wresnet intra_only 64", 3)):
        plan = ROWS[name].plans[0]
        assert isinstance(plan.config, WideResNetConfig)
        giga = {1: 83.6, 64: 4518.2}[ROWS[name].gpus]
        assert ROWS[name].sample == pytest.approx(times * giga * 1e9)


def test_stages_whose_batch_was_forced_stay_split_by_samples() -> None:
    stages = [[(s.dp, s.tp) for s in plan.stages] for plan in ROWS["wresnet alpa 16"].plans]
    assert stages == [[(4, 1), (4, 1), (8, 1)], [(4, 1), (4, 1), (1, 8)]]


NET = WideResNetConfig(channels=8, width=2, blocks=(1, 2), image=32, classes=8)


def test_blocks_split_by_channels_compute_no_convolution_twice() -> None:
    """Over all ranks the FLOP of one; the head is computed on the whole batch by each but for its classes."""
    whole = Plan(config=NET, batch=4, micro=1, stages=(Stage(3, 1),), recompute=False)
    split = replace(whole, stages=(Stage(1, 1), Stage(2, 1, 4)))
    cluster = load_cluster("p3_16xlarge_x8")
    flop = [forecast(af.built(plan), cluster).total_flops for plan in (whole, split)]
    assert flop[1] == pytest.approx(flop[0], rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 4])
def test_deepspeed_sends_gradients_whole_down_a_chain(ranks: int) -> None:
    """Of n ranks a chain carries n / (n - 1) of what a scattering reduction sends, every micro-batch."""
    cluster = load_cluster("p3_16xlarge_x8")
    plan = Plan(
        config=TINY,
        batch=16,
        micro=2,
        stages=(Stage(8, ranks),),
        zero=2,
        software="deepspeed",
        recompute=False,
    )
    ring = replace(load_runtime("deepspeed"), gradients=Gradients(each_micro_batch=True))
    scattered = forecast(af.built(plan), cluster, runtime=ring).step_seconds
    cost, mesh = CollectiveCost(cluster), ProcessMesh.grid(dp=ranks)
    split = [
        2 * math.prod(p.shape)
        for name, p in af.model_of(plan).named_parameters()
        if optim.shard_states(mesh, "dp")(name, p.shape, None) is not None
    ]
    messages = [op for op in af.built(plan).lowered.ops if op.kind == "comm.reduce_scatter"]
    sizes = [sum(value.nbytes for value in op.operands) for op in messages]
    assert sum(sizes) == sum(split)
    once = sum(cost.time("reduce_scatter", range(ranks), size) for size in sizes)
    assert af.forecast_of(plan, cluster).seconds - scattered == pytest.approx(
        2 * once / (ranks - 1), rel=1e-6
    )


def test_the_longest_dim_is_split_or_none() -> None:
    mesh = ProcessMesh.grid(tp=4)
    assert af.longest((8, 1024), mesh) == ((), ("tp",))
    assert af.longest((7, 4), mesh) == ((), ())
    plan = Plan(config=TINY, batch=4, micro=1, stages=(Stage(8, 1, 4),), largest=True)
    graph = af.graph_of(plan)
    (ids,) = [name for name in graph.attrs if graph.producers[name].kind == "input"]
    assert graph.attrs[ids].spec.dims == ((), ("tp",))


def test_master_copy_and_moments_are_split_over_the_batch_axes() -> None:
    cluster = load_cluster("p3_16xlarge_x8")
    plan = Plan(config=TINY, batch=8, micro=1, stages=(Stage(8, 4),))
    parameters = af.model_of(plan).parameter_count()
    whole, split = (af.forecast_of(replace(plan, zero=zero), cluster).memory for zero in (0, 2))
    assert whole["parameters"] == 2 * parameters
    assert whole["states"] == 12 * parameters  # f32 master, two moments
    assert split["states"] == pytest.approx(3 * parameters, rel=0.02)  # some are too small to split


def test_a_program_that_needs_more_than_the_allocator_has_is_out_of_memory() -> None:
    plan = Plan(config=TINY, batch=8, micro=1, stages=(Stage(8, 1),))
    needed = af.forecast_of(plan, load_cluster("p3_16xlarge_x8")).needed
    for memory, missing in ((needed / 0.9 + 2, 0.0), (needed / 0.9 - 2, 1.8)):
        cluster = load_cluster("p3_16xlarge_x8")
        devices = tuple(replace(device, memory=memory) for device in cluster.devices)
        found = af.forecast_of(plan, replace(cluster, devices=devices))
        assert found.missing == pytest.approx(missing, abs=0.01)


def test_the_fastest_that_fits_is_chosen_else_what_lacks_least() -> None:
    plan = Plan(config=TINY, batch=8, micro=1, stages=(Stage(8, 1),))
    slow, fast, large = (
        af.Found(replace(plan, micro=m), s, {}, missing)
        for m, s, missing in ((1, 2.0, 0.0), (2, 1.0, 0.0), (4, 0.5, 1.0))
    )
    assert alpa_tables.best([slow, fast, large]) is fast
    larger = af.Found(plan, 0.1, {}, 2.0)
    assert alpa_tables.best([larger, large]) is large


def test_a_table_row_end_to_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alpa_tables, "calibrated", lambda run: {})  # no row on 1 GPU calibrates this one
    plan = Plan(config=replace(TINY, layers=2), batch=8, micro=2, stages=(Stage(2, 2),))
    row = Row("tiny", "alpa", 2, 1.0, False, True, (plan,), 1e9, None)
    figures = alpa_tables.study([row], Console(width=140), workers=1)
    (entry,) = figures["rows"]
    seconds = af.forecast_of(plan, load_cluster("p3_16xlarge_x8")).seconds
    assert entry["forecast"] == pytest.approx(8e9 / seconds / 2 / 1e12)
    assert figures["mean_error"] == pytest.approx(abs(1.0 / entry["forecast"] - 1.0))
    assert figures["oom_missed"] == figures["oom_false"] == []
    assert "tiny" in capsys.readouterr().out


def test_experts_on_some_of_the_data_parallel_gpus() -> None:
    """Batch over dp x ep, experts over ep: each GPU has a share of the experts and the whole of the rest."""
    config = MoEConfig(
        hidden=32,
        layers=2,
        experts=4,
        heads=4,
        vocabulary=64,
        sequence=16,
        group=16,
        packed=True,
        fused=False,
        dtype="f16",
    )
    plan = Plan(config=config, batch=8, micro=1, stages=(Stage(2, 2, 1, 2),))
    memory = af.forecast_of(plan, load_cluster("p3_16xlarge_x8")).memory
    count = {name: int(np.prod(p.shape)) for name, p in af.model_of(plan).named_parameters()}
    experts = sum(n for name, n in count.items() if ".mlp.up" in name or ".mlp.down" in name)
    dense = {n for n in count if "blocks.0.mlp" in n}
    experts -= sum(count[n] for n in dense if ".mlp.up" in n or ".mlp.down" in n)
    assert memory["parameters"] == 2 * (sum(count.values()) - experts // 2)


def test_presets_are_those_of_the_rows() -> None:
    assert ROWS["gpt alpa 64"].plans[0].config == GPT_PRESETS["39B"]
    assert plans_of("intra_gpt", "zero2", 8).plans[0].config.heads == 40  # type: ignore[union-attr]
