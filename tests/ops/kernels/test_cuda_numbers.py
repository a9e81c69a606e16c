"""The CUDA sources of rows and of attention compute what the NumPy kernels compute.

The same sources are compiled as C++ and run on the host, so neither a GPU nor CuPy is needed. Every launch
runs twice, with the threads of a block in two orders, and between guards: see `cuda_emulator.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.devices.cuda_emulator import COMPILER, DeadlockError, GuardError, RaceError, emulator
from support.ops.kernel_cases import Case, all_cases, as_tuple

from distgraph.errors import GraphError, RuntimeFault
from distgraph.kernels import attention, loss, norm, softmax
from distgraph.kernels.cuda import flash_attention
from distgraph.kernels.cuda.block_kernel import BlockKernel

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler: install g++ or clang")

LAUNCHES: dict[Callable[..., Any], dict[str, int]] = {
    softmax.softmax: {"softmax": 1},
    softmax.softmax_grad: {"softmax_grad": 1},
    softmax.log_softmax: {"log_softmax": 1},
    softmax.log_softmax_grad: {"log_softmax_grad": 1},
    norm.layer_norm: {"layer_norm": 1},
    norm.layer_norm_grad: {"layer_norm_grad": 1, "column_sums": 2},
    norm.rms_norm: {"rms_norm": 1},
    norm.rms_norm_grad: {"rms_norm_grad": 1, "column_sums": 1},
    loss.cross_entropy: {"cross_entropy": 1},
    loss.cross_entropy_grad: {"cross_entropy_grad": 1},
    attention.attention: {"attention": 1},
    attention.attention_grad: {"attention_delta": 1, "attention_grad_q": 1, "attention_grad_kv": 1},
}
"""The launches of each kernel."""


def fused(dtype: Any = np.float32) -> dict[str, Case]:
    """The cases of `kernel_cases` that a CUDA source computes."""
    return {c.name: c for c in all_cases(dtype) if c.kernel in LAUNCHES and "axis0" not in c.name}


CASES, DOUBLE_CASES = fused(), fused(np.float64)
SMALL = [name for name in CASES if "small" in name]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return emulator(tmp_path_factory.mktemp("cuda"))


def launched(emulated: Any, kernel: Callable[..., Any], *arrays: Any, **attrs: Any) -> tuple[Any, ...]:
    """Results of a kernel, by the CUDA source and nothing else."""
    emulated.launches.clear()
    results = as_tuple(kernel(emulated, *arrays, **attrs))
    assert emulated.launches == Counter(LAUNCHES[kernel])
    return results


def assert_close(got: tuple[Any, ...], want: tuple[Any, ...], tolerance: float) -> None:
    for g, w in zip(got, map(np.asarray, want), strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        finite = np.abs(w[np.isfinite(w)])
        atol = tolerance * max(1, finite.max() if finite.size else 0)
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=atol)


def draw(*shape: int, dtype: Any = np.float64, seed: int = 3) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("name", CASES)
def test_float32_agrees_with_numpy(emulated: Any, name: str) -> None:
    case = CASES[name]
    want = as_tuple(case.kernel(np, *case.arrays, **case.attrs))
    assert_close(launched(emulated, case.kernel, *case.arrays, **case.attrs), want, 2 * case.tolerance)
    given = tuple(np.full_like(w, 7) for w in want)
    out = given if len(given) > 1 else given[0]
    for result, array in zip(
        launched(emulated, case.kernel, *case.arrays, **case.attrs, out=out), given, strict=True
    ):
        assert result is array
    assert_close(given, want, 2 * case.tolerance)


@pytest.mark.parametrize("name", DOUBLE_CASES)
def test_float64_agrees_with_numpy(emulated: Any, name: str) -> None:
    case = DOUBLE_CASES[name]
    want = as_tuple(case.kernel(np, *case.arrays, **case.attrs))
    assert_close(launched(emulated, case.kernel, *case.arrays, **case.attrs), want, 1e-12)


@pytest.mark.parametrize("name", SMALL)
def test_half_precision_is_computed_in_float32_and_rounded_once(emulated: Any, name: str) -> None:
    case, half = CASES[name], ml_dtypes.bfloat16
    narrow = [a.astype(half) if a.dtype == np.float32 else a for a in case.arrays]
    want = as_tuple(case.kernel(np, *narrow, **case.attrs))
    emulated.launches.clear()
    got = as_tuple(case.kernel(emulated, *narrow, **case.attrs))
    recomputed = {"attention": 1} if case.kernel is attention.attention_grad else {}  # lse, as on NumPy
    assert emulated.launches == Counter(LAUNCHES[case.kernel]) + Counter(recomputed)
    step = float(ml_dtypes.finfo(half).eps)  # the float32 results may lie on two sides of a rounding limit
    for g, w in zip(got, want, strict=True):
        assert g.dtype == half
        wide = w.astype(np.float32)
        np.testing.assert_allclose(g.astype(np.float32), wide, rtol=step, atol=step * np.abs(wide).max())


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
def test_half_precision_is_read_exactly_and_rounded_to_nearest(emulated: Any, half: type) -> None:
    """The gradient of the bias is dy itself for one row, in the dtype of the weight."""
    every = np.arange(0, 1 << 16, 7, dtype=np.uint16).view(half)
    wide = draw(1800, dtype=np.float32) * np.exp2(np.arange(1800) % 180 - 150).astype(np.float32)
    bits = np.arange(1, 0x7B00, 11, dtype=np.uint16)  # neighbours, between which a tie lies
    ties = (bits.view(half).astype(np.float32) + (bits + np.uint16(1)).view(half).astype(np.float32)) / 2
    for dy in (every, np.concatenate([wide, ties])):
        row, one = dy[None], np.ones(1, np.float32)
        zeros, w = np.zeros_like(row), np.ones(dy.shape, half)
        db = launched(emulated, norm.layer_norm_grad, row, zeros, w, one, one)[2]
        assert db.dtype == half
        with np.errstate(all="ignore"):
            want, undefined, zero = dy.astype(half), np.isnan(dy.astype(np.float32)), dy == 0
        compared = ~(undefined | zero)  # a sum from 0 has no negative zero
        np.testing.assert_array_equal(db.view(np.uint16)[compared], want.view(np.uint16)[compared])
        assert np.isnan(db[undefined].astype(np.float32)).all()
        assert (db[zero] == 0).all()


@pytest.mark.parametrize("name", SMALL)
def test_views_of_any_layout(emulated: Any, name: str) -> None:
    case, views = CASES[name], []
    for a in case.arrays:
        spaced = np.zeros((*a.shape[:-1], a.shape[-1] * 2), a.dtype, order="F")
        spaced[..., ::2] = a
        views.append(spaced[..., ::2])
    want = as_tuple(case.kernel(np, *case.arrays, **case.attrs))
    assert_close(launched(emulated, case.kernel, *views, **case.attrs), want, 2 * case.tolerance)


@pytest.mark.parametrize("name", [n for n in CASES if "attention" not in n])
def test_a_row_kernel_may_overwrite_an_input(emulated: Any, name: str) -> None:
    case = CASES[name]
    want = as_tuple(case.kernel(np, *case.arrays, **case.attrs))
    for i, a in enumerate(case.arrays):
        if a.shape == want[0].shape and a.dtype == want[0].dtype:
            arrays = [np.copy(b) for b in case.arrays]
            out = arrays[i] if len(want) == 1 else (arrays[i], *(None,) * (len(want) - 1))
            got = launched(emulated, case.kernel, *arrays, **case.attrs, out=out)
            assert got[0] is arrays[i]
            assert_close(got, want, 2 * case.tolerance)


@pytest.mark.parametrize(
    "shape", [(1,), (1, 1), (2, 3, 31), (3, 32), (2, 33), (1, 1025), (2, 5003), (300, 2)]
)
def test_rows_of_any_length(emulated: Any, shape: tuple[int, ...]) -> None:
    """Shorter than a warp, not a multiple of one, longer than a block; more rows than sums of gradients."""
    x, dy, w, b = draw(*shape), draw(*shape, seed=4), draw(shape[-1]), draw(shape[-1], seed=5)
    labels, dloss = (np.abs(9 * draw(*shape[:-1])).astype(np.int32) - 2), draw(*shape[:-1])
    y, lse = softmax.softmax(np, x), np.log(np.exp(x).sum(-1))
    _, mean, rstd = norm.layer_norm(np, x, w, b)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (softmax.softmax, (x,), {}),
        (softmax.softmax_grad, (y, dy), {}),
        (softmax.log_softmax, (x,), {"axis": len(shape) - 1}),
        (softmax.log_softmax_grad, (np.log(y), dy), {}),
        (norm.layer_norm, (x, w, b), {"eps": 0.1}),
        (norm.layer_norm_grad, (dy, x, w, mean, rstd), {}),
        (norm.rms_norm, (x, w), {"eps": 0.1}),
        (norm.rms_norm_grad, (dy, x, w, rstd), {}),
        (loss.cross_entropy_grad, (x, labels, lse, dloss), {"offset": 1}),
    ]
    for kernel, arrays, attrs in calls:
        want = as_tuple(kernel(np, *arrays, **attrs))
        assert_close(launched(emulated, kernel, *map(np.asarray, arrays), **attrs), want, 1e-11)
    inside = np.clip(labels, 0, shape[-1] - 1)
    got = launched(emulated, loss.cross_entropy, x, np.asarray(inside))
    assert_close(got, loss.cross_entropy(np, x, inside), 1e-12)


def test_labels_of_any_type_and_outside_of_the_classes(emulated: Any) -> None:
    x = draw(4, 7)
    lse = np.log(np.exp(x).sum(-1))
    for dtype in (np.int8, np.uint16, np.int64):
        labels = np.array([0, 6, 7, 100], dtype)
        losses, sums = launched(emulated, loss.cross_entropy, x, labels)
        np.testing.assert_allclose(sums, lse, rtol=1e-14)
        np.testing.assert_allclose(losses, lse - [x[0, 0], x[1, 6], 0, 0], rtol=1e-13)
    shards = [launched(emulated, loss.cross_entropy, x[:, i : i + 4], labels, offset=i) for i in (0, 4)]
    np.testing.assert_allclose(np.logaddexp(shards[0][1], shards[1][1]), lse, rtol=1e-13)
    picked = sum(sums - losses for losses, sums in shards)
    np.testing.assert_allclose(picked, [x[0, 0], x[1, 6], 0, 0], atol=1e-14)


@pytest.mark.parametrize("width", [3, 300])
def test_nan_and_infinity_as_on_numpy(emulated: Any, width: int) -> None:
    x = draw(8, width)
    x[0, 1], x[1, 2], x[2, 0], x[3] = np.nan, np.inf, -np.inf, -np.inf
    x[4, : width // 2], x[5, 0], x[5, 1], x[6, 0] = -np.inf, np.inf, np.nan, 1e4
    dy, w, labels = draw(8, width, seed=4), draw(width), np.arange(8) % 3
    with np.errstate(all="ignore"):
        y = softmax.softmax(np, x)
        log_y = softmax.log_softmax(np, x)
        mean, rstd, lse = x.mean(-1), 1 / np.sqrt(x.var(-1) + 1), np.log(np.exp(x).sum(-1))
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (softmax.softmax, (x,)),
            (softmax.softmax_grad, (y, dy)),
            (softmax.log_softmax, (x,)),
            (softmax.log_softmax_grad, (log_y, dy)),
            (norm.layer_norm, (x, w, w)),
            (norm.layer_norm_grad, (dy, x, w, mean, rstd)),
            (norm.rms_norm, (x, w)),
            (norm.rms_norm_grad, (dy, x, w, rstd)),
            (loss.cross_entropy, (x, labels)),
            (loss.cross_entropy_grad, (x, labels, lse, mean)),
        ]
        for kernel, arrays in calls:
            for dtype in (np.float64, np.float32):
                typed = [a if a is labels else a.astype(dtype) for a in arrays]
                want = as_tuple(kernel(np, *typed))
                assert_close(launched(emulated, kernel, *typed), want, 1e-10 if dtype == np.float64 else 2e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("q", "k", "e"),
    [
        ((1, 1, 1, 1), (1, 1, 1, 1), 1),
        ((2, 3, 1, 4), (2, 1, 70, 4), 3),  # decoding with a cache
        ((1, 4, 65, 17), (1, 2, 33, 17), 16),  # under the mask, 32 queries see no key
        ((1, 2, 33, 5), (1, 2, 97, 5), 40),
        ((1, 1, 3, 256), (1, 1, 4, 256), 256),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_attention_of_any_shape(
    emulated: Any, q: tuple[int, ...], k: tuple[int, ...], e: int, causal: bool
) -> None:
    arrays = [draw(*q), draw(*k, seed=4), draw(*k[:3], e, seed=5)]
    do, attrs = draw(*q[:3], e, seed=6), {"causal": causal, "scale": 0.7}
    o, lse = attention.attention(np, *arrays, **attrs)
    grads = attention.attention_grad(np, do, *arrays, o, lse, **attrs)
    assert_close(launched(emulated, attention.attention, *arrays, **attrs), (o, lse), 1e-11)
    got = launched(emulated, attention.attention_grad, do, *arrays, o, lse, **attrs)
    assert_close(got, grads, 1e-11)


def test_attention_of_nan_and_of_large_scores(emulated: Any) -> None:
    q, k, v = 40 * draw(1, 2, 70, 3), 40 * draw(1, 1, 70, 3, seed=4), draw(1, 1, 70, 2, seed=5)
    want = attention.attention(np, q, k, v, causal=True)
    assert_close(launched(emulated, attention.attention, q, k, v, causal=True), want, 1e-11)
    q[0, 0, 5, 0], k[0, 0, 66, 0] = np.nan, np.nan
    o, lse = launched(emulated, attention.attention, q, k, v, causal=True)
    undefined = np.zeros((1, 2, 70), bool)
    undefined[0, 0, 5] = undefined[0, :, 66:] = True
    np.testing.assert_array_equal(np.isnan(lse), undefined)
    np.testing.assert_array_equal(np.isnan(o).any(-1), undefined)


def test_operands_of_several_dtypes(emulated: Any) -> None:
    x, w = draw(5, 9, dtype=ml_dtypes.bfloat16), draw(9, dtype=np.float32)
    want = norm.rms_norm(np, x, w)
    for g, h in zip(launched(emulated, norm.rms_norm, x, w), want, strict=True):
        assert g.dtype == h.dtype == x.dtype
        np.testing.assert_allclose(g.astype(np.float32), h.astype(np.float32), rtol=2**-7)
    exact = norm.rms_norm(np, x, w, wide=True)
    assert_close(launched(emulated, norm.rms_norm, x, w, wide=True), exact, 1e-5)
    targets = tuple(np.empty_like(a) for a in exact)
    launched(emulated, norm.rms_norm, x, w, out=targets)
    assert_close(targets, exact, 1e-5)


def test_what_the_sources_do_not_take_is_left_to_the_array_functions(emulated: Any) -> None:
    x = draw(4, 6, dtype=np.float32)
    wide_head = [draw(1, 1, 2, 257) for _ in range(3)]
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (softmax.softmax, (x,), {"axis": 0}),
        (softmax.softmax, (x[:0],), {}),
        (softmax.softmax_grad, (x, x.astype(np.float64)), {}),
        (norm.layer_norm, (x, x[0], x[0].astype(np.float64)), {}),
        (norm.layer_norm, (x[:0], x[0], x[0]), {}),
        (loss.cross_entropy, (x[:, :0], np.arange(4)), {"classes": 4}),
        (attention.attention, (*wide_head,), {}),
        (
            attention.attention,
            (wide_head[0][..., :3], wide_head[1][:, :, :0, :3], wide_head[2][:, :, :0]),
            {},
        ),
    ]
    emulated.launches.clear()
    for kernel, arrays, attrs in calls:
        assert_close(
            as_tuple(kernel(emulated, *arrays, **attrs)), as_tuple(kernel(np, *arrays, **attrs)), 1e-6
        )
    assert not emulated.launches


def test_mistakes_of_the_user_are_errors_before_a_launch(emulated: Any) -> None:
    q, k = draw(1, 3, 4, 8), draw(1, 2, 4, 8)
    emulated.launches.clear()
    with pytest.raises(GraphError, match="do not fit"):
        attention.attention(emulated, q, k, k)
    with pytest.raises(RuntimeFault, match="expected a tuple of 2 arrays, got ndarray"):
        attention.attention(emulated, q, q, q, out=q)
    assert not emulated.launches


# Tests of the tests: the emulation notices each kind of mistake that a source can have.


def source(kernel: BlockKernel) -> str:
    """The source for float64; of attention for d = 32 and e = 16."""
    return kernel.source(["float64"] * len(kernel.arrays), (2, 1)[: len(kernel.constants)])


def run_layer_norm(emulated: Any, code: str) -> None:
    """A row of 300 numbers by a block of three warps."""
    x, w = draw(1, 300), draw(300)
    results = np.empty((1, 300)), np.empty(1), np.empty(1)
    numbers = norm._LAYER_NORM_CUDA.numbers((300, 1e-5), np.dtype(np.float64))
    emulated.RawKernel(code, "distgraph_layer_norm")((1,), (96,), (x, w, w, *results, *numbers))
    assert_close(results, norm.layer_norm(np, x, w, w), 1e-12)


def run_attention(emulated: Any, code: str) -> None:
    """40 queries and keys: two tiles of each."""
    q, k, v = draw(1, 1, 40, 32, seed=1), draw(1, 1, 40, 32, seed=2), draw(1, 1, 40, 16, seed=3)
    results = np.empty((1, 1, 40, 16)), np.empty((1, 1, 40))
    numbers = flash_attention.ATTENTION.numbers((1, 40, 40, 32, 16, 0.25, 0), np.dtype(np.float64))
    emulated.RawKernel(code, "distgraph_attention")((2,), (256,), (q, k, v, *results, *numbers))
    assert_close(results, attention.attention(np, q, k, v, scale=0.25), 1e-11)


def run_attention_grad_kv(emulated: Any, code: str) -> None:
    q, k, v = draw(1, 1, 40, 32, seed=1), draw(1, 1, 40, 32, seed=2), draw(1, 1, 40, 16, seed=3)
    o, lse = attention.attention(np, q, k, v, scale=0.25)
    do = draw(*o.shape, seed=4)
    results = np.empty(k.shape), np.empty(v.shape)
    numbers = flash_attention.ATTENTION_GRAD_KV.numbers((1, 40, 40, 32, 16, 0.25, 0), np.dtype(np.float64))
    arguments = do, q, k, v, lse, (do * o).sum(-1), *results, *numbers
    emulated.RawKernel(code, "distgraph_attention_grad_kv")((2,), (256,), arguments)
    assert_close(results, attention.attention_grad(np, do, q, k, v, o, lse, scale=0.25)[1:], 1e-11)


BARRIER = "__syncthreads();"
RUNS: list[tuple[BlockKernel, Callable[[Any, str], None]]] = [
    (norm._LAYER_NORM_CUDA, run_layer_norm),
    (flash_attention.ATTENTION, run_attention),
    (flash_attention.ATTENTION_GRAD_KV, run_attention_grad_kv),
]
UNUSED = source(norm._LAYER_NORM_CUDA).count(BARRIER)
"""Barriers of `block_sum`, which is in every source and which kernels on tiles do not call."""


@pytest.mark.parametrize(("kernel", "run"), RUNS, ids=lambda value: getattr(value, "name", ""))
def test_every_barrier_is_needed(emulated: Any, kernel: BlockKernel, run: Callable[[Any, str], None]) -> None:
    code = source(kernel)
    run(emulated, code)
    parts = code.split(BARRIER)
    first = UNUSED if kernel.constants else 0
    assert len(parts) - 1 > first
    for i in range(first, len(parts) - 1):
        without = BARRIER.join(parts[: i + 1]) + BARRIER.join(parts[i + 1 :])
        assert without.count(BARRIER) == len(parts) - 2
        with pytest.raises(AssertionError):
            run(emulated, without)


def test_a_write_outside_and_a_barrier_of_some_threads_are_noticed(emulated: Any) -> None:
    code = source(norm._LAYER_NORM_CUDA)
    with pytest.raises(GuardError, match="distgraph_layer_norm has written outside of its arrays"):
        run_layer_norm(emulated, code.replace("store(y + start + j,", "store(y + start + j + 1,"))
    with pytest.raises(DeadlockError, match="wait at a barrier"):
        run_layer_norm(emulated, code.replace(BARRIER, f"if (threadIdx.x != 5) {BARRIER}"))
    with pytest.raises(RaceError, match="in descending order"):
        run_layer_norm(emulated, code.replace("store(mean + blockIdx.x, m)", "").replace(
            "if (threadIdx.x == 0) {", "store(mean, A(threadIdx.x)); if (threadIdx.x == 0) {"
        ))  # fmt: skip
