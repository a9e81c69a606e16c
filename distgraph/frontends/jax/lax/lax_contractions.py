"""Matrix products and convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.jax.rule_registry import primitive
from distgraph.ir.dtypes import is_float, itemsize, short
from distgraph.tracing.tensor import emit_one

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@primitive("dot_general")
def _dot_general(
    x: Any, y: Any, *, dimension_numbers: Any, preferred_element_type: Any = None, **params: Any
) -> Any:
    """The product over the contracted dims; dims of the result: batch, other dims of x, other dims of y."""
    x, y = _widened(x, y, preferred_element_type)
    (sum_x, sum_y), (batch_x, batch_y) = dimension_numbers
    letters = iter(_LETTERS)
    left = [next(letters) for _ in range(x.ndim)]
    right = ["" for _ in range(y.ndim)]
    for d, e in (*zip(sum_x, sum_y, strict=True), *zip(batch_x, batch_y, strict=True)):
        right[e] = left[d]
    right = [letter or next(letters) for letter in right]
    batch = [left[d] for d in batch_x]
    others = [i for d, i in enumerate(left) if d not in (*sum_x, *batch_x)]
    others += [i for d, i in enumerate(right) if d not in (*sum_y, *batch_y)]
    return ops.einsum(f"{''.join(left)},{''.join(right)}->{''.join(batch + others)}", x, y)


def _widened(x: Any, y: Any, preferred: Any) -> tuple[Any, Any]:
    """Operands in the dtype in which JAX accumulates, where that is wider, and in one dtype."""
    if preferred is None:
        return x, y
    dtype = short(preferred)
    if is_float(dtype) and itemsize(dtype) >= max(itemsize(x.dtype), itemsize(y.dtype)):
        return tuple(ops.cast(z, dtype) if z.dtype != dtype else z for z in (x, y))  # type: ignore[return-value]
    return x, y


@primitive("conv_general_dilated")
def _conv(
    x: Any, kernel: Any, *, window_strides: Any, padding: Any, lhs_dilation: Any, rhs_dilation: Any,
    dimension_numbers: Any, feature_group_count: int, batch_group_count: int,
    preferred_element_type: Any = None, **params: Any,
) -> Any:  # fmt: skip
    """Dims are ordered as [n, c, ...] and [o, i, ...] for the op, and as JAX has them afterwards."""
    if batch_group_count != 1:
        raise GraphError(f"batch_group_count is {batch_group_count} but only 1 has a rule; use vmap")
    x, kernel = _widened(x, kernel, preferred_element_type)
    numbers = dimension_numbers
    x, kernel = _ordered(x, numbers.lhs_spec), _ordered(kernel, numbers.rhs_spec)
    sides = [(int(a), int(b)) for a, b in padding]
    zeros = (0,) * x.ndim
    interior = (0, 0, *(int(n) - 1 for n in lhs_dilation))
    if any(interior):
        x = emit_one("pad", x, low=zeros, high=zeros, interior=interior, value=0)
    if any(n < 0 for side in sides for n in side):
        cut = [slice(max(0, -a), n - max(0, -b)) for (a, b), n in zip(sides, x.shape[2:], strict=True)]
        x = ops.getitem(x, (slice(None), slice(None), *cut))
        sides = [(max(0, a), max(0, b)) for a, b in sides]
    y = ops.conv(x, kernel, tuple(window_strides), sides, tuple(rhs_dilation), feature_group_count)
    return _ordered(y, tuple(int(d) for d in np.argsort(numbers.out_spec)))


def _ordered(x: Any, order: Any) -> Any:
    dims = tuple(int(d) for d in order)
    return x if dims == tuple(range(x.ndim)) else ops.transpose(x, dims)
