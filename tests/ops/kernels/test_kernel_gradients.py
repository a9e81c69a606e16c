"""Every gradient kernel against finite differences of its forward kernel, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distgraph.kernels import activation, attention, conv, embedding, loss, norm, softmax
from distgraph.kernels import random as rnd
from distgraph.kernels.windows import pooling

RNG = np.random.default_rng(9)


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def slopes(function: Callable[[], np.ndarray], x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """d sum(weights * function()) / dx by central differences; ``function`` reads x."""
    grad, step = np.zeros_like(x), 1e-5
    for at in np.ndindex(*x.shape):
        kept = x[at]
        x[at] = kept + step
        high = np.sum(weights * function())
        x[at] = kept - step
        low = np.sum(weights * function())
        x[at] = kept
        grad[at] = (high - low) / (2 * step)
    return grad


def check(got: Any, function: Callable[[], np.ndarray], operands: list[np.ndarray], dy: np.ndarray) -> None:
    """``got``: the gradients by the kernel, one for each operand."""
    for result, x in zip(got if isinstance(got, tuple) else (got,), operands, strict=True):
        np.testing.assert_allclose(result, slopes(function, x, dy), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_softmax_gradients(axis: int) -> None:
    x, dy = draw(3, 4, 5), draw(3, 4, 5)
    for forward, grad in (
        (softmax.softmax, softmax.softmax_grad),
        (softmax.log_softmax, softmax.log_softmax_grad),
    ):
        y = forward(np, x, axis=axis)
        check(grad(np, y, dy, axis=axis), lambda f=forward: f(np, x, axis=axis), [x], dy)


def test_norm_gradients() -> None:
    x, w, b, dy = draw(2, 3, 5), draw(5), draw(5), draw(2, 3, 5)
    _, mean, rstd = norm.layer_norm(np, x, w, b)
    check(
        norm.layer_norm_grad(np, dy, x, w, mean, rstd), lambda: norm.layer_norm(np, x, w, b)[0], [x, w, b], dy
    )
    _, rstd = norm.rms_norm(np, x, w)
    check(norm.rms_norm_grad(np, dy, x, w, rstd), lambda: norm.rms_norm(np, x, w)[0], [x, w], dy)


def test_activation_gradients() -> None:
    x, dy = draw(4, 9), draw(4, 9)
    for approximate in (False, True):
        got = activation.gelu_grad(np, x, dy, approximate=approximate)
        check(got, lambda a=approximate: activation.gelu(np, x, approximate=a), [x], dy)
    check(activation.silu_grad(np, x, dy), lambda: activation.silu(np, x), [x], dy)
    check(activation.relu_grad(np, x, dy), lambda: np.maximum(x, 0), [x], dy)
    check(activation.tanh_grad(np, np.tanh(x), dy), lambda: np.tanh(x), [x], dy)


def test_loss_gradients() -> None:
    x, dy = draw(2, 3, 6), draw(2, 3)
    labels = np.array([[0, 5, 2], [3, 3, 1]])
    lse = loss.cross_entropy(np, x, labels)[1]
    got = loss.cross_entropy_grad(np, x, labels, lse, dy)
    check(got, lambda: loss.cross_entropy(np, x, labels)[0], [x], dy)
    got = loss.pick_grad(np, dy, labels, size=6, offset=2)
    check(got, lambda: loss.pick(np, x, labels, offset=2), [x], dy)


def test_embedding_gradient() -> None:
    table, ids, dy = draw(5, 3), np.array([[1, 4, 4], [7, 2, 1]]), draw(2, 3, 3)
    got = embedding.embedding_grad(np, dy, ids, rows=5, offset=1)
    check(got, lambda: embedding.embedding(np, table, ids, offset=1), [table], dy)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 6), (5, 2)])
def test_attention_gradients(causal: bool, queries: int, keys: int) -> None:
    q, k, v, do = draw(2, 4, queries, 3), draw(2, 2, keys, 3), draw(2, 2, keys, 2), draw(2, 4, queries, 2)
    o, lse = attention.attention(np, q, k, v, causal=causal, scale=0.7)
    got = attention.attention_grad(np, do, q, k, v, o, lse, causal=causal, scale=0.7)
    check(got, lambda: attention.attention(np, q, k, v, causal=causal, scale=0.7)[0], [q, k, v], do)


CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 7), (4, 3, 3), {"stride": 2, "padding": ((1, 2),)}),
    ((2, 4, 6, 5), (6, 2, 3, 2), {"stride": (2, 1), "padding": ((1, 0), (0, 1)), "groups": 2}),
    ((2, 2, 6, 7), (3, 2, 2, 3), {"dilation": (2, 2)}),
    ((1, 3, 4, 5), (2, 3, 1, 1), {}),
    ((1, 2, 3, 4, 3), (2, 1, 2, 2, 2), {"groups": 2, "padding": 1, "stride": (1, 2, 1)}),
]


@pytest.mark.parametrize(("x_shape", "w_shape", "attrs"), CONVOLUTIONS)
def test_convolution_gradients(
    x_shape: tuple[int, ...], w_shape: tuple[int, ...], attrs: dict[str, Any]
) -> None:
    x, w = draw(*x_shape), draw(*w_shape)
    dy = draw(*conv.conv(np, x, w, **attrs).shape)
    dx = conv.conv_grad_input(np, dy, w, input_shape=x_shape, **attrs)
    dw = conv.conv_grad_weight(np, x, dy, kernel_shape=w_shape, **attrs)
    check((dx, dw), lambda: conv.conv(np, x, w, **attrs), [x, w], dy)


@pytest.mark.parametrize("attrs", [
    {"window": (2, 2)}, {"window": (3, 2), "stride": (2, 1), "padding": ((1, 0), (0, 1))},
])  # fmt: skip
def test_pooling_gradients(attrs: dict[str, Any]) -> None:
    x = draw(2, 3, 6, 5)
    y = pooling.max_pool(np, x, **attrs)
    dy = draw(*y.shape)
    check(pooling.max_pool_grad(np, x, y, dy, **attrs), lambda: pooling.max_pool(np, x, **attrs), [x], dy)
    got = pooling.avg_pool_grad(np, dy, input_shape=x.shape, **attrs)
    check(got, lambda: pooling.avg_pool(np, x, **attrs), [x], dy)


def test_max_pool_gives_a_tie_to_the_first_place() -> None:
    x = np.ones((1, 1, 2, 2))
    y = pooling.max_pool(np, x, window=(2, 2))
    got = pooling.max_pool_grad(np, x, y, np.full((1, 1, 1, 1), 5.0), window=(2, 2))
    np.testing.assert_array_equal(got, [[[[5, 0], [0, 0]]]])


def test_dropout_is_its_own_gradient() -> None:
    x, dy = draw(6, 5), draw(6, 5)
    attrs = {"rate": 0.4, "salt": 3}
    check(rnd.dropout(np, dy, 77, **attrs), lambda: rnd.dropout(np, x, 77, **attrs), [x], dy)
