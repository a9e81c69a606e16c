"""Recurrent models whose layers are loops, and how they train: on meshes, in micro-batches, with dropout."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from support.programs.equivalence import gathered

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine import Engine
from distgraph.ir.mesh import ProcessMesh
from distgraph.plan.strategy import Strategy

grid = ProcessMesh.grid
Meshes = tuple[ProcessMesh | None, ...]


class Recurrent(nn.Module):
    """A recurrent layer, as a loop or turn by turn; its modules are called in the body."""

    def __init__(self, mesh: ProcessMesh | None, rate: float, scanned: bool, recompute: bool) -> None:
        self.read, self.keep = nn.Linear(4, 12, dtype="f64"), nn.Linear(12, 12, dtype="f64")
        self._mesh, self._rate, self._scanned, self._recompute = mesh, rate, scanned, recompute
        for layer in (self.read, self.keep):
            if mesh is not None and "tp" in mesh.sizes:
                dg.shard_tensor(layer.weight, mesh, [None, "tp"])

    def forward(self, x: Any) -> Any:
        if self._mesh is not None and "dp" in self._mesh.sizes:
            dg.shard_tensor(x, self._mesh, ["dp", None, None])

        def turn(c: Any, v: Any) -> Any:
            h = ops.tanh(self.read(v) + self.keep(c[0]) + 0.1 * c[1])
            h = ops.dropout(h, self._rate) if self._rate else h
            return (h, c[0]), h

        zero, turns = ops.zeros((x.shape[0], 12), "f64"), ops.transpose(x, (1, 0, 2))
        if self._scanned:
            carry, hs = ops.scan(turn, (zero, zero), turns, recompute=self._recompute)
            return carry[0] + ops.mean(hs, 0)
        carry, rows = (zero, zero), []
        for number in range(turns.shape[0]):
            carry, row = turn(carry, turns[number])
            rows.append(row)
        return carry[0] + ops.mean(ops.stack(rows, 0), 0)


class Model(nn.Module):
    """Two recurrent layers, each on its mesh."""

    def __init__(
        self, meshes: Meshes, rate: float = 0.0, *, scanned: bool = True, recompute: bool = False
    ) -> None:
        self.first = Recurrent(meshes[0], rate, scanned, recompute)
        self.between = nn.Linear(12, 4, dtype="f64")
        self.second = Recurrent(meshes[-1], rate, scanned, recompute)
        self.head = nn.Linear(12, 3, dtype="f64")
        self._meshes = meshes

    def forward(self, x: Any) -> Any:
        with dg.on(self._meshes[0]):
            y = self.between(self.first(x))
        with dg.on(self._meshes[-1]):
            turns = ops.reshape(y, (y.shape[0], 1, 4)) * np.array([[[1.0], [0.5], [2.0]]])
            return self.head(self.second(turns))


def loss(y: Any, target: Any) -> Any:
    return ops.mean((y - target) * (y - target))


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(5)
    return [(rng.standard_normal((12, 5, 4)), rng.standard_normal((12, 3))) for _ in range(3)]


def engine(meshes: Meshes, strategy: Strategy, rate: float = 0.0, plan: Any = None, **how: bool) -> Engine:
    def placed_loss(y: Any, target: Any) -> Any:
        with dg.on(meshes[-1]):
            return loss(y, target)

    model = Model(meshes, rate, **how)
    return Engine(model, placed_loss, optim.Adam(lr=1e-2, eps=1e-8), strategy=strategy, seed=3, plan=plan)


def train(
    meshes: Meshes, strategy: Strategy, rate: float = 0.0, **how: bool
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    trained = engine(meshes, strategy, rate, **how)
    try:
        losses = [trained.run(batch)["loss"] for batch in batches()]
        return np.array(losses), gathered(trained)
    finally:
        trained.close()


@cache
def reference(rate: float) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Without loops if there is no dropout, whose numbers differ between a loop and repeated modules."""
    return train((None,), Strategy(), rate, scanned=bool(rate))


CASES: dict[str, tuple[Meshes, dict[str, Any], float, bool]] = {
    "serial": ((None,), {"micro_batches": 2}, 0.0, False),
    "dp2-zero3": ((grid(dp=2),), {"micro_batches": 3, "zero": 3}, 0.0, False),
    "dp2-dropout": ((grid(dp=2),), {"micro_batches": 3, "zero": 1}, 0.5, True),
    "dp2-tp2": ((grid(dp=2, tp=2),), {"zero": 2}, 0.0, True),
    "dp2-tp3-dropout": ((grid(dp=2, tp=3),), {"micro_batches": 2}, 0.5, False),
    "stages": ((grid(dp=2), grid(2, tp=2)), {"micro_batches": 3, "schedule": "1f1b"}, 0.0, False),
    "stages-zb": ((grid(tp=2), grid(2, dp=2)), {"micro_batches": 3, "schedule": "zb-h1"}, 0.5, True),
}


def check(case: str) -> None:
    """Train a case, and compare with one rank."""
    meshes, strategy, rate, recompute = CASES[case]
    losses, tensors = train(meshes, Strategy(**strategy), rate, recompute=recompute)
    wanted, whole = reference(rate)
    np.testing.assert_allclose(losses, wanted, rtol=1e-11)
    for name, array in tensors.items():
        np.testing.assert_allclose(array, whole[name], rtol=1e-9, atol=1e-12, err_msg=name)
