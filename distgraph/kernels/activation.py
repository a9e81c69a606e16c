"""Activations and their gradients, elementwise: each in NumPy, as a loop for Numba and as CUDA source."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from distgraph.kernels._common import ERF_EVEN, ERF_ODD, Array, Namespace, computed_in_f32
from distgraph.kernels._cupy_elementwise import CudaKernel
from distgraph.kernels._elementwise import LOOP_BLOCK, blocked, copy, one_pass
from distgraph.kernels._jit import inlined, jit
from distgraph.kernels._math import HALF, ONE, erf32, exp32, sigmoid32

_F = np.float32
_SQRT_HALF = _F(0.7071067811865476)
_PHI_0 = _F(0.3989422804014327)
_TANH_SCALE = _F(1.5957691216057308)
_CUBIC = _F(0.044715)
_CUBIC_3 = _F(0.134145)

_CUDA_TANH_GATE = "T s = T(1) / (T(1) + exp(T(-1.5957691216057308) * (x + T(0.044715) * x * x * x)));"
_CUDA_ERF_GATE = "T s = T(0.5) * (T(1) + erf(x * T(0.7071067811865476)));"
_CUDA_SIGMOID = "T s = T(1) / (T(1) + exp(-x));"


def _erf(xp: Namespace, x: Array) -> Array:
    if xp is np and x.dtype == np.float32 and x.size >= 1024:
        return _erf_quotient(x)  # 20 times as fast as SciPy's, which is one call for each element
    special = import_module("scipy.special" if xp is np else "cupyx.scipy.special")
    return special.erf(x)


def _erf_quotient(x: Array) -> Array:
    """The float32 approximation of the compiled loops, in NumPy."""
    c = np.clip(x, np.float32(-4), np.float32(4))
    s = c * c
    parts = []
    for coefficients in (ERF_ODD, ERF_EVEN):
        total = s * np.float32(coefficients[-1])
        for coefficient in coefficients[-2:0:-1]:
            total += np.float32(coefficient)
            total *= s
        total += np.float32(coefficients[0])
        parts.append(total)
    c *= parts[0]
    c /= parts[1]
    return c


def _sigmoid(xp: Namespace, x: Array) -> Array:
    # 1 / (1 + exp(-x)) overflows to 1 / inf = 0 for large negative x, which is right; tanh never overflows.
    y = xp.tanh(x * x.dtype.type(0.5))
    y += 1
    y *= x.dtype.type(0.5)
    return y


def _gelu_gate(xp: Namespace, x: Array, approximate: bool) -> Array:
    """The factor of x in gelu: the normal distribution function, or its logistic approximation."""
    if approximate:
        return _sigmoid(xp, 1.5957691216057308 * (x + 0.044715 * x * x * x))
    return (1 + _erf(xp, x * 0.7071067811865476)) * x.dtype.type(0.5)


@inlined
def _gelu_erf(x: Any) -> Any:
    return x * HALF * (ONE + erf32(x * _SQRT_HALF))


@inlined
def _gelu_tanh(x: Any) -> Any:
    return x * sigmoid32(_TANH_SCALE * (x + _CUBIC * x * x * x))


@jit
def _gelu_loop(x: Any, approximate: bool, y: Any) -> None:
    """y = gelu(x); float32."""
    scratch = np.empty(LOOP_BLOCK, x.dtype)
    for start in range(0, x.size, LOOP_BLOCK):
        part = x[start : start + LOOP_BLOCK]
        if approximate:
            for j in range(part.size):
                scratch[j] = _gelu_tanh(part[j])
        else:
            for j in range(part.size):
                scratch[j] = _gelu_erf(part[j])
        copy(scratch[: part.size], y[start : start + LOOP_BLOCK])


_GELU_CUDA = CudaKernel("gelu", "T x", "T y", _CUDA_ERF_GATE + "y = x * s;")
_GELU_TANH_CUDA = CudaKernel("gelu_tanh", "T x", "T y", _CUDA_TANH_GATE + "y = x * s;")


@computed_in_f32(0)
def gelu(xp: Namespace, x: Array, *, approximate: bool = False, out: Array | None = None) -> Array:
    """y = x * Phi(x) = x / 2 * (1 + erf(x / sqrt(2))) (Hendrycks and Gimpel, 2016).

    Args:
        x: any shape.
        approximate: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) instead.
    """
    cuda = _GELU_TANH_CUDA if approximate else _GELU_CUDA
    done = one_pass(_gelu_loop, cuda, xp, (x,), out, approximate)
    return blocked(lambda a: a * _gelu_gate(xp, a, approximate), xp, (x,), out) if done is None else done


def _gelu_slope(xp: Namespace, x: Array, approximate: bool) -> Array:
    s = _gelu_gate(xp, x, approximate)
    if approximate:
        return s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    return s + x * 0.3989422804014327 * xp.exp(-0.5 * x * x)


@inlined
def _gelu_erf_slope(x: Any) -> Any:
    return HALF * (ONE + erf32(x * _SQRT_HALF)) + x * _PHI_0 * exp32(-HALF * x * x)


@inlined
def _gelu_tanh_slope(x: Any) -> Any:
    s = sigmoid32(_TANH_SCALE * (x + _CUBIC * x * x * x))
    return s + x * s * (ONE - s) * _TANH_SCALE * (ONE + _CUBIC_3 * x * x)


@jit
def _gelu_grad_loop(x: Any, dy: Any, approximate: bool, dx: Any) -> None:
    """dx = dy * gelu'(x); float32."""
    scratch = np.empty(LOOP_BLOCK, x.dtype)
    for start in range(0, x.size, LOOP_BLOCK):
        part, grad = x[start : start + LOOP_BLOCK], dy[start : start + LOOP_BLOCK]
        if approximate:
            for j in range(part.size):
                scratch[j] = _gelu_tanh_slope(part[j]) * grad[j]
        else:
            for j in range(part.size):
                scratch[j] = _gelu_erf_slope(part[j]) * grad[j]
        copy(scratch[: part.size], dx[start : start + LOOP_BLOCK])


_GELU_GRAD_CUDA = CudaKernel(
    "gelu_grad",
    "T x, T dy",
    "T dx",
    _CUDA_ERF_GATE + "dx = dy * (s + x * T(0.3989422804014327) * exp(T(-0.5) * x * x));",
)
_GELU_TANH_GRAD_CUDA = CudaKernel(
    "gelu_tanh_grad",
    "T x, T dy",
    "T dx",
    _CUDA_TANH_GATE
    + "dx = dy * (s + x * s * (T(1) - s) * T(1.5957691216057308) * (T(1) + T(0.134145) * x * x));",
)


@computed_in_f32(0)
def gelu_grad(
    xp: Namespace, x: Array, dy: Array, *, approximate: bool = False, out: Array | None = None
) -> Array:
    """dx = dy * (Phi(x) + x * phi(x)), phi the normal density; for ``approximate`` the slope of that
    formula."""
    cuda = _GELU_TANH_GRAD_CUDA if approximate else _GELU_GRAD_CUDA
    done = one_pass(_gelu_grad_loop, cuda, xp, (x, dy), out, approximate)
    if done is not None:
        return done
    return blocked(lambda a, da: da * _gelu_slope(xp, a, approximate), xp, (x, dy), out)


@jit
def _silu_loop(x: Any, y: Any) -> None:
    """y = x * sigmoid(x); float32."""
    scratch = np.empty(LOOP_BLOCK, x.dtype)
    for start in range(0, x.size, LOOP_BLOCK):
        part = x[start : start + LOOP_BLOCK]
        for j in range(part.size):
            scratch[j] = part[j] * sigmoid32(part[j])
        copy(scratch[: part.size], y[start : start + LOOP_BLOCK])


_SILU_CUDA = CudaKernel("silu", "T x", "T y", _CUDA_SIGMOID + "y = x * s;")


@computed_in_f32(0)
def silu(xp: Namespace, x: Array, *, out: Array | None = None) -> Array:
    """y = x * sigmoid(x)."""
    done = one_pass(_silu_loop, _SILU_CUDA, xp, (x,), out)
    return blocked(lambda a: a * _sigmoid(xp, a), xp, (x,), out) if done is None else done


def _silu_slope(xp: Namespace, x: Array) -> Array:
    s = _sigmoid(xp, x)
    return s * (1 + x * (1 - s))


@jit
def _silu_grad_loop(x: Any, dy: Any, dx: Any) -> None:
    """dx = dy * s * (1 + x * (1 - s)), s = sigmoid(x); float32."""
    scratch = np.empty(LOOP_BLOCK, x.dtype)
    for start in range(0, x.size, LOOP_BLOCK):
        part, grad = x[start : start + LOOP_BLOCK], dy[start : start + LOOP_BLOCK]
        for j in range(part.size):
            s = sigmoid32(part[j])
            scratch[j] = grad[j] * s * (ONE + part[j] * (ONE - s))
        copy(scratch[: part.size], dx[start : start + LOOP_BLOCK])


_SILU_GRAD_CUDA = CudaKernel(
    "silu_grad", "T x, T dy", "T dx", _CUDA_SIGMOID + "dx = dy * s * (T(1) + x * (T(1) - s));"
)


@computed_in_f32(0)
def silu_grad(xp: Namespace, x: Array, dy: Array, *, out: Array | None = None) -> Array:
    """dx = dy * s * (1 + x * (1 - s)) with s = sigmoid(x)."""
    done = one_pass(_silu_grad_loop, _SILU_GRAD_CUDA, xp, (x, dy), out)
    return blocked(lambda a, da: da * _silu_slope(xp, a), xp, (x, dy), out) if done is None else done


@jit
def _sigmoid_loop(x: Any, y: Any) -> None:
    """y = 1 / (1 + exp(-x)); float32."""
    scratch = np.empty(LOOP_BLOCK, x.dtype)
    for start in range(0, x.size, LOOP_BLOCK):
        part = x[start : start + LOOP_BLOCK]
        for j in range(part.size):
            scratch[j] = sigmoid32(part[j])
        copy(scratch[: part.size], y[start : start + LOOP_BLOCK])


_SIGMOID_CUDA = CudaKernel("sigmoid", "T x", "T y", _CUDA_SIGMOID + "y = s;")


@computed_in_f32(0)
def sigmoid(xp: Namespace, x: Array, *, out: Array | None = None) -> Array:
    """y = 1 / (1 + exp(-x)), without overflow."""
    done = one_pass(_sigmoid_loop, _SIGMOID_CUDA, xp, (x,), out)
    return blocked(partial(_sigmoid, xp), xp, (x,), out) if done is None else done


@computed_in_f32(0)
def sigmoid_grad(xp: Namespace, y: Array, dy: Array, *, out: Array | None = None) -> Array:
    """dx = dy * y * (1 - y) with y = sigmoid(x)."""
    return blocked(lambda a, da: a * (1 - a) * da, xp, (y, dy), out)


@jit
def _erf_loop(x: Any, y: Any) -> None:
    """y = erf(x); float32."""
    scratch = np.empty(LOOP_BLOCK, x.dtype)
    for start in range(0, x.size, LOOP_BLOCK):
        part = x[start : start + LOOP_BLOCK]
        for j in range(part.size):
            scratch[j] = erf32(part[j])
        copy(scratch[: part.size], y[start : start + LOOP_BLOCK])


_ERF_CUDA = CudaKernel("erf", "T x", "T y", "y = erf(x);")


@computed_in_f32(0)
def erf(xp: Namespace, x: Array, *, out: Array | None = None) -> Array:
    """y = 2 / sqrt(pi) * integral of exp(-t^2) from 0 to x."""
    done = one_pass(_erf_loop, _ERF_CUDA, xp, (x,), out)
    return blocked(partial(_erf, xp), xp, (x,), out) if done is None else done


@jit
def _relu_grad_loop(x: Any, dy: Any, dx: Any) -> None:
    """dx = dy where x > 0, else 0."""
    scratch = np.empty(LOOP_BLOCK, x.dtype)
    for start in range(0, x.size, LOOP_BLOCK):
        part, grad = x[start : start + LOOP_BLOCK], dy[start : start + LOOP_BLOCK]
        for j in range(part.size):
            g = grad[j]  # read for every element, so that the choice needs no branch
            scratch[j] = g if part[j] > x.dtype.type(0.0) else x.dtype.type(0.0)
        copy(scratch[: part.size], dx[start : start + LOOP_BLOCK])


_RELU_GRAD_CUDA = CudaKernel("relu_grad", "T x, T dy", "T dx", "dx = x > T(0) ? dy : T(0);")


@computed_in_f32(0)
def relu_grad(xp: Namespace, x: Array, dy: Array, *, out: Array | None = None) -> Array:
    """dx = dy where x > 0, else 0; x may be the input or the output of the relu."""
    done = one_pass(_relu_grad_loop, _RELU_GRAD_CUDA, xp, (x, dy), out, double=True)
    if done is not None:
        return done
    return blocked(lambda a, da: xp.where(a > 0, da, da.dtype.type(0)), xp, (x, dy), out)


@jit
def _tanh_grad_loop(y: Any, dy: Any, dx: Any) -> None:
    """dx = dy * (1 - y^2)."""
    scratch = np.empty(LOOP_BLOCK, y.dtype)
    for start in range(0, y.size, LOOP_BLOCK):
        part, grad = y[start : start + LOOP_BLOCK], dy[start : start + LOOP_BLOCK]
        for j in range(part.size):
            scratch[j] = grad[j] * (y.dtype.type(1.0) - part[j] * part[j])
        copy(scratch[: part.size], dx[start : start + LOOP_BLOCK])


_TANH_GRAD_CUDA = CudaKernel("tanh_grad", "T y, T dy", "T dx", "dx = dy * (T(1) - y * y);")


@computed_in_f32(0)
def tanh_grad(xp: Namespace, y: Array, dy: Array, *, out: Array | None = None) -> Array:
    """dx = dy * (1 - y^2) with y = tanh(x)."""
    done = one_pass(_tanh_grad_loop, _TANH_GRAD_CUDA, xp, (y, dy), out, double=True)
    return blocked(lambda a, da: da * (1 - a * a), xp, (y, dy), out) if done is None else done
