"""Ranks with a GPU each: the NCCL transport (`cupy.cuda.nccl`), CuPy arrays.

Another transport, MPI between processes, is used for bootstrap and control only: unique ids, small objects,
failures, and the agreement on messages. NCCL refuses groups in which two members share a GPU, and other ranks
of the job may have no GPU: `reaches` says which groups can use this transport. `StagedTransport` moves the
data of others through host memory.

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
Each is made by its members alone: the first of them in that order that is not made yet has all its members.
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
from distgraph.runtime.transport.group_objects import broadcast_in_group, gather_in_group
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
    """One rank with a GPU; see `distgraph.runtime.transport.transport.Transport`.

    Making one is collective over the ranks with a GPU. It uses the CUDA device that is planned, else that
    with the position of this rank among those of its machine as its number, modulo the number of devices of
    the machine, and makes it current.

    Args:
        control: transport of all ranks for host data.
        members: ranks of the job with a GPU; by default all.
        limit: seconds without progress before a wait gives up; default DISTGRAPH_TIMEOUT or 60.
        serves_process: it is the only transport of the process and lives as long as the process.
        device: number of the CUDA device that a plan gives to this rank; None where no plan does.

    Attributes:
        device: number of the CUDA device.
        members: the ranks with a GPU.

    Raises:
        RuntimeFault: CuPy is not installed, has no NCCL, or finds no device.
    """

    def __init__(
        self,
        control: Transport,
        members: Group | None = None,
        *,
        limit: float | None = None,
        serves_process: bool = False,
        device: int | None = None,
    ) -> None:
        self.serves_process, self.device = serves_process, 0
        self.cupy, self._nccl = _load_cupy()
        self._control, self._limit = control, time_limit(limit)
        self.members: Group = tuple(range(control.size)) if members is None else members
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

    def reaches(self, group: Iterable[int]) -> bool:
        """Whether all the ranks have a GPU of their own, so that they can exchange data by NCCL."""
        used = [self._devices.get(rank) for rank in group]
        return None not in used and len(set(used)) == len(used)

    def prepare(self, groups: Iterable[Group], pairs: Iterable[tuple[int, int]] = ()) -> None:
        """Make the communicators that the programs of all members need. Collective over the members.

        Args:
            groups: groups that this rank will use for collectives; those that it does not reach are left out.
            pairs: (source, destination) of the messages that it will send or receive, likewise.
        """
        requests = gather_in_group(self._control, (set(groups), set(pairs)), self.members)
        all_groups, all_pairs = (sorted(set().union(*sets)) for sets in zip(*requests.values(), strict=True))
        for group in filter(self.reaches, all_groups):
            if self.rank in group and group not in self._prepared:
                self._prepared.add(group)
                self._communicators[group] = self._communicator(group)
        for source, dest in filter(self.reaches, all_pairs):
            if self.rank in (source, dest) and ((source, dest), "message") not in self._prepared:
                self._prepared.add(((source, dest), "message"))
                communicator = self._communicator((source, dest))
                channel = _Channel(communicator, self.cupy.cuda.Stream(non_blocking=True))
                channels, peer = (self._sending, dest) if source == self.rank else (self._receiving, source)
                channels[peer] = channel

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, buffer: Array, op: str, group: Group) -> Request:
        check_reduction(op, buffer.dtype, "all_reduce")
        flat(buffer, "all_reduce")
        kind, code, pointer = self._type(buffer), _OPS[op], buffer.data.ptr
        return self._launch(
            f"all_reduce({op})",
            group,
            (buffer,),
            lambda comm, stream: comm.allReduce(pointer, pointer, buffer.size, kind, code, stream),
        )

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int], group: Group) -> Request:
        check_counts("all_gather", recv.size, counts, group)
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
        return self._post(self._sending, dest, buffer, tag, f"send to rank {dest} (tag {tag})")

    def recv(self, buffer: Array, source: int, tag: int) -> Request:
        flat(buffer, "recv")
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

    def _choose_device(self, planned: int | None) -> dict[int, tuple[str, bytes]]:
        """Make this rank's device current. Returns (machine, UUID of the device) of every member."""
        runtime, machine = self.cupy.cuda.runtime, socket.gethostname()
        machines = gather_in_group(self._control, machine, self.members)
        before = [rank for rank in self.members if rank < self.rank and machines[rank] == machine]
        try:
            number = len(before) if planned is None else planned
            self.device = number % runtime.getDeviceCount()
            self.cupy.cuda.Device(self.device).use()
            identity = bytes(runtime.getDeviceProperties(self.device)["uuid"])
        except runtime.CUDARuntimeError as error:
            raise RuntimeFault(f"rank {self.rank}: nccl transport finds no CUDA device: {error}") from error
        return gather_in_group(self._control, (machine, identity), self.members)

    def _communicator(self, group: Group) -> Any:
        """The communicator of a group, whose id the first member makes. Collective over the group."""
        unique = self._nccl.get_unique_id() if self.rank == group[0] else None
        unique = broadcast_in_group(self._control, unique, group[0], group)
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
