"""Interleaved 1F1B and ZB-H1 on the ranks of `mpiexec -n 4 python -m pytest tests/mpi`."""

from __future__ import annotations

import numpy as np
import pytest

import distgraph as dg
from distgraph import optim
from distgraph.models import GPT, GPTConfig
from distgraph.models.megatron_layout import stages
from distgraph.runtime.launch.launch import current_transport

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
