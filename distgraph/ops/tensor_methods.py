"""Array methods of traced tensors that are made of ops: `x @ y`, `x[1:]`, `x.reshape(2, -1)`,
`x.sum(axis=0)`.

`TensorOperators`, the base of tensors and of parameters (which become tensors on use), is defined below the
ops, so that ops and their gradients can be written with tensors. The methods are bound to it when the package
of the ops loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distgraph.ops.contraction import matmul
from distgraph.ops.manipulation import getitem
from distgraph.ops.reduction import mean, reduce, var
from distgraph.ops.shape import reshape, transpose
from distgraph.tracing.tensor import Tensor, TensorOperators


def _dims(arguments: Sequence[Any]) -> Sequence[int]:
    """The dims of `f(2, 3)` and of `f((2, 3))`."""
    only = arguments[0] if len(arguments) == 1 else None
    return only if isinstance(only, Sequence) else arguments


def _reshape(self: Any, *shape: int | Sequence[int]) -> Tensor:
    """The same elements in row-major order with another shape; one length may be -1."""
    return reshape(self, _dims(shape))


def _transpose(self: Any, *dims: int | Sequence[int]) -> Tensor:
    """The tensor with its dims in another order; reversed by default."""
    return transpose(self, _dims(dims) or None)


def _reduction(kind: str) -> Callable[..., Tensor]:
    def method(self: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
        return reduce(kind, self, axis, keepdims)

    return method


_METHODS: dict[str, Callable[..., Tensor]] = {
    "__matmul__": matmul,
    "__rmatmul__": lambda self, other: matmul(other, self),
    "__getitem__": getitem,
    "reshape": _reshape,
    "transpose": _transpose,
    "mean": mean,
    "var": var,
    **{kind: _reduction(kind) for kind in ("sum", "max", "min")},
}


def bind_tensor_methods() -> None:
    """Binds the methods of this module to tensors and parameters."""
    for name, method in _METHODS.items():
        setattr(TensorOperators, name, method)
