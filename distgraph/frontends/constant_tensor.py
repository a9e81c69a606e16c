"""Constants of an imported model: what depends on no input and no parameter, computed by its own framework.

A constant becomes part of the traced graph only where an op reads it. Small ones are stored in the graph;
uniform and broadcast ones are computed by `full` and `broadcast_to`, and large ones by the rule of the op
that computed them, so that no graph holds the numbers of a large mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

from distgraph import ops
from distgraph.ir.dtypes import short
from distgraph.tracing.tensor import Tensor, TensorOperators
from distgraph.tracing.tracer import Trace

STORED = 4096
"""Numbers of the largest constant that is stored in a graph although a rule could compute it."""


class ConstantTensor(TensorOperators):
    """An array of another framework, used as a tensor by a trace.

    Attributes:
        value: the array.
        recipe: traces the op that computed it; None where there is no rule.
    """

    def __init__(self, value: Any, recipe: Callable[[], Any] | None = None) -> None:
        self.value = value
        self.recipe = recipe
        self._traced: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> str:
        """Short dtype name."""
        return short(self.value.dtype)

    def strides(self) -> tuple[int, ...]:
        """Distance of neighbours in memory along each dim; 0 where the constant repeats."""
        return tuple(self.value.strides)

    def numbers(self) -> Any:
        """The constant as a contiguous array of NumPy."""
        raise NotImplementedError

    def __distgraph_tensor__(self, trace: Trace) -> Tensor:
        """The tensor of this constant in a trace."""
        if self._traced is None or self._traced.trace is not trace:
            self._traced = self._trace(trace)
        return self._traced

    def narrow(self) -> Self:
        """The constant once along every dim along which it repeats; itself where it repeats along none."""
        sides = zip(self.shape, self.strides(), strict=True)
        value = self.value[tuple(slice(0, 1) if n > 1 and step == 0 else slice(None) for n, step in sides)]
        first = value[(slice(0, 1),) * self.ndim]
        if 1 < math.prod(value.shape) <= STORED and bool((value == first).all()):
            value = first
        return self if tuple(value.shape) == self.shape else type(self)(value)

    def _trace(self, trace: Trace) -> Tensor:
        narrow = self.narrow()
        if narrow.size == 1 < self.size:
            return ops.full(self.shape, narrow.value.item(), self.dtype)
        if narrow.size > STORED and self.recipe is not None:
            return trace.tensor(self.recipe())
        stored = trace.constant(narrow.numbers(), self.dtype)
        return stored if narrow.shape == self.shape else ops.broadcast_to(stored, self.shape)
