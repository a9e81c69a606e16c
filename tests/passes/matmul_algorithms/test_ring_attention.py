"""Ring attention: the numbers of serial attention, the messages of its formula, and what it refuses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support.programs.partitioned import run_partitioned
from support.sequences.split_attention import SplitAttention

from distgraph.errors import GraphError, ShardingError
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import flops
from distgraph.ir.parser import parse_graph
from distgraph.ir.printer import print_graph
from distgraph.ir.verifier import verify
from distgraph.passes.lower import lower
from distgraph.passes.matmul_algorithms.distribute_attention import distribute_attention
from distgraph.passes.matmul_algorithms.ring_attention import by_rings
from distgraph.passes.pass_pipeline import run_passes
from distgraph.passes.reshard import reshard

GRID = ProcessMesh.grid


def check(case: SplitAttention) -> None:
    """Run on in-process ranks, and compare with the serial interpreter."""
    outputs, _, _ = run_partitioned(case.completed(), [case.arrays()], {})
    for name, expected in case.expected().items():
        (found,) = outputs[name]
        assert np.abs(found - expected).max() <= 1e-12, name


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [8, 7, 5])  # over 4 ranks: blocks of 2; of 2 and 1; of 2 and none
def test_numbers_are_those_of_one_rank(length: int, causal: bool) -> None:
    check(SplitAttention(GRID(sp=4), length, causal=causal))
    check(SplitAttention(GRID(sp=3), length, causal=causal, groups=4))


@pytest.mark.parametrize(
    "mesh", [GRID(dp=2, sp=2), GRID(dp=2, sp=3), GRID(sp=3, tp=2), GRID(dp=2, sp=2, tp=2)]
)
def test_beside_data_and_tensor_parallelism(mesh: ProcessMesh) -> None:
    check(SplitAttention(mesh, 9))


def test_heads_over_more_ranks_than_key_heads() -> None:
    check(SplitAttention(GRID(sp=2, tp=2), 6, groups=1))  # gradients of the keys are summed over tp


def test_a_sequence_over_two_axes_is_one_ring() -> None:
    case = SplitAttention(GRID(a=2, b=2), 8, sequence=("a", "b"))
    check(case)
    steps = [op for op in distribute_attention(case.completed()).ops if op.kind.startswith("ring_attention")]
    assert [op.attrs["shift"] for op in steps] == [*range(4), *range(4)]


@pytest.mark.parametrize("mesh", [GRID(sp=4), GRID(dp=2, sp=3)])
def test_keys_and_values_move_by_single_messages_and_are_never_whole(mesh: ProcessMesh) -> None:
    case, parts = SplitAttention(mesh, 12), mesh.axis_size("sp")
    lowered = lower(reshard(distribute_attention(case.completed())))
    moves = Counter((op.role, op.kind) for op in lowered.ops if op.kind.startswith("comm."))
    # forward k and v; backward k and v again, and dk and dv, which return to where the keys are stored
    assert moves == {
        ("forward", "comm.transfer"): 2 * (parts - 1),
        ("backward", "comm.transfer"): 2 * (parts - 1) + 2 * parts,
    }
    for op in lowered.ops:
        for value in op.results:
            shape = lowered.attrs[value.name].spec.local_shape(value.shape, mesh, mesh.members[0])
            assert len(shape) < 3 or shape[2] <= 12 // parts, op
    _, _, built = run_partitioned(case.completed(), [case.arrays()], {})
    sent = {built.program(rank).bytes_sent() for rank in built.ranks}
    assert sent == {case.block_bytes * (2 * (parts - 1) + 2 * (parts - 1) + 2 * parts)}


def test_gathered_keys_send_as_many_bytes_forward_but_are_whole() -> None:
    case = SplitAttention(GRID(sp=4), 12, algorithm=None)
    _, _, built = run_partitioned(case.completed(), [case.arrays()], {})
    assert max(built.program(rank).bytes_sent() for rank in built.ranks) == case.block_bytes * 3 * 4
    gathered = [op for op in built.lowered.ops if op.kind == "comm.all_gather"]
    assert [op.result.shape for op in gathered] == [(4, 2, 12, 3)] * 2


@pytest.mark.parametrize("causal", [True, False])
def test_the_steps_compute_the_scores_of_one_attention(causal: bool) -> None:
    case = SplitAttention(GRID(sp=3), 12, causal=causal)
    serial, rewritten = case.completed(), distribute_attention(case.completed())
    for one, several in (("attention", "ring_attention"), ("attention_grad", "ring_attention_grad")):
        whole = sum(flops(op) for op in serial.ops if op.kind == one)
        steps = [op for op in rewritten.ops if op.kind.removesuffix("_add") == several]
        assert len(steps) == 3
        assert sum(map(flops, steps)) == whole


def test_the_text_of_the_graph_is_read_back() -> None:
    completed = SplitAttention(GRID(dp=2, sp=2), 8, pruned=False).completed()
    assert 'algorithm %0 "ring"' in print_graph(completed)
    for graph, stage in ((completed, "completed"), (distribute_attention(completed), "completed")):
        again = parse_graph(print_graph(graph))
        verify(again, stage)
        assert again == graph
    run_passes(completed, ["distribute_matmuls", "distribute_attention", "reshard", "lower"])


class TestErrors:
    def test_other_keys_than_queries(self) -> None:
        with pytest.raises(ShardingError, match=r"ring needs as many queries as keys but there are 8 and 12"):
            distribute_attention(SplitAttention(GRID(sp=2), 8, keys=12).completed())

    def test_queries_that_are_not_split(self) -> None:
        case = SplitAttention(GRID(sp=2), 8, sequence=())
        with pytest.raises(ShardingError, match=r"ring needs queries that are split along the sequence"):
            distribute_attention(case.completed())

    def test_weights(self) -> None:
        case = SplitAttention(GRID(sp=2).weighted(sp=(3, 1)), 8)
        with pytest.raises(ShardingError, match=r"ring needs equal shares but axis sp of .* has weights"):
            distribute_attention(case.completed())

    def test_a_ring_computes_attention_alone(self) -> None:
        completed = SplitAttention(GRID(sp=2), 8, pruned=False).completed()
        name = next(op.name for op in completed.ops if op.kind == "attention_grad")
        wrong = replace(completed, algorithms={name: MatmulAlgorithm("ring")})
        with pytest.raises(GraphError, match=r"is made by attention_grad; ring computes attention"):
            verify(wrong, "completed")


def test_one_rank_computes_attention_as_it_is() -> None:
    completed = SplitAttention(GRID(sp=1), 8).completed()
    assert [op.kind for op in distribute_attention(completed).ops] == [op.kind for op in completed.ops]


@pytest.mark.parametrize("mesh", [GRID(sp=4), GRID(dp=2, sp=3)])
def test_layouts_that_gather_keys_are_computed_by_rings(mesh: ProcessMesh) -> None:
    case = SplitAttention(mesh, 7, algorithm=None)
    completed = by_rings(case.completed())
    assert [str(each) for each in completed.algorithms.values()] == ["ring"]
    assert by_rings(completed) is completed
    outputs, _, _ = run_partitioned(completed, [case.arrays()], {})
    for name, expected in case.expected().items():
        assert np.abs(outputs[name][0] - expected).max() <= 1e-12, name


def test_attention_whose_heads_are_split_has_no_ring() -> None:
    for case in (
        SplitAttention(GRID(tp=2), 8, sequence=()),
        SplitAttention(GRID(sp=2), 8, keys=6, algorithm=None),
    ):
        completed = replace(case.completed(), algorithms={})
        assert by_rings(completed) is completed
