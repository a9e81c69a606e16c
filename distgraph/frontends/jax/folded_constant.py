"""Constants of a jaxpr: what depends on no input and no parameter is computed by JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np

from distgraph.errors import GraphError
from distgraph.frontends.constant_tensor import ConstantTensor
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace


def is_key(value: Any) -> bool:
    """Whether an array or its type holds random keys of JAX, which have no counterpart as numbers."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


class Constant(ConstantTensor):
    """An array in a jaxpr: of NumPy where it holds numbers and of JAX where it holds random keys."""

    def __init__(self, value: Any, recipe: Callable[[], Any] | None = None) -> None:
        super().__init__(value if is_key(value) else np.asarray(value), recipe)

    def numbers(self) -> Any:
        return np.ascontiguousarray(self.value).reshape(self.shape)

    def narrow(self) -> Self:
        """See `ConstantTensor`; random keys are not narrowed."""
        return self if is_key(self.value) else super().narrow()

    def __distgraph_tensor__(self, trace: Trace) -> Tensor:
        """The tensor of this constant in a trace. Raises GraphError: it holds random keys."""
        if is_key(self.value):
            raise GraphError(f"random key of type {self.value.dtype} is used as a number")
        return super().__distgraph_tensor__(trace)
