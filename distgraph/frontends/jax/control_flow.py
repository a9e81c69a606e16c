"""Calls, loops and branches of a jaxpr: calls are inlined, scans unrolled, branches selected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.jax.custom_derivatives import custom_derivative, with_derivative
from distgraph.frontends.jax.folded_constant import Constant
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

LONGEST = 512
"""Turns of the longest scan that is unrolled."""


class Evaluator(Protocol):
    """What evaluates the jaxprs that an equation holds; see `jaxpr_evaluator`."""

    loops: int
    inlining: bool

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


def _control(*names: str) -> Callable[[Control], Control]:
    def register(function: Control) -> Control:
        for name in names:
            CONTROL[name] = function
        return function

    return register


@_control("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
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


@_control("remat", "remat2", "checkpoint")
def _recomputed(eqn: Any, operands: Sequence[Any], evaluator: Evaluator) -> Sequence[Any]:
    with Trace.current().recomputing():
        return evaluator.evaluate(eqn.params["jaxpr"], operands)


@_control("scan")
def _scan(eqn: Any, operands: Sequence[Any], evaluator: Evaluator) -> Sequence[Any]:
    """One copy of the body for each turn, in a scope of its own."""
    params = eqn.params
    length, fixed, carried = params["length"], params["num_consts"], params["num_carry"]
    if length > LONGEST:
        raise GraphError(
            f"scan has {length} turns but at most {LONGEST} are unrolled; nest it in a jax.lax.map over "
            "shorter sequences, or give shorter examples"
        )
    constants, carry = list(operands[:fixed]), list(operands[fixed : fixed + carried])
    sequences = operands[fixed + carried :]
    evaluator.loops += 1
    loop = "scan" if evaluator.loops == 1 else f"scan{evaluator.loops}"
    rows: list[list[Any]] = [[] for _ in eqn.outvars[carried:]]
    order = range(length - 1, -1, -1) if params["reverse"] else range(length)
    for turn in order:
        with Trace.current().within(scope=f"{loop}.{turn}"):
            items = [_item(x, turn) for x in sequences]
            results = evaluator.evaluate(params["jaxpr"], [*constants, *carry, *items])
        carry = results[:carried]
        for row, x in zip(rows, results[carried:], strict=True):
            row.append(x)
    if params["reverse"]:
        rows = [row[::-1] for row in rows]
    stacked = [_stacked(row, var.aval) for row, var in zip(rows, eqn.outvars[carried:], strict=True)]
    return [*carry, *stacked]


def _item(x: Any, position: int) -> Any:
    """An item of the first dim."""
    if isinstance(x, Constant):
        return Constant(x.value[position])
    if isinstance(x, Tensor):
        return ops.getitem(x, position)
    return x.item(position) if hasattr(x, "item") else x


def _stacked(row: Sequence[Any], expected: Any) -> Any:
    """Results of all turns along a new first dim."""
    if not row:
        return Constant(np.zeros(expected.shape, expected.dtype))
    if all(isinstance(x, Constant) for x in row):
        return Constant(np.stack([x.value for x in row]))
    other = next((x for x in row if not isinstance(x, (Constant, Tensor))), None)
    return ops.stack(list(row), 0) if other is None else other


@_control("cond")
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


@_control("while")
def _while(eqn: Any, operands: Sequence[Any], evaluator: Evaluator) -> Sequence[Any]:
    """A loop whose number of turns depends on data; it has no gradient."""
    if any(not isinstance(x, (Tensor, Constant)) for x in operands):
        return [next(x for x in operands if not isinstance(x, (Tensor, Constant))) for _ in eqn.outvars]
    params = eqn.params
    trace = Trace.current()
    first, second = params["cond_nconsts"], params["body_nconsts"]
    fixed, state = operands[: first + second], operands[first + second :]
    count = len(state)

    def condition(*xs: Any) -> Any:
        return evaluator.evaluate(params["cond_jaxpr"], [*xs[count : count + first], *xs[:count]])[0]

    def body(*xs: Any) -> tuple[Any, ...]:
        return tuple(evaluator.evaluate(params["body_jaxpr"], [*xs[count + first :], *xs[:count]]))

    return ops.while_loop(condition, body, list(map(trace.tensor, state)), list(map(trace.tensor, fixed)))
