"""Optimiser steps as one op each: a single pass over the parameter, its gradient and its states.

They are elementwise, so any layout of the states is legal: with states split over the data-parallel axis, the
gradient comes from a reduce_scatter and the new parameter needs an all_gather, which is ZeRO. Parameter and
states may be updated in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distgraph.errors import GraphError
from distgraph.ir.graph import Value
from distgraph.ir.index_rule import Rule
from distgraph.ir.op_registry import Attrs, Shape, Shapes, broadcast_rule, define
from distgraph.kernels import optimizer as kernels
from distgraph.kernels import workspace
from distgraph.ops.normalization import require_float


def _rule(results: int) -> Callable[[Shapes, Attrs], Rule]:
    def rule(shapes: Shapes, attrs: Attrs) -> Rule:
        return broadcast_rule(shapes, results)

    return rule


def _infer(
    names: tuple[str, ...], results: tuple[int, ...]
) -> Callable[[Sequence[Value], Attrs], list[tuple[Shape, str]]]:
    """Checks that the named operands have one shape and the others are scalars; infers the results."""

    def infer(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
        first = operands[0]
        for name, value in zip(names, operands, strict=False):
            require_float(value)
            if value.shape != first.shape:
                raise GraphError(f"{name} is {value.type} but the parameter is {first.type}")
        for value in operands[len(names) :]:
            if value.shape != ():
                raise GraphError(f"%{value.name} is {value.type} but must be a scalar")
        return [(operands[i].shape, operands[i].dtype) for i in results]

    return infer


define(
    "adam",
    _rule(3),
    kernels.adam,
    infer=_infer(("parameter", "gradient", "first moment", "second moment"), (0, 2, 3)),
    flops=14,
    inplace=(0, 2, 3),
    together=kernels.adam_together,
    workspace=workspace.contiguous,
)
define(
    "momentum",
    _rule(2),
    kernels.momentum,
    infer=_infer(("parameter", "gradient", "velocity"), (0, 2)),
    flops=6,
    inplace=(0, 2),
    together=kernels.momentum_together,
    workspace=workspace.contiguous,
)
