"""The public functions: traced, interpreted and compared with NumPy; and what they say about bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distgraph import ops
from distgraph.array_api.trace import trace
from distgraph.errors import GraphError, RuntimeFault
from distgraph.ir.reference_interpreter import interpret
from distgraph.passes.serial.backward import differentiate
from distgraph.tracing.tracer import Trace

X = np.arange(24, dtype=np.float32).reshape(4, 6)
Y = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7
IDS = np.array([[3, 0, 1], [2, 2, 0]], np.int32)


def evaluate(function: Callable[..., Any], *arrays: Any) -> Any:
    graph = trace(function, *arrays)
    outputs, _ = interpret(graph, {f"x{i}": a for i, a in enumerate(arrays)})
    return list(outputs.values()) if len(outputs) > 1 else next(iter(outputs.values()))


def same(function: Callable[..., Any], reference: Callable[..., Any], *arrays: Any) -> None:
    found, expected = evaluate(function, *arrays), reference(*arrays)
    found = found if isinstance(found, list) else [found]
    expected = list(expected) if isinstance(expected, (list, tuple)) else [expected]
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert a.shape == np.shape(b)


KEYS = [
    np.s_[1], np.s_[-1], np.s_[:, 2], np.s_[1:3], np.s_[::2], np.s_[::-1], np.s_[3:0:-2], np.s_[None],
    np.s_[..., None], np.s_[..., 1:4], np.s_[1, None, ::3], np.s_[:, -2:], np.s_[2:2], np.s_[0, 1], np.s_[()],
    np.s_[[2, 0, -1]], np.s_[:, [1, 1, 0]], np.s_[1:, [0, 5]],
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_getitem(key: Any) -> None:
    same(lambda x: x[key], lambda x: x[key], X)


def test_getitem_by_a_traced_tensor() -> None:
    same(lambda x, i: x[i], lambda x, i: x[i], X, IDS)
    same(lambda x, i: x[:, i, None], lambda x, i: x[:, i, None], X, IDS)


BOTH: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("sum", lambda np, x: np.sum(x, axis=0)),
    ("sum of all", lambda np, x: np.sum(x)),
    ("mean", lambda np, x: np.mean(x, axis=-1, keepdims=True)),
    ("max", lambda np, x: np.max(x, axis=(0, 1))),
    ("argmax", lambda np, x: np.argmax(x, axis=1)),
    ("stack", lambda np, x: np.stack([x, x + 1], axis=1)),
    ("roll", lambda np, x: np.roll(x, 2, axis=1)),
    ("roll back", lambda np, x: np.roll(x, -1, axis=0)),
    ("tile", lambda np, x: np.tile(x, (2, 1, 3))),
    ("repeat", lambda np, x: np.repeat(x, 2, axis=1)),
    ("flip", lambda np, x: np.flip(x, axis=0)),
    ("squeeze", lambda np, x: np.squeeze(np.expand_dims(x, axis=(0, 2)))),
    ("broadcast_to", lambda np, x: np.broadcast_to(x, (3, 4, 6))),
    ("take", lambda np, x: np.take(x, [0, -1], axis=1)),
    ("clip", lambda np, x: np.clip(x, 3, 9)),
    ("where", lambda np, x: np.where(x > 4, x, 0)),
    ("tril", lambda np, x: np.tril(x, -1)),
    ("triu", lambda np, x: np.triu(x, k=1)),
    ("diff", lambda np, x: np.diff(x, axis=1)),
    ("moveaxis", lambda np, x: np.moveaxis(x, 0, -1)),
    ("tensordot", lambda np, x: np.tensordot(x, x, axes=((1,), (1,)))),
    ("sort", lambda np, x: np.sort(-x, axis=0)),
    ("zeros_like", lambda np, x: np.zeros_like(x) + x),
    ("logaddexp", lambda np, x: np.logaddexp(x, x * 2)),
    ("outer", lambda np, x: np.outer(x[0], x[1])),
    ("std", lambda np, x: np.std(x, axis=0)),
    ("matmul", lambda np, x: np.matmul(x, np.matrix_transpose(x))),
    ("arithmetic", lambda np, x: (2 - x) / (x + 1) ** 2 + abs(-x) % 3 - x // 2),
    ("logic", lambda np, x: np.any((x > 2) & ~(x > 5), axis=1)),
    ("round", lambda np, x: np.round(x / 4)),
    ("unstack", lambda np, x: np.unstack(x, axis=1)[2] if hasattr(np, "unstack") else x[:, 2]),
]


@pytest.mark.parametrize(("function"), [f for _, f in BOTH], ids=[name for name, _ in BOTH])
def test_array_api_and_numpy(function: Callable[[Any, Any], Any]) -> None:
    """Code written for a namespace: through the array API, and through NumPy's own protocols."""
    expected = function(np, X)
    for found in (
        evaluate(lambda x: function(x.__array_namespace__(), x), X),
        evaluate(lambda x: function(np, x), X),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert found.shape == np.shape(expected)


def test_numpy_only_functions() -> None:
    same(lambda x: np.concatenate([x, x], axis=1), lambda x: np.concatenate([x, x], axis=1), X)
    same(lambda x: np.vstack([x[0], x]), lambda x: np.vstack([x[0], x]), X)
    same(lambda x: np.hstack([x, x]), lambda x: np.hstack([x, x]), X)
    same(lambda x: np.split(x, [1, 3]), lambda x: np.split(x, [1, 3]), X)
    same(lambda x: np.pad(x, ((1, 0), (0, 2))), lambda x: np.pad(x, ((1, 0), (0, 2))), X)
    same(lambda x: np.var(x, axis=0, ddof=1), lambda x: np.var(x, axis=0, ddof=1), X)
    same(lambda x: np.linalg.norm(x, axis=1), lambda x: np.linalg.norm(x, axis=1), X)
    same(np.add.reduce, np.add.reduce, X)
    same(lambda x: np.multiply.outer(x[0], x[1]), lambda x: np.multiply.outer(x[0], x[1]), X)
    same(lambda x: np.add.accumulate(x, axis=1), lambda x: np.add.accumulate(x, axis=1), X)
    same(lambda x: np.ones((3, 4), np.float32) @ x, lambda x: np.ones((3, 4), np.float32) @ x, X)
    same(lambda x: np.dot(x, x[0]), lambda x: np.dot(x, x[0]), X)


def test_contractions() -> None:
    same(lambda y: y @ np.ones(4, np.float32), lambda y: y @ np.ones(4), Y)
    same(lambda y: ops.einsum("...ij,kj->...ik", y, y[0]), lambda y: np.einsum("...ij,kj->...ik", y, y[0]), Y)
    same(lambda y: ops.einsum("...i,...i", y, y[:1]), lambda y: np.einsum("...i,...i", y, y[:1]), Y)
    same(lambda y: ops.outer(y[0, 0], y[1, 1]), lambda y: np.outer(y[0, 0], y[1, 1]), Y)
    same(lambda x: ops.matmul(x[0], x[1]), lambda x: x[0] @ x[1], X)


def test_order_and_positions() -> None:
    same(lambda x: list(ops.top_k(x, 2)), lambda x: (np.sort(x)[:, :-3:-1], np.argsort(x)[:, :-3:-1]), X)
    same(ops.embedding, lambda t, i: t[i], X, IDS)
    same(lambda i: ops.one_hot(i, 4), lambda i: np.eye(4, dtype=np.float32)[i], IDS)
    same(lambda x: ops.pick(x, np.array([5, 0, 1, 2])), lambda x: x[np.arange(4), [5, 0, 1, 2]], X)
    same(lambda x: ops.arange(2, 9, 3) + ops.cast(x[0, 0], "i64"), lambda x: np.arange(2, 9, 3), X)
    same(lambda x: ops.logsumexp(x, 1), lambda x: np.log(np.exp(x).sum(1)), X)


def test_mean_of_half_precision_does_not_overflow() -> None:
    big = np.full((400, 3), 60000, np.float16)
    assert (evaluate(lambda x: ops.mean(x, 0), big) == 60000).all()


MISTAKES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda x: x @ x, "index k is 6 in the left operand but 4 in the right"),
    (
        lambda x: x @ x.astype("f64").T,
        "operand 0 is f32.* but operand 1 is f64.*; a contraction needs one dtype",
    ),
    (lambda x: ops.einsum("ij,ik->jk", x, x[1:]), "index i is 4 in operand 0 but 3 in operand 1"),
    (lambda x: ops.einsum("ijk->i", x), "names 3 dims"),
    (lambda x: x + x[:, :5], "do not broadcast"),
    (lambda x: x[x > 2], "boolean mask"),
    (lambda x: x[7], "index 7 is out of range for dim 0"),
    (lambda x: x[0, 0, 0], "has 2 dims but the index names 3"),
    (lambda x: x[x], "cast it to an integer dtype"),
    (lambda x: x.reshape(5, -1), "24 elements, no multiple of 5"),
    (lambda x: x.reshape(4, 7), "24 elements but shape"),
    (lambda x: x.sum(axis=2), "axis 2 is out of range"),
    (lambda x: x.sum(axis=(0, 0)), "names a dim twice"),
    (lambda x: x.transpose(0, 0), "no permutation"),
    (lambda x: ops.mean(x > 1), "needs a floating dtype"),
    (lambda x: ops.split(x, 5), "does not split in 5 equal parts"),
    (lambda x: ops.concat([x, x[:, :2]], 0), "differ in a dim other than 0"),
    (lambda x: ops.embedding(x, x), "positions must be integers"),
    (lambda x: ops.take(x, [9]), "out of range for dim 0"),
    (lambda x: ops.top_k(x, 7), "k must be between 1"),
    (lambda x: ops.squeeze(x, 0), "only length 1 is squeezed"),
    (lambda x: ops.broadcast_to(x, (3, 6)), "does not broadcast to shape"),
    (lambda x: ops.where(x, x, x), "must be bool"),
    (np.median, "numpy.median does not trace"),
    (np.linalg.svd, "numpy.linalg.svd does not trace"),
    (lambda x: np.exp(x, out=np.zeros(3)), "tensors are never written to"),
    (
        lambda x: np.sum(x, where=np.ones((4, 6), bool)),
        r"where= .*; use np.sum\(np.where\(mask, x, 0\), axis\)",
    ),
    (lambda x: np.add.reduce(x, where=x > 0), r"where= .*; use np.sum\(np.where\(mask, x, 0\), axis\)"),
    (
        lambda x: np.mean(x, where=x > 0),
        r"where= .*; use np.where\(mask, x, 0\).sum\(axis\) / mask.sum\(axis\)",
    ),
    (lambda x: np.max(x, -1, initial=0.0), r"initial= .*; use np.maximum\(np.max\(x, axis\), initial\)"),
    (lambda x: np.reshape(x, (6, 4), order="F"), r"order= .*; use np.reshape\(x.T, shape\[::-1\]\).T"),
    (np.asarray, "its numbers are not known yet"),
    (lambda x: float(x[0, 0]), "its numbers are not known yet"),
    (lambda x: list(range(x.sum())), r"its numbers are not known yet, so int\(\)"),
    (lambda x: f"{x.sum():.2f}", r"its numbers are not known yet, so format\(\)"),
    (lambda x: x if x.sum() > 0 else -x, "use dg.ops.where or dg.ops.while_loop"),
    (lambda x: x.__array_namespace__().linalg, "numpy.linalg does not trace"),
]


@pytest.mark.parametrize(("function", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_mistakes(function: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        trace(function, X)


def test_errors_name_the_op_and_the_line() -> None:
    with pytest.raises(
        GraphError, match=r"matmul\(%x0 f32\[4, 6\], %x0 f32\[4, 6\]\) \(test_functions.py:\d+\)"
    ):
        trace(lambda x: x @ x, X)


def test_positions_outside_the_table_are_refused_at_run_time() -> None:
    graph = trace(ops.embedding, X, IDS)
    with pytest.raises(RuntimeFault, match=r"position 4 is outside 0\.\.3"):
        interpret(graph, {"x0": X, "x1": IDS + 1})
    with pytest.raises(RuntimeFault, match=r"position -1 is outside 0\.\.3"):
        interpret(graph, {"x0": X, "x1": IDS - 1})


MASK = np.array([[True, False, True], [False, False, True]])
SIGNED = np.array([[-3, 2, 0], [4, -5, 1]], np.float32)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: np.where(m, 1, -1) * x,
        lambda m, x: (m * 2 + 1) * x,
        lambda m, x: np.where(m, 5, 2.5) + x,
        lambda m, x: (m * 3).sum(-1),
        lambda m, x: np.maximum(m, 2) * x,
        lambda m, x: (1 - m) * x,
        lambda m, x: np.where(m, True, False) + x,
        lambda m, x: (m + 0.5) * x,
        lambda m, x: np.logical_and(m, 1),
        lambda m, x: np.where(m, 300, x),
    ],
)
def test_numbers_keep_their_value_beside_masks(function: Callable[..., Any]) -> None:
    same(function, function, MASK, SIGNED)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_logarithms_of_sums_of_exponentials_have_the_limits_of_infinities() -> None:
    inf = np.inf
    rows = np.array([[-inf, -inf], [inf, 0], [-inf, 1], [inf, inf], [2, 2], [inf, -inf]])
    expected = [-inf, inf, 1, inf, 2 + np.log(2), inf]
    np.testing.assert_allclose(evaluate(lambda x: ops.logsumexp(x, 1), rows), expected)
    np.testing.assert_allclose(evaluate(lambda x: ops.logsumexp(x, 1, keepdims=True)[:, 0], rows), expected)
    left, right = rows.T
    np.testing.assert_allclose(evaluate(np.logaddexp, left, right), expected)


def test_the_gradient_of_a_norm_of_zeros_is_zero() -> None:
    rows = np.array([[0, 0], [3, 4]], np.float32)

    def gradient(function: Callable[..., Any]) -> np.ndarray:
        made = Trace()
        with made.activate():
            x = made.source("input", "x", rows.shape, "f32")
            graph = made.finish({"y": differentiate(made, ops.reduce("sum", function(x)), [x])[0]})
        found: np.ndarray = interpret(graph, {"x": rows})[0]["y"]
        return found

    np.testing.assert_allclose(gradient(lambda x: ops.norm(x, 1)), [[0, 0], [0.6, 0.8]], rtol=1e-6)
    other = np.array([[0, 0], [1e4, -1e4]], np.float32)
    np.testing.assert_allclose(gradient(lambda x: np.logaddexp(x, other)), [[0.5, 0.5], [0, 1]], atol=1e-6)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: ops.bitwise_and(x, x), "operand of dtype f32 has no bits; cast it to integers or bool"),
        (lambda x: ~x, "operand of dtype f32 has no bits"),
        (lambda x: -(x > 0), "operands are bool, which has no signs; cast one with .astype"),
        (lambda x: (x > 0) - (x < 0), "operands are bool, which has no signs"),
        (lambda x: np.sign(x > 0), "operands are bool, which has no signs"),
    ],
)
def test_types_without_bits_or_signs_are_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        trace(function, X)


OPERATORS: list[Callable[[Any], Any]] = [
    lambda n: n << 2, lambda n: n >> 1, lambda n: 2 << n, lambda n: 100 >> n, lambda n: 6 & n,
    lambda n: 6 | n, lambda n: 6 ^ n, lambda n: divmod(n, 3), lambda n: divmod(17, n + 1),
]  # fmt: skip


@pytest.mark.parametrize("function", OPERATORS)
@pytest.mark.parametrize("dtype", ["i4", "u1"])
def test_operators_of_integers(function: Callable[[Any], Any], dtype: str) -> None:
    same(function, function, np.arange(6, dtype=dtype))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x << 2, "operand of dtype f32 has no bits; cast it to integers"),
        (lambda x: 2 >> x, "operand of dtype f32 has no bits; cast it to integers"),
        (lambda x: (x > 0) << (x > 1), "operands are bool, which has one bit to shift; cast one to integers"),
    ],
)
def test_types_that_are_not_shifted(function: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        trace(function, X)
