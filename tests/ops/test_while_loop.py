"""Loops whose number of turns is found while running."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distgraph import ops
from distgraph.array_api.trace import trace
from distgraph.errors import GraphError
from distgraph.ir.index_rule import choices
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import rule_of
from distgraph.ir.reference_interpreter import interpret
from distgraph.tracing.tracer import Trace


def test_newton_iteration_runs_until_it_has_converged() -> None:
    def root(a: Any) -> Any:
        def improve(x: Any, error: Any, a: Any) -> Any:
            new = 0.5 * (x + a / x)
            return new, ops.reduce("max", ops.absolute(new - x), None)

        x, _ = ops.while_loop(lambda x, e, a: e > 1e-12, improve, (a, ops.reduce("max", a, None)), (a,))
        return x

    a = np.array([2.0, 9.0, 1e4])
    graph = trace(root, a)
    found, _ = interpret(graph, {"x0": a})
    np.testing.assert_allclose(found["y"], np.sqrt(a), rtol=1e-14)


def test_a_condition_that_fails_at_once_returns_the_start_and_never_aliases_it() -> None:
    x = np.array([5.0, 1.0])
    graph = trace(lambda x: ops.while_loop(lambda x: x.sum() < 0.0, lambda x: x + 1.0, (x,))[0], x)
    found, _ = interpret(graph, {"x0": x})
    np.testing.assert_array_equal(found["y"], x)
    assert not np.shares_memory(found["y"], x)


def test_several_states_of_different_dtypes_and_shapes() -> None:
    x = np.arange(3)
    graph = trace(
        lambda x: ops.while_loop(
            lambda n, x: n < 4, lambda n, x: (n + 1, x * 2), (ops.reduce("sum", x * 0, None), x)
        ),
        x,
    )
    found, _ = interpret(graph, {"x0": x})
    assert found["y0"] == 4
    np.testing.assert_array_equal(found["y1"], x * 16)


def test_a_loop_is_never_split() -> None:
    x = np.ones((4, 6))
    graph = trace(lambda x: ops.while_loop(lambda x: x.sum() < 9.0, lambda x: x * 2.0, (x,))[0], x)
    (op,) = [op for op in graph.ops if op.kind == "while_loop"]
    assert len(choices(rule_of(op), ProcessMesh.grid(x=2, y=3))) == 1


@pytest.mark.parametrize(
    ("condition", "body", "message"),
    [
        (lambda x: x, lambda x: x, "must return one bool scalar"),
        (lambda x: x.sum() > 0.0, lambda x: x.sum(), r"the carry \(f64\[\]\) but gets \(f64\[3\]\)"),
        (
            lambda x: x.sum() > 0.0,
            lambda x: (x, x),
            r"\(f64\[3\], f64\[3\]\) but gets \(f64\[3\]\)",
        ),
    ],
)
def test_state_must_keep_its_types(condition: Any, body: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        trace(lambda x: ops.while_loop(condition, body, (x,)), np.ones(3))


def test_condition_and_body_may_read_tensors_from_outside() -> None:
    x, y, most = np.ones(3), np.array([1.0, 2.0, 3.0]), np.array(20.0)
    graph = trace(
        lambda x, y, most: ops.while_loop(lambda x: x.sum() < most, lambda x: x + y, (x,))[0], x, y, most
    )
    found, _ = interpret(graph, {"x0": x, "x1": y, "x2": most})
    np.testing.assert_array_equal(found["y"], x + 3 * y)


def test_an_endless_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distgraph.ops.control.structured_loops.MAX_TURNS", 20)
    graph = trace(lambda x: ops.while_loop(lambda x: x.sum() < 9.0, lambda x: x * 1.0, (x,))[0], np.ones(3))
    with pytest.raises(GraphError, match="ran 20 turns"):
        interpret(graph, {"x0": np.ones(3)})


def test_a_loop_has_no_gradient() -> None:
    from distgraph.passes.serial.backward import differentiate

    builder = Trace()
    with builder.activate():
        x = builder.source("input", "x", (3,), "f64")
        (y,) = ops.while_loop(lambda x: x.sum() < 9.0, lambda x: x * 2.0, (x,))
        with pytest.raises(GraphError, match=r"while_loop .* has no gradient"):
            differentiate(builder, y.sum(), [x])


def test_a_loop_over_a_stopped_value_needs_no_gradient() -> None:
    """What the loop returns is a constant for the gradient, so the program trains."""
    from distgraph.passes.serial.backward import differentiate

    builder = Trace()
    with builder.activate():
        x = builder.source("input", "x", (3,), "f64")
        (y,) = ops.while_loop(lambda x: x.sum() < 9.0, lambda x: x * 2.0, (ops.stop_gradient(x),))
        (gradient,) = differentiate(builder, (x * y).sum(), [x])
    found, _ = interpret(builder.finish({"gradient": gradient, "y": y}), {"x": np.ones(3)})
    np.testing.assert_array_equal(found["y"], np.full(3, 4.0))
    np.testing.assert_array_equal(found["gradient"], found["y"])


@pytest.mark.parametrize(
    ("functions", "state", "message"),
    [
        (
            (lambda c: c[1] < 3, lambda c: c),
            lambda x: (x, 0),
            r"condition of while_loop takes \(c\) but .* 2 arg",
        ),
        (
            (lambda x, n: n < 3, lambda c: c),
            lambda x: (x, 0),
            r"body of while_loop takes \(c\) but .* own, such as",
        ),
        (
            (lambda c: True, lambda c: c),
            lambda x: {"x": x},
            r"is a dict but .* list or tuple .*state.values\(\)\)",
        ),
        (
            (lambda c: True, lambda c: c),
            lambda x: x,
            r"state of while_loop is a Tensor but .*; give \(state,\)",
        ),
    ],
)
def test_functions_and_states_in_the_form_of_jax_are_refused(
    functions: Any, state: Any, message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        trace(lambda x: ops.while_loop(*functions, state(x)), np.ones(3))
