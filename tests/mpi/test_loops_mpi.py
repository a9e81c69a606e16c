"""Models with loops on the ranks of `mpiexec -n 2 python -m pytest -m mpi`, or 4 or 6 of them."""

from __future__ import annotations

import pytest
from support.loops.models import CASES, check

from distgraph.runtime.launch.mpi_rank import ranks_of_job

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_rank(case: str) -> None:
    meshes = CASES[case][0]
    needed = 1 + max((max(mesh.members) for mesh in meshes if mesh is not None), default=0)
    if needed > ranks_of_job():
        pytest.skip(f"needs {needed} ranks; there are {ranks_of_job()}")
    check(case)
