"""Layer norm and root-mean-square norm over the last dim, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distgraph.kernels._common import Array, Namespace, computed_in_f32, empty, outputs, rows, store
from distgraph.kernels._jit import jit, pays
from distgraph.kernels._row_loops import GROUP, add_and_clear, copy_row
from distgraph.kernels.cuda.block_kernel import (
    WARP,
    BlockKernel,
    compute_dtype,
    launch,
    launch_rows,
    result_dtype,
    row_count,
    takes,
    threads_of,
)


def _compiled(xp: Namespace, x: Array, *others: Array) -> bool:
    """Whether the compiled loops apply: equal float32 or float64 operands on NumPy."""
    return pays(xp, x, np.float32, np.float64) and all(a.dtype == x.dtype for a in others)


def _mean(x: Array) -> Array:
    """Mean over the last dim; of a few rows in less time than `mean` takes."""
    total = x.sum(axis=-1)
    total /= x.shape[-1]
    return total


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


_PARTIAL_SUMS = 256
"""Most blocks of a gradient on CuPy, each of which sums the gradients of weights over rows of its own."""

_LAYER_NORM_CUDA = BlockKernel(
    "layer_norm",
    "x w b",
    "y mean rstd",
    "int width, A eps",
    """
    const long long start = (long long)blockIdx.x * width;
    A sum = A(0), squares = A(0);
    for (int j = threadIdx.x; j < width; j += blockDim.x) sum += load(x[start + j]);
    const A m = block_sum(sum) / A(width);
    for (int j = threadIdx.x; j < width; j += blockDim.x) {
        const A d = load(x[start + j]) - m;
        squares += d * d;
    }
    const A r = A(1) / sqrt(block_sum(squares) / A(width) + eps);
    for (int j = threadIdx.x; j < width; j += blockDim.x)
        store(y + start + j, (load(x[start + j]) - m) * r * load(w[j]) + load(b[j]));
    if (threadIdx.x == 0) {
        store(mean + blockIdx.x, m);
        store(rstd + blockIdx.x, r);
    }
""",
)

_LAYER_NORM_GRAD_CUDA = BlockKernel(
    "layer_norm_grad",
    "dy x w mean rstd",
    "dx parts_w parts_b",
    "int width, long long rows, A share",
    """
    parts_w += (long long)blockIdx.x * width;
    parts_b += (long long)blockIdx.x * width;
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const long long start = row * width;
        const A m = load(mean[row]), r = load(rstd[row]);
        const bool is_first = row == blockIdx.x;
        A first = A(0), second = A(0);
        for (int j = threadIdx.x; j < width; j += blockDim.x) {
            const A d = load(dy[start + j]), h = (load(x[start + j]) - m) * r, g = d * load(w[j]);
            first += g;
            second += g * h;
            parts_w[j] = is_first ? d * h : parts_w[j] + d * h;
            parts_b[j] = is_first ? d : parts_b[j] + d;
        }
        first = block_sum(first) * share;
        second = block_sum(second) * share;
        for (int j = threadIdx.x; j < width; j += blockDim.x) {
            const A h = (load(x[start + j]) - m) * r, g = load(dy[start + j]) * load(w[j]);
            store(dx + start + j, r * (g - first - h * second));
        }
    }
""",
)

_RMS_NORM_CUDA = BlockKernel(
    "rms_norm",
    "x w",
    "y rstd",
    "int width, A eps",
    """
    const long long start = (long long)blockIdx.x * width;
    A squares = A(0);
    for (int j = threadIdx.x; j < width; j += blockDim.x) squares += load(x[start + j]) * load(x[start + j]);
    const A r = A(1) / sqrt(block_sum(squares) / A(width) + eps);
    for (int j = threadIdx.x; j < width; j += blockDim.x)
        store(y + start + j, load(x[start + j]) * r * load(w[j]));
    if (threadIdx.x == 0) store(rstd + blockIdx.x, r);
""",
)

_RMS_NORM_GRAD_CUDA = BlockKernel(
    "rms_norm_grad",
    "dy x w rstd",
    "dx parts_w",
    "int width, long long rows, A share",
    """
    parts_w += (long long)blockIdx.x * width;
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const long long start = row * width;
        const A r = load(rstd[row]);
        A total = A(0);
        for (int j = threadIdx.x; j < width; j += blockDim.x) {
            const A d = load(dy[start + j]), h = load(x[start + j]) * r;
            total += d * load(w[j]) * h;
            parts_w[j] = row == blockIdx.x ? d * h : parts_w[j] + d * h;
        }
        total = block_sum(total) * share;
        for (int j = threadIdx.x; j < width; j += blockDim.x) {
            const A h = load(x[start + j]) * r;
            store(dx + start + j, r * (load(dy[start + j]) * load(w[j]) - h * total));
        }
    }
""",
)

_COLUMN_SUMS_CUDA = BlockKernel(
    "column_sums",
    "parts",
    "total",
    "int width, int count",
    """
    __shared__ A of_warps[8][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long column = (long long)blockIdx.x * 32 + lane;
    A sum = A(0);
    if (column < width)
        for (int i = warp; i < count; i += 8) sum += parts[(long long)i * width + column];
    of_warps[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= width) return;
    for (int i = 1; i < 8; ++i) sum += of_warps[i][lane];
    store(total + column, sum);
""",
    threads=256,
)


def _has_rows_on_cuda(
    xp: Namespace, x: Array, weights: tuple[Array, ...], of_rows: tuple[Array, ...]
) -> bool:
    """Whether the CUDA sources take ``x``, vectors as long as its rows, and numbers of its rows."""
    if not takes(xp, x, *weights, *of_rows):
        return False
    same = all(w.shape == x.shape[-1:] for w in weights)
    return same and all(a.shape == x.shape[:-1] for a in of_rows)


def _layer_norm_on_cuda(
    xp: Namespace, x: Array, w: Array, b: Array, *, eps: float = 1e-5, out: Any = None, wide: bool = False
) -> Any:
    if not _has_rows_on_cuda(xp, x, (w, b), ()):
        return None
    dtype = result_dtype(x, wide)
    results = [(x.shape, dtype), (x.shape[:-1], dtype), (x.shape[:-1], dtype)]
    return launch_rows(_LAYER_NORM_CUDA, xp, (x, w, b), results, (eps,), out)


def _rms_norm_on_cuda(
    xp: Namespace, x: Array, w: Array, *, eps: float = 1e-6, out: Any = None, wide: bool = False
) -> Any:
    if not _has_rows_on_cuda(xp, x, (w,), ()):
        return None
    dtype = result_dtype(x, wide)
    return launch_rows(_RMS_NORM_CUDA, xp, (x, w), [(x.shape, dtype), (x.shape[:-1], dtype)], (eps,), out)


def _grad_on_cuda(kernel: BlockKernel) -> Callable[..., Any]:
    """Launch of the gradient of a norm: dx and sums of weight gradients over the rows of each block, then one
    launch for each weight that adds these sums.

    No sum depends on the order in which blocks run, so the gradients of two equal calls have the same bits.
    """

    def run(
        xp: Namespace, dy: Array, x: Array, w: Array, *of_rows: Array, out: Any = None, wide: bool = False
    ) -> Any:
        weights = len(kernel.outputs.split()) - 1
        out_x, *out_weights = outputs(out, 1 + weights)
        if dy.shape != x.shape or not _has_rows_on_cuda(xp, x, (w,), (*of_rows,)) or not takes(xp, dy, x):
            return None
        operands, (count, width) = (dy, x, w, *of_rows), row_count(x)
        blocks = min(count, _PARTIAL_SUMS)
        parts = ((blocks, width), compute_dtype(*operands))
        dx, *sums = launch(
            kernel, xp, operands, [(x.shape, result_dtype(x, wide)), *[parts] * weights],
            (width, count, 1 / width), (out_x, *[None] * weights),
            blocks=blocks, threads=threads_of(width, kernel),
        )  # fmt: skip
        totals = [
            launch(
                _COLUMN_SUMS_CUDA, xp, (part,), [(w.shape, result_dtype(w, wide))], (width, blocks), o,
                blocks=-(-width // WARP), threads=_COLUMN_SUMS_CUDA.threads,
            )
            for part, o in zip(sums, out_weights, strict=True)
        ]  # fmt: skip
        return dx, *totals

    return run


@computed_in_f32(0, 0, 0, cuda=_layer_norm_on_cuda)
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
        mean = _mean(x)
        centred = x - mean[..., None]
        rstd = 1 / xp.sqrt(_mean(xp.square(centred)) + x.dtype.type(eps))
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


@computed_in_f32(1, 2, 2, cuda=_grad_on_cuda(_LAYER_NORM_GRAD_CUDA))
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


@computed_in_f32(0, 0, cuda=_rms_norm_on_cuda)
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
        rstd = 1 / xp.sqrt(_mean(xp.square(x)) + x.dtype.type(eps))
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


@computed_in_f32(1, 2, cuda=_grad_on_cuda(_RMS_NORM_GRAD_CUDA))
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
