"""Ranks whose messages take random times, so that what is ready first differs from run to run.

A send starts a random time after it was given to the transport, while its rank waits or tests for something.
Messages to one rank with one tag stay in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distgraph.errors import RuntimeFault
from distgraph.runtime.transport.inprocess import connect
from distgraph.runtime.transport.transport import MESSAGES, Request, Transport

_LIMIT, _PAUSE = 100.0, 5e-5


class _Waiting:
    """A request that makes the held sends of its rank go on. See `Request`."""

    def __init__(self, transport: JitteryTransport, request: Request | None = None) -> None:
        self._transport, self.request = transport, request

    def done(self) -> bool:
        self._transport.release()
        return self.request is not None and self.request.done()

    def wait(self) -> None:
        self._transport.poll(self.done, "a message")
        assert self.request is not None
        self.request.wait()


class JitteryTransport:
    """A transport whose sends are held back for random times.

    Args:
        transport: what is wrapped.
        seed: of the times.
        longest: seconds for which a message is held at most.
    """

    def __init__(self, transport: Transport, seed: int, longest: float) -> None:
        self._transport, self._longest = transport, longest
        self._rng = np.random.default_rng([seed, transport.rank])
        self._held: list[tuple[float, Callable[[], Request], _Waiting]] = []
        self._latest: dict[tuple[int, int], float] = {}

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._transport, name)
        if name not in MESSAGES:
            return attribute
        return lambda *arguments: _Waiting(self, attribute(*arguments))

    def send(self, buffer: Any, dest: int, tag: int) -> _Waiting:
        due = time.monotonic() + self._longest * float(self._rng.random())
        due = self._latest[dest, tag] = max(due, self._latest.get((dest, tag), 0.0))
        request = _Waiting(self)
        self._held.append((due, lambda: self._transport.send(buffer, dest, tag), request))
        return request

    def release(self, *, everything: bool = False) -> None:
        """Start the sends that are due."""
        now, held, self._held = time.monotonic(), self._held, []
        for due, start, request in held:
            if everything or due <= now:
                request.request = start()
            else:
                self._held.append((due, start, request))

    def poll(self, ready: Callable[[], bool], what: str) -> None:
        begun = time.monotonic()
        while not ready():
            self.progress()
            if time.monotonic() - begun > _LIMIT:
                raise RuntimeFault(f"rank {self._transport.rank}: {what} made no progress in {_LIMIT:g} s")
            time.sleep(_PAUSE)

    def progress(self) -> None:
        self.release()
        self._transport.progress()

    def barrier(self, group: Any = None) -> None:
        self.release(everything=True)
        self._transport.barrier(group)

    def gather_objects(self, obj: Any, root: int = 0) -> list[Any] | None:
        self.release(everything=True)
        return self._transport.gather_objects(obj, root)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        self.release(everything=True)
        return self._transport.broadcast_object(obj, root)


def connected(size: int, seed: int, longest: float = 2e-3) -> Sequence[Any]:
    """The transports of so many ranks of this process."""
    return [JitteryTransport(transport, seed, longest) for transport in connect(size)]
