"""Distributed matrix products on 4 ranks of an MPI job:

mpiexec -n 4 python -m pytest -m mpi tests/mpi/test_matrix_products_mpi.py
"""

from __future__ import annotations

import numpy as np
import pytest
from support.programs.matrix_products import FLOWS, product
from support.programs.partitioned import joined, run_rank

from distgraph.passes.matmul_algorithms import MATMUL_ALGORITHMS
from distgraph.runtime.launch.launch import current_transport
from distgraph.runtime.program.build import build

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", MATMUL_ALGORITHMS)
def test_every_algorithm_equals_the_serial_product(name: str, flow: str) -> None:
    transport = current_transport()
    assert transport is not None
    if transport.size < 4:
        pytest.skip(f"needs 4 ranks; there are {transport.size}")
    case = product(2, 2, flow, name, *((2, 2) if name == "meshslice" else ()))
    feeds, params = case.arrays()
    built = build(case.completed())
    mine = transport.rank in built.ranks
    held = transport.gather_objects(run_rank(built, transport, [feeds], params) if mine else None)
    if held is not None:
        found, _ = joined(built, held)
        for label, expected in case.expected().items():
            (value,) = found[label]
            assert np.abs(value - expected).max() <= 1e-12 * max(1.0, np.abs(expected).max()), label
    transport.barrier()
