"""Layer norm and root-mean-square norm over the last dim, with their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from distgraph.kernels._common import Array, Namespace, computed_in_f32, empty, outputs, rows, store
from distgraph.kernels._jit import fused_for


def _loops(xp: Namespace, x: Array, *others: Array) -> Any:
    """Compiled loops where they apply: equal float32 or float64 operands on NumPy."""
    if any(a.dtype != x.dtype for a in others):
        return None
    return fused_for("_numba_rows", xp, x, np.float32, np.float64)


@computed_in_f32(0, 0, 0)
def layer_norm(
    xp: Namespace, x: Array, w: Array, b: Array, *, eps: float = 1e-5, out: Any = None
) -> tuple[Array, Array, Array]:
    """y = (x - mean) * rstd * w + b with rstd = 1 / sqrt(var + eps), mean and (biased) variance over the last
    dim.

    Args:
        x: [..., n].
        w: [n], b: [n].
        eps: added to the variance.

    Returns:
        y [..., n], mean [...], rstd [...].
    """
    out_y, out_mean, out_rstd = outputs(out, 3)
    loops = _loops(xp, x, w, b)
    if loops is None:
        mean = x.mean(axis=-1)
        centred = x - mean[..., None]
        rstd = 1 / xp.sqrt(xp.square(centred).mean(axis=-1) + x.dtype.type(eps))
        y = empty(xp, out_y, x.shape, x.dtype)
        centred *= rstd[..., None]
        centred *= w
        xp.add(centred, b, out=y)
    else:
        y = empty(xp, out_y, x.shape, x.dtype)
        mean = empty(xp, out_mean, x.shape[:-1], x.dtype)
        rstd = empty(xp, out_rstd, x.shape[:-1], x.dtype)
        w, b = np.ascontiguousarray(w), np.ascontiguousarray(b)
        width = x.shape[-1]
        loops.layer_norm(
            rows(x), w, b, x.dtype.type(eps), y.reshape(-1, width), mean.reshape(-1), rstd.reshape(-1)
        )
    return store(xp, y, out_y), store(xp, mean, out_mean), store(xp, rstd, out_rstd)


@computed_in_f32(1, 2, 2)
def layer_norm_grad(
    xp: Namespace, dy: Array, x: Array, w: Array, mean: Array, rstd: Array, *, out: Any = None
) -> tuple[Array, Array, Array]:
    """Gradients of `layer_norm`, with h = (x - mean) * rstd and g = dy * w:

    dx = rstd * (g - mean(g) - h * mean(g * h)), dw = sum(dy * h), db = sum(dy), sums over all but the last
    dim.

    Returns:
        dx [..., n], dw [n], db [n].
    """
    out_x, out_w, out_b = outputs(out, 3)
    loops = _loops(xp, x, dy, w, mean, rstd)
    if loops is None:
        h = (x - mean[..., None]) * rstd[..., None]
        leading = tuple(range(x.ndim - 1))
        dw, db = (dy * h).sum(axis=leading), dy.sum(axis=leading)
        g = dy * w
        h *= (g * h).mean(axis=-1, keepdims=True)
        g -= g.mean(axis=-1, keepdims=True)
        g -= h
        g *= rstd[..., None]
        return store(xp, g, out_x), store(xp, dw, out_w), store(xp, db, out_b)
    dx = empty(xp, out_x, x.shape, x.dtype)
    dw, db = empty(xp, out_w, w.shape, x.dtype), empty(xp, out_b, w.shape, x.dtype)
    mean, rstd = np.ascontiguousarray(mean).reshape(-1), np.ascontiguousarray(rstd).reshape(-1)
    w = np.ascontiguousarray(w)
    loops.layer_norm_grad(rows(dy), rows(x), w, mean, rstd, dx.reshape(-1, x.shape[-1]), dw, db)
    return store(xp, dx, out_x), store(xp, dw, out_w), store(xp, db, out_b)


@computed_in_f32(0, 0)
def rms_norm(xp: Namespace, x: Array, w: Array, *, eps: float = 1e-6, out: Any = None) -> tuple[Array, Array]:
    """y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps) over the last dim (Zhang and Sennrich, 2019).

    Args:
        x: [..., n].
        w: [n].

    Returns:
        y [..., n], rstd [...].
    """
    out_y, out_rstd = outputs(out, 2)
    loops = _loops(xp, x, w)
    if loops is None:
        rstd = 1 / xp.sqrt(xp.square(x).mean(axis=-1) + x.dtype.type(eps))
        y = empty(xp, out_y, x.shape, x.dtype)
        xp.multiply(x, rstd[..., None], out=y)
        y *= w
    else:
        y, rstd = empty(xp, out_y, x.shape, x.dtype), empty(xp, out_rstd, x.shape[:-1], x.dtype)
        width = x.shape[-1]
        loops.rms_norm(
            rows(x), np.ascontiguousarray(w), x.dtype.type(eps), y.reshape(-1, width), rstd.reshape(-1)
        )
    return store(xp, y, out_y), store(xp, rstd, out_rstd)


@computed_in_f32(1, 2)
def rms_norm_grad(
    xp: Namespace, dy: Array, x: Array, w: Array, rstd: Array, *, out: Any = None
) -> tuple[Array, Array]:
    """Gradients of `rms_norm`, with h = x * rstd and g = dy * w: dx = rstd * (g - h * mean(g * h)), dw =
    sum(dy * h).

    Returns:
        dx [..., n], dw [n].
    """
    out_x, out_w = outputs(out, 2)
    loops = _loops(xp, x, dy, w, rstd)
    if loops is None:
        h = x * rstd[..., None]
        dw = (dy * h).sum(axis=tuple(range(x.ndim - 1)))
        g = dy * w
        h *= (g * h).mean(axis=-1, keepdims=True)
        g -= h
        g *= rstd[..., None]
        return store(xp, g, out_x), store(xp, dw, out_w)
    dx, dw = empty(xp, out_x, x.shape, x.dtype), empty(xp, out_w, w.shape, x.dtype)
    rstd = np.ascontiguousarray(rstd).reshape(-1)
    loops.rms_norm_grad(rows(dy), rows(x), np.ascontiguousarray(w), rstd, dx.reshape(-1, x.shape[-1]), dw)
    return store(xp, dx, out_x), store(xp, dw, out_w)
