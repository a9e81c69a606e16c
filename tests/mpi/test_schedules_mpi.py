"""Interleaved 1F1B, ZB-H1 and tasks of the user on the ranks of `mpiexec -n 4 python -m pytest tests/mpi`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.models import GPT, GPTConfig
from distgraph.models.megatron_layout import stages
from distgraph.runtime.launch.mpi_rank import current_transport

pytestmark = pytest.mark.mpi
grid = dg.ProcessMesh.grid


def losses(meshes: list[dg.ProcessMesh], policy: str) -> list[float]:
    model = GPT(GPTConfig(hidden=16, layers=4, heads=2, vocabulary=40, sequence=8))
    if meshes:
        stages(model, meshes)
    tokens = np.random.default_rng(0).integers(0, 40, (8, 9)).astype("i4")
    strategy = dg.Strategy(schedule=policy, micro_batches=4)
    trained = dg.Engine(model, model.loss, optim.AdamW(3e-2, eps=1e-3), strategy=strategy, seed=3)
    return [trained.run((tokens[:, :-1], tokens[:, 1:]))["loss"] for _ in range(3)]


@pytest.mark.parametrize(
    ("policy", "count", "chunks"),
    [("zb-h1", 2, 1), ("zb-h1", 4, 1), ("interleaved-1f1b", 2, 2)],
)
def test_training_equals_one_rank(policy: str, count: int, chunks: int) -> None:
    transport = current_transport()
    assert transport is not None
    if count > transport.size:
        pytest.skip(f"needs {count} ranks; there are {transport.size}")
    assert losses([grid(rank, dp=1) for rank in range(count)] * chunks, policy) == losses([], "1f1b")


class Layers(nn.Module):
    """Four layers on two meshes, each a task if `named`; the loss is outside of tasks."""

    def __init__(self, meshes: list[dg.ProcessMesh], named: bool) -> None:
        self.layers = [nn.Linear(8, 8) for _ in range(4)]
        self.meshes, self.named = meshes, named

    def forward(self, x: Any) -> Any:
        for n, layer in enumerate(self.layers):
            mesh = self.meshes[n // 2] if self.meshes else None
            with dg.on(mesh), dg.task(f"layer{n}") if self.named else nullcontext():
                x = x + ops.tanh(layer(x))
        return x


ORDERED = """
tasks n=2 m=2
F0:layer0 -
F0:layer1 -
F1:layer0 F0
F1:layer1 B0
B0:layer1 F1
B0:layer0 B1
B1:layer1 -
B1:layer0 -
"""


@pytest.mark.parametrize("executor", ["static", "actors"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", ORDERED])
@pytest.mark.parametrize("size", [1, 2])
def test_tasks_of_the_user(size: int, schedule: str, executor: str) -> None:
    transport = current_transport()
    assert transport is not None
    if 2 * size > transport.size:
        pytest.skip(f"needs {2 * size} ranks; there are {transport.size}")
    batch = [np.random.default_rng(0).normal(size=(12, 8)).astype("f4") for _ in range(2)]
    results = []
    for meshes in ([grid(0, dp=size), grid(size, dp=size)], []):
        strategy = dg.Strategy(schedule=schedule if meshes else None, micro_batches=2, executor=executor)
        model = Layers(meshes, named=bool(meshes))
        engine = dg.Engine(model, nn.MeanSquaredError(), optim.AdamW(1e-2), strategy=strategy, seed=3)
        results.append([engine.run(batch)["loss"] for _ in range(3)])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)
