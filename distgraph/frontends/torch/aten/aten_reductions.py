"""Reductions, cumulative ops, order along a dim."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.torch.rule_registry import aten
from distgraph.frontends.torch.torch_dtypes import short_dtype
from distgraph.ir.dtypes import is_float


def _axes(dim: Any) -> Any:
    """Dims of a reduction as distgraph has them: None for all."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return None
    return tuple(dim) if isinstance(dim, (list, tuple)) else dim


def _reduction(*names: str, kind: str) -> None:
    @aten(*names)
    def _reduce(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        if dtype is not None:
            x = ops.cast(x, short_dtype(dtype))
        return ops.reduce(kind, x, _axes(dim), keepdim)


_reduction("sum.default", "sum.dim_IntList", kind="sum")
_reduction("amax.default", "max.default", kind="max")
_reduction("amin.default", "min.default", kind="min")
_reduction("prod.default", "prod.dim_int", kind="prod")


def _test(kind: str) -> None:
    @aten(f"{kind}.default", f"{kind}.dim", f"{kind}.dims")
    def _reduce(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        return ops.reduce(kind, ops.cast(x, "bool"), _axes(dim), keepdim)


_test("any")
_test("all")


@aten("mean.default", "mean.dim")
def _mean(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if isinstance(dim, bool):
        raise GraphError("mean has a bool in the place of its dim")
    return ops.mean(x if dtype is None else ops.cast(x, short_dtype(dtype)), _axes(dim), keepdim)


@aten("var.correction")
def _var(x: Any, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    return ops.var(x, _axes(dim), keepdim, 1.0 if correction is None else float(correction))


@aten("var.default", "var.dim")
def _var_unbiased(x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> Any:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return ops.var(x, _axes(dim), keepdim, float(unbiased))


@aten("std.correction")
def _std(x: Any, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    return ops.sqrt(_var(x, dim, correction, keepdim))


@aten("var_mean.correction")
def _var_mean(x: Any, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    return _var(x, dim, correction, keepdim), ops.mean(x, _axes(dim), keepdim)


@aten("logsumexp.default")
def _logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    return ops.logsumexp(x, _axes(dim), keepdim)


@aten("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.Scalar")
def _vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    x = x if dtype is None else ops.cast(x, short_dtype(dtype))
    axes, ord = _axes(dim), 2 if ord is None else ord
    if ord == 2:
        return ops.norm(x, axes, keepdim)
    size = ops.absolute(x)
    if math.isinf(ord):
        return ops.reduce("max" if ord > 0 else "min", size, axes, keepdim)
    if ord == 0:
        return ops.reduce("sum", ops.cast(ops.not_equal(x, 0), x.dtype), axes, keepdim)
    if ord == 1:
        return ops.reduce("sum", size, axes, keepdim)
    return ops.power(ops.reduce("sum", ops.power(size, ord), axes, keepdim), 1 / ord)


@aten("cumsum.default")
def _cumsum(x: Any, dim: int, dtype: Any = None) -> Any:
    x = ops.cast(x, "i64") if x.dtype == "bool" else x
    return ops.cumsum(x if dtype is None else ops.cast(x, short_dtype(dtype)), dim)


@aten("cumprod.default")
def _cumprod(x: Any, dim: int, dtype: Any = None) -> Any:
    return ops.cumprod(x if dtype is None else ops.cast(x, short_dtype(dtype)), dim)


@aten("logcumsumexp.default")
def _logcumsumexp(x: Any, dim: int) -> Any:
    """Relative to the largest element of the line, as far as exp does not underflow."""
    top = ops.stop_gradient(ops.reduce("max", x, dim % x.ndim, keepdims=True))
    return ops.log(ops.cumsum(ops.exp(x - top), dim)) + top


aten("argmax.default")(ops.argmax)
aten("argmin.default")(ops.argmin)


def _extreme(name: str, position: Callable[..., Any]) -> None:
    @aten(f"{name}.dim")
    def _extreme_and_position(x: Any, dim: int, keepdim: bool = False) -> Any:
        index = position(x, dim, True)
        value = ops.take_along(x, index, dim)
        return (value, index) if keepdim else (ops.squeeze(value, dim), ops.squeeze(index, dim))


_extreme("max", ops.argmax)
_extreme("min", ops.argmin)


@aten("topk.default")
def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    last = dim in (-1, x.ndim - 1)
    moved = x if last else x.swapaxes(dim, -1)
    values, places = ops.top_k(moved if largest else -moved, k)
    values = values if largest else -values
    return (values, places) if last else (values.swapaxes(dim, -1), places.swapaxes(dim, -1))


@aten("sort.default", "sort.stable")
def _sort(x: Any, dim: int = -1, descending: bool = False, stable: Any = None) -> Any:
    order = ops.argsort(-x if descending else x, dim)
    return ops.take_along(x, order, dim), order


@aten("kthvalue.default")
def _kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest element of each line, and its position."""
    axis = dim % x.ndim
    order = ops.argsort(x, axis)
    place = ops.getitem(order, (*(slice(None),) * axis, slice(k - 1, k)))
    value = ops.take_along(x, place, axis)
    return (value, place) if keepdim else (ops.squeeze(value, axis), ops.squeeze(place, axis))


@aten("median.dim")
def _median(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    return _kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


@aten("median.default")
def _median_of_all(x: Any) -> Any:
    return _kthvalue(ops.reshape(x, (-1,)), (x.size + 1) // 2)[0]


@aten("bucketize.Tensor")
def _bucketize(x: Any, boundaries: Any, out_int32: bool = False, right: bool = False) -> Any:
    """The number of boundaries below each element; `right` counts equal ones too."""
    passed = (ops.greater_equal if right else ops.greater)(ops.expand_dims(x, -1), boundaries)
    return ops.reduce("sum", ops.cast(passed, "i32" if out_int32 else "i64"), -1)


@aten("argsort.default", "argsort.stable")
def _argsort(x: Any, dim: int = -1, descending: bool = False, stable: Any = None) -> Any:
    return ops.argsort(-x if descending else x, dim)


@aten("softmax.int", "_softmax.default")
def _softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    return _along_last(ops.softmax, x, dim, dtype)


@aten("_safe_softmax.default")
def _safe_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    """Zeros along a dim that is minus infinity everywhere."""
    hidden = ops.equal(x, -math.inf)
    lowest = -1e30 if x.dtype != "f16" else -6e4
    return ops.where(hidden, 0, _softmax(ops.where(hidden, lowest, x), dim, dtype))


@aten("log_softmax.int", "_log_softmax.default")
def _log_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    return _along_last(ops.log_softmax, x, dim, dtype)


def _along_last(function: Callable[..., Any], x: Any, dim: int, dtype: Any) -> Any:
    """A function of the last dim along another one; a bool in the place of the dtype is an old flag."""
    if dtype is not None and not isinstance(dtype, bool):
        x = ops.cast(x, short_dtype(dtype))
    if not is_float(x.dtype):
        raise GraphError(f"softmax of {x.dtype} needs a floating dtype; cast it first")
    if dim in (-1, x.ndim - 1):
        return function(x)
    return function(x.swapaxes(dim, -1)).swapaxes(dim, -1)
