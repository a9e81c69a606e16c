"""Constants of an exported graph: what depends on no input and no parameter is computed by torch.

A constant becomes part of the traced graph only where an op reads it. Small ones are stored in the graph;
uniform and broadcast ones are computed by `full` and `broadcast_to`, and large ones by the rule of the op
that computed them, so that no graph holds the numbers of a large mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distgraph import ops
from distgraph.frontends.torch.torch_dtypes import as_array, short_dtype
from distgraph.tracing.tensor import Tensor, TensorOperators
from distgraph.tracing.tracer import Trace

STORED = 4096
"""Numbers of the largest constant that is stored in a graph although a rule could compute it."""


class Constant(TensorOperators):
    """A tensor of torch in an exported graph, used as a tensor by a trace.

    Attributes:
        value: the tensor.
        recipe: traces the op that computed it; None where there is no rule.
    """

    def __init__(self, value: torch.Tensor, recipe: Callable[[], Any] | None = None) -> None:
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
        return short_dtype(self.value.dtype)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return int(self.value.ndim)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self.value.numel())

    def __distgraph_tensor__(self, trace: Trace) -> Tensor:
        """The tensor of this constant in a trace."""
        if self._traced is None or self._traced.trace is not trace:
            self._traced = self._trace(trace)
        return self._traced

    def _trace(self, trace: Trace) -> Tensor:
        value = self.value
        repeated = [
            d for d, (n, step) in enumerate(zip(value.shape, value.stride(), strict=True)) if n > 1 > step
        ]
        narrow = value
        for d in repeated:
            narrow = narrow.narrow(d, 0, 1)
        if narrow.numel() == 1 and value.numel() > 1:
            return ops.full(self.shape, narrow.item(), self.dtype)
        if narrow.numel() > STORED and self.recipe is not None:
            return trace.tensor(self.recipe())
        if 1 < narrow.numel() <= STORED and bool((narrow == narrow.flatten()[0]).all()):
            return ops.full(self.shape, narrow.flatten()[0].item(), self.dtype)
        stored = trace.constant(as_array(narrow), self.dtype)
        return ops.broadcast_to(stored, self.shape) if repeated else stored
