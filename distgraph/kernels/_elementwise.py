"""What fused elementwise kernels share: one pass on CuPy, one compiled pass on NumPy, else NumPy by blocks.

A compiled loop goes over a contiguous vector block by block through a scratch block in the first-level cache,
so that an output may be an input and LLVM still vectorises (see `_row_loops`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np

from distgraph.kernels._common import (
    BFLOAT16,
    Array,
    Namespace,
    bfloat16_bits,
    empty,
    flat,
    float32_of_bits,
    has_cuda,
    store,
)
from distgraph.kernels._jit import Loop, has_numba, inlined, jit, pays
from distgraph.kernels.cuda.elementwise_kernel import CudaKernel

LOOP_BLOCK = 2048
"""Elements of a block of a compiled loop: 8 KiB in float32."""

_BLOCK = 1 << 14
"""Elements of a block in plain NumPy: 64 KiB a temporary in float32."""

_FORMULA_MIN_SIZE = 1 << 10
"""Elements from which a loop over a formula is worth its call (measured: the gradient of relu, the shortest
one, takes 1.5 us by a loop and 5 us to 8 us by three NumPy passes)."""


@inlined
def copy(source: Any, target: Any) -> None:
    """A loop that LLVM vectorises; Numba's own `target[:] = source` checks overlap and takes 45 us more for
    1 MiB."""
    for j in range(source.size):
        target[j] = source[j]


def _unary_loop(x: Any, y: Any) -> None:
    scratch = np.empty(LOOP_BLOCK, x.dtype)
    for start in range(0, x.size, LOOP_BLOCK):
        part = x[start : start + LOOP_BLOCK]
        for j in range(part.size):
            scratch[j] = element(part[j])  # type: ignore[name-defined] # noqa: F821 (see `fused`)
        copy(scratch[: part.size], y[start : start + LOOP_BLOCK])


def _binary_loop(x: Any, dy: Any, dx: Any) -> None:
    scratch = np.empty(LOOP_BLOCK, x.dtype)
    for start in range(0, x.size, LOOP_BLOCK):
        part, grad = x[start : start + LOOP_BLOCK], dy[start : start + LOOP_BLOCK]
        for j in range(part.size):
            scratch[j] = element(part[j], grad[j])  # type: ignore[name-defined] # noqa: F821
        copy(scratch[: part.size], dx[start : start + LOOP_BLOCK])


def _unary_bfloat16_loop(x: Any, y: Any) -> None:
    scratch = np.empty(LOOP_BLOCK, np.uint16)
    for start in range(0, x.size, LOOP_BLOCK):
        part = x[start : start + LOOP_BLOCK]
        for j in range(part.size):
            scratch[j] = bfloat16_bits(element(float32_of_bits(part[j])))  # type: ignore[name-defined] # noqa: F821
        copy(scratch[: part.size], y[start : start + LOOP_BLOCK])


def _binary_bfloat16_loop(x: Any, dy: Any, dx: Any) -> None:
    scratch = np.empty(LOOP_BLOCK, np.uint16)
    for start in range(0, x.size, LOOP_BLOCK):
        part, grad = x[start : start + LOOP_BLOCK], dy[start : start + LOOP_BLOCK]
        for j in range(part.size):
            value = element(float32_of_bits(part[j]), float32_of_bits(grad[j]))  # type: ignore[name-defined] # noqa: F821
            scratch[j] = bfloat16_bits(value)
        copy(scratch[: part.size], dx[start : start + LOOP_BLOCK])


def _bfloat16_rows_loop(x: Any, y: Any, out: Any) -> None:
    """out[i] = element(x[i], y[i]) of rows of bits; the rows of y are repeated."""
    scratch = np.empty(min(LOOP_BLOCK, x.shape[1]), np.uint16)
    repeated = y.shape[0]
    for i in range(x.shape[0]):
        row, other, result = x[i], y[i % repeated], out[i]
        for start in range(0, row.size, LOOP_BLOCK):
            part, beside = row[start : start + LOOP_BLOCK], other[start : start + LOOP_BLOCK]
            for j in range(part.size):
                value = element(float32_of_bits(part[j]), float32_of_bits(beside[j]))  # type: ignore[name-defined] # noqa: F821
                scratch[j] = bfloat16_bits(value)
            copy(scratch[: part.size], result[start : start + LOOP_BLOCK])


@dataclass(frozen=True, slots=True)
class Fused:
    """An elementwise op of one or two operands in one pass over memory.

    Attributes:
        loop: for NumPy, over contiguous vectors: loop(*operands, result).
        bfloat16: the same for the bits of bfloat16.
        cuda: for CuPy: cuda(*operands, result).
        double: whether the loop takes float64 as well.
    """

    loop: Loop[..., None]
    bfloat16: Loop[..., None]
    cuda: CudaKernel
    double: bool

    def __call__(
        self, formula: Callable[..., Array], xp: Namespace, operands: tuple[Array, ...], out: Array | None
    ) -> Array:
        """Compute the op in one pass on CuPy and of large NumPy arrays, else by ``formula`` of arrays."""
        first = operands[0]
        dtypes = (np.float32, np.float64, BFLOAT16) if self.double else (np.float32, BFLOAT16)
        loops = pays(xp, first, *dtypes, least=_FORMULA_MIN_SIZE)
        same = all(a.dtype == first.dtype and a.shape == first.shape for a in operands)
        if not same or not (loops or has_cuda(xp)):
            return blocked(formula, xp, operands, out)
        fits = out is not None and (not loops or out.flags.c_contiguous)  # loops write contiguous vectors
        y = empty(xp, out if fits else None, first.shape, first.dtype)
        if loops and first.dtype == BFLOAT16:
            self.bfloat16(*(flat(a).view(np.uint16) for a in operands), y.reshape(-1).view(np.uint16))
        elif loops:
            self.loop(*(flat(a) for a in operands), y.reshape(-1))
        else:
            self.cuda(*operands, y)
        return store(xp, y, out)


def fused(cuda: str, *, double: bool = False) -> Callable[[Callable[..., Any]], Fused]:
    """Decorate a formula of one element, from which the compiled loop follows.

    The loop counts as code of the formula's file, by which Numba names its disk cache and sees that it is
    stale. The name of the formula is that of the op behind `_fused_`.

    Args:
        cuda: the formula in CUDA; its operands have the names of the arguments, its result is y of one
            operand, dx of two.
        double: as of `Fused`.
    """

    def decorate(formula: Callable[..., Any]) -> Fused:
        names = formula.__code__.co_varnames[: formula.__code__.co_argcount]
        loops = (_unary_loop, _unary_bfloat16_loop), (_binary_loop, _binary_bfloat16_loop)
        loop, bfloat16 = (_loop_over(formula, template) for template in loops[len(names) - 1])
        operands = ", ".join(f"T {name}" for name in names)
        kernel = CudaKernel(
            formula.__name__.removeprefix("_fused_"), operands, "T y" if len(names) == 1 else "T dx", cuda
        )
        return Fused(loop, bfloat16, kernel, double)

    return decorate


def _loop_over(formula: Callable[..., Any], template: Callable[..., None]) -> Loop[..., None]:
    """A template's loop with a formula as its element."""
    source = formula.__code__
    code = template.__code__.replace(co_filename=source.co_filename, co_firstlineno=source.co_firstlineno)
    loop = FunctionType(code, {**template.__globals__, "element": inlined(formula)}, formula.__name__)
    loop.__qualname__, loop.__module__ = formula.__qualname__, formula.__module__
    return jit(loop)


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


def _add(x: Any, y: Any) -> Any:
    return x + y


def _subtract(x: Any, y: Any) -> Any:
    return x - y


def _multiply(x: Any, y: Any) -> Any:
    return x * y


def _bfloat16_ufunc(
    ufunc: Callable[..., Array], loop: Loop[..., None], x: Array, y: Array, *, out: Array
) -> Array:
    """One ufunc call of bfloat16, by the loop where the last dims of the first operand are those of the
    second. A first operand that is not contiguous is copied into the result first."""
    fits = out.shape == x.shape and y.ndim > 0 and y.size > 0 and x.shape[x.ndim - y.ndim :] == y.shape
    fits = fits and out.dtype == BFLOAT16 and y.flags.c_contiguous and out.flags.c_contiguous
    if not (fits and x.size >= _FORMULA_MIN_SIZE and has_numba()) or any(_overlaps(a, out) for a in (x, y)):
        return ufunc(x, y, out=out)
    if not x.flags.c_contiguous:
        if np.may_share_memory(y, out):
            return ufunc(x, y, out=out)
        np.copyto(out, x)
        x = out
    width = y.size if y.ndim == x.ndim else y.shape[-1]
    loop(*(a.view(np.uint16).reshape(-1, width) for a in (x, y, out)))
    return out


def _overlaps(x: Array, out: Array) -> bool:
    """Whether two arrays share memory, and are not the same elements in the same order."""
    same = x.ctypes.data == out.ctypes.data and x.shape == out.shape and x.strides == out.strides
    return not same and np.may_share_memory(x, out)


_OF_BFLOAT16 = {
    f.__name__.removeprefix("_"): partial(
        _bfloat16_ufunc, getattr(np, f.__name__.removeprefix("_")), _loop_over(f, _bfloat16_rows_loop)
    )
    for f in (_add, _subtract, _multiply)
}


def ufunc_of(xp: Namespace, name: str, dtypes: Iterable[Any]) -> Callable[..., Array]:
    """The ufunc of a namespace, for operands of known dtypes.

    Sums, differences and products of bfloat16 on NumPy are compiled loops with the same results, which take a
    tenth of the time.
    """
    if xp is np and name in _OF_BFLOAT16 and all(dtype == BFLOAT16 for dtype in dtypes):
        return _OF_BFLOAT16[name]
    ufunc: Callable[..., Array] = getattr(xp, name)
    return ufunc
