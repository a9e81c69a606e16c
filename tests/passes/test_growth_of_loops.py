"""How results of loops depend on the number of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distgraph import ops
from distgraph.ir.graph import Graph
from distgraph.passes.analysis.accumulation import Growth, growths
from distgraph.tracing.tracer import Trace


def traced(function: Callable[[Any], Any], samples: int) -> Graph:
    trace = Trace("forward")
    with trace.activate():
        return trace.finish({"result": function(trace.source("input", "x", (samples, 3), "f32"))})


def growth(function: Callable[[Any], Any]) -> Growth:
    small, large = traced(function, 2), traced(function, 6)
    return growths(small, large, 3)[dict(small.outputs)["result"].name]


def items(x: Any) -> Any:
    """Four items of each sample, the items first."""
    return ops.stack([x, 2.0 * x, x * x, x])


def scanned(body: Any, number: int, start: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    return lambda x: ops.scan(body, x if start is None else start(x), items(x))[number]


def turned(condition: Any, body: Any) -> Callable[[Any], Any]:
    return lambda x: ops.while_loop(condition, body, (ops.zeros((), "i32"), x))[1]


def number(x: Any) -> Any:
    return ops.zeros(())


ROWS, MEAN, OTHER = Growth("rows"), Growth("linear"), Growth("other")


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (scanned(lambda c, x: (ops.tanh(c + x), None), 0), ROWS),
        (scanned(lambda c, x: (c, c * x), 1), Growth("rows", dim=1)),
        (scanned(lambda c, x: (c + ops.mean(x**2), None), 0, number), MEAN),
        (scanned(lambda c, x: (c, ops.mean(x**2)), 1), MEAN),
        (
            lambda x: ops.scan(
                lambda c, item: ((c[0] + ops.mean(item**2), c[0] + c[1]), None),
                (number(x), number(x)),
                items(x),
            )[0][1],
            MEAN,
        ),
        (turned(lambda n, c: n < 3, lambda n, c: (n + 1, c * 2.0)), ROWS),
        (turned(lambda n, c: ops.mean(c) < 3.0, lambda n, c: (n + 1, c * 2.0)), OTHER),
        (turned(lambda n, c: n < 3, lambda n, c: (n + 1, c - ops.mean(c, 0))), OTHER),
        (scanned(lambda c, x: (c + x - ops.mean(x, 0), None), 0), OTHER),
        (scanned(lambda c, x: (c + ops.mean(x**2) ** 0.5, None), 0, number), OTHER),
        (scanned(lambda c, x: (c * ops.mean(x), None), 0, lambda x: ops.zeros(()) + 1.0), OTHER),
        (lambda x: ops.scan(lambda c, row: (c + row, None), x[0] * 0.0, x)[0], OTHER),
        (lambda x: ops.scan(lambda c, row: (c, c + row), ops.zeros((3,)), x)[1], OTHER),
    ],
)  # fmt: skip
def test_results_of_loops(function: Callable[[Any], Any], wanted: Growth) -> None:
    assert growth(function) == wanted
