"""The schema of resource files as pydantic models, and the check of a document against it."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    model_validator,
)

from distgraph.errors import ResourceError
from distgraph.resources.cluster import MOST_DIMS, Compute, Dtype, RingRate, one_of
from distgraph.resources.collective_algorithms import priced_kinds
from distgraph.resources.units import Bandwidth, ComputeRate, Seconds, Size
from distgraph.serialization.documents import Entry, refuse, validate

MOST_DEVICES: Final = 1 << 16
"""Limit on the devices of a cluster and of one machine; a device with its links takes about 2 KiB."""
MOST_LEVELS: Final = 16
"""Limit on the levels of switches: a binary tree over `MOST_DEVICES` has as many."""
_MOST_LANES: Final = 1_000


Count = Annotated[int, Field(gt=0, le=MOST_DEVICES)]
Shape = Annotated[list[Count], Field(min_length=1, max_length=MOST_DIMS)]


def _collective(name: str) -> str:
    if name not in priced_kinds():
        raise ValueError(one_of(priced_kinds()))
    return name


DEVICE_TYPES = ["gpu", "xpu", "cpu", "tpu", "npu"]
"""Types of devices that a resource file may name; `register_device_type` adds to them."""


def register_device_type(name: str) -> None:
    """Declare a type of device for resource files.

    Raises:
        ResourceError: there is one of this name.
    """
    if name in DEVICE_TYPES:
        raise ResourceError(f"device type {name} is declared twice; choose another name")
    DEVICE_TYPES.append(name)


def _device_type(name: str) -> str:
    if name not in DEVICE_TYPES:
        raise ValueError(one_of(DEVICE_TYPES))
    return name


Collective = Annotated[str, AfterValidator(_collective)]
DeviceType = Annotated[str, AfterValidator(_device_type)]


class DeviceEntry(Entry):
    """`count` equal devices of a machine."""

    count: Count = 1
    type: DeviceType
    model: str
    memory: Size
    memory_bandwidth: Bandwidth | None = None
    peak: dict[Dtype, ComputeRate] = Field(default_factory=dict)
    measured: dict[Dtype, ComputeRate] = Field(default_factory=dict)
    compute: Compute = Field(default_factory=Compute)


class LinkEntry(Entry):
    """Numbers of one class of links; bandwidth of each direction."""

    kind: str = "link"
    bandwidth: Bandwidth | None = None
    latency: Seconds | None = None


class Level(Entry):
    """One level of a tree: `children` nodes under each switch, whose uplink is their sum over
    `oversubscription`.
    """

    children: Count
    oversubscription: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    latency: Seconds | None = None


Levels = Annotated[list[Level], Field(max_length=MOST_LEVELS)]


class InsideEntry(LinkEntry):
    """How the devices of a machine are joined."""

    topology: Literal["full", "ring", "torus", "tree", "pcie_pairs", "links"]
    shape: Shape | None = None
    levels: Levels | None = None
    links: list[list[int]] | None = None
    host_bandwidth: Bandwidth | None = None
    host: LinkEntry | None = None

    @model_validator(mode="after")
    def _complete(self) -> InsideEntry:
        needs = {"torus": "shape", "tree": "levels", "links": "links"}
        _check_topology_fields(self.topology, needs, self)
        if self.host is not None and self.topology != "links":
            raise ValueError(f"host only with topology links, not {self.topology}")
        for pair in self.links or ():
            if (
                len(pair) not in (2, 3)
                or min(pair) < 0
                or (len(pair) == 3 and not 1 <= pair[2] <= _MOST_LANES)
            ):
                raise ValueError(
                    f"links as [device, device] or [device, device, lanes], of 1 to {_MOST_LANES} lanes"
                )
        return self


class NicEntry(LinkEntry):
    """`count` network cards; bandwidth and latency are those of the cable; attach is the way from a device to
    it.
    """

    count: Count = 1
    attach: LinkEntry


class NetworkEntry(LinkEntry):
    """How machines (their NICs), or the devices of all machines, are joined."""

    topology: Literal["switch", "tree", "ring", "torus"]
    over: Literal["machines", "devices"] = "machines"
    shape: Shape | None = None
    block: Shape | None = None
    levels: Levels | None = None
    rings: list[RingRate] = Field(default_factory=list)
    reconfigurable: bool = False

    @model_validator(mode="after")
    def _complete(self) -> NetworkEntry:
        _check_topology_fields(self.topology, {"torus": "shape", "tree": "levels"}, self)
        if self.over == "devices" and self.topology not in ("ring", "torus"):
            raise ValueError(f'topology ring or torus with over "devices", not {self.topology}')
        if self.over == "machines" and (self.bandwidth is not None or self.latency is not None):
            raise ValueError(
                "bandwidth and latency of the cables under nics (of switch levels: levels[].latency)"
            )
        if self.block is not None and (self.over != "devices" or len(self.block) != len(self.shape or ())):
            raise ValueError('block with as many numbers as shape, and only with over "devices"')
        if self.reconfigurable and (self.topology, self.over) != ("torus", "devices"):
            raise ValueError('reconfigurable only with topology torus and over "devices"')
        self._check_rings()
        return self

    def _check_rings(self) -> None:
        if self.rings and self.over != "devices":
            raise ValueError('rings only with over "devices"')
        names = [ring.collective for ring in self.rings]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ValueError(f"rings with one entry for each collective, but {repeated} has two")
        axes = len(self.shape or (1,))
        for ring in self.rings:
            if len(ring.bandwidth) != axes:
                raise ValueError(
                    f"rings with a bandwidth for each of the {axes} axes, but {ring.collective} has "
                    f"{len(ring.bandwidth)}"
                )


class MachineEntry(Entry):
    """`count` equal machines."""

    count: Count = 1
    name: str | None = None
    devices: Annotated[list[DeviceEntry], Field(min_length=1)]
    inside: InsideEntry | None = None
    nics: NicEntry | None = None


class MeasuredEntry(Entry):
    """A measured table of one collective."""

    collective: Collective
    machines: Count
    devices_per_machine: Count
    model: str | None = None
    sizes: Annotated[list[Size], Field(min_length=1)]
    times: Annotated[list[Seconds], Field(min_length=1)]
    groups: Annotated[list[list[NonNegativeInt]], Field(min_length=1)] | None = None
    busy: list[Seconds] | None = None

    @model_validator(mode="after")
    def _matched(self) -> MeasuredEntry:
        for name, column in (("times", self.times), ("busy", self.busy)):
            if column is not None and len(self.sizes) != len(column):
                raise ValueError(f"as many {name} as sizes ({len(self.sizes)}), not {len(column)}")
        if any(later <= earlier for earlier, later in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError("sizes in increasing order")
        if not self.times[-1]:
            raise ValueError("a time above zero for the largest size")
        members = [device for group in self.groups or [] for device in group]
        size = self.machines * self.devices_per_machine
        if any(len(group) != size for group in self.groups or []) or len(set(members)) < len(members):
            raise ValueError(f"groups of {size} devices each, every device in one of them at most")
        return self


class ResourceFile(Entry):
    """A whole resource file."""

    name: str
    about: str = ""
    launch: Seconds | None = None
    machines: Annotated[list[MachineEntry], Field(min_length=1)]
    network: NetworkEntry | None = None
    measured: list[MeasuredEntry] = Field(default_factory=list)


def _check_topology_fields(topology: str, needs: dict[str, str], entry: Entry) -> None:
    for owner, name in needs.items():
        present = getattr(entry, name) is not None
        if owner == topology and not present:
            raise ValueError(f"{name} with topology {topology}")
        if owner != topology and present:
            raise ValueError(f"{name} only with topology {owner}, not {topology}")


def check(document: object, file: str) -> ResourceFile:
    """The document as a ResourceFile.

    `devices` may be one mapping instead of a list of them.

    Raises:
        ResourceError: one line per mistake: file, path in the document, what was expected, what was found.
    """
    resource_file = validate(
        ResourceFile, _wrap_devices(document), file, ResourceError, "docs/resources.md", written=document
    )
    devices = 0
    for number, machine in enumerate(resource_file.machines):
        per_machine = sum(group.count for group in machine.devices)
        devices += machine.count * per_machine
        if per_machine > MOST_DEVICES or devices > MOST_DEVICES:
            expected = f"at most {MOST_DEVICES} devices in all machines together"
            refuse(ResourceError, file, ["machines", number], expected, f"{machine.count} x {per_machine}")
    return resource_file


def _wrap_devices(document: object) -> object:
    if not isinstance(document, dict) or not isinstance(document.get("machines"), list):
        return document
    machines = [
        {**machine, "devices": [machine["devices"]]}
        if isinstance(machine, dict) and isinstance(machine.get("devices"), dict)
        else machine
        for machine in document["machines"]
    ]
    return {**document, "machines": machines}
