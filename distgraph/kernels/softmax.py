"""Softmax and log-softmax along one dim, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distgraph.kernels._common import Array, Namespace, computed_in_f32, empty, rows, store
from distgraph.kernels._jit import jit, pays
from distgraph.kernels._math import exp32
from distgraph.kernels._row_loops import copy_row, exp_sum, row_max, scale_row, sum_of_exp
from distgraph.kernels.cuda.block_kernel import BlockKernel, launch_rows, result_dtype, takes
from distgraph.kernels.cuda.device_functions import ROW_EXPONENTIALS


def _fused_rows(
    loop: Callable[..., None],
    xp: Namespace,
    operands: tuple[Array, ...],
    out: Array | None,
    axis: int,
    *dtypes: Any,
) -> Any:
    """Run the compiled ``loop`` over the last dim, or return None where it does not apply."""
    first = operands[0]
    if axis not in (-1, first.ndim - 1):
        return None
    if any(a.dtype != first.dtype for a in operands) or not pays(xp, first, *dtypes):
        return None
    y = empty(xp, out, first.shape, first.dtype)
    loop(*(rows(a) for a in operands), y.reshape(-1, first.shape[-1]))
    return store(xp, y, out)


@jit
def _softmax_loop(x: Any, y: Any) -> None:
    """y = exp(x - max) / sum, by row; float32."""
    scratch = np.empty(x.shape[1], x.dtype)
    for i in range(x.shape[0]):
        total = exp_sum(x[i], row_max(x[i]), scratch)
        scale_row(scratch, np.float32(1.0) / total, y[i])


@jit
def _softmax_grad_loop(y: Any, dy: Any, dx: Any) -> None:
    """dx = y * (dy - sum(y * dy)), by row."""
    scratch = np.empty(y.shape[1], y.dtype)
    for i in range(y.shape[0]):
        row, grad = y[i], dy[i]
        total = y.dtype.type(0.0)
        for j in range(row.size):
            total += row[j] * grad[j]
        for j in range(row.size):
            scratch[j] = row[j] * (grad[j] - total)
        copy_row(scratch, dx[i])


@jit
def _log_softmax_loop(x: Any, y: Any) -> None:
    """y = x - logsumexp(x), by row; float32."""
    for i in range(x.shape[0]):
        row, result = x[i], y[i]
        m = row_max(row)
        shift = m + np.log(sum_of_exp(row, m))
        for j in range(row.size):
            result[j] = row[j] - shift


@jit
def _log_softmax_grad_loop(y: Any, dy: Any, dx: Any) -> None:
    """dx = dy - exp(y) * sum(dy), by row; float32."""
    scratch = np.empty(y.shape[1], y.dtype)
    for i in range(y.shape[0]):
        row, grad = y[i], dy[i]
        total = np.float32(0.0)
        for j in range(row.size):
            total += grad[j]
        for j in range(row.size):
            scratch[j] = grad[j] - exp32(row[j]) * total
        copy_row(scratch, dx[i])


_SOFTMAX_CUDA = BlockKernel(
    "softmax",
    "x",
    "y",
    "int width",
    """
    const long long start = (long long)blockIdx.x * width;
    const Exponentials sum = row_exponentials(x + start, width);
    const A share = A(1) / sum.total;
    for (int j = threadIdx.x; j < width; j += blockDim.x)
        store(y + start + j, exp(load(x[start + j]) - sum.largest) * share);
""",
    ROW_EXPONENTIALS,
)

_SOFTMAX_GRAD_CUDA = BlockKernel(
    "softmax_grad",
    "y dy",
    "dx",
    "int width",
    """
    const long long start = (long long)blockIdx.x * width;
    A total = A(0);
    for (int j = threadIdx.x; j < width; j += blockDim.x) total += load(y[start + j]) * load(dy[start + j]);
    total = block_sum(total);
    for (int j = threadIdx.x; j < width; j += blockDim.x)
        store(dx + start + j, load(y[start + j]) * (load(dy[start + j]) - total));
""",
)

_LOG_SOFTMAX_CUDA = BlockKernel(
    "log_softmax",
    "x",
    "y",
    "int width",
    """
    const long long start = (long long)blockIdx.x * width;
    const Exponentials sum = row_exponentials(x + start, width);
    const A shift = sum.largest + log(sum.total);
    for (int j = threadIdx.x; j < width; j += blockDim.x) store(y + start + j, load(x[start + j]) - shift);
""",
    ROW_EXPONENTIALS,
)

_LOG_SOFTMAX_GRAD_CUDA = BlockKernel(
    "log_softmax_grad",
    "y dy",
    "dx",
    "int width",
    """
    const long long start = (long long)blockIdx.x * width;
    A total = A(0);
    for (int j = threadIdx.x; j < width; j += blockDim.x) total += load(dy[start + j]);
    total = block_sum(total);
    for (int j = threadIdx.x; j < width; j += blockDim.x)
        store(dx + start + j, load(dy[start + j]) - exp(load(y[start + j])) * total);
""",
)


def _on_cuda(kernel: BlockKernel) -> Callable[..., Any]:
    """Launch of a source over the last dim; None for another dim, and for operands that `takes` refuses."""

    def run(
        xp: Namespace, *operands: Array, axis: int = -1, out: Array | None = None, wide: bool = False
    ) -> Array | None:
        first = operands[0]
        if not takes(xp, *operands) or any(a.shape != first.shape for a in operands):
            return None
        if axis not in (-1, first.ndim - 1):
            return None
        return launch_rows(kernel, xp, operands, [(first.shape, result_dtype(first, wide))], out=out)

    return run


@computed_in_f32(0, cuda=_on_cuda(_SOFTMAX_CUDA))
def softmax(xp: Namespace, x: Array, *, axis: int = -1, out: Array | None = None) -> Array:
    """y = exp(x - m) / sum(exp(x - m)) along ``axis``, with m the maximum, so that nothing overflows.

    Args:
        x: any shape.
        axis: the dim that sums to one.
    """
    done = _fused_rows(_softmax_loop, xp, (x,), out, axis, np.float32)
    if done is not None:
        return done
    y = empty(xp, out, x.shape, x.dtype)
    xp.subtract(x, x.max(axis=axis, keepdims=True), out=y)
    xp.exp(y, out=y)
    y /= y.sum(axis=axis, keepdims=True)
    return store(xp, y, out)


@computed_in_f32(0, cuda=_on_cuda(_SOFTMAX_GRAD_CUDA))
def softmax_grad(xp: Namespace, y: Array, dy: Array, *, axis: int = -1, out: Array | None = None) -> Array:
    """dx = y * (dy - sum(y * dy)) along ``axis``, with y the result of `softmax`."""
    done = _fused_rows(_softmax_grad_loop, xp, (y, dy), out, axis, np.float32, np.float64)
    if done is not None:
        return done
    total = (y * dy).sum(axis=axis, keepdims=True)
    dx = empty(xp, out, y.shape, y.dtype)
    xp.multiply(y, dy - total, out=dx)
    return store(xp, dx, out)


@computed_in_f32(0, cuda=_on_cuda(_LOG_SOFTMAX_CUDA))
def log_softmax(xp: Namespace, x: Array, *, axis: int = -1, out: Array | None = None) -> Array:
    """y = x - m - log(sum(exp(x - m))) along ``axis``, with m the maximum."""
    done = _fused_rows(_log_softmax_loop, xp, (x,), out, axis, np.float32)
    if done is not None:
        return done
    m = x.max(axis=axis, keepdims=True)
    shift = m + xp.log(xp.exp(x - m).sum(axis=axis, keepdims=True))
    y = empty(xp, out, x.shape, x.dtype)
    xp.subtract(x, shift, out=y)
    return store(xp, y, out)


@computed_in_f32(0, cuda=_on_cuda(_LOG_SOFTMAX_GRAD_CUDA))
def log_softmax_grad(
    xp: Namespace, y: Array, dy: Array, *, axis: int = -1, out: Array | None = None
) -> Array:
    """dx = dy - exp(y) * sum(dy) along ``axis``, with y the result of `log_softmax`."""
    done = _fused_rows(_log_softmax_grad_loop, xp, (y, dy), out, axis, np.float32)
    if done is not None:
        return done
    total = dy.sum(axis=axis, keepdims=True)
    return store(xp, dy - xp.exp(y) * total, out)
