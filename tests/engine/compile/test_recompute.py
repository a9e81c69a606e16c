"""Recomputation: the same numbers, and nothing inside a block is kept for the backward part."""

from __future__ import annotations

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn
from distgraph.array_api.trace import trace
from distgraph.passes.serial.dead_code_elimination import prune
from distgraph.passes.split_tasks import phases


class Net(nn.Module):
    """Three blocks with dropout."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.blocks = [nn.TransformerBlock(8, 2, dropout=0.1, dtype="f64") for _ in range(3)]
        self.again = again

    def forward(self, x: dg.Tensor) -> dg.Tensor:
        for block in self.blocks:
            x = dg.recompute(block)(x) if self.again else block(x)
        return x


def engine(again: bool, strategy: dg.Strategy | None = None) -> dg.Engine:
    return dg.Engine(Net(again), nn.MeanSquaredError(), dg.optim.Adam(lr=0.01), strategy=strategy, seed=3)


@pytest.mark.parametrize("micro", [1, 2])
def test_losses_are_the_same(rng: np.random.Generator, micro: int) -> None:
    x, y = rng.normal(size=(2, 8, 5, 8))
    plain = engine(False).fit((x, y), epochs=4, batch_size=4, progress=False)
    mesh = dg.ProcessMesh.grid(dp=2)
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp", micro_batches=micro)
    again = engine(True, strategy).fit((x, y), epochs=4, batch_size=4, progress=False)
    np.testing.assert_allclose(again.losses, plain.losses, rtol=1e-10)


def crossing(again: bool) -> set[str]:
    """Scopes whose forward results the backward part reads."""
    trained = engine(again)
    trained.run((np.zeros((4, 5, 8)), np.zeros((4, 5, 8))))
    graph = trained.plan.build.lowered
    parts = phases(graph)
    made = {v.name: op for t in parts.tasks if t.kind == "forward" for op in t.body for v in op.results}
    read = {v.name for t in parts.tasks if t.kind == "backward" for op in t.body for v in op.operands}
    return {made[name].scope for name in read & set(made)}


def test_only_inputs_of_blocks_cross() -> None:
    assert any("blocks.1.attn" in scope for scope in crossing(False))
    assert not any("attn" in scope or "mlp.up" in scope for scope in crossing(True))


def test_prune_drops_what_nobody_reads() -> None:
    graph = trace(lambda x: (x.sum(), dg.ops.exp(x * 2 + 1))[0], ((3, 5), "f32"))
    kinds = [op.kind for op in prune(graph).ops]
    assert "exp" not in kinds
    assert "reduce_sum" in kinds
    assert len(kinds) < len(graph.ops)
