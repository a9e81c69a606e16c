"""A cluster in a few lines of text, for the command line and for logs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from distgraph.errors import ResourceError
from distgraph.errors.arguments import checked_arguments
from distgraph.resources.cluster import RATED_DTYPES, Cluster, Device, Link, RingRate
from distgraph.resources.compute_cost import ComputeCost
from distgraph.resources.units import ORIGINS, Origin, format_bytes, format_si


@checked_arguments(ResourceError)
def describe(cluster: Cluster) -> str:
    """Machines, device meshes with their numbers, links by kind, and where the numbers come from.

    Numbers that the file does not have are "not stated".

    Example:
        >>> from distgraph.resources.load import load_cluster
        >>> print(describe(load_cluster("tpu_v4_16x16")))
        cluster tpu_v4_16x16 (resources/files/tpu_v4_16x16.yaml): 256 devices in 64 machines, torus 16 x 16...
          mesh tpu: 256 x TPU-v4, 32 GiB, memory 1.2 TB/s, peak f32 45.8 TFLOP/s, peak bf16 275 TFLOP/s, ...
            ops: start 1 us, memory 960 GB/s, lookup 360 GB/s
            large products: f32 44.3 TFLOP/s, bf16 266 TFLOP/s
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
        kinds = Counter((_device(device), *_computation(cluster, device)) for device in mesh.devices)
        for (text, *details), count in kinds.items():
            lines += [f"  mesh {mesh.type}: {count} x {text}", *details]
    links = Counter(_link(link) for link in cluster.links)
    lines += [f"  {count} x {text}" for text, count in links.items()]
    lines += map(_ring, network.rings)
    lines += [] if cluster.errors is None else [f"  forecasts: {cluster.errors}"]
    lines += [f"  origin of {path}: {origin}" for path, origin in _grouped(cluster.origins).items()]
    return "\n".join(lines)


@checked_arguments(ResourceError)
def summarize(cluster: Cluster) -> str:
    """One line: devices, what can be priced on all of them, and where the numbers come from.

    Example:
        >>> from distgraph.resources.load import load_cluster
        >>> print(summarize(load_cluster("local")))
        local: 2 devices, prices products in f64 f32 f16 bf16, memory, network; origin measured within 100%...
    """
    devices, network = cluster.devices, [(link.bandwidth, link.latency) for link in cluster.links]
    dtypes = [d for d in RATED_DTYPES if all(d in device.compute.matmul for device in devices)]
    priced = [f"products in {' '.join(dtypes)}"] if dtypes else []
    if all(device.memory_bandwidth and device.compute.memory_efficiency for device in devices):
        priced.append("memory")
    if cluster.launch is not None and all(number is not None for numbers in network for number in numbers):
        priced.append("network")
    errors = defaultdict[str, list[float]](list)
    for origin in cluster.origins.values():
        errors[origin.kind].append(origin.error or 0.0)
    origins = [str(Origin(kind, max(errors[kind]) or None)) for kind in ORIGINS if kind in errors]
    return (
        f"{cluster.name}: {len(devices)} devices, prices {', '.join(priced) or 'nothing'}; "
        f"origin {', '.join(origins) or 'not stated'}"
    )


def _grouped(origins: Mapping[str, Origin]) -> dict[str, Origin]:
    """Origins by path, with one entry for a group of numbers, such as peaks, if all have the same origin."""
    groups = defaultdict[str, list[str]](list)
    for path in origins:
        groups[path.rpartition(".")[0]].append(path)
    origins_of = dict[str, Origin]()
    for path, origin in origins.items():
        group = path.rpartition(".")[0]
        same = len(groups[group]) > 1 and all(origins[other] == origin for other in groups[group])
        same = same and not group.rpartition(".")[2].startswith("devices")
        origins_of[group if same else path] = origin
    return origins_of


def _computation(cluster: Cluster, device: Device) -> list[str]:
    """Lines on the numbers of a device that price ops, if it has all of them."""
    compute, bandwidth = device.compute, device.memory_bandwidth
    stated = (bandwidth, compute.launch, compute.memory_efficiency, compute.lookup_efficiency)
    if bandwidth is None or None in stated:
        return []
    rates = {
        kind: (getattr(compute, f"{kind}_efficiency") or 0.0) * bandwidth for kind in ("memory", "lookup")
    }
    parts = [f"start {_format_number(compute.launch, 's')}"]
    parts += [f"{kind} {format_si(rate, 'B/s')}" for kind, rate in rates.items()]
    cost, large = ComputeCost(cluster), (1, 1 << 40, 1 << 40, 1 << 40)
    products = [
        f"{dtype} {format_si(cost.matmul_rate(device.index, dtype, large), 'FLOP/s')}"
        for dtype in compute.matmul
    ]
    return [f"    ops: {', '.join(parts)}", f"    large products: {', '.join(products) or 'not stated'}"]


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
