"""Gradients of a parameter that two stages share cross between them once a step, not once a micro-batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn
from distgraph.engine.compile.train_graph import train_graph
from distgraph.models import GPT, GPTConfig, stages
from distgraph.passes.complete import complete
from distgraph.runtime.program.build import build


class Tied(nn.Module):
    """One matrix, used by two stages and on both sides of the border."""

    def __init__(self, stages: tuple[dg.ProcessMesh, dg.ProcessMesh] | None) -> None:
        super().__init__()
        self.shared = nn.Parameter((6, 6), "f64", init=("normal", 0.3))
        self.stages = stages

    def forward(self, x: dg.Tensor) -> dg.Tensor:
        first, second = self.stages or (None, None)
        with dg.on(first):
            x = dg.ops.tanh(x @ self.shared)
        with dg.on(second):
            return dg.ops.tanh(x @ self.shared) @ self.shared


def train(stages: tuple[dg.ProcessMesh, dg.ProcessMesh] | None, micro: int) -> tuple[list[float], dg.Engine]:
    engine = dg.Engine(
        Tied(stages), nn.MeanSquaredError(), dg.optim.Adam(lr=0.01), strategy=dg.Strategy(micro_batches=micro)
    )
    x, y = np.random.default_rng(5).normal(size=(2, 12, 6))
    losses = engine.fit((x, y), epochs=4, batch_size=12, shuffle=False, progress=False).losses
    return losses, engine


@pytest.mark.parametrize("micro", [1, 3])
def test_shared_gradient_crosses_once(micro: int) -> None:
    stages = (dg.ProcessMesh.grid(s=1), dg.ProcessMesh.grid(1, tp=2))
    serial, _ = train(None, 1)
    losses, engine = train(stages, micro)
    np.testing.assert_allclose(losses, serial, rtol=1e-10)
    parts = engine.plan.build.parts
    sends = [
        (part.kind, part.per_micro and op.name not in part.tail)
        for part in parts.tasks
        for op in part.body
        if op.kind == "comm.transfer" and op.role == "backward" and part.mesh == stages[1]
    ]
    # the gradient of the activation goes back with every micro-batch, that of the matrix once
    assert sorted(per_micro for _, per_micro in sends) == [False, True]


def test_shared_gradient_crosses_once_also_where_an_op_is_decomposed() -> None:
    """Classes split over ranks decompose the loss, after which meshes are found anew."""
    first, second = dg.ProcessMesh.grid(dp=2, tp=3), dg.ProcessMesh.grid(6, dp=2, tp=3)
    model = GPT(GPTConfig(hidden=12, layers=2, heads=3, vocabulary=31, sequence=6, tied=True))
    stages(model, [first, second])
    tokens = ((4, 6), "i32")
    completed = complete(replace(train_graph(model, (tokens, tokens)), micro_batches=3), first)
    assert not any(op.kind == "cross_entropy" for op in completed.ops)
    parts = build(completed, micro_batches=3).parts
    back = [
        op.name not in part.tail
        for part in parts.tasks
        for op in part.body
        if part.kind == "backward"
        and part.mesh == second
        and op.kind == "comm.transfer"
        and op.role == "backward"
    ]
    assert sorted(back) == [False, True]


def test_a_sum_with_an_annotation_stays() -> None:
    """The gradient of the sum is that of the bias, from two meshes; where it is annotated it crosses."""
    first, second = dg.ProcessMesh.grid(a=1), dg.ProcessMesh.grid(1, a=2)

    class Model(nn.Module):
        def __init__(self, *, placed: bool) -> None:
            self.bias = nn.Parameter((4, 6), "f64", init=("normal", 0.3))
            self.placed = placed

        def forward(self, x: dg.Tensor) -> dg.Tensor:
            h = x + self.bias
            if self.placed:
                dg.shard_tensor(h, first, ["a", None], gradient=True)
            with dg.on(second if self.placed else None):
                far = dg.ops.tanh(h)
            return dg.ops.mean(far) + dg.ops.mean(dg.ops.square(dg.ops.sin(h)))

    losses = []
    for placed in (False, True):
        strategy = dg.Strategy(micro_batches=2)
        engine = dg.Engine(Model(placed=placed), None, dg.optim.SGD(lr=0.5), strategy=strategy)
        x = np.random.default_rng(1).normal(size=(8, 6))
        losses.append(engine.fit((x,), epochs=3, batch_size=8, shuffle=False, progress=False).losses)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-12)
