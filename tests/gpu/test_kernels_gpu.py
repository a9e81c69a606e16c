"""Every kernel on CuPy against the same kernel on NumPy; random bits must be identical."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.ops.kernel_cases import KEY, Case, all_cases, as_tuple

from distgraph.kernels import optimizer
from distgraph.kernels import random as rnd

pytestmark = pytest.mark.gpu
CASES = {c.name: c for c in all_cases()}


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


def on_device(cupy: Any, case: Case) -> list[Any]:
    return [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in case.arrays]


@pytest.mark.parametrize("name", CASES)
def test_cupy_agrees_with_numpy(cupy: Any, name: str) -> None:
    case = CASES[name]
    want = as_tuple(case.kernel(np, *case.arrays, **case.attrs))
    got = as_tuple(case.kernel(cupy, *on_device(cupy, case), **case.attrs))
    outs = tuple(cupy.full(w.shape, 7, w.dtype) for w in want)
    case.kernel(cupy, *on_device(cupy, case), **case.attrs, out=outs if len(outs) > 1 else outs[0])
    for g, o, w in zip(got, outs, want, strict=True):
        assert isinstance(g, cupy.ndarray)
        assert g.dtype == w.dtype
        assert g.shape == w.shape
        tolerance = 10 * case.tolerance
        np.testing.assert_allclose(g.get(), w, rtol=tolerance, atol=tolerance * max(1, np.abs(w).max()))
        np.testing.assert_allclose(o.get(), w, rtol=tolerance, atol=tolerance * max(1, np.abs(w).max()))


@pytest.mark.parametrize("name", CASES)
def test_cupy_takes_views(cupy: Any, name: str) -> None:
    case = CASES[name]
    views = []
    for a in on_device(cupy, case):
        if isinstance(a, cupy.ndarray) and a.ndim:
            spaced = cupy.zeros((*a.shape[:-1], a.shape[-1] * 2), a.dtype)
            spaced[..., ::2] = a
            a = spaced[..., ::2]
        views.append(a)
    results = as_tuple(case.kernel(cupy, *views, **case.attrs))
    for g, w in zip(results, as_tuple(case.kernel(np, *case.arrays, **case.attrs)), strict=True):
        tolerance = 10 * case.tolerance
        np.testing.assert_allclose(g.get(), w, rtol=tolerance, atol=tolerance * max(1, np.abs(w).max()))


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("name", [n for n in CASES if "small" in n])
def test_cupy_half_precision_follows_numpy(cupy: Any, name: str, half: type) -> None:
    case = CASES[name]
    narrow = [a.astype(half) if getattr(a, "dtype", None) == np.float32 else a for a in case.arrays]
    want = as_tuple(case.kernel(np, *narrow, **case.attrs))
    moved = [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in narrow]
    for g, w in zip(as_tuple(case.kernel(cupy, *moved, **case.attrs)), want, strict=True):
        assert g.dtype == half
        step = 2 * float(ml_dtypes.finfo(half).eps)
        wide = w.astype(np.float32)
        np.testing.assert_allclose(
            g.get().astype(np.float32), wide, rtol=step, atol=step * max(1, np.abs(wide).max())
        )


@pytest.mark.parametrize("shape", [(7,), (301, 130), (3, 40, 500)])
def test_random_bits_and_dropout_masks_are_identical(cupy: Any, shape: tuple[int, ...]) -> None:
    bits = rnd.random_bits(cupy, KEY, shape=shape)
    np.testing.assert_array_equal(bits.get(), rnd.random_bits(np, KEY, shape=shape))
    uniform = rnd.random_uniform(cupy, KEY, shape=shape)
    np.testing.assert_array_equal(uniform.get(), rnd.random_uniform(np, KEY, shape=shape))
    normal = rnd.random_normal(cupy, KEY, shape=shape)
    np.testing.assert_allclose(normal.get(), rnd.random_normal(np, KEY, shape=shape), rtol=1e-6, atol=1e-6)
    x = np.ones(shape, np.float32)
    dropped = rnd.dropout(cupy, cupy.asarray(x), KEY, rate=0.3)
    np.testing.assert_array_equal(dropped.get() != 0, rnd.dropout(np, x, KEY, rate=0.3) != 0)


def test_adam_in_place_with_its_numbers_on_the_device(cupy: Any) -> None:
    case = CASES["adam-large"]
    want = case.kernel(np, *case.arrays, **case.attrs)
    p, g, m, v, lr, step = on_device(cupy, case)
    got = optimizer.adam(cupy, p, g, m, v, cupy.asarray(lr), cupy.asarray(step), **case.attrs, out=(p, m, v))
    for result, given, w in zip(got, (p, m, v), want, strict=True):
        assert result is given
        np.testing.assert_allclose(result.get(), w, rtol=1e-5, atol=1e-6)
