"""The array API namespace of traced tensors: what `x.__array_namespace__()` returns.

Functions have the names of the array API standard; dtypes are short names. NumPy's own functions, called
with traced tensors, come here by way of `distgraph.array_api.numpy_protocols`.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.errors.arguments import Size, check_argument
from distgraph.ir.dtypes import is_float, promote, short
from distgraph.ir.op_registry import REGISTRY
from distgraph.ops.contraction import as_tensors, reshape_to
from distgraph.tracing.tensor import Tensor

float64, float32, float16, bfloat16 = "f64", "f32", "f16", "bf16"
int64, int32, int16, int8 = "i64", "i32", "i16", "i8"
uint64, uint32, uint16, uint8 = "u64", "u32", "u16", "u8"
bool = "bool"
pi, e, inf, nan, newaxis = math.pi, math.e, math.inf, math.nan, None


STANDARD = (
    "add", "arange", "argmax", "argmin", "argsort", "bitwise_and", "bitwise_or", "bitwise_xor",
    "broadcast_to", "ceil", "clip", "concat", "cos", "cosh", "divide", "equal", "exp", "expand_dims",
    "expm1", "flip", "floor", "floor_divide", "full", "greater", "greater_equal", "hypot", "isfinite",
    "isinf", "isnan", "less", "less_equal", "log", "log10", "log1p", "log2", "logical_and", "logical_not",
    "logical_or", "logical_xor", "matmul", "maximum", "mean", "minimum", "multiply", "negative",
    "not_equal", "ones", "outer", "reciprocal", "remainder", "repeat", "reshape", "roll", "sign", "sin",
    "sinh", "sort", "sqrt", "square", "squeeze", "stack", "std", "subtract", "take", "tan", "tanh", "tile",
    "tril", "triu", "trunc", "var", "where", "zeros",
)  # fmt: skip
"""Functions of the array API standard that are ops under the same name."""
globals().update({name: getattr(ops, name) for name in STANDARD})


class Unsupported(GraphError, AttributeError):
    """A NumPy function that does not trace; also an AttributeError, so that `hasattr` returns False."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise Unsupported(f"numpy.{name} does not trace; {way_out(name)}")


def way_out(name: str) -> str:
    """Text for messages: the alternative to a function that does not trace."""
    similar = sorted(n for n in {*REGISTRY, *globals()} if n.startswith(name[:3]) and n.islower())[:6]
    hint = f" (near it: {', '.join(similar)})" if similar else ""
    return f"compose it from the functions of distgraph.ops{hint}, or compute it before tracing"


# array API names that differ from ours

abs, acos, asin, atan, atan2 = ops.absolute, ops.arccos, ops.arcsin, ops.arctan, ops.arctan2
bitwise_invert, bitwise_left_shift, bitwise_right_shift = ops.bitwise_not, ops.left_shift, ops.right_shift
astype, positive, pow = ops.cast, ops.identity, ops.power


def asarray(x: Any, dtype: Any = None) -> Tensor:
    """A tensor of the current trace."""
    (tensor,) = as_tensors(x)
    return tensor if dtype is None else ops.cast(tensor, dtype)


def sum(x: Any, axis: Any = None, dtype: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """Sum over dims."""
    return ops.reduce("sum", x if dtype is None else ops.cast(x, dtype), axis, keepdims)


def prod(x: Any, axis: Any = None, dtype: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """Product over dims."""
    return ops.reduce("prod", x if dtype is None else ops.cast(x, dtype), axis, keepdims)


def max(x: Any, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """Largest element over dims."""
    return ops.reduce("max", x, axis, keepdims)


def min(x: Any, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """Smallest element over dims."""
    return ops.reduce("min", x, axis, keepdims)


def any(x: Any, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """True where some element is not 0."""
    return ops.reduce("any", x, axis, keepdims)


def all(x: Any, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """True where no element is 0."""
    return ops.reduce("all", x, axis, keepdims)


def count_nonzero(x: Any, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """Number of elements that are not 0."""
    return ops.reduce("sum", ops.not_equal(x, 0), axis, keepdims)


def cumulative_sum(x: Any, axis: int | None = None) -> Tensor:
    """Running sum along a dim; the flattened tensor by default."""
    (tensor,) = as_tensors(x)
    return ops.cumsum(reshape_to(tensor, (tensor.size,)), 0) if axis is None else ops.cumsum(tensor, axis)


def cumulative_prod(x: Any, axis: int | None = None) -> Tensor:
    """Running product along a dim; the flattened tensor by default."""
    (tensor,) = as_tensors(x)
    return ops.cumprod(reshape_to(tensor, (tensor.size,)), 0) if axis is None else ops.cumprod(tensor, axis)


def round(x: Any, decimals: int = 0) -> Tensor:
    """Nearest integer, halves to even. Raises GraphError for decimals."""
    if decimals:
        raise GraphError(f"round to {decimals} decimals does not trace; multiply, round and divide")
    return ops.rint(x)


def logaddexp(x: Any, y: Any) -> Tensor:
    """log(exp(x) + exp(y)) without overflow; of infinities as the limit."""
    finite = ops.logical_and(ops.isfinite(x), ops.isfinite(y))
    left, right = ops.where(finite, x, 0), ops.where(finite, y, 0)
    size = ops.absolute(left - right)
    # at equal arguments the derivatives are 1/2, as those of |x| are 0
    near = (left + right + size) * 0.5 + ops.log1p(ops.exp(-size))
    return ops.where(finite, near, ops.maximum(x, y))


def permute_dims(x: Any, axes: Sequence[int]) -> Tensor:
    """Dims in another order."""
    return ops.transpose(x, axes)


def transpose(x: Any, axes: Sequence[int] | None = None) -> Tensor:
    """Dims in another order; reversed by default."""
    return ops.transpose(x, axes)


def matrix_transpose(x: Any) -> Tensor:
    """Last two dims swapped."""
    return swapaxes(x, -1, -2)


def swapaxes(x: Any, first: int, second: int) -> Tensor:
    """Two dims exchanged."""
    (tensor,) = as_tensors(x)
    return tensor.swapaxes(first, second)


def moveaxis(x: Any, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """Dims moved to other positions; the other dims keep their order."""
    (tensor,) = as_tensors(x)
    sources = ops.reduction.dims_in_order(source, tensor.ndim)
    positions = ops.reduction.dims_in_order(destination, tensor.ndim)
    if len(positions) != len(sources):
        raise GraphError(f"moveaxis has {len(sources)} sources but {len(positions)} destinations")
    order = [d for d in range(tensor.ndim) if d not in sources]
    for position, dim in sorted(zip(positions, sources, strict=True)):
        order.insert(position, dim)
    return ops.transpose(tensor, order)


_Dims = int | Sequence[int]


def tensordot(x: Any, y: Any, axes: int | Sequence[Sequence[int]] = 2) -> Tensor:
    """Contraction over pairs of dims."""
    left, right = as_tensors(x, y)
    check_argument("tensordot", "axes", axes, Size | tuple[_Dims, _Dims])
    if isinstance(axes, (int, np.integer)):
        if axes > builtins.min(left.ndim, right.ndim):
            raise GraphError(
                f"axes of tensordot is {axes} but the tensors have {left.ndim} and {right.ndim} dims"
            )
        pairs = list(zip(range(left.ndim - axes, left.ndim), range(axes), strict=True))
    else:
        firsts = ops.reduction.dims_in_order(axes[0], left.ndim)
        pairs = list(zip(firsts, ops.reduction.dims_in_order(axes[1], right.ndim), strict=True))
    letters = "abcdefghijklmnopqrstuvwxyz"
    first = list(letters[: left.ndim])
    second = list(letters[left.ndim : left.ndim + right.ndim])
    for d, other in pairs:
        second[other] = first[d]
    free = [c for c in first if c not in second] + [c for c in second if c not in first]
    return ops.einsum(f"{''.join(first)},{''.join(second)}->{''.join(free)}", left, right)


def vecdot(x: Any, y: Any, axis: int = -1) -> Tensor:
    """Sum of products along a dim."""
    return ops.reduce("sum", ops.multiply(x, y), axis)


def dot(x: Any, y: Any) -> Tensor:
    """NumPy's dot: product with a number, of vectors, of matrices, last dim with last but one."""
    left, right = as_tensors(x, y)
    if not left.shape or not right.shape:
        return left * right
    return (
        ops.matmul(left, right)
        if right.ndim <= 2
        else tensordot(left, right, ((left.ndim - 1,), (right.ndim - 2,)))
    )


def inner(x: Any, y: Any) -> Tensor:
    """Sum of products over the last dims."""
    left, right = as_tensors(x, y)
    return tensordot(left, right, ((left.ndim - 1,), (right.ndim - 1,)))


def unstack(x: Any, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices along a dim."""
    (tensor,) = as_tensors(x)
    (dim,) = ops.reduction.dims_of(axis, tensor.ndim)
    return tuple(ops.squeeze(part, dim) for part in ops.split(tensor, tensor.shape[dim], dim))


def broadcast_arrays(*arrays: Any) -> list[Tensor]:
    """The tensors broadcast to their common shape."""
    tensors = as_tensors(*arrays)
    try:
        shape = np.broadcast_shapes(*(t.shape for t in tensors))
    except ValueError:
        raise GraphError(f"shapes {' and '.join(str(t.shape) for t in tensors)} do not broadcast") from None
    return [ops.broadcast_to(t, shape) for t in tensors]


def diff(x: Any, n: int = 1, axis: int = -1) -> Tensor:
    """Differences of neighbours along a dim, n times."""
    (tensor,) = as_tensors(x)
    check_argument("diff", "n", n, Size)
    front = (slice(None),) * ops.reduction.dims_of(axis, tensor.ndim)[0]
    for _ in range(n):
        tensor = tensor[(*front, slice(1, None))] - tensor[(*front, slice(None, -1))]
    return tensor


def take_along_axis(x: Any, indices: Any, axis: int = -1) -> Tensor:
    """Elements of a dim by position, a position for every other dim."""
    return ops.take_along(x, indices, axis)


def zeros_like(x: Any, dtype: Any = None) -> Tensor:
    """Zeros of the same shape."""
    return full_like(x, 0, dtype)


def ones_like(x: Any, dtype: Any = None) -> Tensor:
    """Ones of the same shape."""
    return full_like(x, 1, dtype)


def full_like(x: Any, value: Any, dtype: Any = None) -> Tensor:
    """One number in the same shape."""
    (tensor,) = as_tensors(x)
    return ops.full(tensor.shape, value, tensor.dtype if dtype is None else dtype)


def eye(rows: int, columns: int | None = None, k: int = 0, dtype: Any = "f32") -> Tensor:
    """Ones on the k-th diagonal."""
    shape = (rows, rows if columns is None else columns)
    return ops.cast(ops.equal(ops.iota(shape, 0) + k, ops.iota(shape, 1)), "f32" if dtype is None else dtype)


def linspace(
    start: float, stop: float, num: int, dtype: Any = "f32", endpoint: builtins.bool = True
) -> Tensor:
    """Evenly spaced numbers."""
    step = (stop - start) / builtins.max(1, num - 1 if endpoint else num)
    return ops.iota((num,), 0, "f32" if dtype is None else dtype) * step + start


def result_type(*operands: Any) -> str:
    """Common dtype of tensors and dtypes."""
    dtypes = [x.dtype if isinstance(x, Tensor) else short(x) for x in operands]
    common = dtypes[0]
    for dtype in dtypes[1:]:
        common = promote(common, dtype)
    return common


def isdtype(dtype: Any, kind: str | tuple[str, ...]) -> builtins.bool:
    """Whether a dtype is of a kind of the array API standard."""
    name = short(dtype)
    accepted = (kind,) if isinstance(kind, str) else kind
    kinds = {"bool": name == "bool", "real floating": is_float(name), "signed integer": name.startswith("i")}
    kinds |= {"unsigned integer": name.startswith("u"), "integral": name[0] in "iu"}
    kinds |= {"numeric": name != "bool", "complex floating": False}
    return builtins.any(kinds.get(k, k == name) for k in accepted)
