"""A transport for host arrays on top of one for device arrays, so that the same cases serve both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Returned:
    """A request that brings results back to the host arrays."""

    def __init__(self, request: Any, pairs: Sequence[tuple[Any, Any]], cupy: Any) -> None:
        self.request, self.pairs, self.cupy = request, pairs, cupy

    def wait(self) -> None:
        self.request.wait()
        for host, device in self.pairs:
            host[...] = self.cupy.asnumpy(device).reshape(host.shape)

    def done(self) -> bool:
        if self.request.done():
            self.wait()
            return True
        return False


class OnDevice:
    def __init__(self, transport: Any, cupy: Any) -> None:
        self.transport, self.cupy = transport, cupy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def _back(self, request: Any, *pairs: tuple[Any, Any]) -> Returned:
        return Returned(request, pairs, self.cupy)

    def all_reduce(self, buffer: Any, op: str, group: Any) -> Returned:
        device = self.cupy.asarray(buffer)
        return self._back(self.transport.all_reduce(device, op, group), (buffer, device))

    def all_gather(self, send: Any, recv: Any, counts: Any, group: Any) -> Returned:
        device = self.cupy.asarray(recv)
        return self._back(
            self.transport.all_gather(self.cupy.asarray(send), device, counts, group), (recv, device)
        )

    def reduce_scatter(self, send: Any, recv: Any, counts: Any, op: str, group: Any) -> Returned:
        device = self.cupy.asarray(recv)
        request = self.transport.reduce_scatter(self.cupy.asarray(send), device, counts, op, group)
        return self._back(request, (recv, device))

    def all_to_all(self, send: Any, recv: Any, send_counts: Any, recv_counts: Any, group: Any) -> Returned:
        device = self.cupy.asarray(recv)
        request = self.transport.all_to_all(self.cupy.asarray(send), device, send_counts, recv_counts, group)
        return self._back(request, (recv, device))

    def broadcast(self, buffer: Any, root: int, group: Any) -> Returned:
        device = self.cupy.asarray(buffer)
        return self._back(self.transport.broadcast(device, root, group), (buffer, device))

    def send(self, buffer: Any, dest: int, tag: int) -> Returned:
        return self._back(self.transport.send(self.cupy.asarray(buffer), dest, tag))

    def recv(self, buffer: Any, source: int, tag: int) -> Returned:
        device = self.cupy.asarray(buffer)
        return self._back(self.transport.recv(device, source, tag), (buffer, device))
