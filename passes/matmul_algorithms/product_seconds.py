"""Forecast seconds of one matrix product on a mesh under each of the distributed algorithms.

With compute = FLOP of a chip / FLOP/s, and rows and cols the seconds of communication along both mesh axes:

    meshslice    S slices. OS: max(rows, cols) + (S - 1) * max(rows, cols, compute / S) + compute / S with the
                 times of one slice; LS and RS: all_gather + reduce_scatter take the place of max(rows, cols)
                 (MeshSlice, section 3.2.2)
    collective   meshslice with one slice: nothing is hidden under computation
    wang         one axis is a ring of P steps under P partial products, the other is communicated whole
                 before (all_gather) or after (reduce_scatter), whichever axis is better:
                 whole + (P - 1) * max(shift, compute / P) + compute / P (Wang et al., ASPLOS 2023)
    summa        as meshslice, with K = lcm(rows, cols) panels that are broadcast or reduced in packets
    cannon       P x P chips: skew + (P - 1) * max(rows, cols, compute / P) + compute / P. A skew moves
                 blocks by up to P / 2 chips, the shorter way round; OS skews both operands at once, LS and RS
                 the operand before and the result after
    tensor_parallel
                 one axis: X is gathered (O > I) or Y scattered, and their gradients; nothing is hidden
    fsdp         one axis: W is gathered or dW scattered whole, under the computation of a neighbouring
                 product: max(communication, compute)

The seconds of a launch, of synchronisation and of transfer are sums over both directions, hidden or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distgraph.errors import ShardingError
from distgraph.passes.matmul_algorithms.layer_products import (
    ROLES,
    Flow,
    Mesh,
    Product,
    illegal_sizes,
    nearest_multiples,
    products,
)
from distgraph.passes.matmul_algorithms.ring_prices import CommunicationSeconds, RingPrices

ONE_AXIS = ("tensor_parallel", "fsdp")
"""Algorithms of a mesh with one axis longer than 1."""


@dataclass(frozen=True, slots=True)
class ProductSeconds:
    """Forecast of one product.

    Attributes:
        total: from its beginning to its end.
        compute: of a chip.
        communication: of a chip along both axes, whether or not it is hidden under computation.
        ring: mesh axis that wang makes a ring; None for other algorithms.
    """

    total: float
    compute: float
    communication: CommunicationSeconds
    ring: int | None = None

    @property
    def exposed(self) -> float:
        """Seconds in which the chip does not compute."""
        return self.total - self.compute


@dataclass(frozen=True, slots=True)
class _Case:
    """What an algorithm is priced for."""

    product: Product
    mesh: Mesh
    slices: int
    prices: RingPrices
    compute: float
    item_bytes: int

    def collective(self, flow: Flow, slices: int = 1) -> CommunicationSeconds:
        """One slice of a matrix along its axis."""
        ring = self.prices.ring(flow.kind, flow.axis, self.mesh)
        return ring.seconds(self.mesh[flow.axis], flow.shard_bytes(self.mesh, self.item_bytes) / slices)

    def shift(self, flow: Flow, hops: int = 1) -> CommunicationSeconds:
        """Blocks of a matrix move on by a number of chips."""
        ring = self.prices.ring("send_receive", flow.axis, self.mesh)
        return ring.seconds(hops + 1, flow.shard_bytes(self.mesh, self.item_bytes))

    def panel(self, flow: Flow, panels: int) -> CommunicationSeconds:
        """One panel is broadcast to, or reduced from, the chips of an axis."""
        kind = "broadcast" if flow.kind == "all_gather" else "reduce"
        nbytes = flow.elements * self.item_bytes / self.mesh[1 - flow.axis] / panels
        return self.prices.ring(kind, flow.axis, self.mesh).stream_seconds(self.mesh[flow.axis], nbytes)


Priced = tuple[float, CommunicationSeconds]
"""Seconds in all, and of communication."""


def _pipelined(case: _Case, rows: CommunicationSeconds, cols: CommunicationSeconds, parts: int) -> Priced:
    """A software pipeline of equal parts; the arguments are the seconds of one part."""
    compute = case.compute / parts
    both_gather = case.product.dataflow == "OS"
    ends = max(rows.total, cols.total) if both_gather else rows.total + cols.total
    steady = max(rows.total, cols.total, compute)
    return ends + (parts - 1) * steady + compute, (rows + cols).times(parts)


def _meshslice(case: _Case) -> Priced:
    rows, cols = (case.collective(flow, case.slices) for flow in case.product.flows)
    return _pipelined(case, rows, cols, case.slices)


def _summa(case: _Case) -> Priced:
    panels = math.lcm(*case.mesh)
    rows, cols = (case.panel(flow, panels) for flow in case.product.flows)
    return _pipelined(case, rows, cols, panels)


def _wang(case: _Case) -> Priced:
    seconds, communication, _ = _faster_ring(case)
    return seconds, communication


def _faster_ring(case: _Case) -> tuple[float, CommunicationSeconds, int]:
    """Wang's algorithm with the ring along the axis with which it takes fewer seconds, and that axis."""
    options = []
    for ring, whole in (case.product.flows, case.product.flows[::-1]):
        before, chips = case.collective(whole), case.mesh[ring.axis]
        shift, compute = case.shift(ring), case.compute / chips
        seconds = before.total + (chips - 1) * max(shift.total, compute) + compute
        options.append((seconds, before + shift.times(chips - 1), ring.axis))
    return min(options, key=lambda option: option[0])


def _cannon(case: _Case) -> Priced:
    chips = case.mesh[0]
    compute = case.compute / chips
    shifts = [case.shift(flow) for flow in case.product.flows]
    skews = [case.shift(flow, chips // 2) for flow in case.product.flows]
    ends = [skew.total for skew in skews]
    steady = max(shifts[0].total, shifts[1].total, compute)
    seconds = (max(ends) if case.product.dataflow == "OS" else sum(ends)) + (chips - 1) * steady + compute
    return seconds, skews[0] + skews[1] + (shifts[0] + shifts[1]).times(chips - 1)


def _one_axis(case: _Case, weight_moves: bool) -> CommunicationSeconds:
    """The collective of the weight, or of the smaller of input and output, along the only axis."""
    layer = case.product.layer
    flow = "OS" if layer.outputs > layer.inputs else "LS"
    product = products(layer, flow)[ROLES.index(case.product.role)]
    moved = product.flows[0 if weight_moves else 1]
    axis = 0 if case.mesh[0] > 1 else 1
    return case.collective(Flow(moved.kind, moved.matrix, axis, moved.elements))


def _tensor_parallel(case: _Case) -> Priced:
    communication = _one_axis(case, weight_moves=False)
    return communication.total + case.compute, communication


def _fsdp(case: _Case) -> Priced:
    communication = _one_axis(case, weight_moves=True)
    return max(communication.total, case.compute), communication


_ALGORITHMS: Mapping[str, Callable[[_Case], Priced]] = {
    "meshslice": _meshslice,
    "collective": _meshslice,
    "wang": _wang,
    "summa": _summa,
    "cannon": _cannon,
    "tensor_parallel": _tensor_parallel,
    "fsdp": _fsdp,
}
ALGORITHMS = tuple(_ALGORITHMS)
"""Names of the algorithms that have a price."""


def product_seconds(
    algorithm: str,
    product: Product,
    mesh: Mesh,
    slices: int,
    prices: RingPrices,
    flops_per_second: float,
    item_bytes: int = 2,
) -> ProductSeconds:
    """Forecast seconds of one product on a mesh; see the module for the formulas.

    Args:
        algorithm: one of `ALGORITHMS`, which can use the mesh (`check_algorithm`).
        product: of a layer, in its dataflow; the mesh divides its sizes (`illegal_reason`).
        mesh: rows and columns of chips. The one-axis algorithms do not depend on the dataflow.
        slices: into which meshslice cuts the product, one of `legal_slices`; 1 for the others.
        prices: of communication on the rings of the mesh.
        flops_per_second: effective FLOP/s of a chip.
        item_bytes: bytes of an element.

    Returns:
        Seconds in all, of computation, and of communication by cause.

    Example:
        >>> from distgraph.passes.matmul_algorithms.cluster_prices import ClusterPrices
        >>> from distgraph.passes.matmul_algorithms.layer_products import Layer
        >>> from distgraph.resources.load import load_cluster
        >>> prices = ClusterPrices(load_cluster("tpu_v4_16x16"))
        >>> forward = products(Layer("up", 65536, 4096, 16384), "OS")[0]
        >>> seconds = [product_seconds("meshslice", forward, (8, 8), s, prices, 200e12) for s in (1, 2, 4)]
        >>> [f"{1e6 * each.total:.0f} us" for each in seconds]
        ['1471 us', '1175 us', '1100 us']
    """
    compute = product.flops(math.prod(mesh)) / flops_per_second
    case = _Case(product, mesh, slices, prices, compute, item_bytes)
    total, communication = _ALGORITHMS[algorithm](case)
    ring = _faster_ring(case)[2] if algorithm == "wang" else None
    return ProductSeconds(total, compute, communication, ring)


def check_algorithm(algorithm: str, mesh: Mesh) -> None:
    """Raises ShardingError where an algorithm is unknown or cannot use a mesh."""
    shape = f"{mesh[0]}x{mesh[1]}"
    if algorithm not in _ALGORITHMS:
        raise ShardingError(f"unknown matmul algorithm {algorithm!r}; write one of {', '.join(ALGORITHMS)}")
    if min(mesh) < 1:
        raise ShardingError(f"mesh {shape} has no chips; both axes have at least 1")
    if algorithm in ONE_AXIS and min(mesh) > 1:
        raise ShardingError(
            f"algorithm {algorithm} uses one mesh axis but mesh {shape} has two; use 1x{math.prod(mesh)} or "
            f"{math.prod(mesh)}x1"
        )
    if algorithm == "cannon" and mesh[0] != mesh[1]:
        side = math.isqrt(math.prod(mesh))
        raise ShardingError(
            f"algorithm cannon needs a square mesh but mesh {shape} has {mesh[0]} rows and {mesh[1]} "
            f"columns; use {side}x{side}, or algorithm meshslice"
        )


def check_positive(**numbers: float) -> None:
    """Raises ShardingError for a number that is not finite and above 0."""
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ShardingError(f"{name} is {number} but must be a finite number above 0")


def illegal_reason(algorithm: str, product: Product, mesh: Mesh, block: int) -> str | None:
    """Why a mesh does not divide the sizes of a product, with the nearest legal ones; None where it does.

    The block is of no meaning to algorithms other than meshslice.
    """
    if algorithm in ONE_AXIS:
        layer, chips = product.layer, math.prod(mesh)
        sizes = {"samples": layer.samples}
        if algorithm == "tensor_parallel":
            sizes |= {"outputs": layer.outputs} if layer.outputs > layer.inputs else {"inputs": layer.inputs}
        for name, length in sizes.items():
            if length % chips:
                return (
                    f"layer {layer.name}: {name} is {length} but {algorithm} on {chips} chips needs a "
                    f"multiple of {chips}; the nearest legal size is {nearest_multiples(length, chips)}"
                )
        return None
    return illegal_sizes(product, mesh, block if algorithm == "meshslice" else 1)
