"""Compiled loops of max pooling against the array functions that compute the same without Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distgraph.kernels.windows import pooling

pytest.importorskip("numba")

CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "wide rows": ((3, 7, 36, 52), {"window": (2, 2)}),
    "narrow rows": ((9, 17, 22, 14), {"window": (2, 2)}),
    "elements of no window": ((5, 9, 38, 53), {"window": (2, 3), "stride": (3, 3)}),
    "common elements": ((4, 6, 31, 33), {"window": (3, 3), "stride": (2, 2), "padding": ((1, 1), (1, 1))}),
    "common elements of rows alone": ((4, 6, 31, 64), {"window": (3, 2), "stride": (1, 2)}),
    "padding on one side": ((4, 6, 33, 45), {"window": (2, 2), "padding": ((0, 1), (1, 0))}),
    "one dim": ((8, 16, 270), {"window": (2,)}),
    "three dims": ((3, 5, 14, 16, 40), {"window": (2, 2, 2)}),
}


def computed(x: Any, attrs: dict[str, Any]) -> tuple[Any, Any]:
    """The result of max pooling and the gradient of x for one gradient of the result."""
    y = pooling.max_pool(np, x, **attrs)
    dy = np.random.default_rng(3).standard_normal(y.shape).astype(x.dtype)
    return y, pooling.max_pool_grad(np, x, y, dy, **attrs)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CASES)
def test_loops_compute_what_array_functions_do(
    name: str, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, attrs = CASES[name]
    x = np.random.default_rng(2).standard_normal(shape).astype(dtype).clip(0.0)  # zeros are equal
    monkeypatch.setattr(pooling, "_loops_pay", lambda *_: True)
    y, dx = computed(x, attrs)
    monkeypatch.setattr(pooling, "_loops_pay", lambda *_: False)
    want, gradient = computed(x, attrs)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_allclose(dx, gradient, rtol=1e-5, atol=1e-5)


def test_a_nan_is_the_largest_of_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(2).standard_normal((3, 7, 36, 52)).astype(np.float32)
    x[1, 2, 5, 7], x[2, 0, 0, 0], x[0, 0, 1, 1] = np.nan, -np.inf, np.inf
    monkeypatch.setattr(pooling, "_loops_pay", lambda *_: True)
    y, dx = computed(x, {"window": (2, 2)})
    monkeypatch.setattr(pooling, "_loops_pay", lambda *_: False)
    want, gradient = computed(x, {"window": (2, 2)})
    assert np.isnan(y[1, 2, 2, 3])
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(dx, gradient)


def test_large_arrays_take_the_loops() -> None:
    x, y = np.zeros((8, 16, 32, 32), np.float32), np.zeros((8, 16, 16, 16), np.float32)
    assert pooling._loops_pay(np, x, y)
    assert not pooling._loops_pay(np, x[:1], y[:1])
    assert not pooling._loops_pay(np, x, y.astype(np.float64))
