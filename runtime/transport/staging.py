"""Messages of ranks with a device to ranks that their own transport does not reach, staged through the host.

A rank with a device may have a direct transport to some other ranks, such as NCCL to ranks with GPUs. All
other messages go over the transport for host arrays: the rank copies what it sends to host memory, and what
it has received to its device. The other side, which may be a rank without a device, takes part in the same
operation of the same transport with its own arrays.

Order: a copy from the device follows the work that the current stream had when the operation was started, and
the host waits for it before the operation of the host transport begins. So operations of a group are started
in the same order by all its members. A copy to the device is part of the current stream, so that later work
of the stream reads what has arrived; the host does not wait for it.

Invariant: a host buffer is used again only after the operation that reads it is complete, and after the copy
from it to the device has ended.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from distgraph.errors import RuntimeFault
from distgraph.runtime.transport.transport import (
    Array,
    Group,
    Request,
    Transport,
    flat,
    time_limit,
)
from distgraph.runtime.transport.watchdog import Activity

Done = Callable[[], bool]
"""Whether a copy has ended; never blocks."""


class Copies(Protocol):
    """Copies between the memory of a device and the host. Blocks and buffers are flat and of one dtype.

    A device without streams copies at once and returns a function that is always true.
    """

    def host_buffer(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Host memory of bytes (uint8), from and to which the device copies fast, such as pinned memory."""

    def read(self, block: Array, host: np.ndarray[Any, Any]) -> Done:
        """Start copying a block to a host buffer, after the present work of the current stream."""

    def write(self, host: np.ndarray[Any, Any], block: Array) -> Done:
        """Start copying a host buffer to a block; later work of the current stream comes after it."""


class _StagedRequest:
    """An operation of the host transport, whose results are copied to the device when it is complete."""

    __slots__ = ("_landing", "_request", "_sent", "_transport")

    def __init__(
        self,
        transport: StagedTransport,
        request: Request,
        sent: Sequence[np.ndarray[Any, Any]],
        landing: Sequence[tuple[np.ndarray[Any, Any], Array]],
    ) -> None:
        self._transport, self._request = transport, request
        self._sent, self._landing = sent, landing

    def done(self) -> bool:
        return self._request.done()

    def wait(self) -> None:
        self._request.wait()
        sent, landing, self._sent, self._landing = self._sent, self._landing, (), ()
        self._transport.finish(sent, landing)


class StagedTransport:
    """One rank with a device; see `distgraph.runtime.transport.transport.Transport`.

    Args:
        control: transport of all ranks for host arrays.
        copies: between the device and the host.
        direct: transport for arrays of the device to the ranks that it reaches; None if there are none.
        reaches: whether all ranks of a group, or the two of a message, can use `direct`; equal on all of
            them.
    """

    def __init__(
        self,
        control: Transport,
        copies: Copies,
        direct: Transport | None = None,
        reaches: Callable[[Group], bool] = lambda group: False,
    ) -> None:
        self._control, self._copies, self._direct = control, copies, direct
        self._reaches, self._limit = reaches, time_limit(None)
        self._driver = control if direct is None else direct
        self._free: dict[int, list[np.ndarray[Any, Any]]] = {}
        self._landing: deque[tuple[Done, np.ndarray[Any, Any]]] = deque()

    @property
    def activity(self) -> Activity:
        return self._control.activity

    @property
    def rank(self) -> int:
        return self._control.rank

    @property
    def size(self) -> int:
        return self._control.size

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, buffer: Array, op: str, group: Group) -> Request:
        if direct := self._direct_to(group):
            return direct.all_reduce(buffer, op, group)
        block = flat(buffer, "all_reduce")
        host = self._read(block, "all_reduce")
        return _StagedRequest(self, self._control.all_reduce(host, op, group), (), [(host, block)])

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int], group: Group) -> Request:
        if direct := self._direct_to(group):
            return direct.all_gather(send, recv, counts, group)
        block = flat(recv, "all_gather")
        source, target = self._read(flat(send, "all_gather"), "all_gather"), self._buffer(block)
        request = self._control.all_gather(source, target, counts, group)
        return _StagedRequest(self, request, [source], [(target, block)])

    def reduce_scatter(
        self, send: Array, recv: Array, counts: Sequence[int], op: str, group: Group
    ) -> Request:
        if direct := self._direct_to(group):
            return direct.reduce_scatter(send, recv, counts, op, group)
        block = flat(recv, "reduce_scatter")
        source, target = self._read(flat(send, "reduce_scatter"), "reduce_scatter"), self._buffer(block)
        request = self._control.reduce_scatter(source, target, counts, op, group)
        return _StagedRequest(self, request, [source], [(target, block)])

    def all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Request:
        if direct := self._direct_to(group):
            return direct.all_to_all(send, recv, send_counts, recv_counts, group)
        block = flat(recv, "all_to_all")
        source, target = self._read(flat(send, "all_to_all"), "all_to_all"), self._buffer(block)
        request = self._control.all_to_all(source, target, send_counts, recv_counts, group)
        return _StagedRequest(self, request, [source], [(target, block)])

    def broadcast(self, buffer: Array, root: int, group: Group) -> Request:
        if direct := self._direct_to(group):
            return direct.broadcast(buffer, root, group)
        block = flat(buffer, "broadcast")
        if root == self.rank:
            host = self._read(block, "broadcast")
            return _StagedRequest(self, self._control.broadcast(host, root, group), [host], ())
        host = self._buffer(block)
        return _StagedRequest(self, self._control.broadcast(host, root, group), (), [(host, block)])

    # -- messages ----------------------------------------------------------------------------------

    def send(self, buffer: Array, dest: int, tag: int) -> Request:
        if direct := self._direct_to((self.rank, dest)):
            return direct.send(buffer, dest, tag)
        host = self._read(flat(buffer, "send"), "send")
        return _StagedRequest(self, self._control.send(host, dest, tag), [host], ())

    def recv(self, buffer: Array, source: int, tag: int) -> Request:
        if direct := self._direct_to((self.rank, source)):
            return direct.recv(buffer, source, tag)
        block = flat(buffer, "recv")
        host = self._buffer(block)
        return _StagedRequest(self, self._control.recv(host, source, tag), (), [(host, block)])

    # -- control -----------------------------------------------------------------------------------

    def barrier(self, group: Group | None = None) -> None:
        self._driver.barrier(tuple(range(self.size)) if group is None else group)

    def gather_objects(self, obj: Any, root: int = 0) -> list[Any] | None:
        return self._control.gather_objects(obj, root)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return self._control.broadcast_object(obj, root)

    def progress(self) -> None:
        self._driver.progress()

    def poll(self, ready: Callable[[], bool], what: str) -> None:
        self._driver.poll(ready, what)

    def abort(self, error: BaseException) -> None:
        self._driver.abort(error)

    def close(self) -> None:
        """Release the host buffers; the two transports are closed by their owners."""
        self._free.clear()
        self._landing.clear()

    # -- implementation ----------------------------------------------------------------------------

    def finish(
        self,
        sent: Sequence[np.ndarray[Any, Any]],
        landing: Sequence[tuple[np.ndarray[Any, Any], Array]],
    ) -> None:
        """After an operation: copy what has arrived to the device, release the buffers of what was sent."""
        for host in sent:
            self._release(host)
        for host, block in landing:
            if host.size:
                self._landing.append((self._copies.write(host, block), host))

    def _direct_to(self, group: Group) -> Transport | None:
        return self._direct if self._direct is not None and self._reaches(group) else None

    def _read(self, block: Array, what: str) -> np.ndarray[Any, Any]:
        """A host buffer with the elements of a flat block, complete."""
        host = self._buffer(block)
        if not host.size:
            return host
        done, begun = self._copies.read(block, host), time.monotonic()
        while not done():
            self.progress()
            if time.monotonic() - begun > self._limit:
                raise RuntimeFault(
                    f"rank {self.rank}: {what} waited {self._limit:g} s for the device to compute what is "
                    "sent; look for a rank that does not take part, or raise DISTGRAPH_TIMEOUT"
                )
            os.sched_yield()
        return host

    def _buffer(self, block: Array) -> np.ndarray[Any, Any]:
        """A flat host buffer of the size and dtype of a block."""
        while self._landing and self._landing[0][0]():
            self._release(self._landing.popleft()[1])
        dtype = np.dtype(block.dtype)
        nbytes = int(block.size) * dtype.itemsize
        if not nbytes:
            return np.empty(0, dtype)
        free = self._free.get(nbytes)
        memory = free.pop() if free else self._copies.host_buffer(nbytes)
        return memory.view(dtype)

    def _release(self, host: np.ndarray[Any, Any]) -> None:
        if host.size:
            self._free.setdefault(host.nbytes, []).append(host.view(np.uint8))
