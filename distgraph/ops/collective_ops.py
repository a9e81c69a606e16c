"""Ops that only a distributed program has: each is the identity on the global tensor.

`accumulate` ends the part of a step that runs once a micro-batch: its result is the mean over the
micro-batches, so whatever follows it runs once a step. `reshard` is an explicit change of layout; the pass
`lower` turns it into the collectives of `distgraph.ir.collectives`, whose attrs name the mesh axes and dims.
The layouts of their operands and results are part of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distgraph.ir.collectives import COLLECTIVES
from distgraph.ir.graph import Value
from distgraph.ir.op_registry import Attrs, GradientContext, Shape, define, elementwise
from distgraph.tracing.tensor import emit_one

__all__ = ["COLLECTIVES", "accumulate"]


def _same(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    return [(operands[0].shape, operands[0].dtype)]


def _no_kernel(xp: Any, *arrays: Any, out: Any = None, **attrs: Any) -> Any:
    return arrays[0]


define(
    "accumulate",
    elementwise,
    _no_kernel,
    infer=_same,
    linear=((0,),),
    view="same",
    cost="launch",
)


def _reshard_gradient(c: GradientContext) -> list[Any]:
    return [c.grad]


define(
    "reshard",
    elementwise,
    _no_kernel,
    infer=_same,
    gradient=_reshard_gradient,
    linear=((0,),),
    view="same",
    cost="comm",
)


def accumulate(x: Any) -> Any:
    """Mean over the micro-batches of a step; what uses the result runs once a step."""
    return emit_one("accumulate", x)
