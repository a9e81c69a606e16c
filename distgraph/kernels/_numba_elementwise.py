"""Compiled loops over contiguous vectors: activations, optimizer steps, dropout. Needs Numba.

They go block by block through a scratch block in the first-level cache, so that an output may be an input
and LLVM still vectorises (see `_rows`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distgraph.kernels._jit import inlined, jit
from distgraph.kernels._math import HALF, ONE, erf32, exp32, sigmoid32

_F = np.float32
_BLOCK = 2048
_SQRT_HALF = _F(0.7071067811865476)
_PHI_0 = _F(0.3989422804014327)
_TANH_SCALE = _F(1.5957691216057308)
_CUBIC = _F(0.044715)
_CUBIC_3 = _F(0.134145)


@inlined
def _copy(source: Any, target: Any) -> None:
    """A loop that LLVM vectorises; Numba's own `target[:] = source` checks overlap and takes 45 us more for
    1 MiB."""
    for j in range(source.size):
        target[j] = source[j]


@inlined
def _gelu_erf(x: Any) -> Any:
    return x * HALF * (ONE + erf32(x * _SQRT_HALF))


@inlined
def _gelu_tanh(x: Any) -> Any:
    return x * sigmoid32(_TANH_SCALE * (x + _CUBIC * x * x * x))


@inlined
def _gelu_erf_slope(x: Any) -> Any:
    return HALF * (ONE + erf32(x * _SQRT_HALF)) + x * _PHI_0 * exp32(-HALF * x * x)


@inlined
def _gelu_tanh_slope(x: Any) -> Any:
    s = sigmoid32(_TANH_SCALE * (x + _CUBIC * x * x * x))
    return s + x * s * (ONE - s) * _TANH_SCALE * (ONE + _CUBIC_3 * x * x)


@jit
def gelu(x: Any, approximate: bool, y: Any) -> None:
    """y = gelu(x); float32."""
    scratch = np.empty(_BLOCK, x.dtype)
    for start in range(0, x.size, _BLOCK):
        part = x[start : start + _BLOCK]
        if approximate:
            for j in range(part.size):
                scratch[j] = _gelu_tanh(part[j])
        else:
            for j in range(part.size):
                scratch[j] = _gelu_erf(part[j])
        _copy(scratch[: part.size], y[start : start + _BLOCK])


@jit
def gelu_grad(x: Any, dy: Any, approximate: bool, dx: Any) -> None:
    """dx = dy * gelu'(x); float32."""
    scratch = np.empty(_BLOCK, x.dtype)
    for start in range(0, x.size, _BLOCK):
        part, grad = x[start : start + _BLOCK], dy[start : start + _BLOCK]
        if approximate:
            for j in range(part.size):
                scratch[j] = _gelu_tanh_slope(part[j]) * grad[j]
        else:
            for j in range(part.size):
                scratch[j] = _gelu_erf_slope(part[j]) * grad[j]
        _copy(scratch[: part.size], dx[start : start + _BLOCK])


@jit
def silu(x: Any, y: Any) -> None:
    """y = x * sigmoid(x); float32."""
    scratch = np.empty(_BLOCK, x.dtype)
    for start in range(0, x.size, _BLOCK):
        part = x[start : start + _BLOCK]
        for j in range(part.size):
            scratch[j] = part[j] * sigmoid32(part[j])
        _copy(scratch[: part.size], y[start : start + _BLOCK])


@jit
def silu_grad(x: Any, dy: Any, dx: Any) -> None:
    """dx = dy * s * (1 + x * (1 - s)), s = sigmoid(x); float32."""
    scratch = np.empty(_BLOCK, x.dtype)
    for start in range(0, x.size, _BLOCK):
        part, grad = x[start : start + _BLOCK], dy[start : start + _BLOCK]
        for j in range(part.size):
            s = sigmoid32(part[j])
            scratch[j] = grad[j] * s * (ONE + part[j] * (ONE - s))
        _copy(scratch[: part.size], dx[start : start + _BLOCK])


@jit
def sigmoid(x: Any, y: Any) -> None:
    """y = 1 / (1 + exp(-x)); float32."""
    scratch = np.empty(_BLOCK, x.dtype)
    for start in range(0, x.size, _BLOCK):
        part = x[start : start + _BLOCK]
        for j in range(part.size):
            scratch[j] = sigmoid32(part[j])
        _copy(scratch[: part.size], y[start : start + _BLOCK])


@jit
def erf(x: Any, y: Any) -> None:
    """y = erf(x); float32."""
    scratch = np.empty(_BLOCK, x.dtype)
    for start in range(0, x.size, _BLOCK):
        part = x[start : start + _BLOCK]
        for j in range(part.size):
            scratch[j] = erf32(part[j])
        _copy(scratch[: part.size], y[start : start + _BLOCK])


@jit
def relu_grad(x: Any, dy: Any, dx: Any) -> None:
    """dx = dy where x > 0, else 0."""
    scratch = np.empty(_BLOCK, x.dtype)
    for start in range(0, x.size, _BLOCK):
        part, grad = x[start : start + _BLOCK], dy[start : start + _BLOCK]
        for j in range(part.size):
            g = grad[j]  # read for every element, so that the choice needs no branch
            scratch[j] = g if part[j] > x.dtype.type(0.0) else x.dtype.type(0.0)
        _copy(scratch[: part.size], dx[start : start + _BLOCK])


@jit
def tanh_grad(y: Any, dy: Any, dx: Any) -> None:
    """dx = dy * (1 - y^2)."""
    scratch = np.empty(_BLOCK, y.dtype)
    for start in range(0, y.size, _BLOCK):
        part, grad = y[start : start + _BLOCK], dy[start : start + _BLOCK]
        for j in range(part.size):
            scratch[j] = grad[j] * (y.dtype.type(1.0) - part[j] * part[j])
        _copy(scratch[: part.size], dx[start : start + _BLOCK])


@jit
def adam(
    p: Any, g: Any, m: Any, v: Any, coefficients: Any, new: Any, new_p: Any, new_m: Any, new_v: Any
) -> None:
    """One step of Adam; ``new`` says for p, m, v whether the output is another array than the input.

    ``coefficients``: beta1, beta2, 1 - beta1, 1 - beta2, step size, 1 / sqrt(1 - beta2^t), eps, coupled and
    decoupled decay, in the dtype of the arrays.
    """
    b1, b2, c1, c2 = coefficients[0], coefficients[1], coefficients[2], coefficients[3]
    size, root, eps, coupled, keep = (
        coefficients[4],
        coefficients[5],
        coefficients[6],
        coefficients[7],
        coefficients[8],
    )
    for start in range(0, p.size, _BLOCK):
        stop = min(start + _BLOCK, p.size)
        grad, q, r, s = g[start:stop], new_p[start:stop], new_m[start:stop], new_v[start:stop]
        if new[0]:
            _copy(p[start:stop], q)
        if new[1]:
            _copy(m[start:stop], r)
        if new[2]:
            _copy(v[start:stop], s)
        for j in range(stop - start):
            d = grad[j] + coupled * q[j]
            first = b1 * r[j] + c1 * d
            second = b2 * s[j] + c2 * d * d
            r[j] = first
            s[j] = second
            q[j] = keep * q[j] - size * first / (np.sqrt(second) * root + eps)


@jit
def momentum(
    p: Any, g: Any, buf: Any, coefficients: Any, nesterov: bool, new: Any, new_p: Any, new_buf: Any
) -> None:
    """One step of SGD with momentum; ``coefficients``: lr, momentum, weight decay."""
    lr, mu, decay = coefficients[0], coefficients[1], coefficients[2]
    for start in range(0, p.size, _BLOCK):
        stop = min(start + _BLOCK, p.size)
        grad, q, r = g[start:stop], new_p[start:stop], new_buf[start:stop]
        if new[0]:
            _copy(p[start:stop], q)
        if new[1]:
            _copy(buf[start:stop], r)
        if nesterov:
            for j in range(stop - start):
                d = grad[j] + decay * q[j]
                b = mu * r[j] + d
                r[j] = b
                q[j] = q[j] - lr * (d + mu * b)
        else:
            for j in range(stop - start):
                b = mu * r[j] + (grad[j] + decay * q[j])
                r[j] = b
                q[j] = q[j] - lr * b


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)


@inlined
def _hash(z: Any) -> Any:
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    return z ^ (z >> _S31)


@jit
def random_bits(key: Any, offsets: Any, run: Any, bits: Any) -> None:
    """bits[i * run + j] = hash(key, offsets[i] + j), all uint64."""
    for i in range(offsets.size):
        part = bits[i * run : (i + 1) * run]
        state = key + offsets[i] * _GOLDEN
        for j in range(part.size):
            part[j] = _hash(state + np.uint64(j) * _GOLDEN)


@jit
def dropout(x: Any, key: Any, offsets: Any, run: Any, threshold: Any, scale: Any, y: Any) -> None:
    """y = x * scale where the upper half of hash(key, global index) reaches ``threshold``, else 0."""
    scratch = np.empty(min(_BLOCK, run), x.dtype)
    for i in range(offsets.size):
        for start in range(i * run, (i + 1) * run, _BLOCK):
            stop = min(start + _BLOCK, (i + 1) * run)
            part = x[start:stop]
            state = key + (offsets[i] + np.uint64(start - i * run)) * _GOLDEN
            for j in range(part.size):
                high = _hash(state + np.uint64(j) * _GOLDEN) >> _S32
                scratch[j] = part[j] * scale if high >= threshold else x.dtype.type(0.0)
            _copy(scratch[: part.size], y[start:stop])


@jit
def add_rows(table: Any, positions: Any, updates: Any) -> None:
    """table[positions[i]] += updates[i], in order; positions outside the table are skipped."""
    for i in range(positions.size):
        at = positions[i]
        if 0 <= at < table.shape[0]:
            row, change = table[at], updates[i]
            for j in range(row.size):
                row[j] += change[j]
