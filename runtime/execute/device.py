"""The device of a rank: the host with NumPy arrays, a GPU with CuPy arrays, or one of a registered kind.

A `Device` holds the array namespace of its rank's program, its transport, and the copies between the host
and the memory of the device. The engine uses devices only by this interface. The ranks of a job may have
devices of different kinds; ranks without a GPU use the transport for host arrays as it is.

On a GPU every rank computes on a stream of its own. Feeds are copied asynchronously from pinned memory;
collectives overlap the computation (NCCL on a stream of its own); outputs are copied back at the end of the
step, where the host waits once. The stream is synchronised with the CUDA default stream, so that work which a
library launches there cannot overtake the program.

Transports of ranks with GPUs: NCCL between processes, and between threads where there are several GPUs.
Threads that share one GPU copy from device to device by the in-process transport. Data of processes that
share a GPU, and of ranks with and without a GPU, are staged through the host (`transport/staging.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import numpy as np

from distgraph.errors import ResourceError, RuntimeFault
from distgraph.ir.range_notation import spans
from distgraph.passes.partition import RankProgram
from distgraph.plan.device_types import DEVICE_TYPES, register_device_type
from distgraph.plan.strategy import DEVICES
from distgraph.runtime.execute.cuda_graphs import CudaGraphs
from distgraph.runtime.program.captured_parts import Captures
from distgraph.runtime.program.storage import is_started
from distgraph.runtime.transport.cuda_copies import CudaCopies
from distgraph.runtime.transport.inprocess import InProcessTransport
from distgraph.runtime.transport.mpi import MpiTransport
from distgraph.runtime.transport.nccl import NcclTransport
from distgraph.runtime.transport.staging import StagedTransport
from distgraph.runtime.transport.transport import Array, Group, Transport, register_arrays

Inlet = Callable[[np.ndarray], Array]
"""Host block -> its copy in the memory of the device, valid until the next call."""

_BF16_MAJOR = 14  # major version of the first CuPy with bfloat16


class Device(Protocol):
    """The device of one rank.

    Attributes:
        xp: array namespace: NumPy, or a module with the functions of NumPy for arrays of the device
            (`xp.ndarray`).
        transport: transport to all other ranks for arrays of `xp`; None where there is one rank. Of a device
            with memory of its own it is a `StagedTransport`, alone or around a direct one between devices.
    """

    @property
    def xp(self) -> Any: ...

    @property
    def transport(self) -> Transport | None: ...

    def working(self) -> AbstractContextManager[None]:
        """Context for all computation of the rank, entered on the rank's own thread."""

    def prepare(self, program: RankProgram | None) -> None:
        """Prepare the communicators that a program needs. Collective; None on a rank without a program.

        Raises:
            RuntimeFault: the program has a dtype that the device does not have.
        """

    def asarray(self, block: np.ndarray) -> Array:
        """A copy of a host array in the memory of the device."""

    def to_host(self, block: Array) -> np.ndarray:
        """A copy of a device array in host memory, after waiting for its computation."""

    def inlet(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Inlet:
        """A function that copies host blocks of one shape and dtype to the device, one block a step."""

    def fetch(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """End a step: copy outputs (arrays, or lists of them) to host memory, with one wait for all.

        Raises:
            RuntimeFault: another rank failed, or the step made no progress for the transport's time limit.
        """

    def close(self) -> None:
        """Release the resources of the device; called by every rank of a world that ends."""


@runtime_checkable
class CapturingDevice(Protocol):
    """A `Device` that can repeat parts of tasks by one call, for `Strategy(cuda_graphs=True)`."""

    def graphs(self) -> Captures:
        """The graphs of the rank, the same at every call; called within `working`."""


def captures_of(device: Device) -> Captures | None:
    """The graphs of a device; None if it has none, such as the host."""
    return device.graphs() if isinstance(device, CapturingDevice) else None


class Host:
    """The host as a device; see `Device`."""

    xp: Any = np

    def __init__(self, transport: Transport | None) -> None:
        self._transport = transport

    @property
    def transport(self) -> Transport | None:
        return self._transport

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self, program: RankProgram | None) -> None:
        return None

    def asarray(self, block: np.ndarray) -> Array:
        return block

    def to_host(self, block: Array) -> np.ndarray:
        return np.asarray(block)

    def inlet(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Inlet:
        return _unchanged

    def fetch(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(outputs)

    def close(self) -> None:
        return None


def _unchanged(block: np.ndarray) -> Array:
    return block


class Gpu:
    """A GPU, or a share of one; see `Device`. Making one is collective over `ranks`.

    Args:
        control: transport of all ranks for host arrays; None where there is one rank.
        ranks: those with a GPU.

    Raises:
        ResourceError: CuPy is missing, or finds no GPU.
        RuntimeFault: there is no NCCL; the ranks with GPUs are not those of another engine of this process.
    """

    def __init__(self, control: Transport | None, ranks: Group) -> None:
        self.xp: Any = array_namespace("gpu")
        self._cuda = self.xp.cuda
        self._pinned: Any = import_module("cupyx").empty_pinned
        self.number = 0
        self._nccl: NcclTransport | None = None
        self._transport = None if control is None else self._connect(control, ranks)
        with self._cuda.Device(self.number):
            self.stream = self._cuda.Stream()
        self._threads = isinstance(control, InProcessTransport)
        self._graphs: CudaGraphs | None = None

    def _connect(self, control: Transport, ranks: Group) -> Transport:
        """The transport to all other ranks; sets the number of the GPU."""
        copies, members = CudaCopies(self.xp, self._pinned), frozenset(ranks)
        if isinstance(control, InProcessTransport) and _count(self.xp) == 1:
            control.order_by(self)  # threads on one GPU copy from device to device
            if len(members) == control.size:
                return control
            return StagedTransport(control, copies, control, members.issuperset)
        if len(ranks) == 1:
            self.number = (_planned(control) or 0) % _count(self.xp)
            return StagedTransport(control, copies)
        process = isinstance(control, MpiTransport)
        nccl = _nccl_of_process(control, ranks) if process else NcclTransport(control, ranks)
        self._nccl, self.number = nccl, nccl.device
        return StagedTransport(control, copies, nccl, nccl.reaches)

    @property
    def transport(self) -> Transport | None:
        return self._transport

    @contextmanager
    def working(self) -> Iterator[None]:
        with self._cuda.Device(self.number), self.stream:
            try:
                yield
            except BaseException:
                if self._nccl is not None:
                    self._nccl.stop()  # a collective that other ranks do not join would never end
                raise

    def prepare(self, program: RankProgram | None) -> None:
        dtypes = set() if program is None else {dtype for _, dtype in program.types.values()}
        if "bf16" in dtypes and int(self.xp.__version__.partition(".")[0]) < _BF16_MAJOR:
            raise RuntimeFault(
                f"cupy {self.xp.__version__} has no bfloat16 but the program uses it; install cupy "
                f"{_BF16_MAJOR} or newer, or use float16"
            )
        if self._nccl is not None:
            groups, pairs = communication(program)
            self._nccl.prepare(filter(self._nccl.reaches, groups), filter(self._nccl.reaches, pairs))

    def asarray(self, block: np.ndarray) -> Array:
        return self.xp.asarray(block)

    def to_host(self, block: Array) -> np.ndarray:
        host: np.ndarray = self.xp.asnumpy(block)
        return host

    def inlet(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Inlet:
        array = self.xp.empty(tuple(shape), dtype)
        if not array.size:
            return lambda block: array
        staged = self._pinned(tuple(shape), dtype)

        def put(block: np.ndarray) -> Array:
            np.copyto(staged, block)  # `fetch` of the step before has waited for the copy from it
            array.set(staged, stream=self.stream)
            return array

        return put

    def fetch(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        start = self._start_copy
        host_outputs = {
            label: [start(block) for block in output] if isinstance(output, list) else start(output)
            for label, output in outputs.items()
        }
        end = self.mark()
        if self._transport is None or (self._threads and self._nccl is None):
            end.synchronize()
        else:  # the time limit ends the wait where another rank has died
            self._transport.poll(lambda: bool(end.done), "step on the device")
        return host_outputs

    def _start_copy(self, block: Any) -> np.ndarray:
        if not isinstance(block, self.xp.ndarray):  # a number of the feeds
            return np.asarray(block)
        if not block.size:
            return np.empty(block.shape, block.dtype)
        host: np.ndarray = self._pinned(block.shape, block.dtype)
        self.xp.asnumpy(block, stream=self.stream, out=host, blocking=False)
        return host

    def graphs(self) -> CudaGraphs:
        """See `CapturingDevice`."""
        if self._graphs is None:
            self._graphs = CudaGraphs(self._cuda)
        return self._graphs

    def mark(self) -> Any:
        """See `Order`."""
        event = self._cuda.Event(disable_timing=True)
        event.record(self._cuda.get_current_stream())
        return event

    def after(self, mark: Any) -> None:
        """See `Order`."""
        self._cuda.get_current_stream().wait_event(mark)

    def close(self) -> None:
        self._graphs = None
        if self._nccl is not None and not self._nccl.serves_process:
            self._nccl.close()


@dataclass(frozen=True, slots=True)
class DeviceType:
    """A type of device.

    Attributes:
        take: (transport of all ranks for host arrays, or None where there is one rank; the ranks that have
            devices of this type, ascending) -> the device of the calling rank. Collective over these ranks.
        namespace: -> its array namespace; raises ResourceError where it cannot be used here.
    """

    take: Callable[[Transport | None, Group], Device]
    namespace: Callable[[], Any]


_DEVICE_TYPES: dict[str, DeviceType] = {}


def register_device(
    name: str, take: Callable[[Transport | None, Group], Device], namespace: Callable[[], Any]
) -> None:
    """Declare a type of device (`DeviceType`): for `Strategy(device=name)`, for the `device_type` of meshes
    and for devices of resource files.

    Raises:
        ResourceError: the name is taken.
    """
    if name in _DEVICE_TYPES:
        raise ResourceError(f"device {name} is declared twice; choose another name")
    _DEVICE_TYPES[name] = DeviceType(take, namespace)
    if name not in DEVICES:
        DEVICES.append(name)
    if name not in DEVICE_TYPES:
        register_device_type(name)


def take_device(types: Sequence[str], rank: int, control: Transport | None) -> Device:
    """The device of a rank. Collective over the ranks of `control`.

    Args:
        types: type of the device of every rank: "cpu", "gpu" or a registered one.
        rank: the calling rank.
        control: transport of the ranks for host arrays; None where there is one rank.

    Raises:
        ResourceError: CuPy is missing, or finds no GPU.
        RuntimeFault: there is no NCCL, or it fails.
    """
    ranks = tuple(each for each, kind in enumerate(types) if kind == types[rank])
    device = _DEVICE_TYPES[types[rank]].take(control, ranks)
    register_arrays(device.xp)
    return device


def array_namespace(device: str) -> Any:
    """NumPy for "cpu", CuPy for "gpu".

    Raises:
        ResourceError: CuPy is missing, or finds no GPU.
    """
    return _DEVICE_TYPES[device].namespace()


def missing_device(device: str) -> str:
    """Why a type of device cannot be used here; empty if it can."""
    try:
        array_namespace(device)
    except ResourceError as error:
        return str(error)
    return ""


def _cupy() -> Any:
    """CuPy, where it finds a GPU."""
    try:
        cupy = import_module("cupy")
    except ImportError as error:
        raise ResourceError(
            f'device "gpu" needs CuPy but it cannot be imported ({error}); install it with: pip install '
            "distgraph[cuda12] (or cuda13), or run the rank on another device"
        ) from error
    try:
        devices = _count(cupy)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ResourceError(
            f'device "gpu" needs a CUDA device but CuPy finds none ({error}); look at nvidia-smi and '
            "CUDA_VISIBLE_DEVICES, or run the rank on another device"
        ) from error
    if not devices:
        raise ResourceError(
            'device "gpu" needs a CUDA device but none is visible; look at CUDA_VISIBLE_DEVICES, or run the '
            "rank on another device"
        )
    return cupy


def communication(program: RankProgram | None) -> tuple[set[Group], set[tuple[int, int]]]:
    """Groups of a rank's collectives, and (source, destination) of the messages that it sends or receives."""
    groups: set[Group] = set()
    pairs: set[tuple[int, int]] = set()
    if program is None:
        return groups, pairs
    for local in program.ops:
        if local.mode in ("send", "recv", "exchange"):
            pairs |= {(program.rank, peer) for peer, _ in local.attrs.get("sends", ())}
            pairs |= {(peer, program.rank) for peer, _ in local.attrs.get("recvs", ())}
        elif is_started(local):
            groups.add(tuple(local.attrs["group"]))
    return groups, {(source, dest) for source, dest in pairs if source != dest}


def _count(cupy: Any) -> int:
    return int(cupy.cuda.runtime.getDeviceCount())


def _planned(control: Transport) -> int | None:
    """Number of the GPU that a plan gives to the rank of this process; None where no plan does."""
    if not isinstance(control, MpiTransport):
        return None
    placed = control.arrangement
    return placed.share[0] if placed.share is not None and placed.device_type == "gpu" else None


_NCCL: dict[Transport, NcclTransport] = {}
"""Transport of a process for host arrays -> its NCCL transport, which all engines share: two of them would
receive each other's messages."""


def _nccl_of_process(control: Transport, ranks: Group) -> NcclTransport:
    """The NCCL transport of this process.

    Raises:
        RuntimeFault: an engine of this process has made it for other ranks.
    """
    if control not in _NCCL:
        _NCCL[control] = NcclTransport(control, ranks, serves_process=True, device=_planned(control))
    nccl = _NCCL[control]
    if nccl.members != ranks:
        raise RuntimeFault(
            f"ranks {spans(ranks)} are to compute on GPUs but in another engine of this job ranks "
            f"{spans(nccl.members)} do; give the ranks the same devices in all engines, or run two jobs"
        )
    return nccl


def _host(control: Transport | None, ranks: Group) -> Host:
    return Host(control)


register_device("cpu", _host, lambda: np)
register_device("gpu", Gpu, _cupy)
