"""Constants of a jaxpr: what depends on no input and no parameter is computed by JAX.

A constant becomes part of the traced graph only where an op reads it. Small ones are stored in the graph;
uniform and broadcast ones are computed by `full` and `broadcast_to`, and large ones by the rule of the
primitive that computed them, so that no graph holds the numbers of a large mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.ir.dtypes import short
from distgraph.tracing.tensor import Tensor, TensorOperators
from distgraph.tracing.tracer import Trace

STORED = 4096
"""Numbers of the largest constant that is stored in a graph although a rule could compute it."""


def is_key(value: Any) -> bool:
    """Whether an array or its type holds random keys of JAX, which have no counterpart as numbers."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


class Constant(TensorOperators):
    """An array in a jaxpr, used as a tensor by a trace.

    Attributes:
        value: the array, of NumPy where it holds numbers and of JAX where it holds random keys.
        recipe: traces the primitive that computed it; None where there is no rule.
    """

    def __init__(self, value: Any, recipe: Callable[[], Any] | None = None) -> None:
        self.value = value if is_key(value) else np.asarray(value)
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

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return int(self.value.ndim)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self.value.size)

    def __distgraph_tensor__(self, trace: Trace) -> Tensor:
        """The tensor of this constant in a trace."""
        if is_key(self.value):
            raise GraphError(f"random key of type {self.value.dtype} is used as a number")
        if self._traced is None or self._traced.trace is not trace:
            self._traced = self._trace(trace)
        return self._traced

    def narrow(self) -> Constant:
        """The constant once along every dim along which it repeats."""
        sides = zip(self.value.shape, getattr(self.value, "strides", self.value.shape), strict=True)
        repeated = [n > 1 and step == 0 for n, step in sides]
        if any(repeated):
            return Constant(self.value[tuple(slice(0, 1) if once else slice(None) for once in repeated)])
        uniform = 1 < self.size <= STORED and bool((self.value == self.value.flat[0]).all())
        return Constant(self.value.flat[0].reshape((1,) * self.ndim)) if uniform else self

    def _trace(self, trace: Trace) -> Tensor:
        narrow = self.narrow()
        if narrow.size == 1 and self.size > 1:
            return ops.full(self.shape, narrow.value.item(), self.dtype)
        if narrow.size > STORED and self.recipe is not None:
            return trace.tensor(self.recipe())
        stored = trace.constant(np.ascontiguousarray(narrow.value).reshape(narrow.shape), self.dtype)
        return stored if narrow.shape == self.shape else ops.broadcast_to(stored, self.shape)
