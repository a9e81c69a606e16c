"""Calls and branches of a jaxpr: calls are inlined, of branches on data one is selected. Loops: `loops`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from distgraph import ops
from distgraph.frontends.jax.custom_derivatives import custom_derivative, with_derivative
from distgraph.frontends.jax.folded_constant import Constant
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace


class Refused:
    """The result of a primitive that could not be computed; whatever reads it is not computed either."""


class Evaluator(Protocol):
    """What evaluates the jaxprs that an equation holds; see `jaxpr_evaluator`."""

    loops: int
    inlining: bool
    missing: dict[str, list[str]]
    refused: list[str]

    def evaluate(self, closed: Any, operands: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr."""
        ...


Control = Callable[[Any, Sequence[Any], Evaluator], Sequence[Any]]
CONTROL: dict[str, Control] = {}
"""Name of a primitive that holds jaxprs -> function that evaluates it."""

CALLS = {
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "remat2",
    "checkpoint",
}  # fmt: skip
"""Primitives that call one jaxpr once."""


def control(*names: str) -> Callable[[Control], Control]:
    """Register the function that evaluates primitives that hold jaxprs."""

    def register(function: Control) -> Control:
        for name in names:
            CONTROL[name] = function
        return function

    return register


@control("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
def _call(eqn: Any, operands: Sequence[Any], evaluator: Evaluator) -> Sequence[Any]:
    inner = eqn.params["call_jaxpr"] if "call_jaxpr" in eqn.params else eqn.params["jaxpr"]
    if evaluator.inlining or not eqn.primitive.name.startswith("custom_"):
        return evaluator.evaluate(inner, operands)
    if _is_rectifier(inner) and isinstance(operands[0], Tensor):
        return [ops.relu(operands[0])]
    derivative = custom_derivative(eqn, inner, operands)
    values = evaluator.evaluate(inner, operands)
    if derivative is None or not all(isinstance(x, (Tensor, Constant)) for x in [*operands, *values]):
        return values
    evaluator.inlining = True  # what follows has no gradient but in dx, in which it is linear
    try:
        return with_derivative(derivative, eqn, operands, values, evaluator.evaluate)
    finally:
        evaluator.inlining = False


def _is_rectifier(closed: Any) -> bool:
    """Whether a jaxpr is max(x, 0) and nothing else, inside of any number of calls."""
    eqns = closed.jaxpr.eqns
    if len(eqns) != 1 or len(closed.jaxpr.invars) != 1:
        return False
    (eqn,) = eqns
    if eqn.primitive.name in ("jit", "pjit"):
        return _is_rectifier(eqn.params["jaxpr"])
    zero = eqn.invars[-1]
    return eqn.primitive.name == "max" and hasattr(zero, "val") and not np.any(zero.val)


@control("remat", "remat2", "checkpoint")
def _recomputed(eqn: Any, operands: Sequence[Any], evaluator: Evaluator) -> Sequence[Any]:
    with Trace.current().recomputing():
        return evaluator.evaluate(eqn.params["jaxpr"], operands)


@control("cond")
def _cond(eqn: Any, operands: Sequence[Any], evaluator: Evaluator) -> Sequence[Any]:
    """The branch of a constant index; all branches, of which one is selected, where it depends on data."""
    index, *rest = operands
    branches = eqn.params["branches"]
    if isinstance(index, Constant):
        return evaluator.evaluate(branches[int(np.clip(index.value, 0, len(branches) - 1))], rest)
    if not isinstance(index, Tensor):
        return [index for _ in eqn.outvars]
    results = [evaluator.evaluate(branch, rest) for branch in branches]
    selected = results[-1]
    for number in range(len(branches) - 2, -1, -1):
        chosen = ops.less_equal(index, number)
        selected = [
            _selected(chosen, one, other) for one, other in zip(results[number], selected, strict=True)
        ]
    return selected


def _selected(chosen: Any, one: Any, other: Any) -> Any:
    for x in (one, other):
        if not isinstance(x, (Tensor, Constant)):
            return x
    return ops.where(chosen, one, other)
