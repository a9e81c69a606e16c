"""Array methods of traced tensors that are made of ops: `x @ y`, `x[1:]`, `x.reshape(2, -1)`,
`x.sum(axis=0)`.

`Tensor` is defined below the ops, so that ops and their gradients can be written with tensors. The methods of
this module are bound to it when the package of the ops loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distgraph.ops.contraction import matmul
from distgraph.ops.manipulation import getitem
from distgraph.ops.reduction import mean, reduce, var
from distgraph.ops.shape import reshape, transpose
from distgraph.tracing.tensor import Tensor, TensorOperators


def _matmul(self: Any, other: Any) -> Tensor:
    return matmul(self, other)


def _rmatmul(self: Any, other: Any) -> Tensor:
    return matmul(other, self)


def _getitem(self: Any, key: Any) -> Tensor:
    return getitem(self, key)


def _dims(arguments: Sequence[Any]) -> Sequence[int]:
    """The dims of `f(2, 3)` and of `f((2, 3))`."""
    only = arguments[0] if len(arguments) == 1 else None
    return only if isinstance(only, Sequence) else arguments


def _reshape(self: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """The same elements in row-major order with another shape; one length may be -1."""
    return reshape(self, _dims(shape))


def _transpose(self: Tensor, *dims: int | Sequence[int]) -> Tensor:
    """The tensor with its dims in another order; reversed by default."""
    return transpose(self, _dims(dims) or None)


def _sum(self: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The sum over dims."""
    return reduce("sum", self, axis, keepdims)


def _mean(self: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The mean over dims."""
    return mean(self, axis, keepdims)


def _var(self: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The variance (divided by n) over dims."""
    return var(self, axis, keepdims)


def _max(self: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The largest element over dims."""
    return reduce("max", self, axis, keepdims)


def _min(self: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The smallest element over dims."""
    return reduce("min", self, axis, keepdims)


def bind_tensor_methods() -> None:
    """Binds the methods of this module to `Tensor` and to parameters, which become tensors on use."""
    for name, operator in {"__matmul__": _matmul, "__rmatmul__": _rmatmul, "__getitem__": _getitem}.items():
        setattr(TensorOperators, name, operator)
    for method in (_reshape, _transpose, _sum, _mean, _var, _max, _min):
        setattr(Tensor, method.__name__.removeprefix("_"), method)
