"""Stream capture of the stand-in for CuPy, by the rules of CUDA and with the refusals of CuPy.

* While a stream is captured nothing is computed: work is recorded with the arrays that it reads and writes
  and the numbers that it is given, and every launch of the graph does just that.
* The host must not wait, copies between host and device and work on other streams are refused, and make the
  capture invalid; so are calls of cuBLAS, which CuPy refuses before CUDA hears of them.
* The memory of new arrays comes from a `MemoryPool` that is the allocator of the thread, and must exist when
  the graph is launched.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

CUBLAS = frozenset({"matmul", "einsum", "tensordot", "dot", "vdot", "inner", "outer"})
WAITS = frozenset({"nonzero", "flatnonzero", "argwhere", "unique", "item", "tolist"})
"""Functions whose result has a shape or a value that the host must know."""

METHODS_THAT_WRITE = frozenset({"fill", "sort", "partition", "put"})
FUNCTIONS_THAT_WRITE = frozenset({"put", "put_along_axis", "place", "fill_diagonal"})
"""What changes an array and returns nothing."""


class CaptureError(RuntimeError):
    """A call that is not permitted while a stream is captured, or the end of a capture with such a call."""


class Captured:
    """A graph while it is recorded, and its launches.

    Attributes:
        work: what it does, in order.
        pools: that have the memory of its arrays.
        valid: whether all calls were permitted.
        launches: how often it was launched.
    """

    def __init__(self, hardware: Any, stream: Any) -> None:
        self.hardware, self.stream, self.valid, self.launches = hardware, stream, True, 0
        self.work: list[Callable[[], None]] = []
        self.pools: set[weakref.ref[MemoryPool]] = set()

    def launch(self, stream: Any = None) -> None:
        captures: Captures = self.hardware.captures
        captures.refuse("launch of a graph")
        assert all(pool() is not None for pool in self.pools), "the memory of the graph has been released"
        with stream or self.hardware.stream:
            for run in self.work:
                run()
        self.launches += 1
        with captures.lock:
            captures.launches += 1


class MemoryPool:
    """Memory of arrays that were made while it was the allocator; it is kept until the pool ends."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray[Any, Any]] = []

    def malloc(self, array: np.ndarray[Any, Any]) -> None:
        self.arrays.append(array)


class Captures:
    """The captures of a machine; each thread captures by itself (mode "relaxed").

    Attributes:
        graphs: all that have been captured.
        launches: of all graphs.
    """

    def __init__(self) -> None:
        self.lock, self._local = threading.Lock(), threading.local()
        self.graphs: list[Captured] = []
        self.launches = 0

    @property
    def current(self) -> Captured | None:
        """What the calling thread captures."""
        found: Captured | None = getattr(self._local, "capture", None)
        return found

    def begin(self, hardware: Any, stream: Any) -> None:
        assert self.current is None, "a capture is under way"
        assert not stream.null, "cannot capture on the default (legacy) stream"
        assert stream.non_blocking, "uses of the default stream by other threads would be errors"
        self._local.capture = Captured(hardware, stream)

    def end(self, stream: Any) -> Captured:
        capture, self._local.capture = self.current, None
        if capture is None or capture.stream is not stream:
            raise CaptureError("cudaErrorIllegalState")
        if not capture.valid:
            raise CaptureError("cudaErrorStreamCaptureInvalidated")
        with self.lock:
            self.graphs.append(capture)
        return capture

    def refuse(self, what: str) -> None:
        """Raise CaptureError if the thread captures: the call is not permitted."""
        if self.current is not None:
            self.current.valid = False
            raise CaptureError(f"{what}: the current stream is capturing")

    def refuse_library(self, name: str) -> None:
        """Raise NotImplementedError if the thread captures and a function calls cuBLAS, as CuPy does."""
        if name in CUBLAS and self.current is not None:
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")

    @contextmanager
    def using_allocator(self, malloc: Any) -> Iterator[None]:
        self._local.malloc = malloc
        try:
            yield
        finally:
            self._local.malloc = None

    def work(self, stream: Any, run: Callable[[], None]) -> None:
        """Do some work of a stream, or record it."""
        capture = self.current
        if capture is None:
            run()
        elif stream is not capture.stream:
            self.refuse("work on another stream")
        else:
            capture.work.append(run)

    def made(self, result: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The memory of a new array in a capture: no number has been computed yet."""
        capture, malloc = self.current, getattr(self._local, "malloc", None)
        assert capture is not None
        assert malloc is not None, "a graph would write to memory that others use: it is of the default pool"
        array = np.full_like(result, np.nan if result.dtype.kind == "f" else 0)
        malloc(array)
        capture.pools.add(weakref.ref(malloc.__self__))
        return array

    def recorded(
        self, stream: Any, function: Callable[..., Any], again: Callable[[], Any], hosts: tuple[Any, ...]
    ) -> Any:
        """Record a call that makes new arrays. Views are made at once, and what is no array returned.

        Args:
            stream: the current one.
            function: computes the result on the host, to know its shape.
            again: computes it on the device.
            hosts: arrays of which the result may be a view.
        """
        with np.errstate(all="ignore"):
            results = function()
        assert results is not None, f"{function} changes an array: add its name above"
        if not isinstance(results, (np.ndarray, np.generic, tuple)):
            return results
        several = isinstance(results, tuple)
        if several and not all(isinstance(r, (np.ndarray, np.generic)) for r in results):
            return results
        found = [np.asarray(r) for r in (results if several else (results,))]
        if any(np.may_share_memory(r, host) for r in found for host in hosts if r.size):
            return results
        arrays = [self.made(r) for r in found]

        def run() -> None:
            computed = again()
            for array, result in zip(arrays, computed if several else (computed,), strict=True):
                array[...] = result.host

        self.work(stream, run)
        return tuple(arrays) if several else arrays[0]
