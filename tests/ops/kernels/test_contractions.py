"""Matrix products, einsum, attention, convolution and pooling against independent references."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import scipy.signal
import scipy.special

from distgraph.errors import GraphError
from distgraph.kernels import attention, conv, matmul
from distgraph.kernels.windows import pooling

RNG = np.random.default_rng(4)


def draw(*shape: int, dtype: type = np.float64) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(("left", "right"), [
    ((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 6, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((4,), (4, 5)),
    ((3, 1, 2, 4), (5, 4, 6)), ((2, 3, 4), (4,)), ((0, 3, 4), (4, 5)), ((3, 0), (0, 5)), ((1, 4), (4, 1)),
])  # fmt: skip
def test_matmul_of_any_layout(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = draw(*left), draw(*right)
    want = np.einsum("...i,...i", a, b) if a.ndim == b.ndim == 1 else a @ b
    for x in layouts(a):
        for y in layouts(b):
            out = np.full(want.shape, np.nan)
            np.testing.assert_allclose(matmul.matmul(np, x, y), want, rtol=1e-12, atol=1e-12)
            assert matmul.matmul(np, x, y, out=out) is out
            np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)


def layouts(x: np.ndarray) -> list[np.ndarray]:
    """The same values contiguous, transposed in memory, with gaps, and backwards."""
    gaps = np.zeros((*x.shape[:-1], 2 * x.shape[-1]))[..., ::2]
    gaps[...] = x
    return [x, np.asfortranarray(x), gaps, x[..., ::-1].copy()[..., ::-1]]


def test_blas_reads_transposed_views_without_a_copy() -> None:
    x = draw(6, 8)
    for view in (x, x.T, x[:, :5], x[:, :5].T, draw(2, 3, 4, 5).transpose(0, 2, 1, 3), x[:1], x[:, :1]):
        assert matmul.blas_ready(view) is view
    for view in (x[:, ::2], x[::-1], draw(2, 3, 4).transpose(2, 1, 0), np.broadcast_to(draw(4), (3, 4))):
        assert matmul.blas_ready(view).flags.c_contiguous


SPECS = [
    "m k, k n -> m n", "m k, k n -> n m", "b s k, b s n -> k n", "b s h d, b t h d -> b h s t",
    "b h s t, b t h d -> b s h d", "b i, b i -> b", "b i, b i ->", "i, j -> j i", "b s k, k n -> b s n",
    "a b c, b d, d c e -> e a", "a b, b c, c d, d e -> a e", "a, b, c -> c a b", "b i k, j k -> j b i",
    "a b c -> c a", "a b -> ", "a a b -> b a", "a a, b a -> b", "g e c, g e c m, e m n -> g c n",
    "a x b, a b -> a b", "row column, column out -> out row", "g s e c, g s m -> e g c m",
    "g s m, g s e c -> e g c m", "e g c m, g s e c -> g s m", "g s m, e g c m -> g s e c",
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_einsum_against_numpy(spec: str) -> None:
    names = sorted(set(spec.replace(",", " ").replace("->", " ").split()))
    sizes = {n: 2 + i for i, n in enumerate(names)}
    letters = {n: chr(ord("a") + i) for i, n in enumerate(names)}
    left, right = spec.split("->")
    terms = [t.split() for t in left.split(",")]
    operands = [draw(*(sizes[n] for n in t)) for t in terms]
    plain = (
        ",".join("".join(letters[n] for n in t) for t in terms)
        + "->"
        + "".join(letters[n] for n in right.split())
    )
    want = np.einsum(plain, *operands)
    np.testing.assert_allclose(matmul.einsum(np, *operands, spec=spec), want, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(matmul.einsum(np, *operands, spec=plain), want, rtol=1e-11, atol=1e-11)
    out = np.full_like(want, np.nan, order="C")
    assert matmul.einsum(np, *operands, spec=spec, out=out) is out
    np.testing.assert_allclose(out, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.count(",") == 1 and s != "a a, b a -> b"])
def test_einsum_allocates_what_it_declares(spec: str) -> None:
    names = sorted(set(spec.replace(",", " ").replace("->", " ").split()))
    sizes = {n: 12 + 2 * i for i, n in enumerate(names)}
    left, right = spec.split("->")
    operands = [draw(*(sizes[n] for n in t.split())) for t in left.split(",")]
    out = np.empty([sizes[n] for n in right.split()])
    matmul.einsum(np, *operands, spec=spec, out=out)
    tracemalloc.start()
    matmul.einsum(np, *operands, spec=spec, out=out)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most <= matmul.einsum_workspace(*operands, spec=spec) + 8192


def test_copied_elements_are_those_that_do_not_merge() -> None:
    dispatch, tokens = (2, 3, 4, 5), (2, 3, 6)  # g s e c, g s m
    assert matmul.copied_elements("gsm,gsec->gmec", (tokens, dispatch)) == 0
    assert matmul.copied_elements("gsec,gsm->egcm", (dispatch, tokens)) == 4 * 2 * 5 * 6  # the product
    assert matmul.copied_elements("gsm,egcm->gsec", (tokens, (4, 2, 5, 6))) == 4 * 2 * 5 * 6  # an operand
    assert matmul.copied_elements("ab,bc,cd->ad", ((3, 4), (4, 5), (5, 6))) > 0  # what is between two steps


def test_copies_for_blas_keep_the_last_dim_last() -> None:
    x = draw(3, 4, 5, 6)
    for order, rows, shape in (((1, 3, 0, 2), 1, (4, 6, 15)), ((1, 0, 2, 3), 2, (4, 15, 6))):
        y = matmul._matrices(x, order, rows, shape)
        np.testing.assert_array_equal(y, x.transpose(order).reshape(shape))
        assert y.strides[-2 if order[1] == 3 else -1] == x.itemsize
    terms = tuple("gsm"), tuple("gsec"), tuple("egcm")  # m, of the left operand, is last in the result
    assert matmul._plan_pair(*terms, (2, 3, 4), (2, 3, 5, 6)).shape == (2, 30, 4)


def test_einsum_refuses_what_does_not_fit() -> None:
    a, b = draw(3, 4), draw(5, 6)
    for spec, message in (
        ("m k, k n -> m n", "index k is 4 before but 5 in operand 1"),
        ("m k, k n", "no '->'"),
        ("m k -> m", "describes 1 operands but got 2"),
        ("m k, k n p -> m n", "operand 1 has 2 dims but 3 indices"),
        ("m k, j n -> m z", "result index z"),
    ):
        with pytest.raises(GraphError, match=message):
            matmul.einsum(np, a, b, spec=spec)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "groups", "queries", "keys"),
    [(2, 4, 2, 5, 7), (1, 6, 1, 300, 300), (3, 2, 2, 150, 40), (2, 3, 3, 1, 90), (2, 2, 2, 70, 600)],
)
def test_attention_against_its_definition(
    batch: int, heads: int, groups: int, queries: int, keys: int, causal: bool, dtype: type
) -> None:
    q = draw(batch, queries, heads, 8, dtype=dtype).transpose(0, 2, 1, 3)
    k, v = draw(batch, groups, keys, 8, dtype=dtype), draw(batch, groups, keys, 6, dtype=dtype)
    o, lse = attention.attention(np, q, k, v, causal=causal)
    wide = [np.repeat(x.astype(np.float64), heads // groups, axis=1) for x in (k, v)]
    scores = np.einsum("bhsd,bhtd->bhst", q.astype(np.float64), wide[0]) / np.sqrt(8)
    if causal:
        scores[..., np.arange(keys)[None] > np.arange(queries)[:, None] + keys - queries] = -np.inf
    sees = np.isfinite(scores).any(-1)
    p = np.zeros_like(scores)
    p[sees] = scipy.special.softmax(scores[sees], axis=-1)
    tolerance = 50 * np.finfo(dtype).eps
    np.testing.assert_allclose(o, p @ wide[1], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(
        lse[sees], scipy.special.logsumexp(scores[sees], axis=-1), rtol=tolerance, atol=tolerance
    )
    assert np.isneginf(lse[~sees]).all()


@pytest.mark.torch
@pytest.mark.parametrize("causal", [False, True])
def test_large_attention_gradients_follow_torch(causal: bool) -> None:
    torch = pytest.importorskip("torch")
    q, k, v, do = (draw(2, 4, 200, 16, dtype=np.float32) for _ in range(4))
    parts = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    y = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=causal)
    want = torch.autograd.grad(y, parts, torch.tensor(do))
    o, lse = attention.attention(np, q, k, v, causal=causal)
    for g, w in zip(attention.attention_grad(np, do, q, k, v, o, lse, causal=causal), want, strict=True):
        np.testing.assert_allclose(g, w.numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "groups", "queries", "keys"), [
    (4, 4, 150, 150), (6, 2, 90, 117), (4, 4, 130, 40), (4, 1, 17, 200), (3, 3, 160, 64),
])  # fmt: skip
def test_compiled_attention_has_the_numbers_of_float64(
    heads: int, groups: int, queries: int, keys: int, causal: bool
) -> None:
    """Also where keys are copied, and where the first of several tiles writes the gradients of all keys."""
    wide = [draw(2, queries, heads, 24), draw(2, keys, groups, 24), draw(2, keys, groups, 20)]
    wide = [x.transpose(0, 2, 1, 3) for x in (*wide, draw(2, queries, heads, 20))]
    *operands, do = wide
    narrow = [x.astype(np.float32) for x in wide]
    o, lse = attention.attention(np, *operands, causal=causal)
    o32, lse32 = attention.attention(np, *narrow[:3], causal=causal)
    want = attention.attention_grad(np, do, *operands, o, lse, causal=causal)
    got = attention.attention_grad(np, narrow[3], *narrow[:3], o32, lse32, causal=causal)
    for a, b in zip((o, lse, *want), (o32, lse32, *got), strict=True):
        assert b.dtype == np.float32
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("spatial", [(11,), (9, 8), (5, 6, 4)])
def test_convolution_against_scipy(spatial: tuple[int, ...]) -> None:
    kernel = (3, 2, 4)[: len(spatial)]
    x, w = draw(2, 3, *spatial), draw(4, 3, *kernel)
    want = [[sum(scipy.signal.correlate(s[c], o[c], "valid") for c in range(3)) for o in w] for s in x]
    np.testing.assert_allclose(conv.conv(np, x, w), want, rtol=1e-11, atol=1e-11)


TORCH_CASES: list[dict[str, Any]] = [
    {"stride": (2, 1), "padding": (1, 2)},
    {"dilation": (2, 3), "padding": (2, 2)},
    {"groups": 2, "stride": (3, 2)},
    {"groups": 4, "padding": (0, 1)},
]


@pytest.mark.torch
@pytest.mark.parametrize("attrs", TORCH_CASES)
def test_convolution_and_pooling_follow_torch(attrs: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    x, w = draw(3, 4, 12, 11), draw(8, 4 // attrs.get("groups", 1), 3, 2)
    ours = dict(attrs)
    if "padding" in ours:
        ours["padding"] = tuple((p, p) for p in ours["padding"])
    want = functional.conv2d(torch.tensor(x), torch.tensor(w), **attrs).numpy()
    np.testing.assert_allclose(conv.conv(np, x, w, **ours), want, rtol=1e-11, atol=1e-11)
    for stride, pad in (((2, 1), (1, 0)), ((3, 2), (0, 1))):
        over = {"window": (3, 2), "stride": stride, "padding": tuple((p, p) for p in pad)}
        want = functional.max_pool2d(torch.tensor(x), (3, 2), stride, pad).numpy()
        np.testing.assert_array_equal(pooling.max_pool(np, x, **over), want)
        want = functional.avg_pool2d(torch.tensor(x), (3, 2), stride, pad).numpy()
        np.testing.assert_allclose(pooling.avg_pool(np, x, **over), want, rtol=1e-12, atol=1e-12)


def test_many_samples_are_convolved_in_blocks() -> None:
    x, w = draw(70, 8, 20, 20, dtype=np.float32), draw(8, 8, 5, 5, dtype=np.float32)
    y = conv.conv(np, x, w, padding=2)
    np.testing.assert_allclose(y[-1:], conv.conv(np, x[-1:], w, padding=2), rtol=1e-4, atol=1e-4)
    dw = conv.conv_grad_weight(np, x, y, kernel_shape=w.shape, padding=2)
    halves = [
        conv.conv_grad_weight(np, x[s], y[s], kernel_shape=w.shape, padding=2)
        for s in (slice(35), slice(35, 70))
    ]
    np.testing.assert_allclose(dw, sum(halves), rtol=1e-4, atol=1e-4 * float(np.abs(dw).max()))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(GraphError, match="input has 3 channels but weight"):
        conv.conv(np, draw(1, 3, 5, 5), draw(4, 2, 3, 3))
    with pytest.raises(GraphError, match="does not fit in input"):
        conv.conv(np, draw(1, 2, 2, 5), draw(4, 2, 3, 3))
    with pytest.raises(GraphError, match="give one entry for each dim"):
        pooling.max_pool(np, draw(1, 2, 5, 5), window=(2,))
    with pytest.raises(GraphError, match="h a multiple of g"):
        attention.attention(np, draw(1, 3, 2, 4), draw(1, 2, 2, 4), draw(1, 2, 2, 4))
