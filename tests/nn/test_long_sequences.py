"""Sequences split over ranks: the losses of one rank, published patterns of communication, memory, errors."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.programs.searched import two_by_two
from support.sequences.long_sequences import (
    BATCH,
    GRID,
    LAYOUTS,
    batch,
    engine,
    laid_out,
    losses,
    model,
    serial_losses,
)

import distgraph as dg
from distgraph.array_api.trace import trace
from distgraph.engine import train_graph
from distgraph.errors import GraphError, ShardingError
from distgraph.models import GPT, GPTConfig, Llama, LlamaConfig, annotate
from distgraph.runtime.forecast.memory_forecast import RankMemory, rank_memory
from distgraph.runtime.program.memory_plan import plan_storage

FEW = "dp2 sp2"


@pytest.mark.filterwarnings("ignore:.*compete for a mesh axis")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("context_parallel", ["gather", "ring", "ulysses"])
def test_training_is_that_of_one_rank(layout: str, context_parallel: str) -> None:
    if context_parallel == "ulysses" and "sp3" in layout:
        pytest.skip("4 heads are not divided by 3 ranks")
    length = 9 if "3" in layout else 7  # blocks of unequal length
    found = losses(laid_out("gpt", length, layout, context_parallel), length)
    np.testing.assert_allclose(found, serial_losses("gpt", length), rtol=0, atol=1e-12)


@pytest.mark.parametrize("context_parallel", ["gather", "ring", "ulysses"])
def test_grouped_heads_and_micro_batches(context_parallel: str) -> None:
    made = laid_out("llama", 8, FEW, context_parallel)
    found = losses(made, 8, micro_batches=2)
    expected = losses(model("llama", 8), 8, micro_batches=2)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*compete for a mesh axis")
@pytest.mark.parametrize("context_parallel", ["gather", "ring", "ulysses"])
def test_what_processors_need_is_forecast(context_parallel: str) -> None:
    """With the memory of kernels, which skip the keys that the mask hides from all queries of a rank."""
    made, cluster = engine(laid_out("gpt", 8, FEW, context_parallel)), two_by_two()
    made.prepare(batch(8))
    needed = [made.forecast(cluster, runtime=name).peak_memory for name in ("distgraph_cpu", "distgraph_gpu")]
    assert needed[0] > needed[1]


def test_ranks_without_samples_are_forecast() -> None:
    """Micro-batches of two samples on four ranks."""
    made = model("gpt", 8)
    annotate(made, GRID(dp=4))
    trained = engine(made, micro_batches=BATCH // 2)
    trained.prepare(batch(8))
    assert trained.forecast(two_by_two(), runtime="distgraph_cpu").step_seconds > 0


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_beside_a_ring(zero: int) -> None:
    made = laid_out("gpt", 8, FEW, "ring")
    found = losses(made, 8, zero=zero, batch_axis="dp", mesh=LAYOUTS[FEW][0][0])
    np.testing.assert_allclose(found, serial_losses("gpt", 8), rtol=0, atol=1e-12)


def test_a_ring_in_16_bits_is_as_exact_as_one_attention() -> None:
    exact = np.array(losses(model("gpt", 8, "f32"), 8))
    plain, ring = (
        np.array(losses(laid_out("gpt", 8, "sp4", how, "f32"), 8, precision="bf16"))
        for how in ("gather", "ring")
    )
    assert np.abs(ring - exact).max() <= 1.5 * np.abs(plain - exact).max() + 2.0**-9
    assert np.abs(ring - exact).max() > 0


def test_a_plan_keeps_the_ring(tmp_path: Path) -> None:
    trained = engine(laid_out("gpt", 8, FEW, "ring"))
    expected = [trained.run(batch(8))["loss"] for _ in range(2)]
    trained.plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert re.search(r'"attention by ring \{b:dp, s:sp\} -> ', text)
    made = model("gpt", 8)
    again = dg.Engine(made, made.loss, dg.optim.AdamW(lr=1e-2), plan=tmp_path / "plan.json", seed=3)
    assert [again.run(batch(8))["loss"] for _ in range(2)] == expected


# messages


def activations(made: dg.Engine, length: int) -> Counter[tuple[str, str]]:
    """(role, kind) -> collectives of a step, of what has the size of an activation, not of parameters."""
    plan = made.prepare(batch(length))
    lowered = plan.build.lowered
    return Counter(
        (op.role, op.kind.removeprefix("comm."))
        for op in lowered.ops
        if op.kind.startswith("comm.")
        and op.kind != "comm.slice"
        and len(op.results[0].shape) > 2
        and length in op.results[0].shape
        and ".attn" in op.scope
    )


def test_ulysses_exchanges_four_tensors_each_way() -> None:
    made = engine(laid_out("gpt", 8, FEW, "ulysses"))
    # q, k, v to heads and o back; do to heads and dq, dk, dv back, in each of two blocks
    assert activations(made, 8) == {("forward", "all_to_all"): 2 * 4, ("backward", "all_to_all"): 2 * 4}


def test_a_ring_moves_keys_and_values_alone() -> None:
    made = engine(laid_out("gpt", 8, "sp4", "ring"))
    assert activations(made, 8) == {
        ("forward", "transfer"): 2 * 2 * 3,
        ("backward", "transfer"): 2 * (2 * 3 + 2 * 4),
    }
    step = {c.kind: c for c in made.plan.collectives if c.kind == "transfer"}
    assert step
    sent = sum(c.nbytes for c in made.plan.collectives if c.kind == "transfer")
    block = 8 * BATCH * 16 * 8 / 4  # bytes of the keys of a rank
    assert sent == 2 * (2 * 3 + 2 * 3 + 2 * 4) * block


def test_gathered_keys_come_back_as_scattered_sums() -> None:
    made = engine(laid_out("gpt", 8, "sp4", "gather"))
    found = activations(made, 8)
    assert found == {("forward", "all_gather"): 2 * 2, ("backward", "reduce_scatter"): 2 * 2}


def test_sequence_parallel_regions_send_what_megatron_sends() -> None:
    """Two all_gathers and two reduce_scatters a block each way, and one of each for the two ends."""
    length, ranks = 256, 4
    made = GPT(GPTConfig(hidden=64, layers=2, heads=4, vocabulary=50, sequence=length, packed=True))
    annotate(made, GRID(tp=ranks), sequence_parallel=True)
    trained = dg.Engine(made, made.loss, dg.optim.AdamW())
    ids = np.zeros((2, length), "i4")
    trained.prepare((ids, ids))
    shard = 4 * 2 * length * 64 * (ranks - 1) / ranks
    for role in ("forward", "backward"):
        kinds = {c.kind: c for c in trained.plan.collectives if c.role == role and c.nbytes >= shard}
        assert {kind: (c.count, c.nbytes / shard) for kind, c in kinds.items()} == {
            "all_gather": (5, 5.0),
            "reduce_scatter": (5, 5.0),
        }


# memory


def test_memory_of_long_sequences_falls_with_the_ranks() -> None:
    """4,096 positions on 4 ranks need the activations that 1,024 positions need on one."""

    def needed(length: int, ranks: int, how: str) -> RankMemory:
        made = Llama(LlamaConfig(hidden=16, inner=32, layers=2, heads=2, key_heads=2, vocabulary=16))
        annotate(made, GRID(sp=ranks), context_parallel=how)
        trained = engine(made)
        ids = np.zeros((1, length), "i4")
        build = trained.prepare((ids, ids)).build
        programs = [build.program(rank) for rank in build.ranks]
        found = (rank_memory(program, plan_storage(program, build.schedule)) for program in programs)
        return max(found, key=lambda each: each.total)

    alone, ring, gathered = needed(1024, 1, "ring"), needed(4096, 4, "ring"), needed(4096, 4, "gather")
    assert ring.activations == alone.activations < gathered.activations
    assert ring.total < gathered.total
    # besides what one rank needs: two blocks of keys and of values, their gradients, and messages under way
    assert ring.temporary - alone.temporary <= 10 * 4 * 1024 * 16


# errors


def test_heads_that_ranks_do_not_divide() -> None:
    with pytest.raises(
        ShardingError, match=r"4 heads .* axes sp of mesh\(sp=3\) do not divide into 3; use fewer"
    ):
        losses(_on(GRID(sp=3), "ulysses"), 9)


def test_attention_of_separate_ops_has_no_ring() -> None:
    made = GPT(GPTConfig(hidden=16, layers=1, heads=2, vocabulary=20, sequence=8, fused=False))
    annotate(made, GRID(sp=2), context_parallel="ring")
    with pytest.raises(GraphError, match=r"separate ops is not computed by a ring .* fused=True"):
        train_graph(made, (((4, 8), "i32"), ((4, 8), "i32")))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("ring", r"algorithm ring computes ops of kind attention but the call has none .* fused=True"),
        ("wang", r"algorithm wang computes ops of kind matmul and einsum but the call has none"),
    ],
)
def test_an_algorithm_without_an_op_that_it_computes(algorithm: str, message: str) -> None:
    function = dg.shard_op(dg.ops.tanh, GRID(sp=2), algorithm=algorithm)
    with pytest.raises(ShardingError, match=rf"^shard_op \(.*test_long_sequences.py.*\): {message}"):
        trace(function, np.ones((4, 4)))


def test_an_unknown_way() -> None:
    with pytest.raises(
        ShardingError, match=r"context_parallel is 'rings' but must be one of gather, ring, ulysses"
    ):
        _on(GRID(sp=2), "rings")


def _on(mesh: dg.ProcessMesh, context_parallel: str) -> GPT:
    made = model("gpt", 9)
    annotate(made, mesh, context_parallel=context_parallel)
    assert isinstance(made, GPT)
    return made
