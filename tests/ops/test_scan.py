"""The interface of `ops.scan`, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import ops
from distgraph.array_api.trace import trace
from distgraph.errors import GraphError
from distgraph.ir.parser import parse_graph
from distgraph.ir.reference_interpreter import interpret
from distgraph.ir.verifier import verify

X = np.arange(12.0).reshape(4, 3)


def test_a_scan_without_sequences_takes_a_length() -> None:
    def fibonacci(c: Any, _: Any) -> Any:
        return (c[1], c[0] + c[1]), c[0]

    start = ops.zeros
    graph = trace(lambda x: ops.scan(fibonacci, (start((), "f64"), start((), "f64") + 1.0), length=9)[1], X)
    found, _ = interpret(graph, {"x0": X})
    np.testing.assert_array_equal(found["y"], [0, 1, 1, 2, 3, 5, 8, 13, 21])


def test_a_scan_without_carry_maps() -> None:
    graph = trace(lambda x: ops.scan(lambda _, v: (None, {"y": v * v}), None, x)[1]["y"], X)
    np.testing.assert_array_equal(interpret(graph, {"x0": X})[0]["y"], X * X)


def test_eager_computes_loops_and_their_gradients() -> None:
    with dg.eager() as run:
        x = run.input("x", X)
        y, _ = ops.scan(lambda c, v: (c * 0.5 + v, None), ops.zeros((3,), "f64"), x)
        np.testing.assert_allclose(np.asarray(y), 0.125 * X[0] + 0.25 * X[1] + 0.5 * X[2] + X[3])


def test_keys_of_a_carry_have_no_order() -> None:
    def turn(c: Any, v: Any) -> Any:
        return {"last": v, "sum": c["sum"] + 2.0 * v}, None

    graph = trace(lambda x: ops.scan(turn, {"sum": x[0], "last": x[0] * 0.0}, x)[0]["sum"], X)
    np.testing.assert_array_equal(interpret(graph, {"x0": X})[0]["y"], X[0] + 2.0 * X.sum(0))


def _scan_with(function: Any, *options: Any, **named: Any) -> Any:
    """A scan over a tensor, or over what is made of it, from its first row."""
    return lambda x: ops.scan(function, x[0], *(option(x) for option in options), **named)


def _keep(c: Any, v: Any) -> Any:
    return c, None


def _same(x: Any) -> Any:
    return x


def _leaked(x: Any) -> Any:
    inside = []

    def turn(c: Any, v: Any) -> Any:
        inside.append(v)
        return c + v, None

    carry, _ = ops.scan(turn, x[0], x)
    return carry + inside[0]


BAD: dict[str, tuple[Any, str]] = {
    "shape": (_scan_with(lambda c, v: (c.sum(), None), _same), r"carry \(f64\[\]\) but gets \(f64\[3\]\)"),
    "dtype": (
        _scan_with(lambda c, v: (ops.cast(c, "f32"), None), _same),
        r"carry \(f32\[3\]\) but gets \(f64\[3\]\)",
    ),
    "structure": (_scan_with(lambda c, v: ((c, c), None), _same), "give both the same structure"),
    "no pair": (_scan_with(lambda c, v: c, _same), r"must return \(carry, y\) but returns a Tensor"),
    "lengths": (_scan_with(_keep, lambda x: (x, x[1:])), "is 4 and 3: the tensors of xs"),
    "length": (_scan_with(_keep, _same, length=5), "is 4 and 5: the tensors of xs"),
    "no length": (_scan_with(_keep), "is unknown"),
    "no turns": (_scan_with(_keep, length=0), "has 0 turns but needs at least one"),
    "scalar": (_scan_with(_keep, lambda x: x.sum()), r"f64\[\], without items"),
    "nothing": (
        lambda x: ops.scan(lambda c, v: (None, None), None, x),
        "has no carry and its body returns nothing",
    ),
    "condition": (
        lambda x: ops.while_loop(lambda c: c > 0.0, lambda c: c, (x,)),
        r"returns bool\[4, 3\] but must return one bool scalar",
    ),
    "leak": (_leaked, "belongs to trace 'body' but is used in 'main'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case: str) -> None:
    function, message = BAD[case]
    with pytest.raises(GraphError, match=message):
        trace(function, X)


def test_a_damaged_body_is_found() -> None:
    text = str(trace(lambda x: ops.scan(lambda c, v: (c + v, None), x[0], x)[0], X))
    for old, new, message in (
        ("add(%carry0, %x0)", "maximum(%carry0, %x0 : f32[3])", "in body of .* is read as f32"),
        ("length=4", "length=3", "has 3 turns; the first dim of a sequence must be the number of turns"),
        ('{name="x0"} ', '{name="x7"} ', "has no source 'x0' for operand"),
    ):
        assert old in text, text
        head, body = text.split("graph @body")
        damaged = f"{head}graph @body{body.replace(old, new)}"
        with pytest.raises(GraphError, match=message):
            verify(parse_graph(damaged))
