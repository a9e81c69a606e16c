"""A flipped bit on one rank of `mpiexec -n 2 python -m pytest tests/mpi` is told on all of them."""

from __future__ import annotations

import pytest
from support.programs.replicated import engine, flip
from support.programs.training import LAYOUTS, data

from distgraph import ProcessMesh
from distgraph.errors import RuntimeFault
from distgraph.runtime.launch.launch import current_transport

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
