"""Compiled loops over the rows of contiguous matrices: softmax, norms, cross-entropy. Needs Numba.

A row stays in the first-level cache over its two or three passes, so memory is read and written once. Each
loop writes to a scratch row first: LLVM then proves that input and output do not overlap, vectorises, and a
kernel may be given its input as its output.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distgraph.kernels._jit import inlined, jit
from distgraph.kernels._math import exp32

_GROUP = 64
"""Rows whose weight gradients are summed before they join the total: two-level sums keep float32 error
small."""

_SIGN, _MAGNITUDE = np.int32(31), np.int32(0x7FFFFFFF)


@inlined
def _ordered(bits: Any) -> Any:
    """Bits of a float32 as an int32 of the same order, and back."""
    return np.int32(bits ^ ((bits >> _SIGN) & _MAGNITUDE))


@jit
def row_max(row: Any) -> Any:
    """The largest element of a contiguous float32 row; a NaN counts above infinity.

    Compared as integers: LLVM vectorises no float maximum unless it may assume that there is no NaN.
    """
    bits = row.view(np.int32)
    m = _ordered(bits[0])
    for j in range(1, bits.size):
        m = max(m, _ordered(bits[j]))
    return _ordered(m).view(np.float32)


@jit
def exp_sum(row: Any, shift: Any, scratch: Any) -> Any:
    """Write exp(row - shift) to ``scratch``; return the sum."""
    total = np.float32(0.0)
    for j in range(row.size):
        e = exp32(row[j] - shift)
        scratch[j] = e
        total += e
    return total


@jit
def sum_of_exp(row: Any, shift: Any) -> Any:
    """The sum of exp(row - shift)."""
    total = np.float32(0.0)
    for j in range(row.size):
        total += exp32(row[j] - shift)
    return total


@jit
def _copy_row(row: Any, out: Any) -> None:
    """out = row, in a loop that LLVM vectorises; Numba's own assignment of slices does not."""
    for j in range(row.size):
        out[j] = row[j]


@jit
def scale_row(row: Any, factor: Any, out: Any) -> None:
    """out = row * factor."""
    for j in range(row.size):
        out[j] = row[j] * factor


@jit
def softmax(x: Any, y: Any) -> None:
    """y = exp(x - max) / sum, by row; float32."""
    scratch = np.empty(x.shape[1], x.dtype)
    for i in range(x.shape[0]):
        total = exp_sum(x[i], row_max(x[i]), scratch)
        scale_row(scratch, np.float32(1.0) / total, y[i])


@jit
def log_softmax(x: Any, y: Any) -> None:
    """y = x - logsumexp(x), by row; float32."""
    for i in range(x.shape[0]):
        row, result = x[i], y[i]
        m = row_max(row)
        shift = m + np.log(sum_of_exp(row, m))
        for j in range(row.size):
            result[j] = row[j] - shift


@jit
def log_softmax_grad(y: Any, dy: Any, dx: Any) -> None:
    """dx = dy - exp(y) * sum(dy), by row; float32."""
    scratch = np.empty(y.shape[1], y.dtype)
    for i in range(y.shape[0]):
        row, grad = y[i], dy[i]
        total = np.float32(0.0)
        for j in range(row.size):
            total += grad[j]
        for j in range(row.size):
            scratch[j] = grad[j] - exp32(row[j]) * total
        _copy_row(scratch, dx[i])


@jit
def softmax_grad(y: Any, dy: Any, dx: Any) -> None:
    """dx = y * (dy - sum(y * dy)), by row."""
    scratch = np.empty(y.shape[1], y.dtype)
    for i in range(y.shape[0]):
        row, grad = y[i], dy[i]
        total = y.dtype.type(0.0)
        for j in range(row.size):
            total += row[j] * grad[j]
        for j in range(row.size):
            scratch[j] = row[j] * (grad[j] - total)
        _copy_row(scratch, dx[i])


@jit
def cross_entropy(logits: Any, labels: Any, offset: Any, loss: Any, lse: Any) -> None:
    """lse = logsumexp(row); loss = lse - row[label - offset], or lse where the label is elsewhere."""
    width = logits.shape[1]
    for i in range(logits.shape[0]):
        row = logits[i]
        m = row_max(row)
        total = m + np.log(sum_of_exp(row, m))
        lse[i] = total
        label = np.int64(labels[i]) - offset
        loss[i] = total - row[label] if 0 <= label < width else total


@jit
def cross_entropy_grad(logits: Any, labels: Any, offset: Any, lse: Any, dloss: Any, dx: Any) -> None:
    """dx = (exp(logits - lse) - onehot(label - offset)) * dloss, by row; float32."""
    width = logits.shape[1]
    scratch = np.empty(width, logits.dtype)
    for i in range(logits.shape[0]):
        row, shift, factor = logits[i], lse[i], dloss[i]
        for j in range(width):
            scratch[j] = exp32(row[j] - shift) * factor
        label = np.int64(labels[i]) - offset
        if 0 <= label < width:
            scratch[label] -= factor
        _copy_row(scratch, dx[i])


@jit
def layer_norm(x: Any, w: Any, b: Any, eps: Any, y: Any, mean: Any, rstd: Any) -> None:
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
def layer_norm_grad(dy: Any, x: Any, w: Any, mean: Any, rstd: Any, dx: Any, dw: Any, db: Any) -> None:
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
        if i % _GROUP == _GROUP - 1 or i == x.shape[0] - 1:
            add_and_clear(dw, part_w)
            add_and_clear(db, part_b)


@jit
def add_and_clear(total: Any, part: Any) -> None:
    """total += part; part = 0."""
    for j in range(part.size):
        total[j] += part[j]
    for j in range(part.size):
        part[j] = part.dtype.type(0.0)


@jit
def rms_norm(x: Any, w: Any, eps: Any, y: Any, rstd: Any) -> None:
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
        _copy_row(scratch, y[i])


@jit
def rms_norm_grad(dy: Any, x: Any, w: Any, rstd: Any, dx: Any, dw: Any) -> None:
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
        if i % _GROUP == _GROUP - 1 or i == x.shape[0] - 1:
            add_and_clear(dw, part)


@jit
def attention_rows(scores: Any, scale: Any, first: Any, limit: Any, lse: Any) -> None:
    """scores[a, i] := softmax(scale * scores[a, i, :first + i + 1]), 0 beyond; lse[a, i] its logsumexp.

    ``limit`` bounds the columns; a row with no column is 0 with lse = -infinity. float32.
    """
    for a in range(scores.shape[0]):
        for i in range(scores.shape[1]):
            row, count = scores[a, i], min(limit, first + i + 1)
            row[max(count, 0) :] = np.float32(0.0)
            if count <= 0:
                lse[a, i] = np.float32(-np.inf)
                continue
            seen = row[:count]
            m = row_max(seen) * scale
            total = np.float32(0.0)
            for j in range(count):
                e = exp32(seen[j] * scale - m)
                seen[j] = e
                total += e
            share = np.float32(1.0) / total
            for j in range(count):
                seen[j] *= share
            lse[a, i] = m + np.log(total)


@jit
def attention_grad_rows(
    scores: Any, dp: Any, scale: Any, first: Any, limit: Any, lse: Any, delta: Any
) -> None:
    """scores := p = exp(scale * scores - lse); dp := p * (dp - delta) * scale, both 0 where masked.
    float32."""
    for a in range(scores.shape[0]):
        for i in range(scores.shape[1]):
            row, grad, count = scores[a, i], dp[a, i], max(min(limit, first + i + 1), 0)
            row[count:] = np.float32(0.0)
            grad[count:] = np.float32(0.0)
            shift, d = lse[a, i], delta[a, i]
            seen, change = row[:count], grad[:count]
            for j in range(count):
                seen[j] = exp32(seen[j] * scale - shift)
            for j in range(count):
                change[j] = seen[j] * (change[j] - d) * scale
