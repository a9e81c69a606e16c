"""The resource graph: what hardware there is and how it is connected.

A Cluster is machines with devices, NICs and switches, and full-duplex links between them. It is heterogeneous
by construction: every device carries its own type and numbers, every link its own bandwidth and latency, and
the devices of one type form a DeviceMesh (as in Paddle's distributed resource graph).

Units everywhere: bytes, seconds, FLOP/s, bytes/s. A number that the resource file does not state is None,
never a guess; code that needs it raises a ResourceError that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Final, Literal

import distgraph.ops  # noqa: F401 - declares the kinds of ops
from distgraph.errors import ResourceError
from distgraph.errors.arguments import check_argument, checked_arguments, is_integer, shown
from distgraph.ir.dtypes import NAMES
from distgraph.ir.op_registry import REGISTRY
from distgraph.plan.forecast_errors import ForecastErrors
from distgraph.resources.host_times import HostTimes
from distgraph.resources.units import Bandwidth, Origin, Seconds, Size, Work
from distgraph.serialization.fields import AfterValidator, Limits, documented

if TYPE_CHECKING:
    import networkx as nx


MOST_DEVICES: Final = 1 << 16
"""Limit on the devices of a cluster and of one machine; a device with its links takes about 2 KiB."""
MOST_DIMS: Final = 8
"""Limit on the dimensions of a torus: TPUs have 3, Fugaku has 6."""

Count = Annotated[int, Limits(gt=0, le=MOST_DEVICES, strict=True)]
Fraction = Annotated[float, Limits(ge=1e-6, le=1, strict=True)]
Error = Annotated[float, Limits(ge=0, le=1e6, strict=True)]
Half = Annotated[float, Limits(ge=0, le=1e12, strict=True)]
Exponent = Annotated[float, Limits(ge=0.5, le=8, strict=True)]
RATED_DTYPES: Final = ("f64", "f32", "tf32", "f16", "bf16", "f8", "i8")
"""Dtypes for which a device may state a compute rate. tf32 is the rate of f32 operands on tensor cores, but
products of f32 tensors are priced by the rate of f32."""
_MOST_ROWS: Final = 1 << 16


def _kind_of_op(kind: str) -> str:
    if kind.removesuffix("+=") not in REGISTRY:
        raise ValueError("a kind of op such as matmul or einsum+=")
    return kind


def one_of(names: Sequence[str]) -> str:
    """Names as an expectation: one of 'a', 'b' or 'c'."""
    *others, last = map(repr, names)
    return f"one of {', '.join(others)} or {last}"


def _rated_dtype(name: str) -> str:
    if name not in RATED_DTYPES:
        raise ValueError(one_of(RATED_DTYPES))
    return name


def _dtype(name: str) -> str:
    if name not in NAMES:
        raise ValueError(f"a dtype, one of {', '.join(NAMES)}")
    return name


Dtype = Annotated[str, AfterValidator(_rated_dtype)]
OpKind = Annotated[str, AfterValidator(_kind_of_op)]
AnyDtype = Annotated[str, AfterValidator(_dtype)]


@documented("error", "copied", "exponent", "moved")
@dataclass(frozen=True, slots=True)
class MatmulRate:
    """How much of its peak a device reaches in contractions of one dtype.

    Attributes:
        efficiency: fraction of the peak that large matrices reach.
        half: sizes of m, n and k at which the efficiency falls to one half; 0 where the size does not matter.
        error: relative error of the fit, by name of the number.
        copied: seconds for an element that is copied before or after products; None where none has to be.
        exponent: how steeply the efficiency rises with a size; see `ComputeCost`.
        moved: seconds for a byte, added to those of the FLOPs; None where a device does both at once.
    """

    efficiency: Fraction
    half: Annotated[tuple[Half, ...], Limits(min_length=3, max_length=3)]
    error: Mapping[str, Error] = field(default_factory=dict, hash=False)
    copied: Seconds | None = None
    exponent: Exponent = 1.0
    moved: Seconds | None = None


@documented(complete=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable:
    """Measured cost of one kind of op: seconds by amount of work, a launch time, or both.

    Attributes:
        bytes, flops: amounts of work in increasing order, one of them where there are `times`. None if the op
            costs the same as its class.
        times: seconds for each amount of work.
        rates, tile_rates: of a convolution, seconds per FLOP, element and row of its patches, or per FLOP,
            copied element and tile of compiled loops (see `ComputeCost`). None for other ops, and with times.
        launch: seconds to start one such op; None if it is the launch time of all ops.
        error: mean relative error of the table against the measurements.
    """

    bytes: Annotated[tuple[Size, ...], Limits(min_length=1)] | None = None
    flops: Annotated[tuple[Work, ...], Limits(min_length=1)] | None = None
    times: Annotated[tuple[Seconds, ...], Limits(min_length=1)] | None = None
    rates: Annotated[tuple[Seconds, ...], Limits(min_length=3, max_length=3)] | None = None
    tile_rates: Annotated[tuple[Seconds, ...], Limits(min_length=3, max_length=3)] | None = None
    launch: Seconds | None = None
    error: Error | None = None

    @property
    def unit(self) -> str:
        """Unit of the work: "bytes" read and written, or "flops"; "" if the table has no times."""
        return "bytes" if self.bytes else "flops" if self.flops else ""

    @property
    def work(self) -> tuple[float, ...]:
        """Amounts of work."""
        return self.bytes or self.flops or ()

    def matched(self) -> OpTable:
        """The table. Raises ValueError: its fields do not belong together."""
        given = [rates for rates in (self.rates, self.tile_rates) if rates is not None]
        if given and (self.times or self.work):
            raise ValueError("either rates or times by an amount of work")
        if not all(map(any, given)):
            raise ValueError("rates of which one is above zero")
        if self.times is None and (given or self.launch is not None) and not self.work:
            return self
        if self.times is None or (self.bytes is None) == (self.flops is None):
            raise ValueError("times by bytes or flops, one of them, a launch time, or rates of a convolution")
        if len(self.work) != len(self.times):
            raise ValueError(f"as many times as amounts of work ({len(self.work)}), not {len(self.times)}")
        if any(later <= earlier for earlier, later in pairwise(self.work)):
            raise ValueError("amounts of work in increasing order")
        if not self.times[-1]:
            raise ValueError("a time above zero for the largest amount of work")
        return self


def _rates_of_patches(ops: Mapping[str, Mapping[str, OpTable]]) -> Mapping[str, Mapping[str, OpTable]]:
    for op, tables in ops.items():
        rated = [name for name, declared in REGISTRY.items() if declared.patches is not None]
        if op not in rated and any(table.rates or table.tile_rates for table in tables.values()):
            raise ValueError(f"rates of {', '.join(rated)} alone, and times for {op}")
    return ops


_Matched = Annotated[OpTable, AfterValidator(OpTable.matched)]
OpTables = Annotated[Mapping[OpKind, Mapping[AnyDtype, _Matched]], AfterValidator(_rates_of_patches)]


@documented(complete=False)
@dataclass(frozen=True, slots=True)
class Compute:
    """Numbers of `ComputeCost` for a device, apart from its peaks. One that is not stated is None.

    Attributes:
        launch: seconds to start one op.
        memory_efficiency, lookup_efficiency: fraction of the memory bandwidth that streams and lookups reach.
        matmul: rate of contractions, by dtype.
        ops: kind of op -> dtype -> table, which takes precedence over the class of the op.
        error: relative error of the fit, by name of the number.
        slice_block: rows or columns that stay together where a matrix is cut into strided slices: the height
            of the tiles in which the device accesses its memory.
        cores: processor cores that all devices of the machine share; the other numbers are those of a device
            while all of them compute. None where every device has cores of its own.
        bound: whether equally many neighbouring devices are bound to each of these cores.
        blas: library and kernels with which matrix products were measured, see `blas_kernels`; "" if unknown.
        host: times of its host.
    """

    launch: Seconds | None = None
    memory_efficiency: Fraction | None = None
    lookup_efficiency: Fraction | None = None
    matmul: Mapping[Dtype, MatmulRate] = field(default_factory=dict, hash=False)
    ops: OpTables = field(default_factory=dict, hash=False)
    error: Mapping[str, Error] = field(default_factory=dict, hash=False)
    slice_block: Annotated[int, Limits(gt=0, le=_MOST_ROWS, strict=True)] | None = None
    cores: Annotated[float, Limits(ge=1e-3, le=_MOST_ROWS, strict=True)] | None = None
    bound: bool | None = None
    blas: str = ""
    host: HostTimes = field(default_factory=HostTimes)


@dataclass(frozen=True, slots=True)
class Device:
    """One processor that runs one rank.

    Attributes:
        index: global number of the device, its position in `Cluster.devices`.
        node: name of its node in `Cluster.graph`.
        machine, local: index of its machine, and its position there.
        type: "gpu", "xpu", "cpu", "tpu"; devices of one type form a DeviceMesh.
        model: name of the product.
        memory: bytes.
        peak, measured: FLOP/s by dtype (`RATED_DTYPES`); measured only where somebody measured.
        memory_bandwidth: bytes/s, None where not stated.
        origin: path of its description in the resource file, for messages.
        compute: efficiencies and launch time.
    """

    index: int
    node: str
    machine: int
    local: int
    type: str
    model: str
    memory: float
    peak: Mapping[str, float] = field(default_factory=dict, hash=False)
    measured: Mapping[str, float] = field(default_factory=dict, hash=False)
    memory_bandwidth: float | None = None
    origin: str = ""
    compute: Compute = field(default_factory=Compute)


@dataclass(frozen=True, slots=True)
class Link:
    """A full-duplex connection of two nodes; each direction has the whole bandwidth (bytes/s), latency in
    seconds.
    """

    source: str
    target: str
    kind: str
    bandwidth: float | None = None
    latency: float | None = None
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.source} - {self.target}"


@dataclass(frozen=True, slots=True)
class Switch:
    """A node that only forwards: NVSwitch, PCIe switch, host bridge, network switch. machine is None in the
    network.
    """

    node: str
    machine: int | None


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices in one box. nic_of[local] is the NIC that the device uses, None where it has none.

    Machines with equal `template` have the same devices and the same links inside. The machine's links are
    `Cluster.links[first_link : first_link + link_count]`, in the same order for every machine of a template.
    """

    index: int
    name: str
    devices: tuple[int, ...]
    nics: tuple[str, ...]
    nic_of: tuple[str | None, ...]
    template: int
    first_link: int
    link_count: int


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """All devices of one type, in global order."""

    type: str
    devices: tuple[Device, ...]

    @property
    def machines(self) -> tuple[int, ...]:
        """Indices of the machines that hold a device of this mesh."""
        return tuple(sorted({device.machine for device in self.devices}))

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted({device.model for device in self.devices}))


@documented()
@dataclass(frozen=True, slots=True)
class RingRate:
    """Measured numbers of one collective on a ring along an axis of the torus; see `ring_cost`.

    Attributes:
        collective: name of the collective.
        launch: seconds to start it.
        step: seconds of synchronisation of each step around the ring.
        bandwidth: bytes/s at which a ring passes its blocks on, for each axis of the torus.
    """

    collective: Literal["all_gather", "reduce_scatter", "broadcast", "reduce", "send"]
    launch: Seconds
    step: Seconds
    bandwidth: Annotated[tuple[Bandwidth, ...], Limits(min_length=1, max_length=MOST_DIMS)]


@dataclass(frozen=True, slots=True)
class Network:
    """How machines are joined.

    Attributes:
        topology: "none" (one machine), "switch" or "tree" (every NIC has one uplink), "ring" or "torus", or
            "links" (an arbitrary list, as in Paddle's JSON).
        over: "machines" if the network joins NICs, "devices" if it joins the devices themselves (a TPU pod).
        shape: shape of the ring or torus.
        members: machine or device index at each position of the ring or torus, row-major.
        rings: measured numbers of collectives along one axis, on a ring or torus of devices.
        reconfigurable: whether the devices can be wired as a torus of another shape (`with_torus_shape`), as
            by the optical switches of a TPU pod.
    """

    topology: str = "none"
    over: str = "machines"
    shape: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    rings: tuple[RingRate, ...] = ()
    reconfigurable: bool = False

    def corner_block(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Members of a block at the first corner of the torus, row-major: devices for a mesh of this shape.

        Raises:
            ResourceError: the network is no ring or torus, or the block does not fit in it.

        Example:
            >>> Network("torus", "devices", (2, 3), (0, 1, 2, 3, 4, 5)).corner_block((2, 2))
            (0, 1, 3, 4)
        """
        sizes = " x ".join(map(str, self.shape)) or self.topology
        if len(shape) != len(self.shape) or any(
            not 1 <= part <= length for part, length in zip(shape, self.shape, strict=True)
        ):
            block = " x ".join(map(str, shape))
            raise ResourceError(
                f"block {block}: does not fit in the network, which is {sizes}; give as many lengths, "
                "each from 1 to that of the torus"
            )
        positions = [0]
        for part, length in zip(shape, self.shape, strict=True):
            positions = [start * length + index for start in positions for index in range(part)]
        return tuple(self.members[position] for position in positions)


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """Measured seconds of one collective by message size, for `machines` x `devices_per_machine` devices.

    Attributes:
        collective, machines, devices_per_machine: what the table applies to.
        model: device model that the table applies to; None: any.
        sizes: bytes, ascending. times: seconds.
        groups: devices of the groups that communicated at the same time. The table applies to exactly these
            groups, and to a subset of them if no other table does. None: it applies to any groups that share
            no link.
        busy: the part of `times` for which the devices themselves are busy and cannot compute. None: all of
            `times` for devices of one machine that move messages themselves, and zero otherwise.
    """

    collective: str
    machines: int
    devices_per_machine: int
    sizes: tuple[float, ...]
    times: tuple[float, ...]
    model: str | None = None
    groups: tuple[tuple[int, ...], ...] | None = None
    busy: tuple[float, ...] | None = None


# Not slotted: `graph` and `device_meshes` are computed once on demand and need the instance dictionary.
@dataclass(frozen=True)
class Cluster:
    """Devices, machines, switches and links; see the module docstring.

    Attributes:
        name: of the cluster. source: the file it was read from.
        devices: in global order; `devices[i].index == i`.
        launch: seconds to start one collective on a rank, independent of its size (None: not stated).
        measured: tables that take precedence over the cost model for their collective and shape.
        origins: where the numbers come from, by path in the resource file; see `origin_of`.
        errors: of forecasts with these numbers, from measured runs; None without a calibration.
    """

    name: str
    source: str
    machines: tuple[Machine, ...]
    devices: tuple[Device, ...]
    switches: tuple[Switch, ...]
    links: tuple[Link, ...]
    network: Network = field(default_factory=Network)
    launch: float | None = None
    measured: tuple[MeasuredTable, ...] = ()
    origins: Mapping[str, Origin] = field(default_factory=dict, hash=False)
    errors: ForecastErrors | None = None

    @cached_property
    def kinds_between(self) -> frozenset[str]:
        """Kinds of links that lead to NICs, to the network or to another machine."""
        machine_of = {device.node: device.machine for device in self.devices}
        machine_of |= {s.node: s.machine for s in self.switches if s.machine is not None}
        ends = ((link.kind, machine_of.get(link.source), machine_of.get(link.target)) for link in self.links)
        return frozenset(kind for kind, source, target in ends if source is None or source != target)

    def origin_of(self, path: str) -> Origin | None:
        """Where a number comes from, as the file states it for the number or for the entry that holds it.

        Args:
            path: in the resource file, such as "machines[0].devices.compute.launch": the `origin` of a device
                or a link, a dot, and the name of the number.
        """
        while path not in self.origins and "." in path:
            path = path.rpartition(".")[0]
        return self.origins.get(path)

    @cached_property
    def device_meshes(self) -> tuple[DeviceMesh, ...]:
        """One mesh per device type, in order of first appearance."""
        by_type: dict[str, list[Device]] = {}
        for device in self.devices:
            by_type.setdefault(device.type, []).append(device)
        return tuple(DeviceMesh(kind, tuple(devices)) for kind, devices in by_type.items())

    @cached_property
    def graph(self) -> nx.Graph[str]:
        """Nodes: devices (role "device"), NICs ("nic"), switches ("switch"). Edges: links, with bandwidth and
        latency.
        """
        graph: nx.Graph[str] = import_module("networkx").Graph(name=self.name)
        for device in self.devices:
            graph.add_node(
                device.node, role="device", index=device.index, machine=device.machine, type=device.type,
                model=device.model, memory=device.memory, memory_bandwidth=device.memory_bandwidth,
                peak=dict(device.peak), measured=dict(device.measured),
            )  # fmt: skip
        for machine in self.machines:
            graph.add_nodes_from(machine.nics, role="nic", machine=machine.index)
        for switch in self.switches:
            graph.add_node(switch.node, role="switch", machine=switch.machine)
        for link in self.links:
            graph.add_edge(
                link.source, link.target, kind=link.kind, bandwidth=link.bandwidth, latency=link.latency
            )
        return graph

    def machine_of(self, device: int) -> Machine:
        """Machine that holds device number `device`. Raises ResourceError when there is no such device."""
        return self.machines[self._device(device).machine]

    def _device(self, number: int) -> Device:
        if not is_integer(number) or not 0 <= number < len(self.devices):
            raise ResourceError(
                f"device {shown(number)} is not in cluster {self.name}, which has devices 0 to "
                f"{len(self.devices) - 1}; use a smaller mesh or another resource file"
            )
        return self.devices[number]

    @checked_arguments(ResourceError)
    def check_group(self, group: Iterable[int]) -> tuple[int, ...]:
        """The group as a tuple.

        Raises:
            ResourceError: a device number that the cluster does not have, or one that appears twice.
        """
        members = tuple(group)
        for index in members:
            self._device(index)
        if len(set(members)) != len(members):
            repeated = next(index for index in members if members.count(index) > 1)
            raise ResourceError(f"group {members}: device {repeated} appears twice; name each device once")
        return members

    def flops(self, device: int, dtype: str) -> float:
        """Measured FLOP/s of the device if the file states it, else its peak.

        Raises:
            ResourceError: there is no such device, or the file states neither.
        """
        hardware = self._device(device)
        check_argument(f"cluster {self.name}", "dtype", dtype, str, ResourceError)
        rate = hardware.measured.get(dtype, hardware.peak.get(dtype))
        if rate is None:
            stated = ", ".join(sorted({*hardware.peak, *hardware.measured})) or "no dtype"
            raise ResourceError(
                f"{self.source}: {hardware.origin}.peak.{dtype}: missing, {hardware.model} states {stated}; "
                f'add a compute rate such as {dtype}: "125 TFLOP/s", or run distgraph profile on that machine'
            )
        return rate
