"""Sorting, and the largest elements."""

from __future__ import annotations

from typing import Any

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.jax.rule_registry import primitive


@primitive("sort")
def _sort(*operands: Any, dimension: int, num_keys: int, **params: Any) -> Any:
    """Several operands are sorted by the first, which keeps the order of equal elements."""
    if len(operands) == 1:
        return ops.sort(operands[0], dimension)
    if num_keys != 1:
        raise GraphError(f"sort has {num_keys} keys but only 1 has a rule; combine them to one number")
    order = ops.argsort(operands[0], dimension)
    return [ops.take_along(x, order, dimension) for x in operands]


@primitive("top_k", "approx_top_k")
def _top_k(x: Any, *, k: int, **params: Any) -> Any:
    dim = int(params.get("axis", params.get("reduction_dimension", -1))) % x.ndim
    if not params.get("is_max_k", True):
        raise GraphError("approx_min_k has no rule; use jax.lax.approx_max_k of -x")
    if dim == x.ndim - 1:
        return ops.top_k(x, k)
    return [y.swapaxes(dim, -1) for y in ops.top_k(x.swapaxes(dim, -1), k)]
