"""Paddle's cluster JSON (`paddle.distributed.auto_parallel` Cluster.build_from_file).

The format: {"machines": [{"hostname", "addr", "port", "devices": [...], "links": [...]}], "alpha_latency":
{...}}. A device has global_id, local_id, type (GPU, XPU, DCU, NPU, CPU, NIC), model, memory (GB), and
sp_gflops, dp_gflops, hp_gflops (GFLOP/s); a link has source_global_id, target_global_id, type (NVL, PHB, NET,
...), bandwidth (GB/s) and latency (us). Numbers may be text. A bandwidth, latency or gflops of 0 is Paddle's
"not stated" and becomes None here. alpha_latency parametrises Paddle's own cost formula and has no
counterpart in a resource graph, so it is not read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from distgraph.errors import ResourceError
from distgraph.resources.cluster import Cluster, Device, Link, Machine, Network, Switch

_FORWARDERS = {"CPU", "NIC", "SWITCH", "UNKNOWN"}


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a number")
    try:
        result = float(value)
    except ValueError as cause:
        raise ValueError("a number") from cause
    if not result >= 0:
        raise ValueError("a number, not negative")
    return result


Number = Annotated[float, BeforeValidator(_number)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _PaddleDevice(_Entry):
    global_id: int
    type: str
    model: str | None = None
    memory: Number = 0.0
    sp_gflops: Number = 0.0
    dp_gflops: Number = 0.0
    hp_gflops: Number = 0.0


class _PaddleLink(_Entry):
    source_global_id: int
    target_global_id: int
    type: str = "UNKNOWN"
    bandwidth: Number = 0.0
    latency: Number = 0.0


class _PaddleMachine(_Entry):
    hostname: str | None = None
    devices: list[_PaddleDevice]
    links: list[_PaddleLink] = Field(default_factory=list)


class _PaddleFile(_Entry):
    machines: Annotated[list[_PaddleMachine], Field(min_length=1)]


def load_paddle(path: str | os.PathLike[str]) -> Cluster:
    """A Cluster from Paddle's cluster JSON.

    Accelerators become devices, in order of global_id inside each machine; a CPU becomes a device only in a
    machine without accelerators, and else, like a NIC, a node that forwards.

    Raises:
        ResourceError: the file is missing or malformed; names the path in the document.
    """
    file = os.fspath(path)
    try:
        document = json.loads(Path(file).read_text(encoding="utf-8"))
        found = _PaddleFile.model_validate(document)
    except OSError as error:
        raise ResourceError(f"{file}: cannot be read: {error.strerror}; check the path") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ResourceError(f"{file}: not JSON: {error}; fix the file") from None
    except ValidationError as errors:
        raise ResourceError("\n".join(_describe(file, dict(error)) for error in errors.errors())) from None
    return _build(found, file)


def _describe(file: str, error: dict[str, Any]) -> str:
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error["loc"]).lstrip(".")
    where = f"{file}: {path}" if path else file
    if error["type"] == "missing":
        return f"{where}: missing; Paddle's cluster format needs it"
    expected = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"].lower()
    return f"{where}: expected {expected}, got {json.dumps(error['input'], default=str)[:60]}"


def _build(found: _PaddleFile, file: str) -> Cluster:
    machines: list[Machine] = []
    devices: list[Device] = []
    switches: list[Switch] = []
    node_of: dict[int, str] = {}
    for number, entry in enumerate(found.machines):
        where = f"{file}: machines[{number}].devices"
        first = len(devices)
        everyone = sorted(entry.devices, key=lambda device: device.global_id)
        computing = [device for device in everyone if device.type not in _FORWARDERS]
        computing = computing or [device for device in everyone if device.type == "CPU"]
        if not computing:
            raise ResourceError(f"{where}: no GPU, XPU, NPU, DCU or CPU among them; add one")
        nics = []
        for device in everyone:
            node = f"machine{number}/{device.type.lower()}{device.global_id}"
            if device.global_id in node_of:
                raise ResourceError(
                    f"{where}: global_id {device.global_id} is also {node_of[device.global_id]}; "
                    "give every device its own"
                )
            node_of[device.global_id] = node
            if device in computing:
                origin = f"machines[{number}].devices[{entry.devices.index(device)}]"
                devices.append(_device(device, len(devices), number, len(devices) - first, node, origin))
            elif device.type == "NIC":
                nics.append(node)
            else:
                switches.append(Switch(node, number))
        nic_of = tuple(nics[i * len(nics) // len(computing)] if nics else None for i in range(len(computing)))
        name = entry.hostname or f"machine{number}"
        members = tuple(range(first, len(devices)))
        machines.append(Machine(number, name, members, tuple(nics), nic_of, number, 0, 0))
    parts = (tuple(machines), tuple(devices), tuple(switches), _links(found, node_of, file))
    return Cluster(Path(file).stem, file, *parts, Network("links"))


def _links(found: _PaddleFile, node_of: dict[int, str], file: str) -> tuple[Link, ...]:
    """One full-duplex link for the two directions that Paddle lists; the slower where they differ."""
    links: dict[frozenset[str], Link] = {}
    for number, entry in enumerate(found.machines):
        for at, link in enumerate(entry.links):
            where = f"machines[{number}].links[{at}]"
            for end in (link.source_global_id, link.target_global_id):
                if end not in node_of:
                    raise ResourceError(
                        f"{file}: {where}: global_id {end} is not a device of any machine; add the device"
                    )
            source, target = node_of[link.source_global_id], node_of[link.target_global_id]
            bandwidth, latency = link.bandwidth * 1e9 or None, link.latency * 1e-6 or None
            known = links.get(frozenset((source, target)))
            slower = known is None or (bandwidth or 0.0) < (known.bandwidth or 0.0)
            if slower and source != target:
                links[frozenset((source, target))] = Link(
                    source, target, link.type, bandwidth, latency, where
                )
    return tuple(links.values())


def _device(found: _PaddleDevice, index: int, machine: int, local: int, node: str, origin: str) -> Device:
    stated = {"f32": found.sp_gflops, "f64": found.dp_gflops, "f16": found.hp_gflops}
    peak = {dtype: gflops * 1e9 for dtype, gflops in stated.items() if gflops}
    model = (found.model or found.type).strip()
    return Device(
        index, node, machine, local, found.type.lower(), model, found.memory * 1e9, peak, origin=origin
    )
