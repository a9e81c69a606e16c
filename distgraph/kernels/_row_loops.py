"""What loops over the rows of contiguous matrices share: maximum, sums of exponentials, scaling, copying.

A row stays in the first-level cache over its two or three passes, so memory is read and written once. Each
loop writes to a scratch row first: LLVM then proves that input and output do not overlap, vectorises, and a
kernel may be given its input as its output.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distgraph.kernels._jit import inlined, jit
from distgraph.kernels._math import exp32

GROUP = 64
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
def copy_row(row: Any, out: Any) -> None:
    """out = row, in a loop that LLVM vectorises; Numba's own assignment of slices does not."""
    for j in range(row.size):
        out[j] = row[j]


@jit
def scale_row(row: Any, factor: Any, out: Any) -> None:
    """out = row * factor."""
    for j in range(row.size):
        out[j] = row[j] * factor


@jit
def add_and_clear(total: Any, part: Any) -> None:
    """total += part; part = 0."""
    for j in range(part.size):
        total[j] += part[j]
    for j in range(part.size):
        part[j] = part.dtype.type(0.0)
