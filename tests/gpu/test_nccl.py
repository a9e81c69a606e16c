"""The NCCL transport on hardware; one GPU is enough: one rank on NCCL, two that share it through the host."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.devices import collective_cases as cases
from support.devices.on_device import OnDevice
from support.programs.rank_threads import run_ranks

from distgraph.runtime.transport import collectives
from distgraph.runtime.transport.cuda_copies import CudaCopies
from distgraph.runtime.transport.inprocess import InProcessTransport, connect
from distgraph.runtime.transport.nccl import NcclTransport
from distgraph.runtime.transport.staging import StagedTransport

pytestmark = pytest.mark.gpu

PLAIN = [case for case in cases.PLAIN if case is not cases.refusals_case]


def prepared(control: InProcessTransport) -> OnDevice:
    direct = NcclTransport(control)
    pairs = [p for p in itertools.permutations(range(control.size), 2) if control.rank in p]
    direct.prepare([g for g in cases.groups(control.size) if control.rank in g], pairs)
    copies = CudaCopies(direct.cupy, importlib.import_module("cupyx").empty_pinned)
    return OnDevice(StagedTransport(control, copies, direct, direct.reaches), direct.cupy)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.__name__)
def test_plain(case: Callable[[Any], None], size: int) -> None:
    run_ranks(size, lambda control: case(prepared(control)))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", cases.TYPED, ids=lambda case: case.__name__)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_moving(case: Callable[[Any, str], None], dtype: str, size: int) -> None:
    run_ranks(size, lambda control: case(prepared(control), dtype))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", cases.REDUCING, ids=lambda case: case.__name__)
@pytest.mark.parametrize(("dtype", "op"), cases.reductions())
def test_reducing(case: Callable[[Any, str, str], None], dtype: str, op: str, size: int) -> None:
    run_ranks(size, lambda control: case(prepared(control), dtype, op))


def test_result_is_ordered_after_the_computation_that_made_it() -> None:
    """Started right behind a chain of products, waited for on the device only."""
    import cupy

    transport = NcclTransport(connect(1)[0])
    transport.prepare([(0,)])
    x = cupy.eye(2048, dtype=np.float32) * np.float32(2)
    y = x
    for _ in range(9):
        y = y @ x
    z = collectives.all_gather(transport, y, 1, [2048], (0,)) + 1
    transport.synchronize()
    assert float(z[7, 7].get()) == 2.0**10 + 1
    transport.close()
