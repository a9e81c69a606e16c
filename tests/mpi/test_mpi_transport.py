"""The cases of `collective_cases` on every rank of `mpiexec -n 2 python -m pytest tests/mpi`; or 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import collective_cases as cases
import numpy as np
import pytest

from distgraph.errors import RuntimeFault
from distgraph.runtime.inprocess import run_ranks
from distgraph.runtime.launch import current_transport
from distgraph.runtime.mpi import MpiTransport
from distgraph.runtime.transport import Transport

pytestmark = pytest.mark.mpi


@pytest.fixture
def transport() -> MpiTransport:
    found = current_transport()
    assert found is not None
    found.barrier()
    return found


@pytest.mark.parametrize("case", cases.PLAIN, ids=lambda case: case.__name__)
def test_plain(transport: MpiTransport, case: Callable[[Any], None]) -> None:
    case(transport)


@pytest.mark.parametrize("case", cases.TYPED, ids=lambda case: case.__name__)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_moving(transport: MpiTransport, case: Callable[[Any, str], None], dtype: str) -> None:
    case(transport, dtype)


@pytest.mark.parametrize("case", cases.REDUCING, ids=lambda case: case.__name__)
@pytest.mark.parametrize(("dtype", "op"), cases.reductions())
def test_reducing(
    transport: MpiTransport, case: Callable[[Any, str, str], None], dtype: str, op: str
) -> None:
    case(transport, dtype, op)


def test_same_bits_as_threads(transport: MpiTransport) -> None:
    """Sums of values of very different size depend on the order; processes and threads use the same."""

    def total(t: Transport) -> Any:
        x = np.random.default_rng(t.rank).standard_normal(50_000) * 10.0 ** np.arange(50_000).clip(max=17)
        t.all_reduce(x, "sum", tuple(range(t.size))).wait()
        return x

    mine = total(transport)
    for other in run_ranks(transport.size, total):
        np.testing.assert_array_equal(mine, other)


def test_a_message_of_another_length_is_refused(transport: MpiTransport) -> None:
    if transport.rank == 0:
        transport.send(np.zeros(3), 1, 5).wait()
    if transport.rank == 1:
        with pytest.raises(RuntimeFault, match=r"got 24 bytes; the ranks run different programs"):
            transport.recv(np.zeros(4), 0, 5).wait()


def test_a_wait_without_progress_ends(transport: MpiTransport) -> None:
    """A transport of its own, whose last rank does not take part."""
    other = MpiTransport(limit=0.2)
    if other.rank != other.size - 1:
        with pytest.raises(RuntimeFault, match=r"made no progress in 0.2 s"):
            other.recv(np.zeros(4), other.size - 1, 5).wait()
