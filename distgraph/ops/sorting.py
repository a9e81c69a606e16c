"""Order along one dim: argmax, argmin, sort, argsort, top_k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.errors.arguments import Count, checked_arguments
from distgraph.ir.dtypes import is_float
from distgraph.ir.graph import Op, Value
from distgraph.ir.index_rule import Rule, make_rule, term_of
from distgraph.ir.op_registry import Attrs, GradientContext, Shape, Shapes, define
from distgraph.kernels import workspace
from distgraph.kernels._common import store, store_all
from distgraph.ops.contraction import as_tensors, reshape_to
from distgraph.ops.reduction import along_rule, dims_of
from distgraph.tracing.tensor import Tensor, emit, emit_one

Grads = Sequence[Tensor | None]


def _arg_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    term, sizes = term_of(shapes[0])
    result = tuple(i for d, i in enumerate(term) if d != attrs["dim"])
    return make_rule("arg", (term,), (result,), sizes, whole={f"i{attrs['dim']}"})


def _infer_arg(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    shape = operands[0].shape
    if not -1 < attrs["dim"] < len(shape) or shape[attrs["dim"]] == 0:
        raise GraphError(f"{operands[0].type} has no element along dim {attrs['dim']}")
    return [(tuple(n for d, n in enumerate(shape) if d != attrs["dim"]), "i64")]


def _arg_kernel(name: str) -> Any:
    def kernel(xp: Any, x: Any, out: Any = None, *, dim: int) -> Any:
        return store(xp, getattr(xp, name)(x, axis=dim), out)

    return kernel


def _arg_decompose(reduction: str) -> Any:
    """Position of the first extreme element as two reductions, which may both be partial.

    The first reduction computes the extreme value, the second the least position with that value; NaN counts
    as the extreme.
    """

    def decompose(attrs: Attrs, x: Tensor) -> Tensor:
        dim = attrs["dim"]
        best = emit_one(reduction, x, dims=(dim,), keepdims=True)
        hit = emit_one("equal", x, best)
        if is_float(x.dtype):
            hit = emit_one("logical_or", hit, emit_one("isnan", x))
        place = emit_one("iota", shape=x.shape, dim=dim, dtype="i64")
        return emit_one(
            "reduce_min", emit_one("where", hit, place, x.shape[dim]), dims=(dim,), keepdims=False
        )

    return decompose


for _name in ("argmax", "argmin"):
    define(
        _name,
        _arg_rule,
        _arg_kernel(_name),
        infer=_infer_arg,
        gradient=lambda c: [None],
        flops=1,
        decompose=_arg_decompose(f"reduce_{_name[3:]}"),
        workspace=workspace.argument,
    )


def _sort_flops(op: Op, rule: Rule) -> int:
    n = max(2, op.operands[0].shape[op.attrs["dim"]])
    return op.operands[0].size * int(np.ceil(np.log2(n)))


def _sort_kernel(xp: Any, x: Any, out: Any = None, *, dim: int) -> Any:
    if out is None:
        return xp.sort(x, axis=dim)
    out[...] = x
    out.sort(axis=dim)
    return out


def _argsort_kernel(xp: Any, x: Any, out: Any = None, *, dim: int) -> Any:
    return store(xp, _stable_order(xp, x, dim), out)


def _stable_order(xp: Any, x: Any, dim: int) -> Any:
    return xp.argsort(x, axis=dim, kind="stable") if xp is np else xp.argsort(x, axis=dim)  # CuPy's is stable


def _sort_gradient(c: GradientContext) -> Grads:
    dim = c.attrs["dim"]
    rank = emit_one("argsort", emit_one("argsort", c.operands[0], dim=dim), dim=dim)
    return [emit_one("take_along", c.grad, rank, dim=dim)]


define("sort", along_rule, _sort_kernel, gradient=_sort_gradient, flops=_sort_flops)
define(
    "argsort",
    along_rule,
    _argsort_kernel,
    infer=lambda operands, attrs: [(operands[0].shape, "i64")],
    gradient=lambda c: [None],
    flops=_sort_flops,
    workspace=workspace.order,
)


def _top_k_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    term, sizes = term_of(shapes[0])
    result = (*term[:-1], ())
    return make_rule("top_k", (term,), (result, result), sizes, whole=set(term[-1]))


def _infer_top_k(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    x, k = operands[0], attrs["k"]
    if not x.shape or not 1 <= k <= x.shape[-1]:
        raise GraphError(f"top_k of {x.type} with k={k}: k must be between 1 and the length of the last dim")
    shape = (*x.shape[:-1], k)
    return [(shape, x.dtype), (shape, "i64")]


def _top_k_kernel(xp: Any, x: Any, out: Any = None, *, k: int) -> Any:
    """Largest first; of equal ones the first position wins."""
    wide = x.astype(xp.float32) if x.dtype.itemsize == 2 and x.dtype.kind not in "iu" else x
    key = ~wide if wide.dtype.kind in "iub" else -wide
    indices = _stable_order(xp, key, -1)[..., :k]
    return store_all(xp, (xp.take_along_axis(x, indices, axis=-1), indices), out)


def _top_k_gradient(c: GradientContext) -> Grads:
    if c.grads[0] is None:
        return [None]
    x = c.operands[0]
    return [emit_one("put_along", c.grad, c.results[1], dim=x.ndim - 1, size=x.shape[-1])]


define(
    "top_k",
    _top_k_rule,
    _top_k_kernel,
    infer=_infer_top_k,
    gradient=_top_k_gradient,
    flops=1,
    workspace=workspace.top_k,
)


def _argument(kind: str, x: Any, axis: int | None, keepdims: bool) -> Tensor:
    (tensor,) = as_tensors(x)
    if axis is None:
        flat = emit_one(kind, reshape_to(tensor, (tensor.size,)), dim=0)
        return reshape_to(flat, (1,) * tensor.ndim) if keepdims else flat
    (dim,) = dims_of(axis, tensor.ndim)
    position = emit_one(kind, tensor, dim=dim)
    return (
        reshape_to(position, tuple(1 if d == dim else n for d, n in enumerate(tensor.shape)))
        if keepdims
        else position
    )


@checked_arguments()
def argmax(x: Any, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Position of the first largest element along a dim, or in the flattened tensor."""
    return _argument("argmax", x, axis, keepdims)


@checked_arguments()
def argmin(x: Any, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Position of the first smallest element along a dim, or in the flattened tensor."""
    return _argument("argmin", x, axis, keepdims)


@checked_arguments()
def sort(x: Any, axis: int = -1) -> Tensor:
    """Smallest first along a dim."""
    (tensor,) = as_tensors(x)
    return emit_one("sort", tensor, dim=dims_of(axis, tensor.ndim)[0])


@checked_arguments()
def argsort(x: Any, axis: int = -1) -> Tensor:
    """Positions that sort a dim; equal elements keep their order."""
    (tensor,) = as_tensors(x)
    return emit_one("argsort", tensor, dim=dims_of(axis, tensor.ndim)[0])


@checked_arguments()
def top_k(x: Any, k: Count) -> tuple[Tensor, Tensor]:
    """The k largest elements of the last dim, largest first, and their positions."""
    (tensor,) = as_tensors(x)
    values, indices = emit("top_k", tensor, k=int(k))
    return values, indices
