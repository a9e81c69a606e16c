"""Enough of CuPy and its NCCL to run programs on threads without a GPU: the logic, not the hardware.

Arrays, streams and events are in `fake_device`; calls of NCCL meet in a table.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import queue
import sys
import threading
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.special
from support.devices import collective_cases as cases
from support.devices import fake_capture, fake_device

from distgraph.kernels.cuda.elementwise_kernel import compiled
from distgraph.runtime.transport import nccl as nccl_transport

DTYPES = {
    0: np.int8, 1: np.uint8, 2: np.int32, 3: np.uint32, 4: np.int64, 5: np.uint64,
    6: np.float16, 7: np.float32, 8: np.float64, 9: ml_dtypes.bfloat16,
}  # fmt: skip
OPS = {0: "sum", 1: "prod", 2: "max", 3: "min"}
_LIMIT = 100.0  # seconds after which a call that nobody meets fails: more than a busy machine takes


def memory(pointer: int, count: int, datatype: int) -> np.ndarray[Any, Any]:
    kind = np.dtype(DTYPES[datatype])
    if not count:
        return np.empty(0, kind)
    return np.frombuffer((ctypes.c_uint8 * (count * kind.itemsize)).from_address(pointer), kind)


class Network:
    """Where the communicators of one job meet."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ids = itertools.count()
        self._wires: dict[Any, queue.Queue[Any]] = {}
        self.barriers: dict[Any, threading.Barrier] = {}
        self.tables: dict[Any, dict[int, Any]] = {}
        self.calls: list[str] = []

    def meet(self, key: Any, size: int, rank: int, item: Any) -> list[Any]:
        with self.lock:
            barrier = self.barriers.setdefault(key, threading.Barrier(size, timeout=_LIMIT))
            table = self.tables.setdefault(key, {})
            table[rank] = item
        barrier.wait()
        return [table[i] for i in range(size)]

    def wire(self, unique: int, source: int, target: int) -> queue.Queue[Any]:
        """What one rank sent another; whichever of the two threads asks first makes it."""
        with self.lock:
            return self._wires.setdefault((unique, source, target), queue.Queue())


def make(  # noqa: C901 - one small class each
    network: Network, devices: int, hardware: fake_device.Hardware | None = None
) -> tuple[Any, Any]:
    """A `cupy` and a `cupy.cuda.nccl` for ranks on a machine with that many devices."""
    local = threading.local()
    hardware = hardware or fake_device.Hardware(devices)

    class Communicator:
        def __init__(self, size: int, unique: int, rank: int) -> None:
            self.size, self.unique, self.rank, self.calls = size, unique, rank, 0
            network.meet(("init", unique), size, rank, None)

        def _reduce(self, sendbuf: int, count: int, kind: int, op: int) -> np.ndarray[Any, Any]:
            self.calls += 1
            mine = memory(sendbuf, count, kind).copy()
            return cases.fold(OPS[op], network.meet((self.unique, self.calls), self.size, self.rank, mine))

        def allReduce(self, sendbuf: int, recvbuf: int, count: int, kind: int, op: int, stream: int) -> None:
            network.calls.append("allReduce")
            memory(recvbuf, count, kind)[...] = self._reduce(sendbuf, count, kind, op)

        def reduce(
            self, sendbuf: int, recvbuf: int, count: int, kind: int, op: int, root: int, stream: int
        ) -> None:
            network.calls.append("reduce")
            total = self._reduce(sendbuf, count, kind, op)
            if root == self.rank:
                memory(recvbuf, count, kind)[...] = total

        def reduceScatter(
            self, sendbuf: int, recvbuf: int, count: int, kind: int, op: int, stream: int
        ) -> None:
            network.calls.append("reduceScatter")
            total = self._reduce(sendbuf, count * self.size, kind, op)
            memory(recvbuf, count, kind)[...] = total[count * self.rank : count * (self.rank + 1)]

        def allGather(self, sendbuf: int, recvbuf: int, count: int, kind: int, stream: int) -> None:
            network.calls.append("allGather")
            self.calls += 1
            mine = memory(sendbuf, count, kind).copy()
            parts = network.meet((self.unique, self.calls), self.size, self.rank, mine)
            memory(recvbuf, count * self.size, kind)[...] = np.concatenate(parts)

        def bcast(self, buffer: int, count: int, kind: int, root: int, stream: int) -> None:
            self.calls += 1
            mine = memory(buffer, count, kind)
            mine[...] = network.meet((self.unique, self.calls), self.size, self.rank, mine.copy())[root]

        def send(self, buffer: int, count: int, kind: int, peer: int, stream: int) -> None:
            network.wire(self.unique, self.rank, peer).put(memory(buffer, count, kind).copy())

        def recv(self, buffer: int, count: int, kind: int, peer: int, stream: int) -> None:
            def take() -> None:
                sent = network.wire(self.unique, peer, self.rank).get(timeout=_LIMIT)
                memory(buffer, count, kind)[...] = sent

            if getattr(local, "group", None) is None:
                take()
            else:
                local.group.append(take)

        def abort(self) -> None:
            network.calls.append("abort")

        def destroy(self) -> None:
            network.calls.append("destroy")

    class Device:
        def __init__(self, number: int) -> None:
            assert 0 <= number < devices

        def use(self) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    def group_end() -> None:
        waiting, local.group = local.group, None
        for take in waiting:
            take()

    runtime = SimpleNamespace(
        getDeviceCount=lambda: devices,
        getDeviceProperties=lambda number: {"uuid": bytes([number] * 16)},
        CUDARuntimeError=OSError,
    )
    cuda = SimpleNamespace(
        runtime=runtime,
        Device=Device,
        Stream=functools.partial(fake_device.Stream, hardware),
        Event=functools.partial(fake_device.Event, hardware),
        get_current_stream=lambda: hardware.stream,
        MemoryPool=fake_capture.MemoryPool,
        using_allocator=hardware.captures.using_allocator,
        nccl=None,
    )
    nccl = SimpleNamespace(
        available=True,
        get_unique_id=lambda: next(network.ids),
        NcclCommunicator=Communicator,
        NcclError=OSError,
        groupStart=lambda: setattr(local, "group", []),
        groupEnd=group_end,
    )
    _, cupy = fake_device.namespace(hardware)
    cuda.nccl, cupy.cuda = nccl, cuda
    cupy.ElementwiseKernel = fake_device.elementwise(cupy)
    return cupy, nccl


def install(patch: pytest.MonkeyPatch, devices: int) -> fake_device.Hardware:
    """Put a machine with so many GPUs where `import cupy` looks."""
    hardware = fake_device.Hardware(devices, strict=True)
    cupy, nccl = make(Network(), devices, hardware)
    special = SimpleNamespace(
        **{name: on_device(cupy, getattr(scipy.special, name)) for name in ("erf", "ndtri", "expit", "xlogy")}
    )
    for name, module in {
        "cupy": cupy,
        "cupy.cuda": cupy.cuda,
        "cupy.cuda.nccl": nccl,
        "cupyx": SimpleNamespace(empty_pinned=np.empty, scatter_add=cupy.scatter_add),
        "cupyx.scipy": SimpleNamespace(special=special),
        "cupyx.scipy.special": special,
    }.items():
        patch.setitem(sys.modules, name, module)
    patch.setattr(nccl_transport, "_load_cupy", lambda: (cupy, nccl))
    compiled.cache_clear()  # kernels belong to the CuPy that compiled them
    return hardware


def on_device(cupy: Any, function: Any) -> Any:
    def run(x: Any, out: Any = None) -> Any:
        result = cupy.call(function, (x,), {})
        if out is None:
            return result
        out[...] = result
        return out

    return run
