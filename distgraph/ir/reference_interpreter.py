"""The reference interpreter: runs a serial graph op by op on one device, which defines its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.ir.dtypes import to_numpy
from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.op_registry import lookup

Array = Any


def interpret(
    graph: Graph,
    inputs: Mapping[str, Array],
    params: Mapping[str, Array] | None = None,
    micro: int = 0,
    xp: Any = np,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Run a graph on whole tensors.

    Args:
        graph: a serial graph, before or after completion.
        inputs: name of an input -> array (or number) of its shape.
        params: name of a param or state -> array. Never changed.
        micro: number of the micro-batch that the inputs belong to.
        xp: array namespace, numpy or cupy.

    Returns:
        outputs by label, and the new params and states by name.

    Raises:
        GraphError: an input or param is missing or has another shape than the graph says.
    """
    values: dict[str, Array] = {}
    sources = {"input": inputs, "param": params or {}, "state": params or {}}
    last = {value.name: op.name for op in graph.ops for value in op.operands}
    for op in graph.ops:
        for value, array in zip(op.results, run_op(op, values, sources, micro, xp), strict=True):
            values[value.name] = array
        for value in op.operands:
            if last[value.name] == op.name and value.name not in graph.live_out:
                values.pop(value.name, None)
    outputs = {label: values[value.name] for label, value in graph.outputs}
    names = {op.name: str(op.attrs["name"]) for op in graph.sources("param", "state")}
    return outputs, {names[old]: values[new.name] for old, new in graph.updates}


def run_op(
    op: Op, values: Mapping[str, Array], sources: Mapping[str, Mapping[str, Array]], micro: int, xp: Any
) -> tuple[Array, ...]:
    """The results of one op.

    Args:
        op: an op of a serial graph.
        values: name of each operand -> array.
        sources: "input", "param" and "state" -> name -> array.
        micro, xp: as of `interpret`.

    Raises:
        GraphError: a source is missing or has another shape than the graph says.
    """
    if op.kind in sources:
        return (_source(op, sources[op.kind], xp),)
    if op.kind == "constant":
        return (xp.asarray(op.attrs["value"], dtype=to_numpy(op.result.dtype)),)
    declared = lookup(op.kind)
    attrs = {**op.attrs, "micro": micro} if declared.micro else op.attrs
    returned = declared.kernel(xp, *(values[v.name] for v in op.operands), **attrs)
    results = returned if isinstance(returned, tuple) else (returned,)
    return tuple(_declared(op, value, array, xp) for value, array in zip(op.results, results, strict=True))


def _source(op: Op, arrays: Mapping[str, Array], xp: Any) -> Array:
    name, value = op.attrs["name"], op.result
    if name not in arrays:
        names = ", ".join(sorted(arrays)) or "nothing"
        raise GraphError(f"{op.kind} {name!r} ({value.type}) is not given; there is {names}")
    array = xp.asarray(arrays[name], dtype=to_numpy(value.dtype))
    if array.shape != value.shape:
        raise GraphError(f"{op.kind} {name!r} has shape {array.shape} but the graph wants {value.type}")
    return array


def _declared(op: Op, value: Value, array: Array, xp: Any) -> Array:
    """A result cast to the dtype that the graph declares, as array libraries differ in dtype promotion."""
    array = xp.asarray(array)
    if array.shape != value.shape:
        raise AssertionError(f"{op} gives shape {array.shape} but is declared {value.type}")
    dtype = to_numpy(value.dtype)
    return array if array.dtype == dtype else array.astype(dtype)
