"""Copies between a GPU and pinned host memory, on the current stream of the calling thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distgraph.runtime.transport.staging import Done
from distgraph.runtime.transport.transport import Array


class CudaCopies:
    """See `distgraph.runtime.transport.staging.Copies`.

    Args:
        cupy: the module.
        empty_pinned: (shape, dtype) -> array in pinned memory; that of `cupyx`.
    """

    def __init__(self, cupy: Any, empty_pinned: Callable[..., Any]) -> None:
        self._cupy, self._empty_pinned = cupy, empty_pinned

    def host_buffer(self, nbytes: int) -> np.ndarray[Any, Any]:
        """See `Copies`."""
        buffer: np.ndarray[Any, Any] = self._empty_pinned((nbytes,), np.uint8)
        return buffer

    def read(self, block: Array, host: np.ndarray[Any, Any]) -> Done:
        """See `Copies`."""
        stream = self._cupy.cuda.get_current_stream()
        self._cupy.asnumpy(block, stream=stream, out=host, blocking=False)
        return self._done(stream)

    def write(self, host: np.ndarray[Any, Any], block: Array) -> Done:
        """See `Copies`."""
        stream = self._cupy.cuda.get_current_stream()
        block.set(host, stream=stream)
        return self._done(stream)

    def _done(self, stream: Any) -> Done:
        event = stream.record(self._cupy.cuda.Event(disable_timing=True))
        return lambda: bool(event.done)
