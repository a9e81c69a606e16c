"""Sequences split over ranks: mpiexec -n 4 python -m pytest -m mpi tests/mpi/test_long_sequences_mpi.py."""

from __future__ import annotations

import numpy as np
import pytest
from support.sequences.long_sequences import LAYOUTS, laid_out, losses, serial_losses

from distgraph.runtime.launch.mpi_rank import ranks_of_job

pytestmark = pytest.mark.mpi
CASES = [
    (layout, how)
    for layout in ("dp2 sp2", "sp4", "sp2 tp2", "pp2 sp2")
    for how in ("gather", "ring", "ulysses")
]


@pytest.mark.parametrize(("layout", "context_parallel"), CASES)
def test_training_is_that_of_one_rank(layout: str, context_parallel: str) -> None:
    needed = max(rank for mesh in LAYOUTS[layout][0] for rank in mesh.members) + 1
    if needed > ranks_of_job():
        pytest.skip(f"{layout} needs {needed} ranks; there are {ranks_of_job()}")
    found = losses(laid_out("gpt", 7, layout, context_parallel), 7)
    np.testing.assert_allclose(found, serial_losses("gpt", 7), rtol=0, atol=1e-12)
