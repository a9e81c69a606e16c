"""Loops of a jaxpr: a scan is unrolled where that is short, and else is a loop; a while is a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.jax.control_flow import Evaluator, Refused, control
from distgraph.frontends.jax.folded_constant import Constant, is_key
from distgraph.frontends.jax.stacked_parameters import StackedParameters
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

LONGEST = 512
"""Turns of the longest scan that is unrolled because its body cannot be the body of a loop."""

MOST_EQUATIONS = 1024
"""Turns times equations of the body of the largest scan that is unrolled although it could be a loop."""


@dataclass(frozen=True, slots=True)
class _Scan:
    """A scan and its operands.

    Attributes:
        body: the jaxpr of a turn: (constants, carry, items) -> (carry, results).
        turns: number of turns.
        reverse: whether the last item is first.
        constants, carry, items: operands.
        avals: types of the results that are stacked.
    """

    body: Any
    turns: int
    reverse: bool
    constants: list[Any]
    carry: list[Any]
    items: list[Any]
    avals: list[Any]


class _NoLoop(Exception):
    """A body that cannot be that of a loop."""


@control("scan")
def _scan(eqn: Any, operands: Sequence[Any], evaluator: Evaluator) -> Sequence[Any]:
    """A loop where a copy of the body for each turn would be long; layers that are stacked stay copies.

    A body that needs the number of its turn, such as `y.at[i].set(x)`, is copied too.

    Raises:
        GraphError: the body can be neither a loop nor copied, because there are too many turns.
    """
    params = eqn.params
    fixed, carried = params["num_consts"], params["num_carry"]
    given = list(operands)
    scan = _Scan(
        params["jaxpr"],
        params["length"],
        params["reverse"],
        given[:fixed],
        given[fixed : fixed + carried],
        given[fixed + carried :],
        [var.aval for var in eqn.outvars[carried:]],
    )
    if any(isinstance(x, Refused) for x in given):
        return [Refused() for _ in eqn.outvars]
    of_layers = any(isinstance(x, StackedParameters) for x in scan.items)
    long = scan.turns * equations(scan.body) > MOST_EQUATIONS or scan.turns > LONGEST
    evaluator.loops += 1
    if long and not of_layers:
        try:
            return _loop(scan, evaluator)
        except _NoLoop:
            if scan.turns > LONGEST:
                return [Refused() for _ in eqn.outvars]
        except GraphError as error:
            if scan.turns > LONGEST:
                raise GraphError(
                    f"scan has {scan.turns} turns but at most {LONGEST} are unrolled, and its body cannot be "
                    f"that of a loop: {error}"
                ) from error
    return _unrolled(scan, evaluator)


def equations(closed: Any) -> int:
    """Number of equations of a jaxpr and of those that it calls; those of a scan in every turn."""
    count = 0
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        inner = [
            x for value in eqn.params.values() for x in (value if isinstance(value, tuple) else (value,))
        ]
        called = sum(equations(x) for x in inner if hasattr(x, "eqns") or hasattr(x, "jaxpr"))
        count += max(1, called * int(eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1))
    return count


def _loop(scan: _Scan, evaluator: Evaluator) -> list[Any]:
    """The results of a scan as a loop. What its body refuses is kept only if it cannot be unrolled either.

    Raises:
        _NoLoop: a rule refuses what the body does.
        GraphError: the body cannot be that of a loop.
    """
    trace = Trace.current()
    missing = {name: list(places) for name, places in evaluator.missing.items()}
    refused, loops = list(evaluator.refused), evaluator.loops
    kept: list[Any] = []  # what every turn hands on or returns as it is: random keys

    def turn(carry: Any, items: Any) -> tuple[Any, Any]:
        inner = Trace.current()
        constants = [inner.tensor(x) if isinstance(x, Tensor) else x for x in scan.constants]
        begin = [x if not _is_number(x) else carry[n] for n, x in enumerate(scan.carry)]
        item = [x if not _is_number(x) else items[n] for n, x in enumerate(scan.items)]
        results = evaluator.evaluate(scan.body, [*constants, *begin, *item])
        if (evaluator.missing, evaluator.refused) != (missing, refused):
            raise _NoLoop
        kept[:] = [None if _is_number(x) else x for x in results]
        numbers = [inner.tensor(x) if _is_number(x) else None for x in results]
        return tuple(numbers[: len(carry)]), tuple(numbers[len(carry) :])

    begin, items = (
        tuple(trace.tensor(x) if _is_number(x) else None for x in each) for each in (scan.carry, scan.items)
    )
    try:
        with trace.within(scope="scan" if evaluator.loops == 1 else f"scan{evaluator.loops}"):
            carry, stacked = ops.scan(turn, begin, items, scan.turns, reverse=scan.reverse)
    except (_NoLoop, GraphError):
        evaluator.loops = loops
        if scan.turns <= LONGEST:
            evaluator.missing.clear()
            evaluator.missing.update(missing)
            evaluator.refused[:] = refused
        raise
    return [x if key is None else key for key, x in zip(kept, [*carry, *stacked], strict=True)]


def _is_number(x: Any) -> bool:
    """Whether a value is a tensor or becomes one; random keys do not."""
    return isinstance(x, Tensor) or (isinstance(x, Constant) and not is_key(x.value))


def _unrolled(scan: _Scan, evaluator: Evaluator) -> list[Any]:
    """One copy of the body for each turn, in a scope of its own."""
    loop = "scan" if evaluator.loops == 1 else f"scan{evaluator.loops}"
    carry, carried = scan.carry, len(scan.carry)
    rows: list[list[Any]] = [[] for _ in scan.avals]
    order = range(scan.turns - 1, -1, -1) if scan.reverse else range(scan.turns)
    for turn in order:
        with Trace.current().within(scope=f"{loop}.{turn}"):
            items = [_item(x, turn) for x in scan.items]
            results = evaluator.evaluate(scan.body, [*scan.constants, *carry, *items])
        carry = results[:carried]
        for row, x in zip(rows, results[carried:], strict=True):
            row.append(x)
    if scan.reverse:
        rows = [row[::-1] for row in rows]
    stacked = [_stacked(row, aval) for row, aval in zip(rows, scan.avals, strict=True)]
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


@control("while")
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
