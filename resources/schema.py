"""The schema of resource files as pydantic models, and the check of a document against it.

A device may be described by its type in the device library (`files/devices/`): the fields that the resource
file states itself replace those of the library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, model_validator

from distgraph.errors import ResourceError
from distgraph.plan.device_types import DEVICE_TYPES
from distgraph.plan.forecast_errors import ForecastErrors
from distgraph.resources.cluster import MOST_DEVICES, MOST_DIMS, Compute, Count, Dtype, RingRate, one_of
from distgraph.resources.collective_algorithms import priced_kinds
from distgraph.resources.topology import TreeLevel
from distgraph.resources.units import Bandwidth, ComputeRate, Origin, Seconds, Size
from distgraph.serialization.documents import read_text, refuse
from distgraph.serialization.models import Entry, validate
from distgraph.serialization.yaml_reader import parse_yaml

MOST_LEVELS: Final = 16
"""Limit on the levels of switches: a binary tree over `MOST_DEVICES` has as many."""
_MOST_LANES: Final = 1_000


Shape = Annotated[list[Count], Field(min_length=1, max_length=MOST_DIMS)]


def _collective(name: str) -> str:
    if name not in priced_kinds():
        raise ValueError(one_of(priced_kinds()))
    return name


def _device_type(name: str) -> str:
    if name not in DEVICE_TYPES:
        library = ", ".join(library_devices())
        raise ValueError(f"{one_of(DEVICE_TYPES)}, or a device of the library ({library})")
    return name


def _by_name(origin: object) -> object:
    return {"": origin} if isinstance(origin, str) else origin


Origins = Annotated[dict[str, Origin], BeforeValidator(_by_name)]
"""Where the numbers of an entry come from: one origin for all, or one for each number or group of numbers."""
Collective = Annotated[str, AfterValidator(_collective)]
DeviceType = Annotated[str, AfterValidator(_device_type)]


DEVICE_NUMBERS: Final = ("memory", "memory_bandwidth", "peak", "measured", "compute")
LINK_NUMBERS: Final = ("bandwidth", "latency", "host_bandwidth", "levels", "rings")
"""Fields of the entries of devices and links that are numbers, or groups of them, with an origin."""
_COMPUTE_GROUPS: Final = ("matmul", "ops", "host")  # fields of `compute` that are groups of numbers


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
    origin: Origins = Field(default_factory=dict)

    @model_validator(mode="after")
    def _known_numbers(self) -> DeviceEntry:
        _check_origins(self.origin, _numbers(self.model_dump(exclude_unset=True)))
        return self


class LinkEntry(Entry):
    """Numbers of one class of links; bandwidth of each direction."""

    kind: str = "link"
    bandwidth: Bandwidth | None = None
    latency: Seconds | None = None
    origin: Origins = Field(default_factory=dict)

    @model_validator(mode="after")
    def _known_numbers(self) -> LinkEntry:
        _check_origins(self.origin, self.model_fields_set.intersection(LINK_NUMBERS))
        return self


Levels = Annotated[list[TreeLevel], Field(max_length=MOST_LEVELS)]


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
    origin: Origin | None = None

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
    origin: Origin | None = None
    errors: ForecastErrors | None = None

    def origins(self) -> dict[str, Origin]:
        """Where the numbers come from, by path in the file."""
        collected = {} if self.origin is None else {"launch": self.origin}
        for number, machine in enumerate(self.machines):
            where = f"machines[{number}]"
            for index, group in enumerate(machine.devices):
                path = f"{where}.devices" + (f"[{index}]" if len(machine.devices) > 1 else "")
                collected |= _under_path(path, group.origin)
            links: dict[str, LinkEntry | None] = {"inside": machine.inside, "nics": machine.nics}
            links["inside.host"] = machine.inside and machine.inside.host
            links["nics.attach"] = machine.nics and machine.nics.attach
            for name, link in links.items():
                collected |= _under_path(f"{where}.{name}", link.origin if link else {})
        if self.network is not None:
            collected |= _under_path("network", self.network.origin)
        tables = enumerate(self.measured)
        return collected | {f"measured[{i}]": table.origin for i, table in tables if table.origin is not None}


def _under_path(path: str, origins: Mapping[str, Origin]) -> dict[str, Origin]:
    return {f"{path}.{name}" if name else path: origin for name, origin in origins.items()}


def _check_origins(origins: Mapping[str, Origin], numbers: Iterable[str]) -> None:
    stated = sorted(numbers)
    for name in origins:
        if name and not any(f"{number}.".startswith(f"{name}.") for number in stated):
            raise ValueError(
                f"origin of numbers that are stated ({', '.join(stated) or 'none'}), not of {name}"
            )


def _check_topology_fields(topology: str, needs: dict[str, str], entry: Entry) -> None:
    for owner, name in needs.items():
        present = getattr(entry, name) is not None
        if owner == topology and not present:
            raise ValueError(f"{name} with topology {topology}")
        if owner != topology and present:
            raise ValueError(f"{name} only with topology {owner}, not {topology}")


@cache
def library_devices() -> tuple[str, ...]:
    """Names of the devices that resource files may give as a type."""
    names = (entry.name for entry in (files("distgraph.resources") / "files" / "devices").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


@cache
def _library_entry(name: str) -> dict[str, Any]:
    """The fields of a device of the library; it may itself be a variant of another one."""
    path = Path(str(files("distgraph.resources") / "files" / "devices" / f"{name}.yaml"))
    document = parse_yaml(read_text(path, ResourceError), f"resources/files/devices/{name}.yaml")
    return {**_completed(document), "model": name}


def _completed(entry: Any) -> Any:
    """The entry of a device with all fields of its library device that it does not state itself.

    Rates by dtype and the numbers of `compute` and of `compute.host` are replaced one by one, each with its
    origin.
    """
    if not isinstance(entry, dict) or entry.get("type") not in library_devices():
        return entry
    base = _library_entry(entry["type"])
    merged = {**base, **entry, "type": base["type"]}
    for name in ("peak", "measured", "compute"):
        merged[name] = _merged(base.get(name, {}), entry.get(name, {}))
    merged["origin"] = named = _by_name(entry.get("origin", {}))
    if isinstance(named, dict):
        inherited = (number for number in _numbers(base) if number not in _numbers(entry))
        origins = {number: _origin_in(base.get("origin", {}), number) for number in inherited}
        renamed = {name: origin for name, origin in named.items() if name}
        merged["origin"] = {
            n: old for n, old in origins.items() if old and not _origin_in(renamed, n)
        } | named
    return merged


def _merged(base: Any, stated: Any) -> Any:
    if not isinstance(stated, dict):
        return stated
    parts = {name: _merged(base.get(name, {}), stated[name]) for name in _COMPUTE_GROUPS if name in stated}
    return {**base, **stated, **parts}


def _origin_in(origins: Mapping[str, Any], number: str) -> Any:
    """The origin of a number, or of the group that it belongs to."""
    while number and number not in origins:
        number = number.rpartition(".")[0]
    return origins.get(number)


def _numbers(entry: Mapping[str, Any]) -> Iterator[str]:
    """Names of the numbers that an entry of a device states, such as compute.matmul.bf16."""
    yield from (name for name in DEVICE_NUMBERS[:2] if name in entry)
    compute = _mapping(entry.get("compute"))
    groups = {name: _mapping(entry.get(name)) for name in ("peak", "measured")}
    groups["compute"] = {
        n: 1 for n in compute if compute[n] is not None and n not in (*_COMPUTE_GROUPS, "error", "blas")
    }
    groups |= {f"compute.{name}": _mapping(compute.get(name)) for name in _COMPUTE_GROUPS}
    for group, names in groups.items():
        yield from (f"{group}.{name}" for name in names)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def check(document: object, file: str) -> ResourceFile:
    """The document as a ResourceFile.

    `devices` may be one mapping instead of a list of them, and their type a device of the library.

    Raises:
        ResourceError: one line per mistake: file, path in the document, what was expected, what was found.
    """
    resource_file = validate(
        ResourceFile,
        _with_devices(document),
        file,
        ResourceError,
        "docs/planning/resources.md",
        written=document,
    )
    devices = 0
    for number, machine in enumerate(resource_file.machines):
        per_machine = sum(group.count for group in machine.devices)
        devices += machine.count * per_machine
        if per_machine > MOST_DEVICES or devices > MOST_DEVICES:
            expected = f"at most {MOST_DEVICES} devices in all machines together"
            refuse(ResourceError, file, ["machines", number], expected, f"{machine.count} x {per_machine}")
    return resource_file


def _with_devices(document: object) -> object:
    """The document with a list of complete devices for every machine."""
    if not isinstance(document, dict) or not isinstance(document.get("machines"), list):
        return document
    return {**document, "machines": [_with_complete_devices(machine) for machine in document["machines"]]}


def _with_complete_devices(machine: object) -> object:
    devices = machine.get("devices") if isinstance(machine, dict) else None
    if isinstance(devices, dict):
        devices = [devices]
    if not isinstance(machine, dict) or not isinstance(devices, list):
        return machine
    return {**machine, "devices": [_completed(device) for device in devices]}
