"""Ranks with a GPU each: the NCCL transport (`cupy.cuda.nccl`), CuPy arrays.

Another transport, MPI between processes, is used for bootstrap and control only: unique ids, small objects,
failures, and the agreement on messages. Where two members of a group share a GPU, which NCCL refuses, the
group's data is staged through host memory and moved by that other transport.

Streams: collectives run on a stream of their own, messages on one per peer and direction, so that
communication overlaps the computation on the caller's current stream. An operation waits (on the device) for
the work that the current stream had when the operation was started. `Request.wait` makes the current stream
wait for the operation and returns; the host blocks only for a message whose other side has not been posted
yet. So a collective that never ends is noticed where the host waits next: in `synchronize`, which has the
time limit and is to be called before results are read.

Messages: NCCL has no tags, and a send occupies its stream until it is received. So a receiver sends the tags
that it is ready for to the sender over the control transport; the sender answers, and both launch the
messages in the order of the answers.

Communicators are made by `prepare`, collectively and in one order for all ranks, because making one blocks.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from distgraph.errors import RuntimeFault
from distgraph.runtime.transport.transport import (
    Array,
    Group,
    Request,
    Transport,
    check_counts,
    check_reduction,
    flat,
    position_in,
    stretches,
    time_limit,
)
from distgraph.runtime.transport.watchdog import Activity

# ncclDataType_t and ncclRedOp_t of nccl.h; bools are bytes, whose max, min and prod are any, all and all.
_TYPES: Final = {
    "int8": 0, "uint8": 1, "bool": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
_OPS: Final = {"sum": 0, "prod": 1, "max": 2, "min": 3}
_BYTE: Final = 1
_READY_TAG, _GO_TAG = (1 << 28) - 2, (1 << 28) - 1  # of the control transport


class _DeviceRequest:
    """Work on a communication stream, launched or not; it keeps its arrays alive until it is waited for."""

    __slots__ = ("_arrays", "_transport", "event", "what")

    def __init__(self, transport: NcclTransport, what: str, arrays: tuple[Array, ...]) -> None:
        self._transport, self.what, self._arrays = transport, what, arrays
        self.event: Any = None

    def done(self) -> bool:
        self._transport.progress()
        return self.event is not None and bool(self.event.done)

    def wait(self) -> None:
        if self.event is None:
            self._transport.poll(lambda: self.event is not None, self.what)
        self._transport.cupy.cuda.get_current_stream().wait_event(self.event)
        self._arrays = ()


class _StagedRequest:
    """An operation of the control transport on host copies, whose results are copied to the device."""

    __slots__ = ("_copied", "_pairs", "_request")

    def __init__(self, request: Request, pairs: Sequence[tuple[Array, Array]]) -> None:
        self._request, self._pairs, self._copied = request, pairs, False

    def done(self) -> bool:
        return self._request.done()

    def wait(self) -> None:
        self._request.wait()
        if not self._copied:
            for device, host in self._pairs:
                device.set(host.reshape(device.shape))
            self._copied = True


class _Channel:
    """Messages from one rank to another: those posted here, and the tags received from the other side."""

    __slots__ = ("communicator", "posted", "receive", "stream", "tag_buffer", "tags")

    def __init__(self, communicator: Any, stream: Any) -> None:
        self.communicator, self.stream = communicator, stream
        self.posted: dict[int, deque[tuple[Array, Any, _DeviceRequest]]] = {}
        self.tags: deque[int] = deque()
        self.tag_buffer = np.zeros(1, np.int64)
        self.receive: Request | None = None


class NcclTransport:
    """One rank of a job with GPUs; see `distgraph.runtime.transport.transport.Transport`.

    Making one is collective. It uses the CUDA device that is planned, else that with the position of this
    rank on its machine as its number, modulo the number of devices of the machine, and makes it current.

    Args:
        control: transport of the same ranks for host data.
        limit: seconds without progress before a wait gives up; default DISTGRAPH_TIMEOUT or 60.
        serves_process: it is the only transport of the process and lives as long as the process.
        device: number of the CUDA device that a plan gives to this rank; None where no plan does.

    Attributes:
        device: number of the CUDA device.

    Raises:
        RuntimeFault: CuPy is not installed, has no NCCL, or finds no device.
    """

    def __init__(
        self,
        control: Transport,
        *,
        limit: float | None = None,
        serves_process: bool = False,
        device: int | None = None,
    ) -> None:
        self.serves_process, self.device = serves_process, 0
        self.cupy, self._nccl = _load_cupy()
        self._control, self._limit = control, time_limit(limit)
        self._devices = self._choose_device(device)
        self._stream = self.cupy.cuda.Stream(non_blocking=True)
        self._communicators: dict[Group, Any] = {}
        self._prepared: set[Any] = set()
        self._sending: dict[int, _Channel] = {}
        self._receiving: dict[int, _Channel] = {}
        self._tag_sends: list[tuple[Request, Any]] = []

    @property
    def activity(self) -> Activity:
        return self._control.activity

    @property
    def rank(self) -> int:
        return self._control.rank

    @property
    def size(self) -> int:
        return self._control.size

    def shares_device(self, group: Iterable[int]) -> bool:
        """Whether two of the ranks run on one GPU, so that data between them is staged through the host."""
        used = [self._devices[rank] for rank in group]
        return len(set(used)) < len(used)

    def prepare(self, groups: Iterable[Group], pairs: Iterable[tuple[int, int]] = ()) -> None:
        """Make the communicators that the programs of all ranks need. Collective over all ranks.

        Args:
            groups: groups that this rank will use for collectives.
            pairs: (source, destination) of the messages that it will send or receive.
        """
        requests = self._control.gather_objects((set(groups), set(pairs)))
        union = (
            None
            if requests is None
            else [sorted(set().union(*parts)) for parts in zip(*requests, strict=True)]
        )
        all_groups, all_pairs = self._control.broadcast_object(union)
        # Every rank takes part in exchanging every id, so the order must not depend on this rank's groups.
        new_groups = [group for group in all_groups if group not in self._prepared]
        new_pairs = [
            pair for pair in all_pairs if (pair, "message") not in self._prepared and len(set(pair)) == 2
        ]
        for group in new_groups:
            self._prepared.add(group)
            if not self.shares_device(group) and (communicator := self._communicator(group)) is not None:
                self._communicators[group] = communicator
        for source, dest in new_pairs:
            self._prepared.add(((source, dest), "message"))
            if self.shares_device((source, dest)):
                continue
            communicator = self._communicator((source, dest))
            if communicator is not None:
                channel = _Channel(communicator, self.cupy.cuda.Stream(non_blocking=True))
                channels, peer = (self._sending, dest) if source == self.rank else (self._receiving, source)
                channels[peer] = channel

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, buffer: Array, op: str, group: Group) -> Request:
        check_reduction(op, buffer.dtype, "all_reduce")
        flat(buffer, "all_reduce")
        if self.shares_device(group):
            host = self._to_host(buffer)
            return _StagedRequest(self._control.all_reduce(host, op, group), [(buffer, host)])
        kind, code, pointer = self._type(buffer), _OPS[op], buffer.data.ptr
        return self._launch(
            f"all_reduce({op})",
            group,
            (buffer,),
            lambda comm, stream: comm.allReduce(pointer, pointer, buffer.size, kind, code, stream),
        )

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int], group: Group) -> Request:
        check_counts("all_gather", recv.size, counts, group)
        if self.shares_device(group):
            host = np.empty(recv.size, recv.dtype)
            return _StagedRequest(
                self._control.all_gather(self._to_host(send), host, counts, group), [(recv, host)]
            )
        source, kind = flat(send, "all_gather"), self._type(send)
        places = stretches(counts)

        def even(comm: Any, stream: int) -> None:
            comm.allGather(source.data.ptr, recv.data.ptr, counts[0], kind, stream)

        def uneven(comm: Any, stream: int) -> None:
            self._exchange(comm, stream, [source] * len(group), [flat(recv, "all_gather")[p] for p in places])

        return self._launch("all_gather", group, (send, recv), even if len(set(counts)) == 1 else uneven)

    def reduce_scatter(
        self, send: Array, recv: Array, counts: Sequence[int], op: str, group: Group
    ) -> Request:
        check_reduction(op, send.dtype, "reduce_scatter")
        check_counts("reduce_scatter", send.size, counts, group)
        if self.shares_device(group):
            host = np.empty(recv.size, recv.dtype)
            request = self._control.reduce_scatter(self._to_host(send), host, counts, op, group)
            return _StagedRequest(request, [(recv, host)])
        source, kind, code = flat(send, "reduce_scatter"), self._type(send), _OPS[op]
        places = stretches(counts)

        def even(comm: Any, stream: int) -> None:
            comm.reduceScatter(source.data.ptr, recv.data.ptr, counts[0], kind, code, stream)

        def uneven(comm: Any, stream: int) -> None:
            self._nccl.groupStart()
            for root, place in enumerate(places):
                if counts[root]:
                    pointer = source[place].data.ptr
                    comm.reduce(pointer, recv.data.ptr, counts[root], kind, code, root, stream)
            self._nccl.groupEnd()

        run = even if len(set(counts)) == 1 else uneven
        return self._launch(f"reduce_scatter({op})", group, (send, recv), run)

    def all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Request:
        check_counts("all_to_all", send.size, send_counts, group)
        check_counts("all_to_all", recv.size, recv_counts, group)
        if self.shares_device(group):
            host = np.empty(recv.size, recv.dtype)
            request = self._control.all_to_all(self._to_host(send), host, send_counts, recv_counts, group)
            return _StagedRequest(request, [(recv, host)])
        parts = [flat(send, "all_to_all")[place] for place in stretches(send_counts)]
        targets = [flat(recv, "all_to_all")[place] for place in stretches(recv_counts)]
        return self._launch(
            "all_to_all",
            group,
            (send, recv),
            lambda comm, stream: self._exchange(comm, stream, parts, targets),
        )

    def broadcast(self, buffer: Array, root: int, group: Group) -> Request:
        first = position_in(group, root, "broadcast")
        flat(buffer, "broadcast")
        if self.shares_device(group):
            host = self._to_host(buffer)
            return _StagedRequest(self._control.broadcast(host, root, group), [(buffer, host)])
        pointer, kind = buffer.data.ptr, self._type(buffer)
        return self._launch(
            "broadcast",
            group,
            (buffer,),
            lambda comm, stream: comm.bcast(pointer, buffer.size, kind, first, stream),
        )

    # -- messages ----------------------------------------------------------------------------------

    def send(self, buffer: Array, dest: int, tag: int) -> Request:
        flat(buffer, "send")
        if dest == self.rank or self.shares_device((self.rank, dest)):
            return _StagedRequest(self._control.send(self._to_host(buffer), dest, tag), [])
        return self._post(self._sending, dest, buffer, tag, f"send to rank {dest} (tag {tag})")

    def recv(self, buffer: Array, source: int, tag: int) -> Request:
        flat(buffer, "recv")
        if source == self.rank or self.shares_device((self.rank, source)):
            host = np.empty(buffer.size, buffer.dtype)
            return _StagedRequest(self._control.recv(host, source, tag), [(buffer, host)])
        request = self._post(self._receiving, source, buffer, tag, f"recv from rank {source} (tag {tag})")
        self._send_tag(source, _READY_TAG, tag)
        return request

    def progress(self) -> None:
        self._control.progress()
        self._tag_sends = [(request, buffer) for request, buffer in self._tag_sends if not request.done()]
        for dest, channel in self._sending.items():
            self._receive_tags(channel, dest, _READY_TAG)
            while tags := [tag for tag in channel.tags if channel.posted.get(tag)]:
                tag = tags[0]
                channel.tags.remove(tag)
                self._send_tag(dest, _GO_TAG, tag)
                self._launch_message(channel, tag, sending=True)
        for source, channel in self._receiving.items():
            self._receive_tags(channel, source, _GO_TAG)
            while channel.tags:
                self._launch_message(channel, channel.tags.popleft(), sending=False)

    # -- control -----------------------------------------------------------------------------------

    def barrier(self, group: Group | None = None) -> None:
        self.synchronize()
        self._control.barrier(group)

    def gather_objects(self, obj: Any, root: int = 0) -> list[Any] | None:
        return self._control.gather_objects(obj, root)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return self._control.broadcast_object(obj, root)

    def synchronize(self) -> None:
        """Make the host wait for the started collectives, with the time limit."""
        event = self._mark(self._stream)
        self.poll(lambda: bool(event.done), "collectives on the device")

    def poll(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until `ready()`, while all messages make progress. All waits of the host come here."""
        begun = time.monotonic()
        while not ready():
            self.progress()
            if time.monotonic() - begun > self._limit:
                raise RuntimeFault(
                    f"rank {self.rank}: {what} made no progress in {self._limit:g} s; look for a rank "
                    "that does not take part, or raise DISTGRAPH_TIMEOUT"
                )
            os.sched_yield()

    def abort(self, error: BaseException) -> None:
        self.stop()
        self._control.abort(error)

    def stop(self) -> None:
        """Abort the collectives on the device; no operation may follow."""
        for communicator in self._take_communicators():
            communicator.abort()

    def close(self) -> None:
        for communicator in self._take_communicators():
            communicator.destroy()

    # -- implementation ----------------------------------------------------------------------------

    def _choose_device(self, planned: int | None) -> list[tuple[str, bytes]]:
        """Make this rank's device current. Returns (machine, UUID of the device) of every rank."""
        runtime, machine = self.cupy.cuda.runtime, socket.gethostname()
        machines = self._control.broadcast_object(self._control.gather_objects(machine))
        try:
            number = machines[: self.rank].count(machine) if planned is None else planned
            self.device = number % runtime.getDeviceCount()
            self.cupy.cuda.Device(self.device).use()
            identity = bytes(runtime.getDeviceProperties(self.device)["uuid"])
        except runtime.CUDARuntimeError as error:
            raise RuntimeFault(f"rank {self.rank}: nccl transport finds no CUDA device: {error}") from error
        identities = self._control.gather_objects((machine, identity))
        return [tuple(pair) for pair in self._control.broadcast_object(identities)]

    def _communicator(self, group: Group) -> Any:
        """The communicator of a group, None where this rank is no member.

        The first member makes its id and sends it to all ranks.
        """
        unique = self._nccl.get_unique_id() if self.rank == group[0] else None
        unique = self._control.broadcast_object(unique, root=group[0])
        if self.rank not in group:
            return None
        try:
            return self._nccl.NcclCommunicator(len(group), unique, group.index(self.rank))
        except self._nccl.NcclError as error:
            raise RuntimeFault(
                f"rank {self.rank}: no NCCL communicator for group {group}: {error}"
            ) from error

    def _launch(
        self, what: str, group: Group, arrays: tuple[Array, ...], run: Callable[[Any, int], None]
    ) -> _DeviceRequest:
        """Launch a collective on the communication stream, after the present work of the current stream."""
        position_in(group, self.rank, what)
        self._control.progress()
        communicator = self._communicators.get(group)
        if communicator is None:
            raise RuntimeFault(f"{what}: group {group} has no NCCL communicator; name it in prepare() first")
        request = _DeviceRequest(self, f"{what} in group {group}", arrays)
        self._stream.wait_event(self._mark(self.cupy.cuda.get_current_stream()))
        try:
            run(communicator, self._stream.ptr)
        except self._nccl.NcclError as error:
            raise RuntimeFault(f"rank {self.rank}: {request.what}: NCCL says {error}") from error
        request.event = self._mark(self._stream)
        return request

    def _exchange(self, comm: Any, stream: int, parts: Sequence[Array], targets: Sequence[Array]) -> None:
        """Send part i to member i and receive target i from it, this rank included; skip empty ones."""
        self._nccl.groupStart()
        for peer, (part, target) in enumerate(zip(parts, targets, strict=True)):
            if part.size:
                comm.send(part.data.ptr, part.nbytes, _BYTE, peer, stream)
            if target.size:
                comm.recv(target.data.ptr, target.nbytes, _BYTE, peer, stream)
        self._nccl.groupEnd()

    def _post(
        self, channels: dict[int, _Channel], peer: int, buffer: Array, tag: int, what: str
    ) -> _DeviceRequest:
        channel = channels.get(peer)
        if channel is None:
            raise RuntimeFault(f"{what}: no NCCL communicator for this pair; name it in prepare() first")
        request = _DeviceRequest(self, what, (buffer,))
        posted_after = self._mark(self.cupy.cuda.get_current_stream())
        channel.posted.setdefault(tag, deque()).append((buffer, posted_after, request))
        self.progress()
        return request

    def _launch_message(self, channel: _Channel, tag: int, *, sending: bool) -> None:
        buffer, posted_after, request = channel.posted[tag].popleft()
        channel.stream.wait_event(posted_after)
        move = channel.communicator.send if sending else channel.communicator.recv
        if buffer.size:
            move(buffer.data.ptr, buffer.nbytes, _BYTE, 1 if sending else 0, channel.stream.ptr)
        request.event = self._mark(channel.stream)

    def _send_tag(self, peer: int, purpose: int, tag: int) -> None:
        buffer = np.array([tag], np.int64)
        self._tag_sends.append((self._control.send(buffer, peer, purpose), buffer))

    def _receive_tags(self, channel: _Channel, peer: int, purpose: int) -> None:
        """Receive the tags that the peer has sent about the channel."""
        while True:
            if channel.receive is None:
                channel.receive = self._control.recv(channel.tag_buffer, peer, purpose)
            if not channel.receive.done():
                return
            channel.tags.append(int(channel.tag_buffer[0]))
            channel.receive = None

    def _mark(self, stream: Any) -> Any:
        """An event that happens when the present work of a stream is done."""
        return stream.record(self.cupy.cuda.Event(disable_timing=True))

    def _to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """Flat copy in host memory, made after the present work of the current stream."""
        return np.asarray(self.cupy.asnumpy(array)).reshape(-1)

    def _type(self, array: Array) -> int:
        name = np.dtype(array.dtype).name
        if name not in _TYPES:
            raise RuntimeFault(
                f"nccl transport: dtype {name} is unknown to NCCL; use one of {', '.join(_TYPES)}"
            )
        return _TYPES[name]

    def _take_communicators(self) -> list[Any]:
        """All communicators, which the transport does not have from now on."""
        channels = [*self._sending.values(), *self._receiving.values()]
        all_communicators = [*self._communicators.values(), *(channel.communicator for channel in channels)]
        for owned in (self._communicators, self._sending, self._receiving):
            owned.clear()
        return all_communicators


def _load_cupy() -> tuple[Any, Any]:
    """CuPy and its NCCL module, loaded when a transport is made."""
    try:
        cupy = importlib.import_module("cupy")
        nccl = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise RuntimeFault(
            f"nccl transport: CuPy with NCCL cannot be loaded ({error}); "
            "install it with: pip install distgraph[cuda12]"
        ) from error
    if not getattr(nccl, "available", True):
        raise RuntimeFault(
            "nccl transport: CuPy finds no NCCL; install it with: pip install nvidia-nccl-cu12"
        )
    return cupy, nccl
