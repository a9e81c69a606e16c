"""What a resource file may say, as pydantic models, and the house error when it says something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from distgraph.errors import ResourceError
from distgraph.resources.units import BANDWIDTH, COMPUTE, SIZE, TIME, WORK, Unit, parse


def _parser(unit: Unit) -> Callable[[object], float]:
    def read(value: object) -> float:
        return parse(value, unit)

    return read


Size = Annotated[float, BeforeValidator(_parser(SIZE))]
Bandwidth = Annotated[float, BeforeValidator(_parser(BANDWIDTH))]
Seconds = Annotated[float, BeforeValidator(_parser(TIME))]
Work = Annotated[float, BeforeValidator(_parser(WORK))]
Compute = Annotated[float, BeforeValidator(_parser(COMPUTE))]
Fraction = Annotated[float, Field(gt=0, le=1)]
Dtype = Literal["f16", "bf16", "f32", "f64", "f8", "i8"]
Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute", "send"
]


class Entry(BaseModel):
    """A mapping of the file; a field that is not listed is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class MatmulEntry(Entry):
    """Efficiency of contractions in one dtype; half: the m, n and k at which it falls to a half."""

    efficiency: Fraction
    half: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=3, max_length=3)]
    error: dict[str, float] = Field(default_factory=dict)


CONVOLUTIONS: Final = ("conv", "conv_grad_input", "conv_grad_weight")
"""Kinds of ops that copy patches of their input."""


class OpEntry(Entry):
    """Measured times of one kind of op, by bytes or by FLOPs; of a convolution seconds for a FLOP, an element
    and a row of its patches; or only what starting it costs."""

    bytes: Annotated[list[Size], Field(min_length=1)] | None = None
    flops: Annotated[list[Work], Field(min_length=1)] | None = None
    times: Annotated[list[Seconds], Field(min_length=1)] | None = None
    rates: Annotated[list[Seconds], Field(min_length=3, max_length=3)] | None = None
    launch: Seconds | None = None
    error: float | None = None

    @model_validator(mode="after")
    def _matched(self) -> OpEntry:
        if self.rates is not None and (self.times or self.bytes or self.flops):
            raise ValueError("either rates or times by an amount of work")
        alone = self.rates is not None or self.launch is not None
        if self.times is None and alone and not (self.bytes or self.flops):
            return self
        if self.times is None or (self.bytes is None) == (self.flops is None):
            raise ValueError(
                "times by bytes or by flops, one of them, or a launch time, or rates of a convolution"
            )
        work = self.bytes or self.flops or []
        if len(work) != len(self.times):
            raise ValueError(f"as many times as amounts of work ({len(work)}), not {len(self.times)}")
        if any(later <= earlier for earlier, later in pairwise(work)):
            raise ValueError("amounts of work in increasing order")
        return self


class ComputeEntry(Entry):
    """What computing costs on a device; `error` holds the relative error of the fit of each number."""

    launch: Seconds | None = None
    issue: Seconds | None = None
    message: Seconds | None = None
    step: Seconds | None = None
    task: Seconds | None = None
    memory_efficiency: Fraction | None = None
    lookup_efficiency: Fraction | None = None
    matmul: dict[Dtype, MatmulEntry] = Field(default_factory=dict)
    ops: dict[str, dict[str, OpEntry]] = Field(default_factory=dict)
    error: dict[str, float] = Field(default_factory=dict)

    @field_validator("ops")
    @classmethod
    def _of_convolutions(cls, ops: dict[str, dict[str, OpEntry]]) -> dict[str, dict[str, OpEntry]]:
        for op, tables in ops.items():
            if op not in CONVOLUTIONS and any(table.rates is not None for table in tables.values()):
                raise ValueError(f"rates of {', '.join(CONVOLUTIONS)} alone, and times for {op}")
        return ops


class DeviceEntry(Entry):
    """`count` equal devices of a machine."""

    count: PositiveInt = 1
    type: Literal["gpu", "xpu", "cpu", "tpu", "npu"]
    model: str
    memory: Size
    memory_bandwidth: Bandwidth | None = None
    peak: dict[Dtype, Compute] = Field(default_factory=dict)
    measured: dict[Dtype, Compute] = Field(default_factory=dict)
    compute: ComputeEntry = Field(default_factory=ComputeEntry)


class LinkEntry(Entry):
    """Numbers of one class of links; bandwidth of each direction."""

    kind: str = "link"
    bandwidth: Bandwidth | None = None
    latency: Seconds | None = None


class Level(Entry):
    """One level of a tree: `children` nodes under each switch, whose uplink is their sum over
    `oversubscription`.
    """

    children: PositiveInt
    oversubscription: Annotated[float, Field(gt=0, strict=False)] = 1.0
    latency: Seconds | None = None


class InsideEntry(LinkEntry):
    """How the devices of a machine are joined."""

    topology: Literal["full", "ring", "torus", "tree", "pcie_pairs", "links"]
    shape: list[PositiveInt] | None = None
    levels: list[Level] | None = None
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
            if len(pair) not in (2, 3) or min(pair) < 0 or (len(pair) == 3 and pair[2] < 1):
                raise ValueError("links as [device, device] or [device, device, lanes]")
        return self


class NicEntry(LinkEntry):
    """`count` network cards; bandwidth and latency are those of the cable; attach is the way from a device to
    it.
    """

    count: PositiveInt = 1
    attach: LinkEntry


class NetworkEntry(LinkEntry):
    """How machines (their NICs), or the devices of all machines, are joined."""

    topology: Literal["switch", "tree", "ring", "torus"]
    over: Literal["machines", "devices"] = "machines"
    shape: list[PositiveInt] | None = None
    block: list[PositiveInt] | None = None
    levels: list[Level] | None = None

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
        return self


class MachineEntry(Entry):
    """`count` equal machines."""

    count: PositiveInt = 1
    name: str | None = None
    devices: Annotated[list[DeviceEntry], Field(min_length=1)]
    inside: InsideEntry | None = None
    nics: NicEntry | None = None


class MeasuredEntry(Entry):
    """A measured table of one collective."""

    collective: Collective
    machines: PositiveInt
    devices_per_machine: PositiveInt
    model: str | None = None
    sizes: Annotated[list[Size], Field(min_length=1)]
    times: Annotated[list[Seconds], Field(min_length=1)]
    groups: Annotated[list[list[NonNegativeInt]], Field(min_length=1)] | None = None
    busy: list[Seconds] | None = None

    @model_validator(mode="after")
    def _matched(self) -> MeasuredEntry:
        for name, given in (("times", self.times), ("busy", self.busy)):
            if given is not None and len(self.sizes) != len(given):
                raise ValueError(f"as many {name} as sizes ({len(self.sizes)}), not {len(given)}")
        if any(later <= earlier for earlier, later in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError("sizes in increasing order")
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
    try:
        return ResourceFile.model_validate(_wrap_devices(document))
    except ValidationError as errors:
        lines = [_describe(error, document, file) for error in errors.errors()]
        raise ResourceError("\n".join(dict.fromkeys(lines))) from None


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


def _describe(error: ErrorDetails, document: object, file: str) -> str:
    path, found = _path_in(document, error["loc"])
    where = f"{file}: {path}: " if path else f"{file}: "
    kind = error["type"]
    if kind == "missing":
        return f"{where}missing; add the field, see docs/resources.md for its form"
    if kind == "extra_forbidden":
        return f"{where}unknown field; check its spelling against docs/resources.md"
    return f"{where}expected {_expectation(error)}, got {_shown(found)}"


def _expectation(error: ErrorDetails) -> str:
    named = {
        "model_type": "a mapping of fields",
        "dict_type": "a mapping",
        "list_type": "a list",
        "string_type": "a text",
        "int_type": "a whole number",
        "greater_than": "a number greater than {gt}",
        "greater_than_equal": "a number from {ge:g} up",
        "less_than_equal": "a number up to {le:g}",
        "float_type": "a number",
        "too_long": "at most {max_length} entries",
        "literal_error": "one of {expected}",
        "too_short": "at least {min_length} entry",
    }
    context: dict[str, Any] = error.get("ctx", {})
    if error["type"] in named:
        return named[error["type"]].format(**context)
    if error["type"] == "value_error":
        return str(context["error"])
    return error["msg"]


def _path_in(document: object, location: tuple[int | str, ...]) -> tuple[str, object]:
    """The location as the user wrote it: no index where the user wrote one mapping for a list."""
    path, here = "", document
    for step in location:
        if isinstance(step, int):
            if isinstance(here, dict):
                continue
            path += f"[{step}]"
            here = here[step] if isinstance(here, list) and step < len(here) else None
        elif step != "[key]":
            path += f".{step}" if path else step
            here = here.get(step) if isinstance(here, dict) else None
    return path, here


def _shown(found: object) -> str:
    text = json.dumps(found, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
