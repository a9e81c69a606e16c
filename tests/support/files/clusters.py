"""Small clusters for tests, written as resource-file documents."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from distgraph.resources.cluster import Cluster
from distgraph.resources.cluster_builder import build_cluster
from distgraph.resources.schema import check

GB = 1e9
DEVICE = {"type": "gpu", "model": "G", "memory": "16 GiB", "peak": {"f32": "10 TFLOP/s"}}
INSIDE = {"topology": "full", "kind": "nvlink", "bandwidth": "100 GB/s", "latency": "1 us"}
NICS = {"bandwidth": "10 GB/s", "latency": "5 us", "attach": {"bandwidth": "20 GB/s", "latency": "2 us"}}


def cluster_of(document: dict[str, Any], file: str = "test.yaml") -> Cluster:
    return build_cluster(check(document, file), file)


def machine(count: int, name: str, **fields: Any) -> dict[str, Any]:
    entry = {"name": name, "devices": {**DEVICE, "count": count}, "inside": INSIDE, "nics": NICS}
    return copy.deepcopy({**entry, **fields})


def boxes(sizes: Sequence[int], network: dict[str, Any] | None = None, **fields: Any) -> Cluster:
    """Machines of the given numbers of devices, 100 GB/s inside, one 10 GB/s NIC each, launch 10 us."""
    machines = [machine(size, f"b{number}", **fields) for number, size in enumerate(sizes)]
    return cluster_of(
        {
            "name": "boxes",
            "launch": "10 us",
            "machines": machines,
            "network": network or {"topology": "switch"},
        }
    )


def single(devices: int, inside: dict[str, Any]) -> Cluster:
    """One machine with the given inside; 100 GB/s and 1 us unless said otherwise; launch 10 us."""
    entry = machine(devices, "m", inside={"bandwidth": "100 GB/s", "latency": "1 us", **inside})
    del entry["nics"]
    return cluster_of({"name": "single", "launch": "10 us", "machines": [entry]})
