"""Gradients where ops meet: promotion, broadcasting, ties, integers on the path, and second order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.ir.reference_interpreter import interpret
from distgraph.passes.serial.backward import differentiate
from distgraph.tracing.tracer import Trace


def gradients(function: Callable[..., Any], *arrays: Any, twice: bool = False) -> list[Any]:
    trace = Trace("gradients")
    with trace.activate():
        tensors = [trace.source("input", f"x{i}", a.shape, a.dtype) for i, a in enumerate(arrays)]
        grads = differentiate(trace, function(*tensors), tensors)
        if twice:
            total = ops.reduce("sum", ops.square(grads[0]))
            grads = differentiate(trace, total, tensors)
        graph = trace.finish({f"g{i}": g for i, g in enumerate(grads)})
    found, _ = interpret(graph, {f"x{i}": a for i, a in enumerate(arrays)})
    return list(found.values())


def test_narrow_operands_get_narrow_gradients(rng: np.random.Generator) -> None:
    x, y = rng.standard_normal((3, 2)).astype(np.float16), rng.standard_normal(2).astype(np.float32)
    gx, gy = gradients(lambda x, y: ops.reduce("sum", x * y + x), x, y)
    assert (gx.dtype, gy.dtype) == (np.float16, np.float32)
    np.testing.assert_allclose(gx, np.tile(y + 1, (3, 1)), atol=4 * 2.0**-10)  # y and 1 are rounded apart
    np.testing.assert_allclose(gy, x.astype(np.float32).sum(0), rtol=1e-5)


def test_ties_share_or_choose() -> None:
    tied = np.array([2.0, 2.0, 1.0])
    assert gradients(lambda x: ops.reduce("max", x), tied)[0].tolist() == [0.5, 0.5, 0.0]
    left, right = gradients(lambda x, y: ops.reduce("sum", ops.maximum(x, y)), tied, tied)
    assert (left + right).tolist() == [1.0, 1.0, 1.0]


def test_a_masked_infinity_does_not_leak() -> None:
    x = np.array([0.0, 4.0])
    (grad,) = gradients(lambda x: ops.reduce("sum", ops.where(x > 0, x, 1.0) ** 0.5), x)
    assert grad.tolist() == [0.0, 0.25]


def test_integers_on_the_path_stop_the_gradient(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 3))

    def chosen(x: Any) -> Any:
        best = ops.one_hot(ops.argmax(x, 1), 3, "f64")
        return ops.reduce("sum", best * x) + ops.reduce("sum", x.astype("i32").astype("f64"))

    (grad,) = gradients(chosen, x)
    assert np.array_equal(grad, np.eye(3)[x.argmax(1)])


def test_tied_operands_add_up(rng: np.random.Generator) -> None:
    w = rng.standard_normal((3, 3))
    (grad,) = gradients(lambda w: ops.reduce("sum", w @ w), w)
    ones = np.ones((3, 3))
    np.testing.assert_allclose(grad, ones @ w.T + w.T @ ones, rtol=1e-12)


def test_second_order(rng: np.random.Generator) -> None:
    x = rng.standard_normal(5)
    (grad,) = gradients(lambda x: ops.reduce("sum", ops.exp(x)), x, twice=True)
    np.testing.assert_allclose(grad, 2 * np.exp(2 * x), rtol=1e-12)  # d/dx of exp(x)^2


def test_an_op_without_gradient_is_named() -> None:
    with pytest.raises(GraphError, match=r"floor_divide.*has no gradient"):
        gradients(lambda x: ops.reduce("sum", x // 2), np.ones(3))
