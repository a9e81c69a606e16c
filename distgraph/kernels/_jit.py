"""Loops that Numba compiles: declared next to the NumPy form of their kernel, compiled at their first call,
cached on disk. Numba is optional, and imported at the first call of a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, update_wrapper
from importlib import import_module
from threading import RLock
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

FUSED_MIN_SIZE = 1 << 14
"""Elements from which a compiled loop is worth its call and, once, its compilation (measured: at 16 Ki
elements a NumPy pass takes 5 us, a Numba call 1 us to 2 us)."""

# Reassociation lets sums use vector lanes and contraction uses fused multiply-add. Not the flags that assume
# away NaN and infinity: a diverging run must show its NaN.
SAFE_FASTMATH = frozenset({"reassoc", "contract", "nsz", "arcp"})
EXACT_FASTMATH = frozenset({"contract", "nsz"})

_COMPILING = RLock()  # reentrant: a loop resolves the loops that it calls


@cache
def has_numba() -> bool:
    """Whether Numba is installed; imports it."""
    try:
        import_module("numba")
    except ImportError:
        return False
    return True


def pays(xp: Any, x: Any, *dtypes: Any, least: int = FUSED_MIN_SIZE) -> bool:
    """Whether a compiled loop over ``x`` is worth its call: Numba is installed, and ``x`` is a NumPy array of
    at least ``least`` elements and of one of ``dtypes``."""
    return xp is np and x.size >= least and x.dtype in dtypes and has_numba()


class Loop(Generic[P, R]):
    """A Python function that Numba compiles at its first call, and that is interpreted without Numba, unless
    `without_numba` gave another function for that.

    Numba compiles calls between functions only where it sees its own dispatchers, so a loop is compiled with
    the loops that it calls by a global name replaced by their dispatchers.
    """

    def __init__(
        self, function: Callable[P, R], fastmath: frozenset[str] = SAFE_FASTMATH, inline: str = "never"
    ) -> None:
        self._function, self._fastmath, self._inline = function, fastmath, inline
        self._interpreted = function
        self._dispatcher: Callable[P, R] | None = None
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        run = self._dispatcher
        if run is None:
            run = self.dispatcher() if has_numba() else self._interpreted
        return run(*args, **kwargs)

    def without_numba(self, function: Callable[P, R]) -> Callable[P, R]:
        """A decorator of the function that computes the same with array operations where Numba is not
        installed."""
        self._interpreted = function
        return function

    def dispatcher(self) -> Callable[P, R]:
        """Numba's dispatcher, which compiles for the types of its arguments.

        The disk cache is next to the source, else in NUMBA_CACHE_DIR or the user's cache directory (Numba
        tries them in turn); where none can be written the function is compiled in each process.

        Raises:
            ImportError: Numba is not installed.
        """
        with _COMPILING:
            if self._dispatcher is None:
                self._dispatcher = self._made()
            return self._dispatcher

    def _made(self) -> Callable[P, R]:
        numba, function = import_module("numba"), self._resolved()
        options = {"nogil": True, "fastmath": set(self._fastmath), "inline": self._inline}
        try:
            compiled: Callable[P, R] = numba.njit(cache=True, error_model="numpy", **options)(function)
        except RuntimeError:  # no writable place for the cache
            compiled = numba.njit(cache=False, error_model="numpy", **options)(function)
        return compiled

    def _resolved(self) -> Any:
        """The function, with dispatchers in place of the loops among its globals."""
        function: Any = self._function
        names = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        loops = {
            name: loop.dispatcher()
            for name, loop in names.items()
            if isinstance(loop, Loop) and loop is not self
        }
        if not loops:
            return function
        scope, cells = {**function.__globals__, **loops}, function.__closure__
        resolved = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
        resolved.__qualname__ = function.__qualname__  # with it Numba names the file of its cache
        return resolved


def jit(function: Callable[P, R]) -> Loop[P, R]:
    """Compile at first call, for one thread, without the interpreter lock, keeping machine code on disk."""
    return Loop(function)


def exact(function: Callable[P, R]) -> Loop[P, R]:
    """Compile arithmetic in the order it is written, for functions of one element whose digits depend on it.

    LLVM still inlines them into the loops that call them; the order survives because the flags are on each
    operation.
    """
    return Loop(function, EXACT_FASTMATH)


def inlined(function: Callable[P, R]) -> Loop[P, R]:
    """Compile into every compiled caller, with the caller's freedom of order: for the arithmetic of one
    element."""
    return Loop(function, inline="always")
