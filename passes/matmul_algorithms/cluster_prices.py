"""Prices of rings and speeds of products on the devices of a cluster, as the tuner asks for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from distgraph.errors import ResourceError
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.matmul_algorithms.layer_products import Mesh, Product
from distgraph.passes.matmul_algorithms.ring_prices import AXES, Ring
from distgraph.resources.cluster import Cluster
from distgraph.resources.cluster_builder import with_torus_shape
from distgraph.resources.compute_cost import ComputeCost
from distgraph.resources.mesh_communication import MeshCommunication

_SHORT, _LONG = 2.0**16, 2.0**24
"""Bytes that a rank sends in the two collectives whose seconds give the line of a ring."""
_COLLECTIVES: Final = {"send_receive": "permute"}
_STEPS: Final = {"send_receive": 1, "broadcast": 0, "reduce": 0}
"""Steps of a kind that does not go round the ring; 0 where its price has no steps of its own."""


def devices_of(cluster: Cluster, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Device of every rank of a mesh: a block of a torus of devices, else the first devices in order.

    All axes but the last are one dim of the block where a torus has fewer dims than the mesh has axes.
    """
    for block in (shape, (math.prod(shape[:-1]), shape[-1])):
        if on_torus(cluster, block):
            return cluster.network.corner_block(block)
    return tuple(range(math.prod(shape)))


def on_torus(cluster: Cluster, shape: tuple[int, ...]) -> bool:
    """Whether a mesh is a block of a torus of devices."""
    network = cluster.network
    torus = network.topology == "torus" and network.over == "devices" and len(network.shape) == len(shape)
    return torus and all(part <= length for part, length in zip(shape, network.shape, strict=True))


def torus_of(cluster: Cluster, mesh: Mesh) -> Cluster:
    """The cluster wired as a torus of the shape of a mesh, where it can be; else the cluster itself."""
    if not cluster.network.reconfigurable or cluster.network.shape == mesh:
        return cluster
    try:
        return with_torus_shape(cluster, mesh)
    except ResourceError:  # blocks of its machines do not fill the shape
        return cluster


@dataclass(frozen=True)
class ClusterPrices:
    """Prices of rings on the devices of a cluster (`RingPrices`).

    Attributes:
        cluster: a mesh is on the devices that `devices_of` gives.
        reconfigure: whether a mesh has a torus of its own shape where the cluster can be wired so.
        data: replicas of the mesh for data parallelism, whose rings are busy at the same time.
    """

    cluster: Cluster
    reconfigure: bool = False
    data: int = 1
    _communication: dict[Mesh, MeshCommunication] = field(default_factory=dict, compare=False, repr=False)
    _rings: dict[tuple[str, int, Mesh], Ring] = field(default_factory=dict, compare=False, repr=False)

    def ring(self, kind: str, axis: int, mesh: Mesh) -> Ring:
        """The line through the seconds of a short and a long collective on all rings of an axis at once.

        Its seconds without bytes are those of the launch and of P - 1 steps of synchronisation. A broadcast
        or a reduce is priced in its best number of packets, so that its steps are part of the launch.
        """
        key = (kind, axis, mesh)
        if key not in self._rings:
            self._rings[key] = self._line(kind, axis, mesh) if mesh[axis] > 1 else Ring(0.0, 0.0, 1.0)
        return self._rings[key]

    def reduction_seconds(self, mesh: Mesh, nbytes: float) -> float:
        """Seconds of an all_reduce of a rank's bytes over the meshes of data parallelism."""
        if self.data == 1:
            return 0.0
        sizes = np.array([nbytes])
        return float(self._on(mesh).prices("all_reduce", self._grid(mesh), ("dp",), sizes)[0])

    def _grid(self, mesh: Mesh) -> ProcessMesh:
        return ProcessMesh.grid(dp=self.data, rows=mesh[0], cols=mesh[1])

    def _on(self, mesh: Mesh) -> MeshCommunication:
        if mesh not in self._communication:
            cluster = torus_of(self.cluster, mesh) if self.reconfigure else self.cluster
            devices = devices_of(cluster, mesh if self.data == 1 else (self.data, *mesh))
            self._communication[mesh] = MeshCommunication(cluster, devices)
        return self._communication[mesh]

    def _line(self, kind: str, axis: int, mesh: Mesh) -> Ring:
        communication, grid = self._on(mesh), self._grid(mesh)
        collective = _COLLECTIVES.get(kind, kind)
        seconds = communication.prices(collective, grid, (AXES[axis],), np.array([_SHORT, _LONG]))
        slope = max(float(seconds[1] - seconds[0]) / (_LONG - _SHORT), 1e-30)
        start, steps = max(float(seconds[0]) - _SHORT * slope, 0.0), _STEPS.get(kind, mesh[axis] - 1)
        launch = min(start, _launch(communication, collective, grid, AXES[axis])) if steps else start
        return Ring(launch, (start - launch) / steps if steps else 0.0, 1 / slope)


def _launch(communication: MeshCommunication, kind: str, mesh: ProcessMesh, axis: str) -> float:
    """Seconds to start a long collective along an axis; inf where the cluster states no launch."""
    launches = []
    for groups in communication.patterns(mesh, (axis,)):
        try:
            lines = communication.cost.lines(kind, groups[0], groups[1:])
        except ResourceError:  # its seconds were measured whole
            return math.inf
        launches.append(min(lines, key=lambda line: float(line.seconds(_LONG))).launch)
    return max(launches)


def product_rate(cluster: Cluster, dtype: str) -> Callable[[Product, Mesh], float]:
    """Effective FLOP/s of a product on the slowest device of a cluster, for the shape that a rank multiplies.

    Raises:
        ResourceError: a device has no rate of products in this dtype.
    """
    cost = ComputeCost(cluster)
    kinds = {device.model: number for number, device in enumerate(cluster.devices)}

    def rate(product: Product, mesh: Mesh) -> float:
        sizes = {"m": product.m, "n": product.n, "k": product.k}
        for name, parts in zip(product.split, mesh, strict=True):
            sizes[name] //= parts
        dims = (1, sizes["m"], sizes["n"], sizes["k"])
        return min(cost.matmul_rate(device, dtype, dims) for device in kinds.values())

    return rate


def slice_block(cluster: Cluster) -> int:
    """Neighbouring rows or columns that stay together when a shard is sliced: the largest of any device."""
    return max(device.compute.slice_block or 1 for device in cluster.devices)
