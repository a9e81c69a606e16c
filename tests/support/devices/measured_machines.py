"""Machines of test files, and programs on them, that profiling measures."""

from __future__ import annotations

from dataclasses import replace

from distgraph.resources import ComputeCost, load_cluster
from distgraph.resources.cluster import Cluster, Compute
from distgraph.runtime.forecast.op_cost import Work


def works_of(compute: Compute, bandwidth: float, peak: dict[str, float]) -> list[tuple[Work, float]]:
    """Measurements of a device with known numbers."""
    cluster = one_device(compute, bandwidth, peak)
    cost, found = ComputeCost(cluster), []
    for power in range(8, 27):
        for kind in ("memory", "lookup"):
            work = Work(kind, 0.0, 2.0**power, "f32", op="add" if kind == "memory" else "embedding")
            found.append(work)
    for m, n, k in ((64, 32, 900), (300, 300, 40), (1024, 700, 512), (2048, 2048, 2048), (16, 2000, 100)):
        found.append(
            Work("matmul", 2.0 * m * n * k, 4.0 * (m * n + n * k + m * k), "f32", (1, m, n, k), "matmul")
        )
    return [(w, cost.time(0, w.kind, w.flops, w.nbytes, w.dtype, w.dims)) for w in found]


def one_device(compute: Compute, bandwidth: float, peak: dict[str, float]) -> Cluster:
    cluster = load_cluster("local")
    device = replace(cluster.devices[0], compute=compute, memory_bandwidth=bandwidth, peak=peak)
    return replace(cluster, devices=(device, *cluster.devices[1:]))
