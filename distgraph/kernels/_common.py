"""What every kernel shares: array types, rounding of half precision, and writing to ``out``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from importlib import import_module
from math import prod
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from distgraph.errors import RuntimeFault
from distgraph.kernels._jit import inlined, jit, pays

Array: TypeAlias = Any
"""A numpy.ndarray, a cupy.ndarray (CuPy has no types and may be absent), or that of a registered device."""

Namespace: TypeAlias = Any
"""The module ``numpy``, the module ``cupy``, or the array namespace of a registered device."""

Kernel: TypeAlias = Callable[..., Any]
"""(namespace, *arrays, out=..., **attributes) -> array, or arrays."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

CONVERTED_MIN_SIZE = 1 << 10
"""Elements from which a compiled loop converts bfloat16: like a formula's, it takes a microsecond to call."""

# erf in float32 on [-4, 4]: odd over even minimax quotient in x, lowest power first (Eigen,
# generic_fast_erf_float).
ERF_ODD = (-1.60960333262415e-02, -2.95459980854025e-03, -7.34990630326855e-04, -5.69250639462346e-05,
           -2.10102402082508e-06, 2.77068142495902e-08, -2.72614225801306e-10)  # fmt: skip
ERF_EVEN = (-1.42647390514189e-02, -7.37332916720468e-03, -1.68282697438203e-03, -2.13374055278905e-04,
            -1.45660718464996e-05)  # fmt: skip


def has_cuda(xp: Namespace) -> bool:
    """Whether the kernels written in CUDA, and the functions of ``cupyx``, work on arrays of a namespace.

    NumPy and namespaces of registered devices that are not CUDA devices compute with array functions alone.
    """
    return xp is not np and hasattr(xp, "ElementwiseKernel")


def has_raw_kernels(xp: Namespace) -> bool:
    """Whether the kernels whose blocks of threads work together (`cuda.block_kernel`) run on arrays of a
    namespace."""
    return xp is not np and hasattr(xp, "RawKernel")


def special_functions(xp: Namespace) -> Any:
    """Where a namespace has ``erf`` and ``ndtri``: SciPy, its form for CuPy, or ``xp.special``."""
    if xp is np:
        return import_module("scipy.special")
    return import_module("cupyx.scipy.special") if has_cuda(xp) else xp.special


def is_half(dtype: Any) -> bool:
    """Whether ``dtype`` is float16 or bfloat16, the types that are computed in float32."""
    return bool(dtype.itemsize == 2 and (dtype.kind == "f" or dtype.name == "bfloat16"))


def check_bfloat16(xp: Namespace, dtype: Any) -> None:
    """Refuse bfloat16 where the installed CuPy has none.

    Raises:
        RuntimeFault: the installed CuPy is too old for bfloat16 (it came with CuPy 14).
    """
    if dtype.name == "bfloat16" and has_cuda(xp) and int(xp.__version__.split(".")[0]) < 14:
        raise RuntimeFault(
            f"cupy {xp.__version__} has no bfloat16 but the program uses it; install cupy 14 or use float16"
        )


def widen(xp: Namespace, x: Array) -> Array:
    """``x`` in float32 if it is of half precision, else ``x`` itself.

    Raises:
        RuntimeFault: as `check_bfloat16`.
    """
    if not is_half(x.dtype):
        return x
    check_bfloat16(xp, x.dtype)
    return converted(xp, x, np.dtype(np.float32))


@inlined
def float32_of_bits(bits: Any) -> Any:
    """The float32 that a bfloat16 stands for; of its bits as a uint16."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@inlined
def bfloat16_bits(x: Any) -> Any:
    """Bits of the bfloat16 nearest to a float32, of two the even one; a NaN keeps its sign alone, as in
    ml_dtypes."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    nearest = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd)
    nan = np.uint32(np.uint32(bits & np.uint32(0x80000000)) | np.uint32(0x7FC00000))
    return np.uint16(np.uint32(nearest if x == x else nan) >> np.uint32(16))


@jit
def _widen_loop(bits: Any, y: Any) -> None:
    for j in range(bits.size):
        y[j] = float32_of_bits(bits[j])


@jit
def _round_loop(x: Any, bits: Any) -> None:
    for j in range(x.size):
        bits[j] = bfloat16_bits(x[j])


def _convert(xp: Namespace, x: Array, out: Array) -> bool:
    """Write ``x`` to ``out`` by a compiled loop, if one is bfloat16 and the other float32, both vectors lie
    alike in NumPy's memory, and they share none. Returns whether it was done."""
    if xp is not np or not (isinstance(x, np.ndarray) and isinstance(out, np.ndarray)):
        return False
    wide, narrow = (x, out) if out.dtype == BFLOAT16 else (out, x)
    if narrow.dtype != BFLOAT16 or not pays(xp, wide, np.float32, least=CONVERTED_MIN_SIZE):
        return False
    if not (x.flags.c_contiguous and out.flags.c_contiguous and x.shape == out.shape):
        return False
    if np.may_share_memory(x, out):
        return False
    if narrow is x:
        _widen_loop(x.reshape(-1).view(np.uint16), out.reshape(-1))
    else:
        _round_loop(x.reshape(-1), out.reshape(-1).view(np.uint16))
    return True


def converted(xp: Namespace, x: Array, dtype: Any) -> Array:
    """``x.astype(dtype)``; NumPy arrays of bfloat16 by a compiled loop, which takes a third of the time.

    The dims of the result lie in memory as those of ``x`` do.
    """
    if xp is not np or BFLOAT16 not in (x.dtype, dtype) or x.size < CONVERTED_MIN_SIZE:
        return x.astype(dtype)
    order = sorted(range(x.ndim), key=lambda d: -x.strides[d])
    source = x.transpose(order)
    y = np.empty(source.shape, dtype)
    if not _convert(xp, source, y):
        return x.astype(dtype)
    return y.transpose(sorted(range(x.ndim), key=order.__getitem__))


def outputs(out: Any, count: int) -> tuple[Array | None, ...]:
    """``out`` of a kernel with ``count`` results as a tuple of that length."""
    if out is None:
        return (None,) * count
    if not isinstance(out, (tuple, list)):
        raise RuntimeFault(
            f"out: expected a tuple of {count} arrays, got {type(out).__name__}; pass (a, None)"
        )
    if len(out) != count:
        raise RuntimeFault(f"out: expected {count} arrays, got {len(out)}; use None for those not wanted")
    return tuple(out)


def store(xp: Namespace, result: Array, out: Array | None, dtype: Any = None) -> Array:
    """Put ``result`` into ``out``, or cast it to ``dtype`` where there is no ``out``."""
    if out is None:
        return result if dtype is None or result.dtype == dtype else converted(xp, result, dtype)
    if out is not result and not _convert(xp, result, out):
        xp.copyto(out, result, casting="unsafe")
    return out


def store_all(xp: Namespace, results: Sequence[Array], out: Any) -> tuple[Array, ...]:
    """`store` for each of several results; ``out`` as in `outputs`."""
    return tuple(store(xp, r, o) for r, o in zip(results, outputs(out, len(results)), strict=True))


def empty(xp: Namespace, out: Array | None, shape: Sequence[int], dtype: Any) -> Array:
    """``out`` where it can be computed in directly, else a new array; pair it with `store`."""
    if out is not None and out.dtype == dtype:
        return out
    return xp.empty(tuple(shape), dtype)


def computed_in_f32(
    *follows: int, cuda: Callable[..., Any] | None = None, has_bfloat16_loop: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a kernel so that half-precision operands are computed in float32 and rounded once.

    With the attribute ``wide`` of an op the results are not rounded.

    Args:
        follows: for each result, the position of the operand whose dtype it has.
        cuda: the kernel in CUDA, which is called first on a namespace with ``RawKernel``, with the same
            arguments and ``wide``. It reads and writes half precision itself. It returns the results, or None
            for operands that it does not take.
        has_bfloat16_loop: whether the kernel itself does the same for large NumPy operands of bfloat16,
            without copies of them in float32.
    """

    def decorate(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(kernel)
        def run(xp: Namespace, *arrays: Array, out: Any = None, wide: bool = False, **attrs: Any) -> Any:
            if cuda is not None and has_raw_kernels(xp):
                results = cuda(xp, *arrays, out=out, wide=wide, **attrs)
                if results is not None:
                    return results
            dtypes = [getattr(a, "dtype", None) for a in arrays]
            for dtype in dtypes:  # a generator, or a call for each, takes as long as a small product
                if dtype is not None and dtype.itemsize == 2 and is_half(dtype):
                    break
            else:
                return kernel(xp, *arrays, out=out, **attrs)
            if (
                has_bfloat16_loop
                and not wide
                and all(
                    d == BFLOAT16 and pays(xp, a, d, least=CONVERTED_MIN_SIZE)
                    for a, d in zip(arrays, dtypes, strict=True)
                )
            ):
                return kernel(xp, *arrays, out=out, **attrs)
            widened = [a if d is None else widen(xp, a) for a, d in zip(arrays, dtypes, strict=True)]
            if wide:
                return kernel(xp, *widened, out=out, **attrs)
            results = kernel(xp, *widened, **attrs)
            if not isinstance(results, tuple):
                return store(xp, results, out, dtypes[follows[0]])
            outs = outputs(out, len(results))
            return tuple(store(xp, r, o, dtypes[f]) for r, o, f in zip(results, outs, follows, strict=True))

        _BEHIND[run] = kernel
        return widening(run)

    return decorate


_BEHIND: dict[Kernel, Kernel] = {}  # kernel that is `computed_in_f32` -> the decorated function


def bound_kernel(
    kernel: Kernel, xp: Namespace, dtypes: Iterable[Any], attrs: Mapping[str, Any]
) -> partial[Any]:
    """A kernel with its namespace and attributes, for operands of known dtypes.

    On NumPy, without half precision among them, one that is `computed_in_f32` does not look for it in every
    call: with small operands that takes as long as the computation.
    """
    if xp is not np or kernel not in _BEHIND or any(is_half(dtype) for dtype in dtypes):
        return partial(kernel, xp, **attrs)
    return partial(_BEHIND[kernel], xp, **{name: value for name, value in attrs.items() if name != "wide"})


def widening(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a kernel that makes float32 copies of half-precision operands and results."""
    vars(kernel)["widens"] = True
    return kernel


def widened(operands: Iterable[Array], results: Iterable[tuple[Sequence[int], Any]]) -> int:
    """float32 copies of half-precision operands, and of results (shape, dtype): see `computed_in_f32`."""
    sizes = [int(4 * a.size) for a in operands if is_half(a.dtype)]
    return sum(sizes) + (4 * sum(prod(s) for s, dtype in results if is_half(dtype)) if sizes else 0)


def in_f32(x: Array) -> Array:
    """A half-precision array as `widen` would leave it, as to its shape and strides; others as they are."""
    if not is_half(x.dtype):
        return x
    strides = [2 * stride for stride in x.strides]
    return np.lib.stride_tricks.as_strided(np.empty(1, np.float32), x.shape, strides, writeable=False)


def rows(x: Array) -> Array:
    """A NumPy ``x`` as a C-contiguous matrix over its last dim: a view where it can be, else a copy."""
    width = x.shape[-1]
    return np.ascontiguousarray(x).reshape(x.size // width if width else 0, width)


def flat(x: Array) -> Array:
    """``x`` as a C-contiguous vector: a view where it can be, else a copy."""
    return x.ravel()
