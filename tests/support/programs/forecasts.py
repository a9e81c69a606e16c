"""Programs and clusters for the tests of the forecast."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from support.files.clusters import cluster_of

from distgraph import nn, ops, optim
from distgraph.engine.compile.train_graph import train_graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.complete import complete
from distgraph.passes.pass_pipeline import pipeline
from distgraph.resources.cluster import Cluster
from distgraph.resources.runtimes.runtime_model import RuntimeModel
from distgraph.runtime.program.build import Build, build
from distgraph.tracing.annotations import on, shard_tensor

WAITING = RuntimeModel(name="waiting", about="waits for every collective where it starts")
"""A runtime in which no collective overlaps with computation."""
LAUNCH, BANDWIDTH, RATE = 2e-6, 0.5e12, 5e12
"""Of one op, of streaming through memory, of matmuls of any shape, on the devices of `machines`."""


def machines(*sizes: int, **changes: str) -> Cluster:
    """The cluster of `document`."""
    return cluster_of(document(*sizes, **changes))


def document(*sizes: int, **changes: str) -> dict[str, Any]:
    """A resource file: machines of the given numbers of equal devices, a NIC each, all joined by one switch.

    Args:
        changes: launch, bandwidth and latency of links inside, cable (of NICs), memory of a device.
    """
    numbers = {
        "launch": "10 us",
        "bandwidth": "100 GB/s",
        "latency": "1 us",
        "cable": "10 GB/s",
        "memory": "1 GiB",
    }
    numbers |= changes
    device: dict[str, Any] = {
        "type": "gpu",
        "model": "G",
        "memory": numbers["memory"],
        "memory_bandwidth": "1000 GB/s",
        "peak": {"f32": "10 TFLOP/s"},
        "compute": {
            "launch": "2 us",
            "memory_efficiency": 0.5,
            "lookup_efficiency": 0.5,
            "matmul": {"f32": {"efficiency": 0.5, "half": [0, 0, 0]}},
        },
    }
    inside = {
        "topology": "full",
        "kind": "nvlink",
        "bandwidth": numbers["bandwidth"],
        "latency": numbers["latency"],
    }
    attach = {"kind": "pcie", "bandwidth": "1000000 TB/s", "latency": numbers["latency"]}
    nics = {
        "kind": "ethernet",
        "bandwidth": numbers["cable"],
        "latency": numbers["latency"],
        "attach": attach,
    }
    entries = [
        {"name": f"b{i}", "devices": {**device, "count": size}, "inside": inside, "nics": nics}
        for i, size in enumerate(sizes)
    ]
    return {
        "name": "boxes",
        "launch": numbers["launch"],
        "machines": entries,
        "network": {"topology": "switch", "kind": "ethernet"},
    }


class Chain(nn.Module):
    """Linear layers with a relu behind each but the last, every one on the mesh of its stage.

    Args:
        widths: of the input, and of the output of each layer.
        meshes: one a layer.
        weights: axes of the dims of every weight, where its mesh has them.
    """

    def __init__(
        self, widths: Sequence[int], meshes: Sequence[ProcessMesh], weights: Sequence[Any] = ()
    ) -> None:
        self.meshes = meshes
        self.layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)]
        for number, (layer, mesh) in enumerate(zip(self.layers, meshes, strict=True)):
            shard_tensor(layer.weight, mesh, weights[number] if weights else [None, None])

    def forward(self, x: Any) -> Any:
        for number, (layer, mesh) in enumerate(zip(self.layers, self.meshes, strict=True)):
            with on(mesh):
                rows = "dp" if "dp" in mesh.axes else None
                x = layer(shard_tensor(x, mesh, [rows, None]) if number == 0 else x)
                if number + 1 < len(self.layers):
                    x = ops.relu(x)
        return x

    def loss(self, y: Any, target: Any) -> Any:
        with on(self.meshes[-1]):
            return ops.mean(y * y * target)


def chain(
    rows: int,
    widths: Sequence[int],
    meshes: Sequence[ProcessMesh],
    micro_batches: int = 1,
    policy: str = "1f1b",
    weights: Sequence[Any] = (),
    optimizer: optim.Optimizer | None = None,
    passes: Sequence[str] = (),
) -> Build:
    """Training of a `Chain` on micro-batches of `rows` rows; `passes` are changes of the pipeline."""
    model = Chain(widths, meshes, weights)
    batch = (((rows, widths[0]), "f32"), ((rows, widths[-1]), "f32"))
    graph = train_graph(model, batch, optimizer=optimizer or optim.SGD())
    completed = complete(graph, meshes[0])
    return build(completed, micro_batches=micro_batches, policy=policy, passes=pipeline(passes))
