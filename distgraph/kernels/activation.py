"""Activations and their gradients, elementwise: each in NumPy, as a loop for Numba and as CUDA source."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from distgraph.kernels._common import ERF_EVEN, ERF_ODD, Array, Namespace, computed_in_f32, special_functions
from distgraph.kernels._elementwise import blocked, fused
from distgraph.kernels._math import HALF, ONE, erf32, exp32, sigmoid32

_F = np.float32
_ZERO = _F(0)
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
    return special_functions(xp).erf(x)


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
        z = 0.044715 * x
        z *= x
        z *= x
        z += x
        z *= 1.5957691216057308
        return _sigmoid(xp, z)
    return (1 + _erf(xp, x * 0.7071067811865476)) * x.dtype.type(0.5)


@fused(_CUDA_ERF_GATE + "y = x * s;")
def _fused_gelu(x: Any) -> Any:
    return x * HALF * (ONE + erf32(x * _SQRT_HALF))


@fused(_CUDA_TANH_GATE + "y = x * s;")
def _fused_gelu_tanh(x: Any) -> Any:
    return x * sigmoid32(_TANH_SCALE * (x + _CUBIC * x * x * x))


@computed_in_f32(0, has_bfloat16_loop=True)
def gelu(xp: Namespace, x: Array, *, approximate: bool = False, out: Array | None = None) -> Array:
    """y = x * Phi(x) = x / 2 * (1 + erf(x / sqrt(2))) (Hendrycks and Gimpel, 2016).

    Args:
        x: any shape.
        approximate: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) instead.
    """
    run = _fused_gelu_tanh if approximate else _fused_gelu
    return run(lambda a: a * _gelu_gate(xp, a, approximate), xp, (x,), out)


def _gelu_slope(xp: Namespace, x: Array, approximate: bool) -> Array:
    s = _gelu_gate(xp, x, approximate)
    if approximate:
        return s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    return s + x * 0.3989422804014327 * xp.exp(-0.5 * x * x)


@fused(_CUDA_ERF_GATE + "dx = dy * (s + x * T(0.3989422804014327) * exp(T(-0.5) * x * x));")
def _fused_gelu_grad(x: Any, dy: Any) -> Any:
    return (HALF * (ONE + erf32(x * _SQRT_HALF)) + x * _PHI_0 * exp32(-HALF * x * x)) * dy


@fused(
    _CUDA_TANH_GATE
    + "dx = dy * (s + x * s * (T(1) - s) * T(1.5957691216057308) * (T(1) + T(0.134145) * x * x));"
)
def _fused_gelu_tanh_grad(x: Any, dy: Any) -> Any:
    s = sigmoid32(_TANH_SCALE * (x + _CUBIC * x * x * x))
    return (s + x * s * (ONE - s) * _TANH_SCALE * (ONE + _CUBIC_3 * x * x)) * dy


@computed_in_f32(0, has_bfloat16_loop=True)
def gelu_grad(
    xp: Namespace, x: Array, dy: Array, *, approximate: bool = False, out: Array | None = None
) -> Array:
    """dx = dy * (Phi(x) + x * phi(x)), phi the normal density; for ``approximate`` the slope of that
    formula."""
    run = _fused_gelu_tanh_grad if approximate else _fused_gelu_grad
    return run(lambda a, da: da * _gelu_slope(xp, a, approximate), xp, (x, dy), out)


@fused(_CUDA_SIGMOID + "y = x * s;")
def _fused_silu(x: Any) -> Any:
    return x * sigmoid32(x)


@computed_in_f32(0, has_bfloat16_loop=True)
def silu(xp: Namespace, x: Array, *, out: Array | None = None) -> Array:
    """y = x * sigmoid(x)."""
    return _fused_silu(lambda a: a * _sigmoid(xp, a), xp, (x,), out)


def _silu_slope(xp: Namespace, x: Array) -> Array:
    s = _sigmoid(xp, x)
    return s * (1 + x * (1 - s))


@fused(_CUDA_SIGMOID + "dx = dy * s * (T(1) + x * (T(1) - s));")
def _fused_silu_grad(x: Any, dy: Any) -> Any:
    s = sigmoid32(x)
    return dy * s * (ONE + x * (ONE - s))


@computed_in_f32(0, has_bfloat16_loop=True)
def silu_grad(xp: Namespace, x: Array, dy: Array, *, out: Array | None = None) -> Array:
    """dx = dy * s * (1 + x * (1 - s)) with s = sigmoid(x)."""
    return _fused_silu_grad(lambda a, da: da * _silu_slope(xp, a), xp, (x, dy), out)


@fused(_CUDA_SIGMOID + "y = s;")
def _fused_sigmoid(x: Any) -> Any:
    return sigmoid32(x)


@computed_in_f32(0, has_bfloat16_loop=True)
def sigmoid(xp: Namespace, x: Array, *, out: Array | None = None) -> Array:
    """y = 1 / (1 + exp(-x)), without overflow."""
    return _fused_sigmoid(partial(_sigmoid, xp), xp, (x,), out)


@computed_in_f32(0)
def sigmoid_grad(xp: Namespace, y: Array, dy: Array, *, out: Array | None = None) -> Array:
    """dx = dy * y * (1 - y) with y = sigmoid(x)."""
    return blocked(lambda a, da: a * (1 - a) * da, xp, (y, dy), out)


@fused("y = erf(x);")
def _fused_erf(x: Any) -> Any:
    return erf32(x)


@computed_in_f32(0, has_bfloat16_loop=True)
def erf(xp: Namespace, x: Array, *, out: Array | None = None) -> Array:
    """y = 2 / sqrt(pi) * integral of exp(-t^2) from 0 to x."""
    return _fused_erf(partial(_erf, xp), xp, (x,), out)


@fused("dx = x > T(0) ? dy : T(0);", double=True)
def _fused_relu_grad(x: Any, dy: Any) -> Any:
    return dy if x > _ZERO else _ZERO


@computed_in_f32(0, has_bfloat16_loop=True)
def relu_grad(xp: Namespace, x: Array, dy: Array, *, out: Array | None = None) -> Array:
    """dx = dy where x > 0, else 0; x may be the input or the output of the relu."""
    return _fused_relu_grad(lambda a, da: xp.where(a > 0, da, da.dtype.type(0)), xp, (x, dy), out)


@fused("dx = dy * (T(1) - y * y);", double=True)
def _fused_tanh_grad(y: Any, dy: Any) -> Any:
    return dy * (ONE - y * y)


@computed_in_f32(0, has_bfloat16_loop=True)
def tanh_grad(xp: Namespace, y: Array, dy: Array, *, out: Array | None = None) -> Array:
    """dx = dy * (1 - y^2) with y = tanh(x)."""
    return _fused_tanh_grad(lambda a, da: da * (1 - a * a), xp, (y, dy), out)
