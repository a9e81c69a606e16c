"""Every kernel on CuPy against the same kernel on NumPy; random bits must be identical."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.ops.kernel_cases import KEY, Case, all_cases, as_tuple

from distgraph.kernels import attention, loss, norm, optimizer, softmax
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


# Kernels in which the threads of a block work together: rows and attention.


def agree(cupy: Any, kernel: Any, arrays: tuple[Any, ...], tolerance: float, **attrs: Any) -> None:
    """A kernel on CuPy has the results of the one on NumPy, and the same bits when called again."""
    want = as_tuple(kernel(np, *arrays, **attrs))
    moved = [cupy.asarray(a) for a in arrays]
    first, second = (as_tuple(kernel(cupy, *moved, **attrs)) for _ in range(2))
    for g, again, w in zip(first, second, want, strict=True):
        finite = np.abs(w[np.isfinite(w)])
        atol = tolerance * max(1, finite.max() if finite.size else 0)
        np.testing.assert_allclose(g.get(), w, rtol=tolerance, atol=atol)
        np.testing.assert_array_equal(g.get(), again.get())


@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 31), (3, 32), (2, 33), (700, 1025), (3, 50257)])
def test_rows_of_any_length(cupy: Any, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    x, dy, w = rng.standard_normal(shape), rng.standard_normal(shape), rng.standard_normal(shape[-1])
    labels = rng.integers(0, shape[-1], shape[:-1])
    y, (_, mean, rstd) = softmax.softmax(np, x), norm.layer_norm(np, x, w, w)
    loss_lse = loss.cross_entropy(np, x, labels)
    agree(cupy, softmax.softmax, (x,), 1e-11)
    agree(cupy, softmax.softmax_grad, (y, dy), 1e-11)
    agree(cupy, softmax.log_softmax, (x,), 1e-11)
    agree(cupy, softmax.log_softmax_grad, (np.log(y), dy), 1e-11)
    agree(cupy, norm.layer_norm, (x, w, w), 1e-11, eps=0.1)
    agree(cupy, norm.layer_norm_grad, (dy, x, w, mean, rstd), 1e-9)
    agree(cupy, norm.rms_norm, (x, w), 1e-11, eps=0.1)
    agree(cupy, norm.rms_norm_grad, (dy, x, w, rstd), 1e-9)
    agree(cupy, loss.cross_entropy, (x, labels), 1e-11)
    agree(cupy, loss.cross_entropy_grad, (x, labels, *loss_lse[::-1]), 1e-11)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nan_and_infinity_as_on_numpy(cupy: Any, dtype: type) -> None:
    x = np.random.default_rng(3).standard_normal((7, 300)).astype(dtype)
    x[0, 1], x[1, 2], x[2, 0], x[3], x[4, :150] = np.nan, np.inf, -np.inf, -np.inf, -np.inf
    with np.errstate(all="ignore"):
        agree(cupy, softmax.softmax, (x,), 1e-5)
        agree(cupy, softmax.log_softmax, (x,), 1e-5)
        agree(cupy, loss.cross_entropy, (x, np.arange(7)), 1e-5)
        agree(cupy, norm.layer_norm, (x, x[5], x[6]), 1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("heads", "groups", "queries", "keys", "d", "e"),
    [(1, 1, 1, 1, 1, 1), (4, 2, 1, 300, 64, 64), (6, 2, 200, 131, 17, 40), (2, 2, 129, 257, 128, 256)],
)
def test_attention_of_any_shape(
    cupy: Any, heads: int, groups: int, queries: int, keys: int, d: int, e: int, dtype: type, causal: bool
) -> None:
    rng = np.random.default_rng(3)
    shapes = (2, heads, queries, d), (2, groups, keys, d), (2, groups, keys, e), (2, heads, queries, e)
    q, k, v, do = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    tolerance = 1e-10 if dtype == np.float64 else 2e-4
    agree(cupy, attention.attention, (q, k, v), tolerance, causal=causal)
    o, lse = attention.attention(np, q, k, v, causal=causal)
    agree(cupy, attention.attention_grad, (do, q, k, v, o, lse), tolerance, causal=causal)


def test_attention_keeps_no_matrix_of_scores(cupy: Any) -> None:
    q, k, v = (cupy.zeros((1, 4, 4096, 64), np.float32) for _ in range(3))
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        o, lse = attention.attention(cupy, q, k, v, causal=True)
        attention.attention_grad(cupy, o, q, k, v, o, lse, causal=True)
        assert pool.total_bytes() < 8 * q.nbytes  # the scores of a head alone are 16 times q
