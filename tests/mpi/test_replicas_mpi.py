"""Copies that differ between ranks of `mpiexec -n 2 python -m pytest tests/mpi` are told on all of them."""

from __future__ import annotations

import numpy as np
import pytest
from support.programs.replicated import engine, flip
from support.programs.training import LAYOUTS, data

import distgraph as dg
from distgraph import ProcessMesh, nn, optim
from distgraph.errors import RuntimeFault
from distgraph.runtime.launch.mpi_rank import current_transport

pytestmark = pytest.mark.mpi


def test_a_flipped_bit_is_told_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = current_transport()
    assert transport is not None
    mesh = ProcessMesh.grid(dp=transport.size)
    monkeypatch.setitem(LAYOUTS, "dp", (mesh, mesh))
    trained = engine("dp")
    batch = data(2 * 12)
    trained.run(batch)
    if transport.rank == 1:
        flip(trained, "up.weight", 1)
    with pytest.raises(RuntimeFault, match=r"after step 2 copies of param up.weight.* differ .*rank 1"):
        trained.run(batch)


def test_ranks_that_are_given_different_data_are_not_called_faulty() -> None:
    """The batch is whole on every rank, and each rank passes another one: that is named, not its effect."""
    transport = current_transport()
    assert transport is not None
    strategy = dg.Strategy(mesh=ProcessMesh.grid(tp=transport.size), verify_replicas=1)
    trained = dg.Engine(nn.Linear(6, 3), nn.CrossEntropy(), optim.SGD(lr=0.1), strategy=strategy)
    x, y = np.ones((8, 6), "f4"), np.zeros(8, "i4")
    trained.run((x, y))
    with pytest.raises(RuntimeFault, match=r"step 2 read a batch that .* give every rank the same arrays"):
        trained.run((x + np.float32(transport.rank), y))
