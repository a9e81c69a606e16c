"""Mixtures of experts on several ranks: the losses of one rank, messages, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops
from distgraph.engine import train_graph
from distgraph.errors import GraphError, ShardingError
from distgraph.passes.complete import complete
from distgraph.passes.lower import lower
from distgraph.passes.reshard import reshard

GRID = dg.ProcessMesh.grid
GROUPS, TOKENS, WIDTH, HIDDEN, EXPERTS = 8, 6, 8, 12, 6


class Block(nn.Module):
    """A residual mixture, its loss with the auxiliary one."""

    def __init__(self, top_k: int, mesh: dg.ProcessMesh | None = None, **axes: Any) -> None:
        self.moe = nn.MoE(WIDTH, HIDDEN, EXPERTS, 0.8, dtype="f64", bias=True, top_k=top_k)
        self.moe.split_experts(mesh, "ep", **axes)
        self.first = nn.Linear(WIDTH, WIDTH, dtype="f64")

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        return x + self.moe(x)

    def loss(self, y: Any, t: Any) -> Any:
        """Mean squared error and the auxiliary loss."""
        return ops.mean((y - t) * (y - t)) + 0.05 * self.moe.loss


LAYOUTS: dict[str, tuple[dg.ProcessMesh, dict[str, Any]]] = {
    "ep4": (GRID(ep=4), {"batch": "ep"}),  # 2, 2, 2 and no experts
    "ep3": (GRID(ep=3), {"batch": "ep"}),
    "dp2 ep2": (GRID(dp=2, ep=2), {"batch": ("dp", "ep")}),
    "dp2 ep3": (GRID(dp=2, ep=3), {"batch": ("dp", "ep")}),
    "ep2 tp2": (GRID(ep=2, tp=2), {"batch": "ep", "hidden": "tp"}),
}


def engine(top_k: int, layout: str | None = None) -> dg.Engine:
    """To train the block."""
    mesh, axes = LAYOUTS[layout] if layout else (None, {})
    model = Block(top_k, mesh, **axes)
    dropped = {"dropped": lambda y, t: model.moe.dropped}
    return dg.Engine(model, model.loss, dg.optim.AdamW(0.01), metrics=dropped, seed=2)


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets."""
    rng = np.random.default_rng(7)
    return rng.normal(size=(GROUPS, TOKENS, WIDTH)), rng.normal(size=(GROUPS, TOKENS, WIDTH))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_training_is_that_of_one_rank(layout: str, top_k: int) -> None:
    serial, split = engine(top_k), engine(top_k, layout)
    for _ in range(3):
        expected, found = serial.run(batch()), split.run(batch())
        assert found["loss"] == pytest.approx(expected["loss"], rel=0, abs=1e-12)
        assert found["dropped"] == pytest.approx(expected["dropped"], rel=0, abs=1e-12)
    assert expected["dropped"] > 0


@pytest.mark.parametrize("top_k", [1, 2])
def test_tokens_are_sent_to_their_experts_and_back(top_k: int) -> None:
    mesh, axes = LAYOUTS["dp2 ep2"]
    model = Block(top_k, mesh, **axes)
    shaped = ((GROUPS, TOKENS, WIDTH), "f64")
    lowered = lower(reshard(complete(train_graph(model, (shaped, shaped)))))
    moved = [op for op in lowered.ops if op.kind == "comm.all_to_all"]
    assert Counter(op.role for op in moved) == {"forward": 2, "backward": 2}  # of tokens, of their gradients
    assert {op.result.size for op in moved} == {EXPERTS * GROUPS * model.moe.capacity(TOKENS) * WIDTH}
    experts = ((EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    gathered = [op for op in lowered.ops if op.kind == "comm.all_gather" and op.role != "optimize"]
    assert not [op for op in gathered if op.result.shape in experts]


def test_more_experts_a_token_than_there_are() -> None:
    with pytest.raises(GraphError, match=r"each token to 7 experts but has 6; take top_k from 1 to 6"):
        nn.MoE(4, 8, 6, top_k=7)
    with pytest.raises(GraphError, match=r"capacity_factor of MoE is 0 but must be a number above 0"):
        nn.MoE(4, 8, 6, capacity_factor=0)


def test_an_axis_that_the_mesh_does_not_have() -> None:
    with pytest.raises(ShardingError, match="ep"):
        nn.MoE(4, 8, 6).split_experts(GRID(dp=2), "ep")


def test_nothing_before_the_first_call() -> None:
    with pytest.raises(GraphError, match="dropped nothing before it is called"):
        _ = nn.MoE(4, 8, 6).dropped
