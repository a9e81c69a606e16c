"""Primitives that move elements: reshapes, slices, padding, concatenation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distgraph import ops
from distgraph.frontends.jax.folded_constant import Constant
from distgraph.frontends.jax.lax.lax_elementwise import as_positions
from distgraph.frontends.jax.rule_registry import primitive
from distgraph.tracing.tensor import emit_one


@primitive("broadcast_in_dim")
def _broadcast(x: Any, *dynamic: Any, shape: Any, broadcast_dimensions: Any, **params: Any) -> Any:
    lengths = {int(d): n for d, n in zip(broadcast_dimensions, x.shape, strict=True)}
    lengths_in_place = tuple(lengths.get(d, 1) for d in range(len(shape)))
    x = ops.reshape(x, lengths_in_place) if lengths_in_place != tuple(x.shape) else x
    return ops.broadcast_to(x, tuple(shape)) if lengths_in_place != tuple(shape) else x


@primitive("reshape")
def _reshape(x: Any, *dynamic: Any, new_sizes: Any, dimensions: Any = None, **params: Any) -> Any:
    x = x if dimensions is None else ops.transpose(x, tuple(dimensions))
    return ops.reshape(x, tuple(int(n) for n in new_sizes))


@primitive("squeeze")
def _squeeze(x: Any, *, dimensions: Any, **params: Any) -> Any:
    gone = {int(d) % x.ndim for d in dimensions}
    return ops.reshape(x, tuple(n for d, n in enumerate(x.shape) if d not in gone))


@primitive("expand_dims")
def _expand_dims(x: Any, *, dimensions: Any, **params: Any) -> Any:
    for d in sorted(dimensions):
        x = ops.expand_dims(x, d)
    return x


@primitive("transpose")
def _transpose(x: Any, *, permutation: Any, **params: Any) -> Any:
    return ops.transpose(x, tuple(int(d) for d in permutation))


@primitive("rev")
def _reverse(x: Any, *, dimensions: Any, **params: Any) -> Any:
    return ops.flip(x, tuple(int(d) for d in dimensions)) if len(dimensions) else x


@primitive("slice")
def _slice(x: Any, *, start_indices: Any, limit_indices: Any, strides: Any = None, **params: Any) -> Any:
    steps = strides or (1,) * len(start_indices)
    index = zip(start_indices, limit_indices, steps, strict=True)
    return ops.getitem(x, tuple(slice(int(a), int(b), int(s)) for a, b, s in index))


@primitive("pad")
def _pad(x: Any, value: Any, *, padding_config: Any, **params: Any) -> Any:
    """Padding may be negative, which cuts, and may be between elements."""
    low, high, interior = (tuple(int(n) for n in part) for part in zip(*padding_config, strict=True))
    number = _number(value)
    zeros = (0,) * x.ndim
    if any(interior):
        x = emit_one("pad", x, low=zeros, high=zeros, interior=interior, value=number or 0)
    index = tuple(slice(max(0, -a), n - max(0, -b)) for a, b, n in zip(low, high, x.shape, strict=True))
    if any(n < 0 for n in (*low, *high)):
        x = ops.getitem(x, index)
    outer = {"low": tuple(max(0, n) for n in low), "high": tuple(max(0, n) for n in high)}
    if not any((*outer["low"], *outer["high"])):
        return x
    if number is not None:
        return emit_one("pad", x, interior=zeros, value=number, **outer)
    inside = emit_one("pad", ops.full(x.shape, 1, "f32"), interior=zeros, value=0, **outer)
    return ops.where(ops.greater(inside, 0), emit_one("pad", x, interior=zeros, value=0, **outer), value)


def _number(value: Any) -> Any:
    return value.value.item() if isinstance(value, Constant) else None


@primitive("concatenate")
def _concatenate(*operands: Any, dimension: int, **params: Any) -> Any:
    filled = [x for x in operands if x.shape[dimension]]
    return ops.concat(filled or operands[:1], dimension) if len(filled) != 1 else filled[0]


@primitive("split")
def _split(x: Any, *, sizes: Any, axis: int, **params: Any) -> Any:
    ends = np.cumsum(sizes).tolist()
    front = (slice(None),) * axis
    return [ops.getitem(x, (*front, slice(b - n, b))) for b, n in zip(ends, sizes, strict=True)]


@primitive("stack")
def _stack(*operands: Any, axis: int = 0, **params: Any) -> Any:
    return ops.stack(list(operands), axis)


@primitive("unstack")
def _unstack(x: Any, *, axis: int = 0, **params: Any) -> Any:
    front = (slice(None),) * axis
    return [ops.getitem(x, (*front, i)) for i in range(x.shape[axis])]


@primitive("tile")
def _tile(x: Any, *, reps: Any, **params: Any) -> Any:
    return ops.tile(x, tuple(reps))


@primitive("iota")
def _iota(*, dtype: Any, shape: Any, dimension: int, **params: Any) -> Any:
    return ops.iota(tuple(shape), dimension, dtype)


@primitive("dynamic_slice")
def _dynamic_slice(x: Any, *starts: Any, slice_sizes: Any, **params: Any) -> Any:
    sizes = tuple(int(n) for n in slice_sizes)
    if all(isinstance(start, Constant) for start in starts):
        firsts = [
            min(max(int(start.value), 0), n - size)
            for start, n, size in zip(starts, x.shape, sizes, strict=True)
        ]
        return ops.getitem(x, tuple(slice(a, a + size) for a, size in zip(firsts, sizes, strict=True)))
    return ops.dynamic_slice(x, _vector(starts), sizes) if math.prod(x.shape) else x


@primitive("dynamic_update_slice")
def _dynamic_update_slice(x: Any, update: Any, *starts: Any, **params: Any) -> Any:
    return ops.dynamic_update_slice(x, update, _vector(starts))


def _vector(starts: Any) -> Any:
    if all(isinstance(start, Constant) for start in starts):
        return Constant(np.array([int(start.value) for start in starts], np.int64))
    return ops.concat([ops.reshape(as_positions(start), (1,)) for start in starts], 0)
