"""Layer norm and root-mean-square norm over the last dim, with their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from distgraph.kernels._common import Array, Namespace, computed_in_f32, empty, outputs, rows, store
from distgraph.kernels._jit import jit, pays
from distgraph.kernels._row_loops import GROUP, add_and_clear, copy_row


def _compiled(xp: Namespace, x: Array, *others: Array) -> bool:
    """Whether the compiled loops apply: equal float32 or float64 operands on NumPy."""
    return all(a.dtype == x.dtype for a in others) and pays(xp, x, np.float32, np.float64)


@jit
def _layer_norm_loop(x: Any, w: Any, b: Any, eps: Any, y: Any, mean: Any, rstd: Any) -> None:
    """y = (x - mean) * rstd * w + b; two passes for the variance, over a cached row."""
    width = x.shape[1]
    scratch = np.empty(width, x.dtype)
    share = x.dtype.type(1.0 / width)
    for i in range(x.shape[0]):
        row, result = x[i], y[i]
        total = x.dtype.type(0.0)
        for j in range(width):
            total += row[j]
        m = total * share
        square = x.dtype.type(0.0)
        for j in range(width):
            d = row[j] - m
            scratch[j] = d
            square += d * d
        r = x.dtype.type(1.0) / np.sqrt(square * share + eps)
        mean[i] = m
        rstd[i] = r
        for j in range(width):
            result[j] = scratch[j] * r * w[j] + b[j]


@jit
def _layer_norm_grad_loop(dy: Any, x: Any, w: Any, mean: Any, rstd: Any, dx: Any, dw: Any, db: Any) -> None:
    """Gradients of `layer_norm`; ``dw`` and ``db`` are overwritten."""
    width = x.shape[1]
    share = x.dtype.type(1.0 / width)
    hat, scratch = np.empty(width, x.dtype), np.empty(width, x.dtype)
    part_w, part_b = np.zeros(width, x.dtype), np.zeros(width, x.dtype)
    dw[:] = x.dtype.type(0.0)
    db[:] = x.dtype.type(0.0)
    for i in range(x.shape[0]):
        row, grad, m, r = x[i], dy[i], mean[i], rstd[i]
        first, second = x.dtype.type(0.0), x.dtype.type(0.0)
        for j in range(width):
            h = (row[j] - m) * r
            g = grad[j] * w[j]
            hat[j] = h
            scratch[j] = g
            first += g
            second += g * h
        for j in range(width):
            part_w[j] += grad[j] * hat[j]
            part_b[j] += grad[j]
        first *= share
        second *= share
        result = dx[i]
        for j in range(width):
            result[j] = r * (scratch[j] - first - hat[j] * second)
        if i % GROUP == GROUP - 1 or i == x.shape[0] - 1:
            add_and_clear(dw, part_w)
            add_and_clear(db, part_b)


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
    if not _compiled(xp, x, w, b):
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
        _layer_norm_loop(
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
    if not _compiled(xp, x, dy, w, mean, rstd):
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
    _layer_norm_grad_loop(rows(dy), rows(x), w, mean, rstd, dx.reshape(-1, x.shape[-1]), dw, db)
    return store(xp, dx, out_x), store(xp, dw, out_w), store(xp, db, out_b)


@jit
def _rms_norm_loop(x: Any, w: Any, eps: Any, y: Any, rstd: Any) -> None:
    """y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps)."""
    width = x.shape[1]
    scratch = np.empty(width, x.dtype)
    share = x.dtype.type(1.0 / width)
    for i in range(x.shape[0]):
        row = x[i]
        square = x.dtype.type(0.0)
        for j in range(width):
            square += row[j] * row[j]
        r = x.dtype.type(1.0) / np.sqrt(square * share + eps)
        rstd[i] = r
        for j in range(width):
            scratch[j] = row[j] * r * w[j]
        copy_row(scratch, y[i])


@jit
def _rms_norm_grad_loop(dy: Any, x: Any, w: Any, rstd: Any, dx: Any, dw: Any) -> None:
    """Gradients of `rms_norm`; ``dw`` is overwritten."""
    width = x.shape[1]
    share = x.dtype.type(1.0 / width)
    hat, scratch = np.empty(width, x.dtype), np.empty(width, x.dtype)
    part = np.zeros(width, x.dtype)
    dw[:] = x.dtype.type(0.0)
    for i in range(x.shape[0]):
        row, grad, r = x[i], dy[i], rstd[i]
        total = x.dtype.type(0.0)
        for j in range(width):
            h = row[j] * r
            g = grad[j] * w[j]
            hat[j] = h
            scratch[j] = g
            total += g * h
        for j in range(width):
            part[j] += grad[j] * hat[j]
        total *= share
        result = dx[i]
        for j in range(width):
            result[j] = r * (scratch[j] - hat[j] * total)
        if i % GROUP == GROUP - 1 or i == x.shape[0] - 1:
            add_and_clear(dw, part)


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
    if not _compiled(xp, x, w):
        rstd = 1 / xp.sqrt(xp.square(x).mean(axis=-1) + x.dtype.type(eps))
        y = empty(xp, out_y, x.shape, x.dtype)
        xp.multiply(x, rstd[..., None], out=y)
        y *= w
    else:
        y, rstd = empty(xp, out_y, x.shape, x.dtype), empty(xp, out_rstd, x.shape[:-1], x.dtype)
        width = x.shape[-1]
        _rms_norm_loop(
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
    if not _compiled(xp, x, dy, w, rstd):
        h = x * rstd[..., None]
        dw = (dy * h).sum(axis=tuple(range(x.ndim - 1)))
        g = dy * w
        h *= (g * h).mean(axis=-1, keepdims=True)
        g -= h
        g *= rstd[..., None]
        return store(xp, g, out_x), store(xp, dw, out_w)
    dx, dw = empty(xp, out_x, x.shape, x.dtype), empty(xp, out_w, w.shape, x.dtype)
    rstd = np.ascontiguousarray(rstd).reshape(-1)
    _rms_norm_grad_loop(rows(dy), rows(x), np.ascontiguousarray(w), rstd, dx.reshape(-1, x.shape[-1]), dw)
    return store(xp, dx, out_x), store(xp, dw, out_w)
