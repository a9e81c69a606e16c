"""Mixed precision on every rank of `mpiexec -n 4 python -m pytest tests/mpi`: losses, overflow, scale."""

from __future__ import annotations

import numpy as np
import pytest
from support.mixed_precision import EPS, LAYOUTS, STEPS, batch, engine, serial_losses

import distgraph as dg
from distgraph.runtime.launch.mpi_rank import current_transport

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "dp2tp2", "dp2pp2"])
def test_layouts_train_as_one_rank(layout: str) -> None:
    transport = current_transport()
    assert transport is not None
    if max(rank for mesh in LAYOUTS[layout] for rank in mesh.members) >= transport.size:
        pytest.skip(f"{layout} needs more than {transport.size} ranks")
    precision = dg.MixedPrecision("fp16", loss_scale=2.0**24)
    trained = engine(layout, precision)
    trained.run(batch())
    assert trained.history.skipped == [1]  # on every rank: the gradients overflow
    while trained.step - len(trained.history.skipped) < STEPS:
        trained.run(batch())
    applied = [loss for n, loss in enumerate(trained.history.losses, 1) if n not in trained.history.skipped]
    np.testing.assert_allclose(applied, serial_losses("fp16"), rtol=2 * EPS["fp16"])
    mine = (trained.history.losses, trained.history.skipped, trained._scalars()["loss_scale"])
    gathered = transport.gather_objects(mine, 0)
    assert gathered is None or all(each == gathered[0] for each in gathered)
