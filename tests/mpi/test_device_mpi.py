"""Training with device="gpu" on a stand-in for CuPy, on every rank of `mpiexec -n 2 python -m pytest
tests/mpi`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.devices import fake_cupy
from support.programs.equivalence import Case, Layout, grid, train

from distgraph.runtime.execute import device
from distgraph.runtime.launch.mpi_rank import current_transport

pytestmark = pytest.mark.mpi
TWO = (Layout("dp2", (grid(dp=2),), rows="dp"), Layout("pp2", (grid(0, one=1), grid(1, one=1))))


@pytest.mark.parametrize("layout", TWO, ids=lambda layout: layout.name)
def test_ranks_that_share_a_gpu_exchange_through_the_host(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = current_transport()
    assert transport is not None
    case = Case("gpt", layout, micro=2, dtype="f32")
    wanted = train(case, 3)
    fake_cupy.install(monkeypatch, devices=1)
    try:
        found = train(replace(case, device="gpu"), 3)
    finally:
        device._NCCL.clear()  # it belongs to the stand-in
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-5)
    for name, block in wanted.tensors.items():
        assert found.tensors[name].shape == block.shape
