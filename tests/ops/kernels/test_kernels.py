"""What holds for every kernel: compiled and plain paths agree, views, outputs, half precision, user's
mistakes."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.ops.kernel_cases import Case, all_cases, as_tuple

from distgraph.errors import GraphError, RuntimeFault
from distgraph.kernels import (
    _common,
    _elementwise,
    _jit,
    activation,
    attention,
    embedding,
    loss,
    norm,
    optimizer,
    softmax,
)
from distgraph.kernels import random as rnd
from distgraph.kernels._common import bound_kernel

CASES = {c.name: c for c in all_cases()}
RESULTS_OF = {"adam": (0, 2, 3), "momentum": (0, 2)}


@pytest.fixture
def no_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if Numba were not installed."""
    monkeypatch.setitem(sys.modules, "numba", None)
    _jit.has_numba.cache_clear()
    yield
    _jit.has_numba.cache_clear()


def run(case: Case, **more: object) -> tuple[np.ndarray, ...]:
    return as_tuple(case.kernel(np, *case.arrays, **case.attrs, **more))


def in_float64(case: Case) -> tuple[np.ndarray, ...]:
    wide = [a.astype(np.float64) if getattr(a, "dtype", None) == np.float32 else a for a in case.arrays]
    return as_tuple(case.kernel(np, *wide, **case.attrs))


@pytest.mark.parametrize("name", CASES)
def test_float32_agrees_with_float64(name: str) -> None:
    case = CASES[name]
    for got, want in zip(run(case), in_float64(case), strict=True):
        assert got.dtype == np.float32
        assert got.shape == want.shape
        np.testing.assert_allclose(
            got, want, rtol=case.tolerance, atol=case.tolerance * max(1, np.abs(want).max())
        )


@pytest.mark.parametrize("name", CASES)
def test_plain_numpy_agrees_with_float64(name: str, no_numba: None) -> None:
    assert not _jit.has_numba()
    test_float32_agrees_with_float64(name)


@pytest.mark.parametrize("name", CASES)
def test_inputs_may_be_views_of_any_layout(name: str) -> None:
    case = CASES[name]
    views = []
    for a in case.arrays:
        if isinstance(a, np.ndarray) and a.ndim:
            spaced = np.zeros((*a.shape[:-1], a.shape[-1] * 2), a.dtype, order="F")
            spaced[..., ::2] = a
            a = spaced[..., ::2]
        views.append(a)
    before = [np.copy(a) for a in views]
    results = as_tuple(case.kernel(np, *views, **case.attrs))
    for got, want in zip(results, run(case), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * max(1, np.abs(want).max()))
    for a, b in zip(views, before, strict=True):
        np.testing.assert_array_equal(a, b, err_msg="an input was changed")


@pytest.mark.parametrize("name", CASES)
def test_results_go_to_the_given_arrays(name: str) -> None:
    want = run(CASES[name])
    given = tuple(np.full_like(w, 7, order="C") for w in want)
    got = run(CASES[name], out=given if len(given) > 1 else given[0])
    for g, o, w in zip(got, given, want, strict=True):
        assert g is o
        np.testing.assert_allclose(o, w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.kernel.__module__.endswith(
    ("softmax", "activation", "norm", "random")) or "cross_entropy_grad" in n])  # fmt: skip
@pytest.mark.parametrize("plain", [False, True])
def test_elementwise_and_row_kernels_may_overwrite_an_input(
    name: str, plain: bool, request: pytest.FixtureRequest
) -> None:
    if plain:
        request.getfixturevalue("no_numba")
    case, want = CASES[name], run(CASES[name])
    for i, a in enumerate(case.arrays):
        if getattr(a, "shape", None) != want[0].shape:
            continue
        arrays = [np.copy(b) if isinstance(b, np.ndarray) else b for b in case.arrays]
        out = arrays[i] if len(want) == 1 else (arrays[i], *(None,) * (len(want) - 1))
        got = as_tuple(case.kernel(np, *arrays, **case.attrs, out=out))
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6, err_msg=f"out is operand {i}")


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith(("adam", "momentum"))])
@pytest.mark.parametrize("plain", [False, True])
def test_optimizers_work_in_place_and_over_any_operand(
    name: str, plain: bool, request: pytest.FixtureRequest
) -> None:
    if plain:
        request.getfixturevalue("no_numba")
    case, want = CASES[name], run(CASES[name])
    own = RESULTS_OF[name.split("-")[0]]
    for order in (own, own[::-1], (1, *own[1:])):  # in place, crosswise, over the gradient
        arrays = [np.copy(b) if isinstance(b, np.ndarray) else b for b in case.arrays]
        got = case.kernel(np, *arrays, **case.attrs, out=tuple(arrays[i] for i in order))
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-7, err_msg=f"outputs over operands {order}")


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("name", [n for n in CASES if "large" not in n])
def test_half_precision_is_computed_in_float32_and_rounded_once(name: str, half: type) -> None:
    case = CASES[name]
    if name.startswith("attention_grad"):
        pytest.skip("computes lse anew, see the test below")
    narrow = [a.astype(half) if getattr(a, "dtype", None) == np.float32 else a for a in case.arrays]
    wide = [a.astype(np.float32) if getattr(a, "dtype", None) == half else a for a in narrow]
    got = as_tuple(case.kernel(np, *narrow, **case.attrs))
    want = as_tuple(case.kernel(np, *wide, **case.attrs))
    for g, w in zip(got, want, strict=True):
        assert g.dtype == half
        np.testing.assert_array_equal(g, w.astype(half))


def test_attention_gradient_in_bfloat16_does_not_inherit_the_rounding_of_lse() -> None:
    case = CASES["attention_grad-small"]
    shifted = [case.arrays[0], case.arrays[1] + 3, case.arrays[2] + 3, *case.arrays[3:]]  # lse is about 30
    narrow = [a.astype(ml_dtypes.bfloat16) for a in shifted]
    do, q, k, v = (a.astype(np.float64) for a in narrow[:4])
    o, lse = attention.attention(np, q, k, v)
    want = attention.attention_grad(np, do, q, k, v, o, lse)
    rounded = (o.astype(ml_dtypes.bfloat16), lse.astype(ml_dtypes.bfloat16))
    for g, w in zip(attention.attention_grad(np, *narrow[:4], *rounded), want, strict=True):
        error = np.abs(g.astype(np.float64) - w).max() / np.abs(w).max()
        assert error < 4 * float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps)


def float32_of_all_kinds() -> np.ndarray:
    """Every number whose last 16 bits round up, down or to even, NaN and infinity among them."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    return np.concatenate([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(np.float32)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_bfloat16_is_converted_as_ml_dtypes_does() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    every = bits.view(ml_dtypes.bfloat16).reshape(64, 32, 32)
    for x in (every, every.transpose(2, 0, 1), every[:, ::2], every[:, :, ::-1]):
        got = _common.converted(np, x, np.dtype(np.float32))
        assert got.strides == x.astype(np.float32).strides
        np.testing.assert_array_equal(got.view(np.uint32), x.astype(np.float32).view(np.uint32))
    numbers = float32_of_all_kinds()
    want = numbers.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(_common.converted(np, numbers, _common.BFLOAT16).view(np.uint16), want)
    out = np.empty(numbers.shape, ml_dtypes.bfloat16)
    assert _common.store(np, numbers, out) is out
    np.testing.assert_array_equal(out.view(np.uint16), want)


@pytest.mark.parametrize("name", ["add", "subtract", "multiply"])
@pytest.mark.parametrize("second", [(7, 40, 12), (40, 12), (12,), (1, 12), ()])
def test_sums_and_products_of_bfloat16_are_those_of_ml_dtypes(name: str, second: tuple[int, ...]) -> None:
    random = np.random.default_rng(5)
    x, y = (random.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((7, 40, 12), second))
    run, ufunc = _elementwise.ufunc_of(np, name, [x.dtype, y.dtype]), getattr(np, name)
    assert run is not ufunc
    want = ufunc(x, y)
    np.testing.assert_array_equal(run(x, y, out=np.empty_like(x)), want)
    np.testing.assert_array_equal(run(x.swapaxes(0, 1).copy().swapaxes(0, 1), y, out=np.empty_like(x)), want)
    if second == x.shape:
        turned = x.swapaxes(0, 1).copy().swapaxes(0, 1)
        again = y.copy()
        np.testing.assert_array_equal(run(turned, again, out=again), want)
    moved = np.concatenate([x.ravel(), x.ravel()])  # operand and result overlap by all but a few elements
    shifted, start = moved[5 : 5 + x.size].reshape(x.shape), moved[: x.size].reshape(x.shape)
    want_of_shifted = ufunc(start.copy(), y)
    np.testing.assert_array_equal(run(start, y, out=shifted), want_of_shifted)
    assert run(x, y, out=x) is x
    np.testing.assert_array_equal(x, want)
    assert _elementwise.ufunc_of(np, name, [x.dtype, np.dtype(np.float32)]) is ufunc


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_an_activation_writes_a_result_whose_rows_are_apart(rng: np.random.Generator, dtype: Any) -> None:
    x, wider = rng.normal(size=(512, 64)).astype(dtype), np.zeros((512, 200), dtype)
    result = wider[:, :64]
    assert activation.relu_grad(np, x, x, out=result) is result
    assert np.array_equal(result, np.where(x > 0, x, 0))
    assert not wider[:, 64:].any()


@pytest.mark.parametrize("kernel", [activation.gelu, activation.silu, activation.silu_grad])
def test_activations_of_bfloat16_are_computed_without_copies(kernel: Callable[..., np.ndarray]) -> None:
    operands = [np.ones((512, 512), ml_dtypes.bfloat16)] * (2 if kernel is activation.silu_grad else 1)
    out = np.empty_like(operands[0])
    kernel(np, *operands, out=out)  # compiles
    tracemalloc.start()
    try:
        kernel(np, *operands, out=out)
        assert tracemalloc.get_traced_memory()[1] < out.nbytes / 8
    finally:
        tracemalloc.stop()


def test_nan_and_infinity_are_not_swallowed() -> None:
    x = np.zeros((130, 128), np.float32)
    x[3, 5], x[4, 6], x[6, :64] = np.nan, -np.nan, -np.inf
    y = softmax.softmax(np, x)
    assert np.isnan(y[[3, 4]]).all()
    assert not np.isnan(np.delete(y, [3, 4], axis=0)).any()
    np.testing.assert_array_equal(y[6], np.repeat([0, 1 / 64], 64).astype(np.float32))
    assert np.isnan(activation.gelu(np, x)[3, 5])
    y, mean, _ = norm.layer_norm(np, x[:6], np.ones(128, np.float32), np.ones(128, np.float32))
    assert np.isnan(y[3]).all()
    assert np.isnan(mean[3])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_activations_saturate_without_warning(sign: float) -> None:
    for size in (4, 20000):
        x = np.full(size, sign * 200, np.float32)
        for kernel in (activation.sigmoid, activation.erf, activation.silu, activation.gelu):
            y = kernel(np, x)
            assert np.isfinite(y).all()
            assert abs(y[0] - {"sigmoid": sign > 0, "erf": sign}.get(kernel.__name__, max(x[0], 0))) < 1e-6


def test_a_kernel_compiles_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    caching = pytest.importorskip("numba.core.caching")
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    @_jit.jit
    def double(x: float) -> float:
        return 2 * x

    assert double(4.0) == 8.0


def test_importing_the_kernels_imports_neither_numba_nor_scipy_nor_cupy() -> None:
    families = "activation attention conv embedding loss matmul norm optimizer random softmax windows.pooling"
    program = "import sys; "
    program += "; ".join(f"import distgraph.kernels.{f}" for f in families.split())
    program += "; print(sorted({'numba', 'scipy', 'cupy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_threads_may_compile_and_run_the_same_kernel_at_once() -> None:
    case = CASES["layer_norm_grad-large"]
    want = run(case)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: run(case), range(16)):
            for g, w in zip(got, want, strict=True):
                np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
def test_a_bound_kernel_computes_what_the_kernel_does(dtype: type, wide: bool) -> None:
    x = np.random.default_rng(3).standard_normal((5, 7)).astype(dtype)
    bound = bound_kernel(softmax.softmax, np, [x.dtype], {"axis": 0, "wide": wide})
    got, want = bound(x), softmax.softmax(np, x, axis=0, wide=wide)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_attention_of_one_query_is_that_of_a_sequence() -> None:
    q, k, v = (np.random.default_rng(5).standard_normal((3, n, t, 8)) for n, t in ((6, 1), (2, 9), (2, 9)))
    want = attention.attention(np, q, k, v, causal=True, scale=0.4)[0]
    np.testing.assert_allclose(attention.attention_of_one_query(np, q, k, v, scale=0.4), want, rtol=1e-12)
    wide = [np.repeat(x, 2000, axis=2).astype(np.float32) for x in (k, v)]  # the compiled loop
    got = attention.attention_of_one_query(np, q.astype(np.float32), *wide, scale=0.4)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_wrong_labels_and_outputs_are_refused() -> None:
    x = np.zeros((4, 3), np.float32)
    with pytest.raises(RuntimeFault, match=r"label 3 is outside the 3 classes 0\.\.2"):
        loss.cross_entropy(np, x, np.array([0, 1, 2, 3]))
    with pytest.raises(RuntimeFault, match=r"label -1 is outside"):
        loss.cross_entropy(np, x, np.array([0, 1, 2, -1]))
    with pytest.raises(RuntimeFault, match="expected 2 arrays, got 1"):
        optimizer.momentum(np, x, x, x, 0.1, out=(x,))
    with pytest.raises(GraphError, match="rate is 1"):
        rnd.dropout(np, x, 1, rate=1.0)


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8"])
def test_negative_ids_of_any_width_have_rows_of_zeros(dtype: str) -> None:
    """As bytes without a sign, -100 is 156, which is a row of the table."""
    table = np.arange(1.0, 601.0, dtype=np.float32).reshape(200, 3)
    rows = embedding.embedding(np, table, np.array([5, -100, 127], dtype))
    np.testing.assert_array_equal(rows, [table[5], [0, 0, 0], table[127]])
