"""`trace`: the graph of a function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distgraph.errors import GraphError
from distgraph.errors.arguments import Size, check_argument, checked_arguments, shown
from distgraph.ir.dtypes import short
from distgraph.ir.graph import Graph
from distgraph.tracing.tracer import Trace


@checked_arguments()
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
    if len(names) > len(inputs):
        raise GraphError(
            f"trace has {len(names)} names but {len(inputs)} inputs; give each input at most one"
        )
    labels = list(names) + [f"x{i}" for i in range(len(names), len(inputs))]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise GraphError(f"trace has several inputs named {repeated[0]!r}; give each another name")
    with builder.activate():
        tensors = []
        for label, argument in zip(labels, inputs, strict=True):
            shape, dtype = _type_of(label, argument)
            tensors.append(builder.source("input", label, shape, short(dtype)))
        returned = function(*tensors)
    if isinstance(returned, Mapping):
        outputs = dict(returned)
    elif isinstance(returned, (tuple, list)):
        outputs = {f"y{i}": t for i, t in enumerate(returned)}
    else:
        outputs = {"y": returned}
    return builder.finish(outputs)


def _type_of(label: str, argument: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of an input. Raises GraphError where it has none."""
    given = argument if isinstance(argument, tuple) else ()
    shape = getattr(argument, "shape", given[0] if len(given) == 2 else None)
    if shape is None or (not given and not hasattr(argument, "dtype")):
        raise GraphError(
            f"input {label!r} of trace is {shown(argument)} but must be an array, or a pair such as "
            '((4, 3), "f32")'
        )
    check_argument("trace", f"shape of input {label!r}", shape, Sequence[Size])
    return tuple(int(n) for n in shape), given[1] if given else argument.dtype
