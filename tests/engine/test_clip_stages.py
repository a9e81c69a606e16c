"""Gradients that are clipped by their common norm stay on their stages: one number travels between them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine import Engine
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy

grid = ProcessMesh.grid
MESHES: dict[str, tuple[ProcessMesh, ...]] = {
    "two": (grid(0, dp=2), grid(2, dp=2)),
    "three": (grid(0, dp=1), grid(1, dp=1), grid(2, dp=1)),
    "unequal": (grid(0, dp=2, tp=2), grid(4, tp=2), grid(6, dp=1)),
    "back": (grid(0, dp=2), grid(2, dp=1), grid(0, dp=2)),
}
LIMIT = 0.05


class Stages(nn.Module):
    """A layer a stage; with `tied` the first weight is read by the last stage again."""

    def __init__(self, meshes: Sequence[ProcessMesh] | None, count: int, tied: bool) -> None:
        self.layers = [nn.Linear(6, 6, dtype="f64") for _ in range(count)]
        self._meshes, self.tied = meshes, tied
        for layer, mesh in zip(self.layers, meshes or (), strict=False):
            axis = "tp" if "tp" in mesh.sizes else None
            dg.shard_tensor(layer.weight, mesh, [None, axis])

    def forward(self, x: Any) -> Any:
        for number, layer in enumerate(self.layers):
            if self._meshes is not None:
                with dg.on(self._meshes[number]):
                    x = ops.tanh(layer(x))
                    if self.tied and number == len(self.layers) - 1:
                        x = x @ self.layers[0].weight
            else:
                x = ops.tanh(layer(x))
                if self.tied and number == len(self.layers) - 1:
                    x = x @ self.layers[0].weight
        return x


def trained(
    meshes: Sequence[ProcessMesh] | None, count: int, tied: bool, clip: float | None, **options: Any
) -> tuple[list[float], Graph, Plan | None]:
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(8, 6)), rng.normal(size=(8, 6))
    optimizer = optim.Adam(lr=0.05, clip_norm=clip, eps=1e-3)
    how = options or {"strategy": Strategy(micro_batches=1 if meshes is None else 4)}
    engine = Engine(Stages(meshes, count, tied), nn.MeanSquaredError(), optimizer, seed=2, **how)
    with closing(engine):
        plan = engine.prepare(batch)
        (compiled,) = engine._session.programs.values()
        portable = None if meshes is None else plan.portable
        return [engine.run(batch)["loss"] for _ in range(4)], compiled.build.lowered, portable


def crossings(graph: Graph) -> list[tuple[int, ...]]:
    """Shapes of what goes from mesh to mesh behind the micro-batches."""
    return [op.result.shape for op in graph.ops if op.kind == "comm.transfer" and op.role == "optimize"]


def sent(graph: Graph) -> int:
    """Bytes of all tensors that go from mesh to mesh in a step of one micro-batch."""
    return sum(op.result.nbytes for op in graph.ops if op.kind == "comm.transfer")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MESHES)
def test_one_number_travels_between_stages(name: str, tied: bool) -> None:
    meshes = MESHES[name]
    found, lowered, plan = trained(meshes, len(meshes), tied, LIMIT)
    serial, _, _ = trained(None, len(meshes), tied, LIMIT)
    free, plain, _ = trained(meshes, len(meshes), tied, None)
    np.testing.assert_allclose(found, serial, rtol=1e-9)
    assert found[-1] != free[-1]
    assert set(crossings(lowered)) == {()}
    assert len(crossings(lowered)) - len(crossings(plain)) <= 2 * len(set(meshes)) + 2
    sent = [
        sum(op.operands[0].nbytes for op in g.ops if op.kind == "comm.transfer") for g in (lowered, plain)
    ]
    assert sent[0] - sent[1] <= 8 * (2 * len(set(meshes)) + 2)
    planned, again, _ = trained(meshes, len(meshes), tied, LIMIT, plan=plan)
    np.testing.assert_allclose(planned, serial, rtol=1e-9)
    assert sorted(crossings(again)) == sorted(crossings(lowered))
