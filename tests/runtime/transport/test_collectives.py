"""Every collective against NumPy on 1 to 4 threads: uneven and empty shards, every dtype and reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.devices import collective_cases as cases
from support.programs.rank_threads import run_ranks

from distgraph.runtime.transport.transport import even_counts, reduce_in_order


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", cases.PLAIN, ids=lambda case: case.__name__)
def test_plain(case: Callable[[Any], None], size: int) -> None:
    run_ranks(size, case)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", cases.TYPED, ids=lambda case: case.__name__)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_moving(case: Callable[[Any, str], None], dtype: str, size: int) -> None:
    run_ranks(size, lambda transport: case(transport, dtype))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", cases.REDUCING, ids=lambda case: case.__name__)
@pytest.mark.parametrize(("dtype", "op"), cases.reductions())
def test_reducing(case: Callable[[Any, str, str], None], dtype: str, op: str, size: int) -> None:
    run_ranks(size, lambda transport: case(transport, dtype, op))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_sums_are_rounded_once(dtype: str) -> None:
    """1 + 256 x eps/2 is lost term by term in 16 bits; accumulated in f32 it is exact."""
    kind = cases.dtype_of(dtype)
    half_ulp = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    pieces = [np.full(3, 1.0, kind), *[np.full(3, half_ulp, kind)] * 256]
    out = np.empty(3, kind)
    reduce_in_order(pieces, "sum", out)
    assert out.tolist() == [1.0 + 256 * half_ulp] * 3


@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_result_may_be_any_of_the_pieces(position: int, rng: np.random.Generator) -> None:
    pieces = [rng.standard_normal(100_003) for _ in range(4)]
    want = cases.fold("sum", pieces)
    reduce_in_order(pieces, "sum", pieces[position])
    np.testing.assert_array_equal(pieces[position], want)


def test_overflow_is_infinite_and_silent() -> None:
    """Warnings are errors in this suite."""
    out = np.full(3, 3e38, np.float32)
    reduce_in_order([out, out.copy()], "sum", out)
    assert np.isinf(out).all()


@pytest.mark.parametrize(("total", "parts"), [(7, 3), (2, 4), (0, 3), (12, 4)])
def test_even_counts(total: int, parts: int) -> None:
    counts = even_counts(total, parts)
    assert sum(counts) == total
    assert len(counts) == parts
    assert max(counts) - min(counts) <= 1
