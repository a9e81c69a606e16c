"""Pipelines whose stages take unequal times, and which branch: more than one task of a stage may be ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import distgraph as dg
from distgraph import nn, ops, optim

WIDTH, CLASSES, SAMPLES = 12, 5, 48
grid = dg.ProcessMesh.grid


class Branching(nn.Module):
    """A layer on the first mesh, a branch on each other one (of unequal depth), and their sum on the first.

    Args:
        meshes: where; none for one rank.
        depths: layers of the branches.
    """

    def __init__(self, meshes: Sequence[dg.ProcessMesh], depths: Sequence[int] = (1, 4)) -> None:
        self.first, self.last = nn.Linear(WIDTH, WIDTH, dtype="f64"), nn.Linear(WIDTH, CLASSES, dtype="f64")
        self.branches = [
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype="f64") for _ in range(depth))) for depth in depths
        ]
        self._meshes = meshes

    def mesh(self, place: int) -> dg.ProcessMesh | None:
        """The mesh at a place; the last ones repeat."""
        return self._meshes[place % len(self._meshes)] if self._meshes else None

    def forward(self, x: Any) -> Any:
        with dg.on(self.mesh(0)):
            h = ops.tanh(self.first(x))
        made = []
        for place, branch in enumerate(self.branches):
            with dg.on(self.mesh(place + 1)):
                made.append(ops.sin(branch(h)))
        with dg.on(self.mesh(0)):
            return self.last(made[0] + made[1] * 0.5)


class Row(nn.Module):
    """Two layers on each mesh, one mesh after the other; axis dp splits the batch, axis tp the weights."""

    def __init__(self, meshes: Sequence[dg.ProcessMesh]) -> None:
        self._meshes: list[dg.ProcessMesh | None] = list(meshes) or [None] * 3
        self.up = [nn.Linear(WIDTH, 8 * (1 + place), dtype="f64") for place in range(len(self._meshes))]
        self.down = [nn.Linear(8 * (1 + place), WIDTH, dtype="f64") for place in range(len(self._meshes))]
        for mesh, up, down in zip(self._meshes, self.up, self.down, strict=True):
            if mesh is not None and "tp" in mesh.sizes:
                dg.shard_tensor(up.weight, mesh, [None, "tp"])
                dg.shard_tensor(down.weight, mesh, ["tp", None])

    def forward(self, x: Any) -> Any:
        for mesh, up, down in zip(self._meshes, self.up, self.down, strict=True):
            with dg.on(mesh):
                x = x + down(ops.tanh(up(x)))
                if mesh is not None and "dp" in mesh.sizes:
                    dg.shard_tensor(x, mesh, ["dp", None])
        return x


def row_engine(meshes: Sequence[dg.ProcessMesh], **strategy: Any) -> dg.Engine:
    """An engine for a row of stages."""

    def loss(logits: Any, labels: Any) -> Any:
        with dg.on(meshes[-1] if meshes else None):
            return nn.CrossEntropy()(logits, labels)

    optimizer = optim.AdamW(3e-2, eps=1e-3)
    return dg.Engine(Row(meshes), loss, optimizer, strategy=dg.Strategy(**strategy), seed=2)


def branching_engine(meshes: Sequence[dg.ProcessMesh], **strategy: Any) -> dg.Engine:
    """An engine for a branching program."""
    model = Branching(meshes)

    def loss(logits: Any, labels: Any) -> Any:
        with dg.on(model.mesh(0)):
            return nn.CrossEntropy()(logits, labels)

    return dg.Engine(model, loss, optim.AdamW(3e-2, eps=1e-3), strategy=dg.Strategy(**strategy), seed=2)


def batch() -> tuple[np.ndarray, np.ndarray]:
    """One batch."""
    rng = np.random.default_rng(1)
    return rng.normal(size=(SAMPLES, WIDTH)), rng.integers(0, CLASSES, SAMPLES).astype("i4")
