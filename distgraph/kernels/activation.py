"""Activations and their gradients, elementwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import numpy as np

from distgraph.kernels._common import ERF_EVEN, ERF_ODD, Array, Namespace, computed_in_f32, empty, flat, store
from distgraph.kernels._cupy_elementwise import elementwise
from distgraph.kernels._jit import fused_for

_BLOCK = 1 << 14
"""Elements of a block in plain NumPy: 64 KiB a temporary in float32."""


def _one_pass(
    name: str,
    xp: Namespace,
    operands: tuple[Array, ...],
    out: Array | None,
    *flags: bool,
    double: bool = False,
) -> Array | None:
    """Run the one-pass form of ``name``: CUDA on CuPy, compiled on large NumPy arrays; None where there is
    none.

    Args:
        flags: the first chooses the "_tanh" variant.
        double: whether the compiled loop takes float64 as well.
    """
    first = operands[0]
    if any(a.dtype != first.dtype or a.shape != first.shape for a in operands):
        return None
    if xp is not np:
        y = empty(xp, out, first.shape, first.dtype)
        variant = name.replace("gelu", "gelu_tanh") if flags and flags[0] else name
        elementwise(variant)(*operands, y)
        return store(xp, y, out)
    loops = fused_for("_numba_elementwise", xp, first, np.float32, *([np.float64] if double else []))
    if loops is None:
        return None
    y = empty(xp, out, first.shape, first.dtype)
    getattr(loops, name)(*(flat(a) for a in operands), *flags, y.reshape(-1))
    return store(xp, y, out)


def _blocked(
    formula: Callable[..., Array], xp: Namespace, operands: tuple[Array, ...], out: Array | None
) -> Array:
    """``formula`` of the operands; on NumPy block by block, so that its temporaries stay in the cache."""
    first = operands[0]
    if xp is not np or first.size <= _BLOCK or any(a.shape != first.shape for a in operands):
        return store(xp, formula(*operands), out)
    y = empty(xp, out, first.shape, first.dtype)
    vectors, target = [flat(a) for a in operands], y.reshape(-1)
    for start in range(0, first.size, _BLOCK):
        target[start : start + _BLOCK] = formula(*(a[start : start + _BLOCK] for a in vectors))
    return store(xp, y, out)


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


def _gelu_slope(xp: Namespace, x: Array, approximate: bool) -> Array:
    s = _gelu_gate(xp, x, approximate)
    if approximate:
        return s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    return s + x * 0.3989422804014327 * xp.exp(-0.5 * x * x)


def _silu_slope(xp: Namespace, x: Array) -> Array:
    s = _sigmoid(xp, x)
    return s * (1 + x * (1 - s))


@computed_in_f32(0)
def gelu(xp: Namespace, x: Array, *, approximate: bool = False, out: Array | None = None) -> Array:
    """y = x * Phi(x) = x / 2 * (1 + erf(x / sqrt(2))) (Hendrycks and Gimpel, 2016).

    Args:
        x: any shape.
        approximate: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) instead.
    """
    done = _one_pass("gelu", xp, (x,), out, approximate)
    return _blocked(lambda a: a * _gelu_gate(xp, a, approximate), xp, (x,), out) if done is None else done


@computed_in_f32(0)
def gelu_grad(
    xp: Namespace, x: Array, dy: Array, *, approximate: bool = False, out: Array | None = None
) -> Array:
    """dx = dy * (Phi(x) + x * phi(x)), phi the normal density; for ``approximate`` the slope of that
    formula."""
    done = _one_pass("gelu_grad", xp, (x, dy), out, approximate)
    if done is not None:
        return done
    return _blocked(lambda a, da: da * _gelu_slope(xp, a, approximate), xp, (x, dy), out)


@computed_in_f32(0)
def silu(xp: Namespace, x: Array, *, out: Array | None = None) -> Array:
    """y = x * sigmoid(x)."""
    done = _one_pass("silu", xp, (x,), out)
    return _blocked(lambda a: a * _sigmoid(xp, a), xp, (x,), out) if done is None else done


@computed_in_f32(0)
def silu_grad(xp: Namespace, x: Array, dy: Array, *, out: Array | None = None) -> Array:
    """dx = dy * s * (1 + x * (1 - s)) with s = sigmoid(x)."""
    done = _one_pass("silu_grad", xp, (x, dy), out)
    return _blocked(lambda a, da: da * _silu_slope(xp, a), xp, (x, dy), out) if done is None else done


@computed_in_f32(0)
def sigmoid(xp: Namespace, x: Array, *, out: Array | None = None) -> Array:
    """y = 1 / (1 + exp(-x)), without overflow."""
    done = _one_pass("sigmoid", xp, (x,), out)
    return _blocked(partial(_sigmoid, xp), xp, (x,), out) if done is None else done


@computed_in_f32(0)
def sigmoid_grad(xp: Namespace, y: Array, dy: Array, *, out: Array | None = None) -> Array:
    """dx = dy * y * (1 - y) with y = sigmoid(x)."""
    return _blocked(lambda a, da: a * (1 - a) * da, xp, (y, dy), out)


@computed_in_f32(0)
def erf(xp: Namespace, x: Array, *, out: Array | None = None) -> Array:
    """y = 2 / sqrt(pi) * integral of exp(-t^2) from 0 to x."""
    done = _one_pass("erf", xp, (x,), out)
    return _blocked(partial(_erf, xp), xp, (x,), out) if done is None else done


@computed_in_f32(0)
def relu_grad(xp: Namespace, x: Array, dy: Array, *, out: Array | None = None) -> Array:
    """dx = dy where x > 0, else 0; x may be the input or the output of the relu."""
    done = _one_pass("relu_grad", xp, (x, dy), out, double=True)
    if done is not None:
        return done
    return _blocked(lambda a, da: xp.where(a > 0, da, da.dtype.type(0)), xp, (x, dy), out)


@computed_in_f32(0)
def tanh_grad(xp: Namespace, y: Array, dy: Array, *, out: Array | None = None) -> Array:
    """dx = dy * (1 - y^2) with y = tanh(x)."""
    done = _one_pass("tanh_grad", xp, (y, dy), out, double=True)
    return _blocked(lambda a, da: da * (1 - a * a), xp, (y, dy), out) if done is None else done
