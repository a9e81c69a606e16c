"""The door to Numba: optional, imported at the first large NumPy array, compiled once and cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from distgraph.kernels._common import FUSED_MIN_SIZE, Array, Namespace

Function = TypeVar("Function", bound=Callable[..., Any])

# Reassociation lets sums use vector lanes and contraction uses fused multiply-add. Not the flags that assume
# away NaN and infinity: a diverging run must show its NaN.
SAFE_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


@cache
def fused(module: str) -> ModuleType | None:
    """The module of compiled loops ``distgraph.kernels.<module>``, or None where Numba is not installed."""
    try:
        import_module("numba")
    except ImportError:
        return None
    return import_module(f"distgraph.kernels.{module}")


def fused_for(module: str, xp: Namespace, x: Array, *dtypes: Any) -> ModuleType | None:
    """`fused` where it pays: a NumPy array of at least `FUSED_MIN_SIZE` elements and of one of ``dtypes``."""
    if xp is not np or x.size < FUSED_MIN_SIZE or x.dtype not in dtypes:
        return None
    return fused(module)


def jit(function: Function) -> Function:
    """Compile at first call, for one thread, without the interpreter lock, keeping machine code on disk.

    The disk cache lies beside the source, else in NUMBA_CACHE_DIR or the user's cache directory (Numba tries
    them in turn); where none can be written the function is compiled anew in each process.
    """
    return _njit(function, SAFE_FASTMATH)


def exact(function: Function) -> Function:
    """Compile arithmetic in the order it is written, for functions of one element whose digits depend on it.

    LLVM still inlines them into the loops that call them; the order survives because the flags are on each
    operation.
    """
    return _njit(function, {"contract", "nsz"})


def inlined(function: Function) -> Function:
    """Compile into every compiled caller, with the caller's freedom of order: for the arithmetic of one
    element."""
    return _njit(function, SAFE_FASTMATH, inline="always")


def _njit(function: Function, fastmath: set[str], inline: str = "never") -> Function:
    try:
        numba = import_module("numba")
    except ImportError:  # the modules of loops can still be imported and read; `fused` never hands them out
        return function
    options = {"nogil": True, "fastmath": fastmath, "inline": inline, "error_model": "numpy"}
    try:
        compiled: Function = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no writable place for the cache
        compiled = numba.njit(cache=False, **options)(function)
    return compiled
