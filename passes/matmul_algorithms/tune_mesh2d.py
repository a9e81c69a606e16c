"""The tuner as a function on the sizes of layers and a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from distgraph.errors import InfeasibleError, ResourceError, ShardingError
from distgraph.errors.arguments import Count, checked_arguments
from distgraph.ir.dtypes import itemsize
from distgraph.passes.matmul_algorithms.cluster_prices import (
    ClusterPrices,
    on_torus,
    product_rate,
    slice_block,
)
from distgraph.passes.matmul_algorithms.layer_products import Layer, Mesh, divisors
from distgraph.passes.matmul_algorithms.product_seconds import ALGORITHMS, ONE_AXIS, check_algorithm
from distgraph.passes.matmul_algorithms.tuner import Tuning, tune
from distgraph.resources.cluster import Cluster
from distgraph.resources.load import load_cluster
from distgraph.serialization.text_table import text_table

DTYPES = ("bf16", "f16", "f32")
"""Of matrices, in order of preference."""


@dataclass(frozen=True, slots=True)
class Mesh2dTuning:
    """What the tuner chose for layers on a cluster, beside its rivals; prints as two tables.

    Attributes:
        cluster: its name.
        best: mesh, and for each layer its dataflow, whether it is transposed, and the slices of its products.
        rivals: name of every other algorithm -> its tuning on its own best mesh, or why it has none.
    """

    cluster: str
    best: Tuning
    rivals: Mapping[str, Tuning | str]

    @property
    def mesh(self) -> Mesh:
        """Rows and columns of devices."""
        return self.best.mesh

    @property
    def seconds(self) -> float:
        """Of all layers, forward and backward, one after another."""
        return self.best.seconds

    def __str__(self) -> str:
        rows = [("algorithm", "mesh", "seconds", "computing", "against")]
        reasons = []
        for name, tuning in {self.best.algorithm: self.best, **self.rivals}.items():
            if isinstance(tuning, str):
                reasons.append(f"{name}: {tuning}")
                continue
            share = f"{100 * tuning.compute_share:.1f} %"
            against = f"{100 * (tuning.seconds / self.seconds - 1):+.1f} %"
            shape = f"{tuning.mesh[0]}x{tuning.mesh[1]}"
            rows.append((name, shape, f"{1e3 * tuning.seconds:.3f} ms", share, against))
        return "\n".join([f"{self.cluster}: {self.best}", "", *text_table(rows, left=2), *reasons])


@checked_arguments(ShardingError)
def tune_mesh2d(
    layers: Mapping[str, tuple[Count, Count, Count]],
    cluster: Cluster | str | Path,
    *,
    devices: Count | None = None,
    dtype: str | None = None,
    algorithm: str = "meshslice",
    meshes: Sequence[Mesh] | None = None,
) -> Mesh2dTuning:
    """Choose mesh, dataflows and slices of two-dimensional tensor parallelism for fully connected layers.

    Communication costs what it does in the forecasts of the cluster, whatever its network is. A
    reconfigurable torus takes the shape of the mesh; on another torus the mesh is one of its blocks, if there
    is one of this size.

    Args:
        layers: name -> (samples, inputs, outputs) of Y = X W, in order; samples are batch * sequence.
        cluster: or its shipped name, or a resource file.
        devices: of the mesh, the first of the cluster; all by default.
        dtype: of all matrices; by default the first of bf16, f16 and f32 in which the devices have a speed.
        algorithm: one of `ALGORITHMS`; all others are the rivals.
        meshes: shapes (rows, cols) to choose among; by default all with two axes from 2 up. The one-axis
            rivals are on 1 x devices.

    Returns:
        The tuning with the least seconds: of all meshes and numbers of slices, for dataflows in which the
        largest matrix stays.

    Raises:
        ShardingError: no layers, or one that is not three sizes from 1 up; fewer than 4 devices, or a prime
            number of them; a mesh of another number; an unknown algorithm.
        ResourceError: the cluster has fewer devices, or states no speed of products in this dtype.
        InfeasibleError: no mesh divides the sizes; the message names the nearest legal sizes.

    Example:
        >>> tuning = tune_mesh2d({"up": (65536, 12288, 49152), "down": (65536, 49152, 12288)}, "tpu_v4_16x16")
        >>> tuning.mesh, [layer.dataflow for layer in tuning.best.layers]
        ((16, 16), ['OS', 'LS'])
        >>> tuning.seconds < tuning.rivals["collective"].seconds
        True
    """
    loaded = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    count = len(loaded.devices) if devices is None else devices
    if count > len(loaded.devices):
        raise ResourceError(
            f"tune_mesh2d: devices is {count} but cluster {loaded.name} has {len(loaded.devices)}; use at "
            f"most that many, or another cluster"
        )
    check_algorithm(algorithm, (1, max(count, 1)) if algorithm in ONE_AXIS else (1, 1))
    dtype = _dtype(loaded) if dtype is None else dtype
    sizes = [_layer(name, size) for name, size in layers.items()]
    prices, rate = ClusterPrices(loaded, reconfigure=True), product_rate(loaded, dtype)
    shapes = _shapes(loaded, count) if meshes is None else list(meshes)
    if meshes is not None and not shapes:
        raise ShardingError("tune_mesh2d: meshes is empty; give shapes to choose among, or leave it out")

    def best(name: str) -> Tuning:
        given = None if name in ONE_AXIS or (name == "cannon" and meshes is None) else shapes
        return tune(
            sizes,
            count,
            prices,
            rate,
            item_bytes=itemsize(dtype),
            block=slice_block(loaded),
            algorithm=name,
            meshes=given or None,
        )

    chosen = best(algorithm)
    rivals: dict[str, Tuning | str] = {}
    for name in ALGORITHMS:
        if name != algorithm:
            try:
                rivals[name] = best(name)
            except (InfeasibleError, ShardingError) as error:
                rivals[name] = str(error).removeprefix("tuner: ")
    return Mesh2dTuning(loaded.name, chosen, MappingProxyType(rivals))


def _layer(name: str, size: tuple[int, int, int]) -> Layer:
    if len(size) != 3:
        raise ShardingError(
            f"layer {name}: {len(size)} sizes but a fully connected layer has 3; write (samples, inputs, "
            f"outputs)"
        )
    return Layer(name, *size)


def _dtype(cluster: Cluster) -> str:
    stated = [name for name in DTYPES if all(name in device.compute.matmul for device in cluster.devices)]
    return stated[0] if stated else DTYPES[0]


def _shapes(cluster: Cluster, count: int) -> list[Mesh]:
    """Meshes of two axes: on a torus that cannot be wired otherwise, only its blocks where there are any."""
    shapes = [(rows, count // rows) for rows in divisors(max(count, 1))[1:-1]]
    blocks = [] if cluster.network.reconfigurable else [mesh for mesh in shapes if on_torus(cluster, mesh)]
    return blocks or shapes
