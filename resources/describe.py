"""A cluster in a few lines of text, for the command line and for logs."""

from __future__ import annotations

from collections import Counter

from distgraph.resources.cluster import Cluster, Device, Link, RingRate
from distgraph.resources.units import format_bytes, format_si


def describe(cluster: Cluster) -> str:
    """Machines, device meshes with their numbers, links by kind; "not stated" where the file has no number.

    Example:
        >>> from distgraph.resources.load import load_cluster
        >>> print(describe(load_cluster("tpu_v4_16x16")))
        cluster tpu_v4_16x16 (resources/files/tpu_v4_16x16.yaml): 256 devices in 64 machines, torus 16 x 16...
          mesh tpu: 256 x TPU-v4, 32 GiB, memory 1.2 TB/s, peak bf16 275 TFLOP/s, measured bf16 266 TFLOP/s
          512 x ici: 50 GB/s, 1 us
          ring all_gather: launch 13 us, step 5 us, 27.5 GB/s along axis 0, 79.8 GB/s along axis 1
          ring reduce_scatter: ...
    """
    network = cluster.network
    shape = " ".join([network.topology, " x ".join(map(str, network.shape))]).strip()
    joined = "" if network.topology == "none" else f", {shape}"
    joined += " (reconfigurable)" if network.reconfigurable else ""
    size = f"{len(cluster.devices)} devices in {len(cluster.machines)} machines"
    lines = [f"cluster {cluster.name} ({cluster.source}): {size}{joined}"]
    for mesh in cluster.device_meshes:
        kinds = Counter(_device(device) for device in mesh.devices)
        lines += [f"  mesh {mesh.type}: {count} x {text}" for text, count in kinds.items()]
    links = Counter(_link(link) for link in cluster.links)
    lines += [f"  {count} x {text}" for text, count in links.items()]
    lines += map(_ring, network.rings)
    return "\n".join(lines)


def _device(device: Device) -> str:
    rates = [f"peak {dtype} {format_si(rate, 'FLOP/s')}" for dtype, rate in device.peak.items()]
    rates += [f"measured {dtype} {format_si(rate, 'FLOP/s')}" for dtype, rate in device.measured.items()]
    memory = _format_number(device.memory_bandwidth, "B/s")
    return ", ".join([device.model, format_bytes(device.memory), f"memory {memory}", *rates])


def _link(link: Link) -> str:
    return f"{link.kind}: {_format_number(link.bandwidth, 'B/s')}, {_format_number(link.latency, 's')}"


def _ring(ring: RingRate) -> str:
    speeds = [f"{format_si(speed, 'B/s')} along axis {axis}" for axis, speed in enumerate(ring.bandwidth)]
    launch, step = format_si(ring.launch, "s"), format_si(ring.step, "s")
    return f"  ring {ring.collective}: " + ", ".join([f"launch {launch}", f"step {step}", *speeds])


def _format_number(value: float | None, unit: str) -> str:
    return "not stated" if value is None else format_si(value, unit)
