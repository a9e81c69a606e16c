"""The exponential of compiled loops, over all magnitudes and at its limits."""

from __future__ import annotations

import numpy as np
import pytest

from distgraph.kernels._math import exp32
from distgraph.kernels._row_loops import exp_sum

pytest.importorskip("numba")


def exponentials(x: np.ndarray) -> np.ndarray:
    """exp32 of each element, by a compiled loop."""
    y = np.empty_like(x)
    exp_sum(x, np.float32(0), y)
    return y


def test_exponentials_are_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-87.33, 88.72, 1_000_003).astype(np.float32)
    want = np.exp(x.astype(np.float64))
    assert (np.abs(exponentials(x) - want) <= 2 * np.spacing(want.astype(np.float32))).all()


def test_exponentials_beyond_the_limits() -> None:
    numbers = [-np.inf, -1e30, -87.34, 88.73, 1e30, np.inf, 0.0, -0.0]
    want = [0, 0, 0, np.inf, np.inf, np.inf, 1, 1]
    np.testing.assert_array_equal(exponentials(np.array(numbers, np.float32)), np.float32(want))


def test_every_nan_stays_one() -> None:
    bits = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7FC001FF], np.uint32)
    x = np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)
    assert np.isnan(exponentials(x)).all()
    assert np.isnan(exp32(x[0]))
