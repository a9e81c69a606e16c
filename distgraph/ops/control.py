"""Loops whose number of turns depends on data: condition and body are subgraphs, held as attributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distgraph.errors import GraphError
from distgraph.ir.dtypes import short
from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.index_rule import Rule, make_rule
from distgraph.ir.op_registry import Attrs, Shape, Shapes, define, flops
from distgraph.ir.reference_interpreter import interpret
from distgraph.kernels._common import store_all
from distgraph.ops.contraction import as_tensors
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

MAX_TURNS = 1_000_000
"""Turns after which a loop counts as endless."""


def _rule(shapes: Shapes, attrs: Attrs) -> Rule:
    """Index rule without a split: every rank runs the whole loop on whole tensors."""
    terms = tuple(((),) * len(shape) for shape in shapes)
    return make_rule("while_loop", terms, terms[: len(attrs["body"].outputs)], {})


def _kernel(xp: Any, *arrays: Any, out: Any = None, condition: Graph, body: Graph) -> Any:
    names = [op.attrs["name"] for op in body.sources("input")]
    count = len(body.outputs)
    state, fixed = tuple(arrays[:count]), tuple(arrays[count:])
    for _ in range(MAX_TURNS):
        inputs = dict(zip(names, state + fixed, strict=True))
        go, _ = interpret(condition, inputs, xp=xp)
        if not bool(go["y"]):
            break
        state = tuple(interpret(body, inputs, xp=xp)[0].values())
    else:
        raise GraphError(f"while_loop ran {MAX_TURNS} turns without its condition turning false")
    if out is None:
        return tuple(x.copy() if any(x is a for a in arrays) else x for x in state)
    return store_all(xp, state, out if isinstance(out, (tuple, list)) else (out,))


def _infer(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    return [(value.shape, value.dtype) for value in operands[: len(attrs["body"].outputs)]]


def _flops(op: Op, rule: Rule) -> int:
    """Operations of one turn: the number of turns is only known at run time."""
    return sum(
        flops(inner) for name in ("condition", "body") for inner in op.attrs[name].ops if inner.operands
    )


def _workspace(*arrays: Any, condition: Graph, body: Graph) -> int:
    """Bytes of all values that one turn computes, and of the state before it."""
    computed = sum(
        v.nbytes for graph in (condition, body) for op in graph.ops for v in op.results if op.operands
    )
    return computed + sum(value.nbytes for _, value in body.outputs)


define("while_loop", _rule, _kernel, infer=_infer, flops=_flops, cost="launch", workspace=_workspace)


def while_loop(
    condition: Callable[..., Any], body: Callable[..., Any], state: Sequence[Any], fixed: Sequence[Any] = ()
) -> tuple[Tensor, ...]:
    """Repeat `state = body(*state, *fixed)` while `condition(*state, *fixed)` holds. Not differentiable.

    Args:
        condition: returns a bool scalar.
        body: returns the new state: a tensor or tuple of the same shapes and dtypes.
        state: what changes from turn to turn.
        fixed: further tensors that condition and body read; they may read no other tensor from outside.

    Raises:
        GraphError: the body changes a shape or dtype, the condition is no bool scalar, or one of them uses a
            tensor from outside.

    Example:
        `(n, power) = while_loop(lambda n, p: p < 1000.0, lambda n, p: (n + 1, p * 2.0), (0, 1.0))`
    """
    tensors = as_tensors(*state, *fixed)
    count = len(tuple(state))
    if not count:
        raise GraphError("while_loop has no state; give at least one tensor that changes from turn to turn")
    return tensors[0].trace.emit("while_loop", tensors, while_subgraph(condition, body, tensors, count))


def while_subgraph(
    condition: Callable[..., Any], body: Callable[..., Any], operands: Sequence[Any], count: int
) -> dict[str, Graph]:
    """Attributes of a while_loop over operands (with a shape and dtype), the first `count` its state."""
    test, step = _subgraph("condition", condition, operands), _subgraph("body", body, operands)
    if len(test.outputs) != 1 or test.outputs[0][1].type != "bool[]":
        types = ", ".join(value.type for _, value in test.outputs)
        raise GraphError(f"condition of while_loop returns {types} but must return one bool scalar")
    before = [op.result.type for op in step.sources("input")[:count]]
    after = [value.type for _, value in step.outputs]
    if before != after:
        raise GraphError(
            f"body of while_loop returns ({', '.join(after)}) but its state is ({', '.join(before)})"
        )
    return {"condition": test, "body": step}


def _subgraph(name: str, function: Callable[..., Any], operands: Sequence[Any]) -> Graph:
    inner = Trace(name)
    with inner.activate():
        inputs = [inner.source("input", f"x{i}", t.shape, short(t.dtype)) for i, t in enumerate(operands)]
        returned = function(*inputs)
        outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
        labels = ["y"] if name == "condition" else [f"y{i}" for i in range(len(outputs))]
        graph: Graph = inner.finish(dict(zip(labels, outputs, strict=False)))
    extra = [op.attrs["name"] for op in graph.sources("param", "state")]
    extra += [op.attrs["name"] for op in graph.sources("input")[len(operands) :]]
    if extra:
        raise GraphError(f"{name} of while_loop reads {', '.join(extra)} from outside; pass it in `fixed`")
    return graph
