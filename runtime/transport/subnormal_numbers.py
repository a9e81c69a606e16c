"""Subnormal numbers can be zero while a step computes on a processor, where the user asks for it.

A number below the smallest normal one (1.2e-38 in f32) is computed in microcode, which takes a hundred times
as long. Gradients of classes that a model never chooses get there, and every product with them, so that one
and the same step takes several times as long after some training. The processor can take such operands for
zero and write zero for such results (FTZ and DAZ: Intel 64 and IA-32 Architectures Software Developer's
Manual, volume 1, section 10.2.3), as XLA has it do.

*Invariant:* nothing changes without `DISTGRAPH_FLUSH_SUBNORMALS=1`, or where the mode is not known (other
processors than x86-64, other systems than Linux). The mode belongs to the thread, and is what it was before
when the step ends.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any, Final

import numpy as np

from distgraph.errors import RuntimeFault
from distgraph.errors.arguments import switch_of

_VARIABLE: Final = "DISTGRAPH_FLUSH_SUBNORMALS"
_FLUSH: Final = 0x8040  # bits of the register MXCSR: results to zero, operands from zero
_WORDS, _REGISTER = 8, 7  # 32-bit words of a fenv_t on x86-64, and which of them is MXCSR


@cache
def _library() -> Any:
    """The C library of mathematics, or None where `fenv_t` may be another."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        library = ctypes.CDLL("libm.so.6")
        library.fegetenv, library.fesetenv  # noqa: B018 - raises where it has none
        np.finfo(np.float32), np.finfo(np.float64)  # NumPy warns if it first looks in the other mode
    except (OSError, AttributeError):
        return None
    return library


class FlushedToZero:
    """Context in which subnormal numbers are zero on the thread that enters it, if the user asks for it.

    One object is for one thread at a time. Threads that BLAS starts keep their own mode.

    Raises:
        RuntimeFault: DISTGRAPH_FLUSH_SUBNORMALS is neither 0 nor 1.

    Example:
        >>> with FlushedToZero():
        ...     pass
    """

    __slots__ = ("_before", "_inside", "_library")

    def __init__(self) -> None:
        self._library = _library() if switch_of(_VARIABLE, RuntimeFault) else None
        self._before, self._inside = (ctypes.c_uint32 * _WORDS)(), (ctypes.c_uint32 * _WORDS)()
        if self._library is not None:
            self._library.fegetenv(self._inside)
            self._inside[_REGISTER] |= _FLUSH

    def __enter__(self) -> None:
        if self._library is not None:
            self._library.fegetenv(self._before)
            self._library.fesetenv(self._inside)

    def __exit__(self, *error: object) -> None:
        if self._library is not None:
            self._library.fesetenv(self._before)
