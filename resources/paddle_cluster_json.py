"""Reads clusters that are described in the JSON format of PaddlePaddle's automatic parallelism.

The format is that of `Cluster.build_from_file` in `paddle.distributed.auto_parallel`:
{"machines": [{"hostname", "addr", "port", "devices": [...], "links": [...]}], "alpha_latency":
{...}}. A device has global_id, local_id, type (GPU, XPU, DCU, NPU, CPU, NIC), model, memory (GB), and
sp_gflops, dp_gflops, hp_gflops (GFLOP/s); a link has source_global_id, target_global_id, type (NVL, PHB, NET,
...), bandwidth (GB/s) and latency (us). Numbers may be text. A bandwidth, latency or gflops of 0 is Paddle's
"not stated" and becomes None here. alpha_latency parametrises Paddle's own cost formula and has no
counterpart in a resource graph, so it is not read.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from distgraph.errors import ResourceError
from distgraph.resources.cluster import MOST_DEVICES, Cluster, Device, Link, Machine, Network, Switch
from distgraph.resources.units import LEAST, MOST
from distgraph.serialization.documents import read_json, refuse
from distgraph.serialization.fields import BeforeValidator, Limits

_FORWARDERS = {"CPU", "NIC", "SWITCH", "UNKNOWN"}


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a number")
    try:
        result = float(value)
    except ValueError as cause:
        raise ValueError("a number") from cause
    if not math.isfinite(result) or (result and not LEAST <= result <= MOST):
        raise ValueError(f"a number, not negative, 0 or from {LEAST:g} to {MOST:g}")
    return result


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError("a whole number from 0 up")
    return value


Number = Annotated[float, BeforeValidator(_number)]
Id = Annotated[int, BeforeValidator(_whole)]


@dataclass(frozen=True)
class _PaddleDevice:
    global_id: Id
    type: Literal["GPU", "XPU", "DCU", "NPU", "CPU", "NIC", "SWITCH", "UNKNOWN"]
    model: str | None = None
    memory: Number = 0.0
    sp_gflops: Number = 0.0
    dp_gflops: Number = 0.0
    hp_gflops: Number = 0.0


@dataclass(frozen=True)
class _PaddleLink:
    source_global_id: Id
    target_global_id: Id
    type: str = "UNKNOWN"
    bandwidth: Number = 0.0
    latency: Number = 0.0


@dataclass(frozen=True, kw_only=True)
class _PaddleMachine:
    hostname: str | None = None
    devices: Annotated[list[_PaddleDevice], Limits(fail_fast=True)]
    links: Annotated[list[_PaddleLink], Limits(fail_fast=True)] = field(default_factory=list)


@dataclass(frozen=True)
class _PaddleFile:
    machines: Annotated[list[_PaddleMachine], Limits(min_length=1, fail_fast=True)]


def load_paddle(path: str | os.PathLike[str]) -> Cluster:
    """A Cluster from Paddle's cluster JSON.

    Accelerators become devices, in order of global_id inside each machine; a CPU becomes a device only in a
    machine without accelerators, and else, like a NIC, a node that forwards.

    Raises:
        ResourceError: the file is missing or malformed; names the path in the document.
    """
    from distgraph.serialization.models import validate  # noqa: PLC0415 (loads pydantic)

    file = os.fspath(path)
    document = validate(_PaddleFile, read_json(file, ResourceError), file, ResourceError)
    count = sum(len(machine.devices) for machine in document.machines)
    if count > 2 * MOST_DEVICES:  # NICs, CPUs and switches are devices here too
        refuse(
            ResourceError, file, ["machines"], f"at most {2 * MOST_DEVICES} devices of all machines", count
        )
    return _build(document, file)


def _build(document: _PaddleFile, file: str) -> Cluster:
    machines: list[Machine] = []
    devices: list[Device] = []
    switches: list[Switch] = []
    node_of: dict[int, str] = {}
    for number, entry in enumerate(document.machines):
        where = f"{file}: machines[{number}].devices"
        first = len(devices)
        entries = sorted(entry.devices, key=lambda device: device.global_id)
        computing = [device for device in entries if device.type not in _FORWARDERS]
        computing = computing or [device for device in entries if device.type == "CPU"]
        chosen = {device.global_id for device in computing}
        position = {device.global_id: index for index, device in enumerate(entry.devices)}
        if not computing:
            raise ResourceError(f"{where}: no GPU, XPU, NPU, DCU or CPU among them; add one")
        nics = []
        for device in entries:
            node = f"machine{number}/{device.type.lower()}{device.global_id}"
            if device.global_id in node_of:
                raise ResourceError(
                    f"{where}: global_id {device.global_id} is also {node_of[device.global_id]}; "
                    "give every device its own"
                )
            node_of[device.global_id] = node
            if device.global_id in chosen:
                origin = f"machines[{number}].devices[{position[device.global_id]}]"
                devices.append(_device(device, len(devices), number, len(devices) - first, node, origin))
            elif device.type == "NIC":
                nics.append(node)
            else:
                switches.append(Switch(node, number))
        nic_of = tuple(nics[i * len(nics) // len(computing)] if nics else None for i in range(len(computing)))
        name = entry.hostname or f"machine{number}"
        members = tuple(range(first, len(devices)))
        machines.append(Machine(number, name, members, tuple(nics), nic_of, number, 0, 0))
    parts = (tuple(machines), tuple(devices), tuple(switches), _links(document, node_of, file))
    return Cluster(Path(file).stem, file, *parts, Network("links"))


def _links(document: _PaddleFile, node_of: dict[int, str], file: str) -> tuple[Link, ...]:
    """One full-duplex link for the two directions that Paddle lists, with the lower bandwidth of the two."""
    links: dict[frozenset[str], Link] = {}
    for number, entry in enumerate(document.machines):
        for index, link in enumerate(entry.links):
            where = f"machines[{number}].links[{index}]"
            for end in (link.source_global_id, link.target_global_id):
                if end not in node_of:
                    raise ResourceError(
                        f"{file}: {where}: global_id {end} is not a device of any machine; add the device"
                    )
            source, target = node_of[link.source_global_id], node_of[link.target_global_id]
            bandwidth, latency = link.bandwidth * 1e9 or None, link.latency * 1e-6 or None
            reverse = links.get(frozenset((source, target)))
            slower = reverse is None or (bandwidth or 0.0) < (reverse.bandwidth or 0.0)
            if slower and source != target:
                links[frozenset((source, target))] = Link(
                    source, target, link.type, bandwidth, latency, where
                )
    return tuple(links.values())


def _device(entry: _PaddleDevice, index: int, machine: int, local: int, node: str, origin: str) -> Device:
    stated = {"f32": entry.sp_gflops, "f64": entry.dp_gflops, "f16": entry.hp_gflops}
    peak = {dtype: gflops * 1e9 for dtype, gflops in stated.items() if gflops}
    model = (entry.model or entry.type).strip()
    return Device(
        index, node, machine, local, entry.type.lower(), model, entry.memory * 1e9, peak, origin=origin
    )
