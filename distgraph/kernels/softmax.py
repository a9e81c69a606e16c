"""Softmax and log-softmax along one dim, with their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from distgraph.kernels._common import Array, Namespace, computed_in_f32, empty, rows, store
from distgraph.kernels._jit import fused_for


def _fused_rows(
    name: str, xp: Namespace, operands: tuple[Array, ...], out: Array | None, axis: int, *dtypes: Any
) -> Any:
    """Run the compiled loop ``name`` over the last dim, or return None where it does not apply."""
    first = operands[0]
    if axis not in (-1, first.ndim - 1):
        return None
    loops = fused_for("_numba_rows", xp, first, *dtypes)
    if loops is None or any(a.dtype != first.dtype for a in operands):
        return None
    y = empty(xp, out, first.shape, first.dtype)
    getattr(loops, name)(*(rows(a) for a in operands), y.reshape(-1, first.shape[-1]))
    return store(xp, y, out)


@computed_in_f32(0)
def softmax(xp: Namespace, x: Array, *, axis: int = -1, out: Array | None = None) -> Array:
    """y = exp(x - m) / sum(exp(x - m)) along ``axis``, with m the maximum, so that nothing overflows.

    Args:
        x: any shape.
        axis: the dim that sums to one.
    """
    done = _fused_rows("softmax", xp, (x,), out, axis, np.float32)
    if done is not None:
        return done
    y = empty(xp, out, x.shape, x.dtype)
    xp.subtract(x, x.max(axis=axis, keepdims=True), out=y)
    xp.exp(y, out=y)
    y /= y.sum(axis=axis, keepdims=True)
    return store(xp, y, out)


@computed_in_f32(0)
def softmax_grad(xp: Namespace, y: Array, dy: Array, *, axis: int = -1, out: Array | None = None) -> Array:
    """dx = y * (dy - sum(y * dy)) along ``axis``, with y the result of `softmax`."""
    done = _fused_rows("softmax_grad", xp, (y, dy), out, axis, np.float32, np.float64)
    if done is not None:
        return done
    total = (y * dy).sum(axis=axis, keepdims=True)
    dx = empty(xp, out, y.shape, y.dtype)
    xp.multiply(y, dy - total, out=dx)
    return store(xp, dx, out)


@computed_in_f32(0)
def log_softmax(xp: Namespace, x: Array, *, axis: int = -1, out: Array | None = None) -> Array:
    """y = x - m - log(sum(exp(x - m))) along ``axis``, with m the maximum."""
    done = _fused_rows("log_softmax", xp, (x,), out, axis, np.float32)
    if done is not None:
        return done
    m = x.max(axis=axis, keepdims=True)
    shift = m + xp.log(xp.exp(x - m).sum(axis=axis, keepdims=True))
    y = empty(xp, out, x.shape, x.dtype)
    xp.subtract(x, shift, out=y)
    return store(xp, y, out)


@computed_in_f32(0)
def log_softmax_grad(
    xp: Namespace, y: Array, dy: Array, *, axis: int = -1, out: Array | None = None
) -> Array:
    """dx = dy - exp(y) * sum(dy) along ``axis``, with y the result of `log_softmax`."""
    done = _fused_rows("log_softmax_grad", xp, (y, dy), out, axis, np.float32)
    if done is not None:
        return done
    total = dy.sum(axis=axis, keepdims=True)
    return store(xp, dy - xp.exp(y) * total, out)
