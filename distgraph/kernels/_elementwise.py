"""What fused elementwise kernels share: one pass on CuPy, one compiled pass on NumPy, else NumPy by blocks.

A compiled loop goes over a contiguous vector block by block through a scratch block in the first-level cache,
so that an output may be an input and LLVM still vectorises (see `_row_loops`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distgraph.kernels._common import Array, Namespace, empty, flat, store
from distgraph.kernels._cupy_elementwise import CudaKernel
from distgraph.kernels._jit import inlined, pays

LOOP_BLOCK = 2048
"""Elements of a block of a compiled loop: 8 KiB in float32."""

_BLOCK = 1 << 14
"""Elements of a block in plain NumPy: 64 KiB a temporary in float32."""


@inlined
def copy(source: Any, target: Any) -> None:
    """A loop that LLVM vectorises; Numba's own `target[:] = source` checks overlap and takes 45 us more for
    1 MiB."""
    for j in range(source.size):
        target[j] = source[j]


def one_pass(
    loop: Callable[..., None],
    cuda: CudaKernel,
    xp: Namespace,
    operands: tuple[Array, ...],
    out: Array | None,
    *flags: bool,
    double: bool = False,
) -> Array | None:
    """Run ``cuda`` on CuPy and ``loop`` on large NumPy arrays; None where neither applies.

    Args:
        loop: called as ``loop(*operands, *flags, result)`` with contiguous vectors.
        cuda: called as ``cuda(*operands, result)``.
        double: whether the loop takes float64 as well.
    """
    first = operands[0]
    if any(a.dtype != first.dtype or a.shape != first.shape for a in operands):
        return None
    if xp is not np:
        y = empty(xp, out, first.shape, first.dtype)
        cuda(*operands, y)
        return store(xp, y, out)
    if not pays(xp, first, np.float32, *([np.float64] if double else [])):
        return None
    y = empty(xp, out, first.shape, first.dtype)
    loop(*(flat(a) for a in operands), *flags, y.reshape(-1))
    return store(xp, y, out)


def blocked(
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
