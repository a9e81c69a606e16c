"""Counts of an op, as in MindSpore's strategies: layouts, training as on one rank, mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.array_api.trace import trace
from distgraph.errors import ShardingError
from distgraph.ir.mesh import ProcessMesh

EIGHT = ProcessMesh.grid(dp=8)
FLOATS = ((8, 16), "f32")


def annotations(function: Any, *inputs: Any) -> dict[str, str]:
    """Value -> mesh and layout."""
    graph = trace(function, *inputs)
    return {name: f"{attr.mesh} {attr.spec}" for name, attr in graph.attrs.items()}


def test_a_strategy_of_a_product() -> None:
    cut = dg.shard_op(ops.matmul, counts=((2, 1), (1, 4)))
    found = list(annotations(cut, FLOATS, ((16, 32), "f32")).values())
    assert found == [f"mesh(m=2, n=4) {spec}" for spec in ("[m, _]", "[_, n]", "[m, n]")]


def test_the_parts_of_a_sum_are_added_and_ranks_that_are_left_repeat() -> None:
    cut = dg.shard_op(ops.matmul, EIGHT, counts=((1, 4), (4, 1)))
    found = list(annotations(cut, FLOATS, ((16, 32), "f32")).values())
    assert found == [f"mesh(repeat=2, k=4) {spec}" for spec in ("[_, k]", "[k, _]", "[_, _]")]


def test_no_mesh_and_a_count_of_one() -> None:
    assert dg.shard_op(ops.relu, None, counts=((2, 1),)) is ops.relu
    whole = dg.shard_op(ops.relu, counts=((1, 1),))
    assert list(annotations(whole, FLOATS).values()) == ["mesh(repeat=1) [_, _]"] * 2


class Cut(nn.Module):
    """Two products and a ReLU with strategies, where there are any."""

    def __init__(self, counts: bool) -> None:
        self.first = nn.Linear(24, 32, bias=False, dtype="f64")
        self.last = nn.Linear(32, 6, bias=False, dtype="f64")
        mesh = ProcessMesh.grid(a=4) if counts else None
        self.column = dg.shard_op(ops.matmul, mesh, counts=((1, 1), (1, 4)))
        self.row = dg.shard_op(ops.matmul, mesh, counts=((1, 4), (4, 1)))
        self.relu = dg.shard_op(ops.relu, mesh, counts=((2, 2),))

    def forward(self, x: Any) -> Any:
        return self.row(self.relu(self.column(x, self.first.weight)), self.last.weight)


def test_training_with_strategies_equals_one_rank() -> None:
    rng = np.random.default_rng(2)
    data = rng.normal(size=(12, 24)), rng.integers(0, 6, 12, dtype="i4")
    losses = []
    for counts in (False, True):
        engine = dg.Engine(Cut(counts), nn.CrossEntropy(), optim.SGD(lr=0.1))
        engine.fit(data, batch_size=4, shuffle=False, progress=False)
        losses.append(engine.history.losses)
        assert len(engine.plan.build.ranks) == (4 if counts else 1)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)


@pytest.mark.parametrize(
    ("function", "mesh", "counts", "message"),
    [
        (ops.matmul, ..., ((2, 1),), r"counts are \(\(2, 1\),\) but the call has 2 tensors; give one tuple"),
        (ops.matmul, ..., ((2, 1), (1,)), r"counts of tensor 1 are \(1,\) but it has 2 dims; give a number"),
        (ops.matmul, ..., ((2, 0), (1, 1)), r"counts of tensor 0 are \(2, 0\) but it has 2 dims"),
        (ops.matmul, ..., ((2, 1), "14"), "counts of tensor 1 are '14' but it has 2 dims"),
        (
            ops.matmul,
            ...,
            ((1, 2), (4, 1)),
            "cut index k of matmul into 2 in dim 1 of tensor 0, 4 in dim 0 of",
        ),
        (
            ops.matmul,
            EIGHT,
            ((3, 1), (1, 1)),
            r"counts make 3 parts but mesh\(dp=8\) has 8 ranks, which they do",
        ),
        (
            lambda x, w: ops.relu(x @ w),
            ...,
            ((2, 1), (1, 1)),
            "but the call computes matmul, relu; give counts to",
        ),
        (lambda x, w: x, ..., ((2, 1), (1, 1)), "counts are those of one op but the call computes none"),
    ],
)
def test_mistakes_are_named(function: Any, mesh: Any, counts: Any, message: str) -> None:
    cut = dg.shard_op(function, mesh, counts=counts)
    with pytest.raises(ShardingError, match=rf"shard_op \(.*\)?: .*{message}"):
        trace(cut, FLOATS, ((16, 32), "f32"))


def test_what_an_op_needs_whole_and_what_excludes_counts() -> None:
    cut = dg.shard_op(ops.softmax, counts=((1, 2),))
    with pytest.raises(
        ShardingError, match="cut dim 1 of tensor 0 into 2 parts but softmax needs it whole; give"
    ):
        trace(cut, FLOATS)
    with pytest.raises(
        ShardingError, match=r"shard_op \(.*\) has counts and in_specs; leave one of them out"
    ):
        dg.shard_op(ops.relu, EIGHT, [["dp", None]], counts=((2, 1),))
    with pytest.raises(ShardingError, match=r"shard_op \(.*\) has no mesh and no counts; give it a mesh, or"):
        dg.shard_op(ops.relu)
