"""The tuner of matrix products on published numbers of a torus, without a resource file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from distgraph.errors import ResourceError, ShardingError
from distgraph.passes.matmul_algorithms.layer_products import Mesh, Product, legal_slices
from distgraph.passes.matmul_algorithms.product_seconds import (
    ProductSeconds,
    check_algorithm,
    check_positive,
    illegal_reason,
    product_seconds,
)
from distgraph.passes.matmul_algorithms.ring_prices import AXES, Ring, RingPrices

KINDS: Final = ("all_gather", "reduce_scatter", "send_receive", "broadcast", "reduce")
"""Kinds of communication that have a price."""
_SAME_PRICE: Final = {"broadcast": "all_gather", "reduce": "reduce_scatter"}


@dataclass(frozen=True, slots=True)
class TorusPrices:
    """Prices that do not depend on the shape of the mesh: the `RingPrices` of a torus.

    Attributes:
        launch: kind -> seconds to start an operation.
        step: seconds to synchronise neighbours, once a step.
        bandwidth: kind -> bytes/s on the rings of mesh axes rows and cols.

    Kinds are all_gather, reduce_scatter, send_receive, broadcast and reduce. Where broadcast has no price of
    its own, it has the launch time and bandwidth of all_gather, and reduce those of reduce_scatter.

    Raises:
        ResourceError: an unknown kind, a kind without a launch time or bandwidth, a price that is no positive
            number; on use, a kind without a price.

    Example:
        >>> prices = TorusPrices({"all_gather": 13e-6}, 5e-6, {"all_gather": (27.5e9, 79.8e9)})
        >>> prices.ring("all_gather", 1, (4, 4))
        Ring(launch=1.3e-05, step=5e-06, bandwidth=79800000000.0)
        >>> prices.ring("send_receive", 1, (4, 4))
        Traceback (most recent call last):
            ...
        distgraph.errors.ResourceError: ring prices: no price for send_receive, only for all_gather; add it \
to launch and bandwidth
    """

    launch: Mapping[str, float]
    step: float
    bandwidth: Mapping[str, tuple[float, float]]

    def __post_init__(self) -> None:
        for kind in sorted({*self.launch, *self.bandwidth}):
            if kind not in KINDS:
                raise ResourceError(f"ring prices: unknown kind {kind!r}; write one of {', '.join(KINDS)}")
            for field, given in (("launch", self.launch), ("bandwidth", self.bandwidth)):
                if kind not in given:
                    raise ResourceError(f"ring prices: {kind} has no {field}; add {field}[{kind!r}]")
            if len(self.bandwidth[kind]) != len(AXES):
                raise ResourceError(
                    f"ring prices: bandwidth[{kind!r}] has {len(self.bandwidth[kind])} numbers but a mesh "
                    f"has {len(AXES)} axes; write (rows, cols)"
                )
            for axis in range(len(AXES)):
                Ring(self.launch[kind], self.step, self.bandwidth[kind][axis])

    def ring(self, kind: str, axis: int, mesh: tuple[int, int]) -> Ring:
        """The price of a kind on the rings of an axis; the same for every mesh."""
        priced = kind if kind in self.launch else _SAME_PRICE.get(kind, kind)
        if priced not in self.launch:
            raise ResourceError(
                f"ring prices: no price for {kind}, only for {', '.join(sorted(self.launch)) or 'nothing'}; "
                f"add it to launch and bandwidth"
            )
        return Ring(self.launch[priced], self.step, self.bandwidth[priced][axis])


TPU_V4: Final = TorusPrices(
    launch={"all_gather": 13e-6, "reduce_scatter": 26e-6, "send_receive": 45e-6},
    step=5e-6,
    bandwidth={
        "all_gather": (27.5e9, 79.8e9),
        "reduce_scatter": (37.5e9, 63.2e9),
        "send_receive": (38.8e9, 35.2e9),
    },
)
"""MeshSlice (Nam et al., ISCA 2025): TPU v4. A send takes 50 us with its step, as in `tpu_v4_16x16.yaml`."""


def checked_seconds(
    algorithm: str,
    product: Product,
    mesh: Mesh,
    slices: int,
    prices: RingPrices,
    flops_per_second: float,
    item_bytes: int = 2,
    block: int = 1,
) -> ProductSeconds:
    """`product_seconds` of arguments that are checked first.

    Args:
        algorithm: one of `ALGORITHMS`.
        product: of a layer, in its dataflow.
        mesh: rows and columns of chips. The one-axis algorithms need one of them to be 1, and do not depend
            on the dataflow.
        slices: into which meshslice cuts the product; 1 for the others.
        prices: of communication on the rings of the mesh.
        flops_per_second: effective FLOP/s of a chip.
        item_bytes: bytes of an element.
        block: neighbouring rows or columns that stay together when a shard is sliced.

    Returns:
        Seconds in all, of computation, and of communication by cause.

    Raises:
        ShardingError: an unknown algorithm, a mesh that the algorithm cannot use, sizes that the mesh does
            not divide, or a number of slices that does not divide them; the message names the nearest legal
            values.

    Example:
        >>> from distgraph.passes.matmul_algorithms.layer_products import Layer, products
        >>> prices = TorusPrices({"all_gather": 1e-5}, 1e-6, {"all_gather": (25e9, 25e9)})
        >>> forward = products(Layer("up", 4096, 1024, 4096), "OS")[0]
        >>> seconds = [checked_seconds("meshslice", forward, (4, 4), s, prices, 20e12) for s in (1, 2, 4)]
        >>> [f"{1e6 * each.total:.1f} us" for each in seconds]
        ['183.3 us', '151.8 us', '141.8 us']
    """
    check_algorithm(algorithm, mesh)
    check_positive(flops_per_second=flops_per_second, item_bytes=item_bytes, block=block)
    _check_slices(algorithm, product, mesh, slices, block)
    return product_seconds(algorithm, product, mesh, slices, prices, flops_per_second, item_bytes)


def _check_slices(algorithm: str, product: Product, mesh: Mesh, slices: int, block: int) -> None:
    if illegal := illegal_reason(algorithm, product, mesh, block):
        raise ShardingError(illegal)
    subject = f"layer {product.layer.name}: {product}"
    if algorithm != "meshslice":
        if slices != 1:
            raise ShardingError(
                f"{subject}: algorithm {algorithm} is not sliced but slices is {slices}; use slices=1, or "
                f"algorithm meshslice"
            )
        return
    legal = legal_slices(product, mesh, block)
    if slices not in legal:
        near = [*[s for s in legal if s < slices][-1:], *[s for s in legal if s > slices][:1]]
        rows, cols = (getattr(product, product.sliced) // size for size in mesh)
        raise ShardingError(
            f"{subject}: slices is {slices} but the shards of index {product.sliced}, {rows} and {cols} "
            f"long, must be multiples of block * slices with block {block}; the nearest legal value is "
            f"{' or '.join(map(str, near))}"
        )
