"""A transport that does everything as late as it may, so that a buffer that is used too early gives garbage.

A send reads its buffer only when its rank next waits for something. A receive destroys the contents of its
buffer at once. Both is allowed: from the start of an operation until its `wait` has returned, the buffer
belongs to the transport.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distgraph.runtime.transport.transport import Request, Transport


class Delayed:
    """See `distgraph.runtime.transport.transport.Transport`.

    Args:
        transport: that does the work in the end.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._held: list[_Send] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        if name in ("rank", "size"):
            return found

        def call(*args: Any) -> Any:
            if name in ("barrier", "gather_objects", "broadcast_object"):
                self.drive()
            result = found(*args)
            return _Request(self, result) if hasattr(result, "wait") else result

        return call

    def send(self, buffer: Any, dest: int, tag: int) -> Request:
        """See `Transport`."""
        held = _Send(self, lambda: self._transport.send(buffer, dest, tag))
        self._held.append(held)
        return held

    def recv(self, buffer: Any, source: int, tag: int) -> Request:
        """See `Transport`."""
        buffer[...] = np.nan if buffer.dtype.kind == "f" else 77
        return _Request(self, self._transport.recv(buffer, source, tag))

    def drive(self) -> None:
        """Start what is held back."""
        held, self._held = self._held, []
        for each in held:
            each.start()


class _Send:
    def __init__(self, delayed: Delayed, start: Callable[[], Request]) -> None:
        self._delayed, self._start, self._request = delayed, start, None

    def start(self) -> None:
        self._request = self._start()

    def wait(self) -> None:
        self._delayed.drive()
        self._request.wait()

    def done(self) -> bool:
        self._delayed.drive()
        return self._request.done()


class _Request:
    def __init__(self, delayed: Delayed, request: Request) -> None:
        self._delayed, self._request = delayed, request

    def wait(self) -> None:
        self._delayed.drive()
        self._request.wait()

    def done(self) -> bool:
        self._delayed.drive()
        return self._request.done()
