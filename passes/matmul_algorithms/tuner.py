"""The tuner of two-dimensional tensor parallelism: dataflows of layers, shape of the mesh, numbers of slices.

Phase 1 chooses the dataflow of each layer so that its largest matrix stays in place. Phase 2 forecasts every
shape of the mesh with every legal number of slices of every product, and takes the fastest. On a given mesh
the products do not depend on each other, so each takes its own best number of slices. It works on sizes and
prices alone and knows no graph. Source: Nam et al., "MeshSlice", ISCA 2025, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distgraph.errors import InfeasibleError, ShardingError
from distgraph.passes.matmul_algorithms.layer_products import (
    Layer,
    Mesh,
    Product,
    dataflow,
    divisors,
    legal_slices,
    products,
    transposed_forms,
)
from distgraph.passes.matmul_algorithms.product_seconds import (
    ONE_AXIS,
    ProductSeconds,
    check_algorithm,
    check_positive,
    illegal_reason,
    product_seconds,
)
from distgraph.passes.matmul_algorithms.ring_prices import RingPrices
from distgraph.serialization.text_table import text_table


@dataclass(frozen=True, slots=True)
class ProductTuning:
    """A product, the number of its slices, and its forecast."""

    product: Product
    slices: int
    seconds: ProductSeconds


@dataclass(frozen=True, slots=True)
class LayerTuning:
    """How a layer is computed.

    Attributes:
        layer: the layer.
        dataflow: of the forward product in the form that is not transposed.
        transposed: whether its products are in the transposed form.
        products: forward, gradient of the input, gradient of the weight.
    """

    layer: Layer
    dataflow: str
    transposed: bool
    products: tuple[ProductTuning, ProductTuning, ProductTuning]

    @property
    def seconds(self) -> float:
        """Of the three products, one after another."""
        return sum(each.seconds.total for each in self.products)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the tuner chose; prints as a table."""

    algorithm: str
    mesh: Mesh
    layers: tuple[LayerTuning, ...]

    @property
    def seconds(self) -> float:
        """Of all layers, forward and backward, one after another."""
        return sum(layer.seconds for layer in self.layers)

    @property
    def compute_share(self) -> float:
        """Share of the time in which a chip computes: utilisation of the effective FLOP/s."""
        compute = sum(each.seconds.compute for layer in self.layers for each in layer.products)
        return compute / self.seconds

    def __str__(self) -> str:
        header = ("layer", "product", "slices", "seconds", "compute", "launch", "sync", "transfer")
        rows: list[tuple[str, ...]] = [header]
        for layer in self.layers:
            for each in layer.products:
                parts = each.seconds.communication
                times = (each.seconds.total, each.seconds.compute, parts.launch, parts.sync, parts.transfer)
                cells = (f"{1e3 * seconds:.3f} ms" for seconds in times)
                rows.append((layer.layer.name, str(each.product), str(each.slices), *cells))
        shape = f"{self.algorithm} on mesh {self.mesh[0]}x{self.mesh[1]}"
        first = f"{shape}: {1e3 * self.seconds:.3f} ms, {100 * self.compute_share:.1f} % computing"
        return "\n".join([first, *text_table(rows, left=2)])


def tune(
    layers: Sequence[Layer],
    chips: int,
    prices: RingPrices,
    flops_per_second: float | Callable[[Product, Mesh], float],
    *,
    item_bytes: int = 2,
    block: int = 8,
    algorithm: str = "meshslice",
    forward: str | None = None,
    meshes: Sequence[Mesh] | None = None,
    tolerance: float = 0.0,
) -> Tuning:
    """Choose the fastest mesh and slices for a sequence of fully connected layers, forward and backward.

    Args:
        layers: in order; each reads what the one before it wrote.
        chips: of the mesh, from 4 up.
        prices: of communication on the rings of a mesh; bandwidths in bytes/s, times in seconds.
        flops_per_second: effective FLOP/s of a chip in large products, or a function of a product and a mesh.
        item_bytes: bytes of an element.
        block: neighbouring rows or columns that stay together when meshslice cuts a shard; local sizes must
            be multiples of block * slices. Of no meaning to the other algorithms.
        algorithm: one of `ALGORITHMS`. The one-axis algorithms run on meshes 1 x chips and chips x 1.
        forward: dataflow of the forward product of every layer, instead of the one in which the largest
            matrix stays.
        meshes: shapes (rows, cols) to choose among; by default all with two axes from 2 up.
        tolerance: a product takes the fewest slices whose seconds are at most the least times (1 +
            tolerance). The model does not count that each slice reads and writes the result once more.

    Returns:
        The tuning with the least seconds. Of equal ones the one with fewer rows, and fewer slices.

    Raises:
        ShardingError: no layers; fewer than 4 chips, or a prime number of them; a mesh of another number of
            chips; an unknown algorithm or dataflow; a number that must be positive and is not.
        InfeasibleError: no mesh divides the sizes of all products; the message names the nearest legal sizes.

    Example:
        >>> from distgraph.passes.matmul_algorithms.cluster_prices import ClusterPrices
        >>> from distgraph.resources.load import load_cluster
        >>> prices = ClusterPrices(load_cluster("tpu_v4_16x16"))
        >>> print(tune([Layer("up", 65536, 4096, 16384)], 16, prices, flops_per_second=200e12))
        meshslice on mesh 4x4: 8.669 ms, 95.1 % computing
        layer  product         slices   seconds   compute    launch      sync  transfer
        up     Y = OS(X, W)        32  2.816 ms  2.749 ms  0.832 ms  0.960 ms  2.177 ms
        up     dX = LS(dY, W)      16  2.975 ms  2.749 ms  0.624 ms  0.480 ms  2.508 ms
        up     dW = RS(X, dY)      32  2.878 ms  2.749 ms  1.248 ms  0.960 ms  1.933 ms
    """
    if not callable(flops_per_second):
        check_positive(flops_per_second=flops_per_second)
    check_positive(item_bytes=item_bytes, block=block)
    if not layers:
        raise ShardingError("tuner: no layers; give at least one Layer(name, samples, inputs, outputs)")
    forwards = [forward or dataflow(layer) for layer in layers]
    forms = list(zip(layers, forwards, transposed_forms(forwards), strict=True))
    shapes = _meshes(chips, algorithm) if meshes is None else _checked_meshes(meshes, chips, algorithm)

    def best(product: Product, mesh: Mesh) -> ProductTuning:
        options = legal_slices(product, mesh, block) if algorithm == "meshslice" else (1,)
        speed = flops_per_second(product, mesh) if callable(flops_per_second) else flops_per_second
        seconds = (product_seconds(algorithm, product, mesh, n, prices, speed, item_bytes) for n in options)
        tuned = [ProductTuning(product, *option) for option in zip(options, seconds, strict=True)]
        return _fewest_slices(tuned, tolerance)

    tunings: list[Tuning] = []
    reasons: list[str] = []
    for mesh in shapes:
        three = [products(layer, flow, transposed) for layer, flow, transposed in forms]
        illegal = [illegal_reason(algorithm, each, mesh, block) for group in three for each in group]
        if reason := next(filter(None, illegal), None):
            reasons.append(reason)
            continue
        tuned = (
            LayerTuning(*form, (best(group[0], mesh), best(group[1], mesh), best(group[2], mesh)))
            for form, group in zip(forms, three, strict=True)
        )
        tunings.append(Tuning(algorithm, mesh, tuple(tuned)))
    if not tunings:
        tried = ", ".join(f"{rows}x{cols}" for rows, cols in shapes)
        raise InfeasibleError(f"tuner: no mesh of {tried} divides all layers: {reasons[len(reasons) // 2]}")
    return min(tunings, key=lambda tuning: tuning.seconds)


def _fewest_slices(tuned: Sequence[ProductTuning], tolerance: float) -> ProductTuning:
    """The tuning with the fewest slices whose seconds are at most the least times (1 + tolerance)."""
    least = min(option.seconds.total for option in tuned)
    enough = [option for option in tuned if option.seconds.total <= least * (1 + tolerance)]
    return min(enough, key=lambda option: option.slices)


def _meshes(chips: int, algorithm: str) -> list[Mesh]:
    """Every mesh of a number of chips that an algorithm can use."""
    if chips < 4:
        raise ShardingError(f"tuner: chips is {chips} but a mesh of two axes needs at least 4; use 4 or more")
    if algorithm in ONE_AXIS:
        return [(1, chips), (chips, 1)]
    if algorithm == "cannon":
        side = math.isqrt(chips)
        if side * side != chips:
            raise ShardingError(
                f"tuner: algorithm cannon needs a square mesh but {chips} chips form none; use {side**2} or "
                f"{(side + 1) ** 2} chips, or algorithm meshslice"
            )
        return [(side, side)]
    check_algorithm(algorithm, (1, chips))
    shapes = [(rows, chips // rows) for rows in divisors(chips)[1:-1]]
    if not shapes:
        raise ShardingError(
            f"tuner: {chips} chips form no mesh of two axes because {chips} is a prime number; use "
            f"{chips - 1} or {chips + 1} chips"
        )
    return shapes


def _checked_meshes(meshes: Sequence[Mesh], chips: int, algorithm: str) -> list[Mesh]:
    """Meshes that the user gave."""
    if not meshes:
        raise ShardingError("tuner: meshes is empty; give at least one (rows, cols), or leave it out")
    for mesh in meshes:
        check_algorithm(algorithm, mesh)
        if math.prod(mesh) != chips:
            raise ShardingError(
                f"tuner: mesh {mesh[0]}x{mesh[1]} has {math.prod(mesh)} chips but chips is {chips}; "
                f"make them equal"
            )
    return list(meshes)
