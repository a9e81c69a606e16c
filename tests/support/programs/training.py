"""A small model on many layouts, and a program in plain NumPy that trains the same one."""

from __future__ import annotations

from typing import Any

import numpy as np

import distgraph as dg
from distgraph import nn, ops, optim

P = dg.ProcessMesh.grid
LAYOUTS: dict[str, tuple[Any, Any]] = {  # meshes of the two halves of the model
    "serial": (None, None),
    "dp3": (P(dp=3), P(dp=3)),
    "tp2": (P(tp=2), P(tp=2)),
    "dp2tp2": (P(dp=2, tp=2), P(dp=2, tp=2)),
    "dp2tp3": (P(dp=2, tp=3), P(dp=2, tp=3)),
    "pp2": (P(dp=1), P(1, dp=1)),
    "pp1_3": (P(dp=1), P(1, dp=3)),
    "dp2pp2": (P(dp=2), P(2, tp=2)),
}
INPUTS, HIDDEN, OUTPUTS = 6, 10, 3


class Net(nn.Module):
    """relu MLP with dropout; half of it on each mesh."""

    def __init__(
        self, layout: str = "serial", dropout: float = 0.0, dtype: str = "f64", hidden: int = HIDDEN
    ) -> None:
        self.first, self.second = LAYOUTS[layout]
        self.up, self.down = nn.Linear(INPUTS, hidden, dtype=dtype), nn.Linear(hidden, OUTPUTS, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        if self.first is not None and "tp" in self.first.axes:
            dg.shard_tensor(self.up.weight, self.first, [None, "tp"])
        if self.second is not self.first and self.second is not None and "tp" in self.second.axes:
            dg.shard_tensor(self.down.weight, self.second, ["tp", None])

    def forward(self, x: Any) -> Any:
        if self.first is not None:
            x = dg.shard_tensor(x, self.first, ["dp" if "dp" in self.first.axes else None, None])
        hidden = self.dropout(ops.relu(self.up(x)))
        with dg.on(self.second if self.second is not self.first else None):
            return self.down(hidden)


def data(count: int = 50, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, INPUTS)), rng.integers(0, OUTPUTS, count).astype("i4")


def engine(
    layout: str = "serial", *, dropout: float = 0.0, micro: int = 1, seed: int = 5, **given: Any
) -> dg.Engine:
    given.setdefault("optimizer", optim.Adam(lr=0.01))
    hidden = given.pop("hidden", HIDDEN)
    strategy = dg.Strategy(micro_batches=micro)
    return dg.Engine(
        Net(layout, dropout, hidden=hidden), nn.CrossEntropy(), strategy=strategy, seed=seed, **given
    )


def by_hand(
    weights: dict[str, np.ndarray], batches: list[tuple[np.ndarray, np.ndarray]], rate: float
) -> list[float]:
    """Losses of the same model under plain gradient descent; changes `weights`."""
    losses = []
    for x, y in batches:
        rows = np.arange(len(x))
        before = x @ weights["up.weight"] + weights["up.bias"]
        hidden = np.maximum(before, 0)
        logits = hidden @ weights["down.weight"] + weights["down.bias"]
        shifted = logits - logits.max(1, keepdims=True)
        probability = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
        losses.append(float(-np.log(probability[rows, y]).mean()))
        grad = probability.copy()
        grad[rows, y] -= 1
        grad /= len(x)
        back = grad @ weights["down.weight"].T * (before > 0)
        step = {
            "down.weight": hidden.T @ grad,
            "down.bias": grad.sum(0),
            "up.weight": x.T @ back,
            "up.bias": back.sum(0),
        }
        for name, change in step.items():
            weights[name] -= rate * change
    return losses


def whole(trained: dg.Engine, name: str) -> np.ndarray:
    """A parameter put together from its blocks (in-process ranks)."""
    record = trained.memory.records[name]
    full = np.full(record.shape, np.nan)
    for rank in record.attr.mesh.members:
        full[record.attr.spec.slices(record.shape, record.attr.mesh, rank)] = trained.memory.block(name, rank)
    return full
