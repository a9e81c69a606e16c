"""Reductions over dims, positions of extremes, and running sums and products."""

from __future__ import annotations

from typing import Any

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.jax.rule_registry import primitive
from distgraph.ir.dtypes import short


def _register(name: str, kind: str) -> None:
    @primitive(name)
    def _reduce(x: Any, *, axes: Any, **params: Any) -> Any:
        named = [d for d in axes if not hasattr(d, "__index__")]
        if named:
            raise GraphError(f"axis {named[0]!r} is of a mesh, but the whole batch is here: leave it out")
        dims = tuple(int(d) for d in axes)
        return ops.reduce(kind, x, dims) if dims else x


for _kind in ("sum", "max", "min", "prod"):
    _register(f"reduce_{_kind}", _kind)
for _kind in ("sum", "max", "min"):
    _register(f"p{_kind}", _kind)  # over the axis of a vmap, which is a dim here
_register("reduce_and", "all")
_register("reduce_or", "any")


@primitive("argmax")
def _argmax(x: Any, *, axes: Any, index_dtype: Any, **params: Any) -> Any:
    return ops.cast(ops.argmax(x, int(axes[0])), short(index_dtype))


@primitive("argmin")
def _argmin(x: Any, *, axes: Any, index_dtype: Any, **params: Any) -> Any:
    return ops.cast(ops.argmin(x, int(axes[0])), short(index_dtype))


def _running(function: Any, x: Any, dim: int, reverse: bool) -> Any:
    return ops.flip(function(ops.flip(x, dim), dim), dim) if reverse else function(x, dim)


@primitive("cumsum")
def _cumsum(x: Any, *, axis: int, reverse: bool, **params: Any) -> Any:
    return _running(ops.cumsum, x, axis, reverse)


@primitive("cumprod")
def _cumprod(x: Any, *, axis: int, reverse: bool, **params: Any) -> Any:
    return _running(ops.cumprod, x, axis, reverse)


@primitive("cumlogsumexp")
def _cumlogsumexp(x: Any, *, axis: int, reverse: bool, **params: Any) -> Any:
    """Relative to the largest element of the line, as far as exp does not underflow."""
    top = ops.stop_gradient(ops.reduce("max", x, axis, keepdims=True))
    return ops.log(_running(ops.cumsum, ops.exp(x - top), axis, reverse)) + top


@primitive("reduce_precision_sum", "reduce_xor")
def _refused(*operands: Any, **params: Any) -> Any:
    raise GraphError("a parity over dims has no op; use jax.numpy.sum(x) % 2")
