"""Reductions over whole dims, and the ops that run along one dim: cumulative, sort, top_k, argmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.errors.arguments import Finite, check_argument, checked_arguments, is_integer
from distgraph.ir.dtypes import is_float, to_numpy
from distgraph.ir.graph import Value
from distgraph.ir.index_rule import Rule, make_rule, term_of
from distgraph.ir.op_registry import Attrs, GradientContext, Shape, Shapes, define
from distgraph.kernels import workspace
from distgraph.kernels._common import is_half, store
from distgraph.ops.contraction import as_tensors, reshape_to
from distgraph.tracing.tensor import Tensor, emit_one

Grads = Sequence[Tensor | None]


Axes = int | Sequence[int] | None
"""NumPy's `axis`: a dim, several, or None for all."""
_DIMS = int | Sequence[int]


def dims_of(axis: Any, ndim: int) -> tuple[int, ...]:
    """NumPy's `axis` (None, a number, a sequence) as sorted dims. Raises GraphError when out of range."""
    return tuple(range(ndim)) if axis is None else tuple(sorted(dims_in_order(axis, ndim)))


def dims_in_order(axis: Any, ndim: int) -> tuple[int, ...]:
    """A number or a sequence of them as dims, in the order given. Raises GraphError when out of range."""
    if is_integer(axis):
        axes: tuple[Any, ...] = (axis,)
    else:
        check_argument("a tensor function", "axis", axis, _DIMS)
        axes = tuple(axis)
    for d in axes:
        if not -ndim <= d < ndim:
            raise GraphError(f"axis {d} is out of range for a tensor of {ndim} dims")
    dims = tuple(int(d) % ndim for d in axes)
    if len(set(dims)) != len(dims):
        raise GraphError(f"axis {axis} names a dim twice")
    return dims


def _reduced_shape(shape: Shape, attrs: Attrs) -> Shape:
    dims, keepdims = attrs["dims"], attrs["keepdims"]
    return tuple(1 if d in dims else n for d, n in enumerate(shape) if keepdims or d not in dims)


def _reduce_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    (term, sizes), dims = term_of(shapes[0]), attrs["dims"]
    result = tuple(() if d in dims else i for d, i in enumerate(term) if attrs["keepdims"] or d not in dims)
    return make_rule("reduce", (term,), (result,), sizes)


def _sum_dtype(dtype: str) -> str:
    if is_float(dtype):
        return dtype
    return "u64" if dtype.startswith("u") else "i64"


def _infer_sum(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    return [(_reduced_shape(operands[0].shape, attrs), _sum_dtype(operands[0].dtype))]


def _infer_same(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    return [(_reduced_shape(operands[0].shape, attrs), operands[0].dtype)]


def _infer_bool(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    return [(_reduced_shape(operands[0].shape, attrs), "bool")]


def _total_kernel(name: str) -> Any:
    def kernel(xp: Any, x: Any, out: Any = None, *, dims: tuple[int, ...], keepdims: bool) -> Any:
        reduce = getattr(xp, name)
        if is_half(x.dtype):  # accumulate in f32, round once
            return store(xp, reduce(x, axis=dims, keepdims=keepdims, dtype=xp.float32), out, x.dtype)
        return reduce(x, axis=dims, keepdims=keepdims, out=out)

    return kernel


def lowest(dtype: Any) -> Any:
    """The smallest value of a dtype: the neutral element of a maximum."""
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else dtype.type(-math.inf)


def highest(dtype: Any) -> Any:
    """The largest value of a dtype: the neutral element of a minimum."""
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max if dtype.kind in "iu" else dtype.type(math.inf)


def _extreme_kernel(name: str, neutral: Any) -> Any:
    def kernel(xp: Any, x: Any, out: Any = None, *, dims: tuple[int, ...], keepdims: bool) -> Any:
        if x.size:
            result = getattr(xp, name)(x, axis=dims, keepdims=keepdims)
        else:  # ranks at the end of an uneven split may have an empty block
            shape = _reduced_shape(x.shape, {"dims": dims, "keepdims": keepdims})
            result = xp.full(shape, neutral(x.dtype), dtype=x.dtype)
        return store(xp, result, out)

    return kernel


def _logic_kernel(name: str) -> Any:
    def kernel(xp: Any, x: Any, out: Any = None, *, dims: tuple[int, ...], keepdims: bool) -> Any:
        return getattr(xp, name)(x, axis=dims, keepdims=keepdims, out=out)

    return kernel


def spread(x: Tensor, like: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A reduced tensor repeated over the dims that were reduced away."""
    with_dims = reshape_to(x, tuple(1 if d in dims else n for d, n in enumerate(like.shape)))
    return (
        with_dims if with_dims.shape == like.shape else emit_one("broadcast_to", with_dims, shape=like.shape)
    )


def _sum_gradient(c: GradientContext) -> Grads:
    return [spread(c.grad, c.operands[0], c.attrs["dims"])]


def _extreme_gradient(c: GradientContext) -> Grads:
    x, dims = c.operands[0], c.attrs["dims"]
    reduced = tuple(1 if d in dims else n for d, n in enumerate(x.shape))
    hit = emit_one("cast", emit_one("equal", x, reshape_to(c.results[0], reduced)), dtype=x.dtype)
    share = reshape_to(c.grad, reduced) / emit_one("reduce_sum", hit, dims=dims, keepdims=True)
    return [hit * share]  # equal elements share the gradient evenly


def _prod_gradient(c: GradientContext) -> Grads:
    """Gradient of a product: products before and after each element, which is exact for zeros too."""
    x, dims = c.operands[0], c.attrs["dims"]
    order = tuple(d for d in range(x.ndim) if d not in dims) + dims
    moved = emit_one("transpose", x, order=order)
    flat = reshape_to(moved, (*moved.shape[: x.ndim - len(dims)], math.prod(x.shape[d] for d in dims)))
    last = (flat.ndim - 1,)
    before = _exclusive_cumprod(flat)
    after = emit_one("flip", _exclusive_cumprod(emit_one("flip", flat, dims=last)), dims=last)
    others = reshape_to(before * after, moved.shape)
    inverse = tuple(int(d) for d in np.argsort(order))
    return [emit_one("transpose", others, order=inverse) * spread(c.grad, x, dims)]


def _exclusive_cumprod(x: Tensor) -> Tensor:
    dim = x.ndim - 1
    body = x[(..., slice(0, x.shape[dim] - 1))]
    low = (0,) * dim + (1,)
    none = (0,) * x.ndim
    return emit_one("cumprod", emit_one("pad", body, low=low, high=none, interior=none, value=1), dim=dim)


def _reduction(
    name: str, kernel: Any, infer: Any, gradient: Any, reduction: str, linear: bool = False
) -> None:
    define(
        name,
        _reduce_rule,
        kernel,
        infer=infer,
        gradient=gradient,
        flops=1,
        reduction=reduction,
        linear=((0,),) if linear else (),
    )


_reduction("reduce_sum", _total_kernel("sum"), _infer_sum, _sum_gradient, "sum", linear=True)
_reduction("reduce_prod", _total_kernel("prod"), _infer_sum, _prod_gradient, "prod")
_reduction("reduce_max", _extreme_kernel("max", lowest), _infer_same, _extreme_gradient, "max")
_reduction("reduce_min", _extreme_kernel("min", highest), _infer_same, _extreme_gradient, "min")
_reduction("reduce_any", _logic_kernel("any"), _infer_bool, None, "max")
_reduction("reduce_all", _logic_kernel("all"), _infer_bool, None, "min")


def along_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    """Index rule of ops whose operands and results all have one shape; `dim` must be whole."""
    term, sizes = term_of(shapes[0])
    return make_rule("along", (term,) * len(shapes), (term,), sizes, whole={f"i{attrs['dim']}"})


def _cumulative_kernel(name: str) -> Any:
    def kernel(xp: Any, x: Any, out: Any = None, *, dim: int) -> Any:
        cumulate = getattr(xp, name)
        if is_half(x.dtype):
            return store(xp, cumulate(x.astype(xp.float32), axis=dim), out, x.dtype)
        return cumulate(x, axis=dim, out=out)

    return kernel


def _infer_cumulative(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    return [(operands[0].shape, _sum_dtype(operands[0].dtype))]


def _cumsum_gradient(c: GradientContext) -> Grads:
    dim = c.attrs["dim"]
    return [emit_one("flip", emit_one("cumsum", emit_one("flip", c.grad, dims=(dim,)), dim=dim), dims=(dim,))]


def _cumprod_gradient(c: GradientContext) -> Grads:
    """dx[i] = product before i x sum over j >= i of dy[j] x product of x[i+1..j]; n^2 memory."""
    x, dim = c.operands[0], c.attrs["dim"]
    n, rank = x.shape[dim], x.ndim
    order = (*(d for d in range(rank) if d != dim), dim)
    moved, grad = (emit_one("transpose", t, order=order) for t in (x, c.grad))
    square = (*moved.shape[:-1], n, n)  # [..., i, j]
    row = emit_one("iota", shape=(n, n), dim=0, dtype="i64")
    column = emit_one("iota", shape=(n, n), dim=1, dtype="i64")
    wide = emit_one("broadcast_to", reshape_to(moved, (*moved.shape[:-1], 1, n)), shape=square)
    between = emit_one("cumprod", emit_one("where", emit_one("greater", column, row), wide, 1), dim=rank)
    upper = emit_one("where", emit_one("greater_equal", column, row), between, 0)
    letters = "abcdefgh"[: rank - 1]
    tail = emit_one("einsum", upper, grad, spec=f"{letters}xy,{letters}y->{letters}x")
    inverse = tuple(int(d) for d in np.argsort(order))
    return [emit_one("transpose", _exclusive_cumprod(moved) * tail, order=inverse)]


define(
    "cumsum",
    along_rule,
    _cumulative_kernel("cumsum"),
    infer=_infer_cumulative,
    gradient=_cumsum_gradient,
    linear=((0,),),
    workspace=workspace.cumulative,
)
define(
    "cumprod",
    along_rule,
    _cumulative_kernel("cumprod"),
    infer=_infer_cumulative,
    gradient=_cumprod_gradient,
    workspace=workspace.cumulative,
)


@checked_arguments()
def reduce(kind: str, x: Any, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Reduction `kind` (sum, max, min, prod, any, all) over dims, all of them by default.

    Raises:
        GraphError: an axis out of range, or the maximum of no element.
    """
    (tensor,) = as_tensors(x)
    dims = dims_of(axis, tensor.ndim)
    if kind in ("max", "min") and any(tensor.shape[d] == 0 for d in dims):
        raise GraphError(f"{kind} of {tensor.value.type} over dims {dims} has no element")
    if not dims and kind in ("max", "min"):
        return tensor
    return emit_one(f"reduce_{kind}", tensor, dims=dims, keepdims=bool(keepdims))


@checked_arguments()
def mean(x: Any, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Mean over dims; f16 and bf16 are summed in f32. Raises GraphError for integers and for no element."""
    (tensor,) = as_tensors(x)
    count = math.prod(tensor.shape[d] for d in dims_of(axis, tensor.ndim))
    if not is_float(tensor.dtype):
        raise GraphError(f"mean of {tensor.value.type} needs a floating dtype; cast it first with .astype")
    if count == 0:
        raise GraphError(f"mean of {tensor.value.type} over no element")
    if to_numpy(tensor.dtype).itemsize > 2:
        return reduce("sum", tensor, axis, keepdims) * (1.0 / count)
    return (reduce("sum", tensor.astype("f32"), axis, keepdims) * (1.0 / count)).astype(tensor.dtype)


@checked_arguments()
def var(x: Any, axis: Axes = None, keepdims: bool = False, correction: Finite = 0.0) -> Tensor:
    """Variance over dims: mean square distance from the mean, divided by n - correction."""
    (tensor,) = as_tensors(x)
    count = math.prod(tensor.shape[d] for d in dims_of(axis, tensor.ndim))
    distance = tensor - mean(tensor, axis, keepdims=True)
    result = mean(emit_one("square", distance), axis, keepdims)
    if not correction:
        return result
    if count <= correction:
        raise GraphError(f"variance of {count} elements with correction {correction} divides by nothing")
    return result * (count / (count - correction))


@checked_arguments()
def std(x: Any, axis: Axes = None, keepdims: bool = False, correction: Finite = 0.0) -> Tensor:
    """Standard deviation over dims."""
    return emit_one("sqrt", var(x, axis, keepdims, correction))


@checked_arguments()
def logsumexp(x: Any, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """log(sum(exp(x))) over dims, without overflow; of infinities as the limit."""
    (tensor,) = as_tensors(x)
    top = emit_one("stop_gradient", reduce("max", tensor, axis, keepdims=True))
    top = emit_one("where", emit_one("isfinite", top), top, 0)
    total = reduce("sum", emit_one("exp", tensor - top), axis, keepdims=True)
    empty = emit_one("equal", total, 0)  # all are -inf
    result = emit_one("where", empty, -math.inf, emit_one("log", emit_one("where", empty, 1, total)) + top)
    dims = dims_of(axis, tensor.ndim)
    return (
        result
        if keepdims
        else reshape_to(result, tuple(n for d, n in enumerate(tensor.shape) if d not in dims))
    )


@checked_arguments()
def norm(x: Any, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Euclidean norm over dims; its gradient where all are 0 is 0."""
    (tensor,) = as_tensors(x)
    total = reduce("sum", emit_one("square", tensor), axis, keepdims)
    zero = emit_one("equal", total, 0)
    return emit_one("where", zero, 0, emit_one("sqrt", emit_one("where", zero, 1, total)))


@checked_arguments()
def cumsum(x: Any, axis: int) -> Tensor:
    """Running sum along a dim."""
    (tensor,) = as_tensors(x)
    return emit_one("cumsum", tensor, dim=dims_of(axis, tensor.ndim)[0])


@checked_arguments()
def cumprod(x: Any, axis: int) -> Tensor:
    """Running product along a dim."""
    (tensor,) = as_tensors(x)
    return emit_one("cumprod", tensor, dim=dims_of(axis, tensor.ndim)[0])
