"""Elementary float32 functions without branches or calls, so that LLVM turns loops over them into vector
code.

The exponential is within 2 units in the last place, the others within 4 (tested against float64). Needs
Numba. Numba's disk cache looks at the file of the calling loop only: after a change here, delete
`__pycache__`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distgraph.kernels._common import ERF_EVEN, ERF_ODD
from distgraph.kernels._jit import exact

_F = np.float32
ZERO, HALF, ONE, TWO = _F(0.0), _F(0.5), _F(1.0), _F(2.0)
INFINITY = _F(np.inf)

# exp: Cody-Waite reduction to |r| <= ln(2) / 2 and the minimax polynomial of Cephes (Moshier, expf.c).
_LOG2_E, _LN2_HIGH, _LN2_LOW = _F(1.44269504088896341), _F(0.693359375), _F(-2.12194440e-4)
_EXP_LOW, _EXP_HIGH = _F(-87.33654), _F(88.72283)
_E0, _E1, _E2 = _F(1.9875691500e-4), _F(1.3981999507e-3), _F(8.3334519073e-3)
_E3, _E4, _E5 = _F(4.1665795894e-2), _F(1.6666665459e-1), _F(5.0000001201e-1)
_ROUNDING = _F(1.5 * 2**23)
_MANTISSA = np.int32(23)

_ERF_LIMIT = _F(4.0)
_A1, _A3, _A5, _A7, _A9, _A11, _A13 = (_F(c) for c in ERF_ODD)
_B0, _B2, _B4, _B6, _B8 = (_F(c) for c in ERF_EVEN)


@exact
def exp32(x: Any) -> Any:
    """e to the x; 0 below -87.3 (no denormals), infinity above 88.7, NaN for NaN."""
    c = x if x > _EXP_LOW else _EXP_LOW  # noqa: FURB136
    c = c if c < _EXP_HIGH else _EXP_HIGH  # noqa: FURB136
    shifted = c * _LOG2_E + _ROUNDING  # its last bits are the nearest integer, two's complement
    n = shifted - _ROUNDING
    r = c - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    p = p * (r * r) + r + ONE
    # p times 2^n, a normal number within the limits on c: n joins the exponent of p.
    power = np.int32(np.float32(shifted).view(np.int32) << _MANTISSA)
    y = np.int32(np.float32(p).view(np.int32) + power).view(np.float32)
    y = y if x >= _EXP_LOW else ZERO
    return y if x <= _EXP_HIGH else x + INFINITY


@exact
def erf32(x: Any) -> Any:
    """The error function 2 / sqrt(pi) * integral of exp(-t^2) from 0 to x."""
    c = x if x > -_ERF_LIMIT else -_ERF_LIMIT  # noqa: FURB136
    c = c if c < _ERF_LIMIT else _ERF_LIMIT  # noqa: FURB136
    s = c * c
    a = (((((_A13 * s + _A11) * s + _A9) * s + _A7) * s + _A5) * s + _A3) * s + _A1
    b = (((_B8 * s + _B6) * s + _B4) * s + _B2) * s + _B0
    y = c * a / b
    return y if x == x else x


@exact
def sigmoid32(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return ONE / (ONE + exp32(-x))
