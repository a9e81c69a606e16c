"""A small model whose layers are on meshes of different kinds of devices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

import distgraph as dg
from distgraph import nn, ops, optim

INPUTS, HIDDEN, OUTPUTS = 6, 10, 3
Meshes = Sequence[dg.ProcessMesh | None]


class Layers(nn.Module):
    """Linear layers with tanh and relu between them, one on each mesh; an axis dp splits the batch, an axis
    tp the weights."""

    def __init__(self, meshes: Meshes, dtype: str = "f64", dropout: float = 0.0) -> None:
        widths = [INPUTS, *[HIDDEN] * (len(meshes) - 1), OUTPUTS]
        self.meshes = meshes
        self.layers = [nn.Linear(a, b, dtype=dtype) for a, b in itertools.pairwise(widths)]
        self.dropout = nn.Dropout(dropout)
        for layer, mesh in zip(self.layers, meshes, strict=True):
            if mesh is not None and "tp" in mesh.axes:
                dg.shard_tensor(layer.weight, mesh, ["tp", None])

    def forward(self, x: Any) -> Any:
        for number, (layer, mesh) in enumerate(zip(self.layers, self.meshes, strict=True)):
            with dg.on(mesh):
                if mesh is not None:
                    x = dg.shard_tensor(x, mesh, ["dp" if "dp" in mesh.axes else None, None])
                if number:
                    x = self.dropout(ops.relu(x) + ops.tanh(x))
                x = layer(x)
        return x


def samples(count: int = 48, dtype: str = "f8") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.normal(size=(count, INPUTS)).astype(dtype), rng.integers(0, OUTPUTS, count).astype("i4")


def on(*kinds: str | Sequence[str], weights: Sequence[int] | None = None) -> list[dg.ProcessMesh]:
    """A mesh for each argument, over ranks of its own: one of a type, or an axis dp over several types."""
    meshes, start = [], 0
    for kind in kinds:
        size = 1 if isinstance(kind, str) else len(kind)
        mesh = dg.ProcessMesh.grid(start, dp=size)
        mesh = mesh if weights is None or size == 1 else mesh.weighted(dp=weights)
        meshes.append(mesh.requiring(kind))
        start += size
    return meshes


def engine(
    meshes: Meshes,
    optimizer: Any = None,
    dropout: float = 0.0,
    cluster: Any = None,
    plan: Any = None,
    **strategy: Any,
) -> dg.Engine:
    optimizer = optimizer or optim.SGD(lr=0.1, momentum=0.9)
    last = meshes[-1]

    def loss(logits: Any, labels: Any) -> Any:
        with dg.on(last):
            return nn.CrossEntropy()(logits, labels)

    return dg.Engine(
        Layers(meshes, dropout=dropout),
        loss,
        optimizer,
        strategy=dg.Strategy(**strategy),
        cluster=cluster,
        seed=5,
        plan=plan,
    )


def trained(meshes: Meshes, *, epochs: int = 2, **given: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of all steps, and the parameters after them."""
    made = engine(meshes, **given)
    made.fit(samples(), epochs=epochs, batch_size=16, progress=False, shuffle=False)
    found = list(made.history.losses), made.parameters()
    made.close()
    return found
