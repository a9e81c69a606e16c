"""`trace`: the graph of a function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distgraph.ir.dtypes import short
from distgraph.ir.graph import Graph
from distgraph.tracing.tracer import Trace


def trace(function: Callable[..., Any], *inputs: Any, name: str = "main", names: Sequence[str] = ()) -> Graph:
    """Graph of a function of tensors.

    Args:
        function: called once with one Tensor an input; returns a tensor, a tuple, list or dict of them.
        inputs: anything with `shape` and `dtype` (arrays), or (shape, dtype) pairs.
        name: of the graph.
        names: of the inputs; by default x0, x1, ...

    Raises:
        GraphError: shapes or dtypes do not fit, or the function returns something that is no tensor.

    Example:
        >>> graph = trace(lambda x, w: x @ w, ((4, 3), "f32"), ((3, 5), "f32"))
        >>> graph.outputs[0][1].type
        'f32[4, 5]'
    """
    builder = Trace(name)
    labels = list(names) + [f"x{i}" for i in range(len(names), len(inputs))]
    with builder.activate():
        tensors = []
        for label, argument in zip(labels, inputs, strict=True):
            shape, dtype = argument if isinstance(argument, tuple) else (argument.shape, argument.dtype)
            tensors.append(builder.source("input", label, shape, short(dtype)))
        returned = function(*tensors)
    if isinstance(returned, Mapping):
        outputs = dict(returned)
    elif isinstance(returned, (tuple, list)):
        outputs = {f"y{i}": t for i, t in enumerate(returned)}
    else:
        outputs = {"y": returned}
    return builder.finish(outputs)
