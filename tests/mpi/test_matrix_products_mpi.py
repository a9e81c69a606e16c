"""Distributed matrix products and their gradients on MPI ranks.

mpiexec -n 4 python -m pytest -m mpi tests/mpi/test_matrix_products_mpi.py     # or -n 2
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.programs.matrix_products import FLOWS, Product, product
from support.programs.partitioned import joined, run_rank

from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.passes.matmul_algorithms import MATMUL_ALGORITHMS
from distgraph.runtime.launch.mpi_rank import current_transport, ranks_of_job
from distgraph.runtime.program.build import build

pytestmark = pytest.mark.mpi
MESHES = ((2, 2), (1, 2), (2, 1), (4, 1), (1, 4))
SLICED = ((2, 1), (4, 8))


def check(case: Product) -> None:
    """Compute on all ranks; rank 0 compares with NumPy."""
    transport = current_transport()
    assert transport is not None
    built = build(case.completed())
    feeds, params = case.arrays()
    mine = run_rank(built, transport, [feeds], params) if transport.rank in built.ranks else None
    held = transport.gather_objects(mine)
    if held is not None:
        outputs, _ = joined(built, held)
        for name, expected in case.expected().items():
            (value,) = outputs[name]
            assert np.abs(value - expected).max() <= 1e-12 * max(1.0, np.abs(expected).max()), name
    transport.barrier()


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("mesh", MESHES, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("name", sorted(MATMUL_ALGORITHMS))
def test_products_and_gradients_are_those_of_numpy(name: str, mesh: tuple[int, int], flow: str) -> None:
    if mesh[0] * mesh[1] > ranks_of_job():
        pytest.skip(f"needs {mesh[0] * mesh[1]} ranks; there are {ranks_of_job()}")
    if name == "cannon" and mesh[0] != mesh[1]:
        pytest.skip("needs a square mesh")
    for slices, block in SLICED if name == "meshslice" else ((1, 1),):
        check(product(*mesh, flow, name, slices, block))
    for ring in ("rows", "cols") if name == "wang" and min(mesh) > 1 else ():
        check(replace(product(*mesh, flow, name), algorithm=MatmulAlgorithm(name, ring=ring)))
