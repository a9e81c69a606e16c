"""Prices of moving one value between layouts: one move, and all that is read of it, windows of ops included.

Both are what `lower` will ask for: the price of the cheapest sequence of collectives, or of the transfer.
"""

from __future__ import annotations

import math

from distgraph.ir.op_registry import Windows
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.redistribution.cross_mesh import transfer_cost
from distgraph.passes.redistribution.halo import halo_tiles, halo_volume
from distgraph.passes.redistribution.planner import Price, redistribute_cost
from distgraph.passes.redistribution.tiles import busiest
from distgraph.passes.reshard import fetches

TOUCH = 1e-4  # cost of a byte touched locally, in bytes on the wire

Read = tuple[DistAttr, Windows]


def move_cost(shape: tuple[int, ...], size: int, source: DistAttr, target: DistAttr, price: Price) -> float:
    """Price of a change of layout; by default the bytes that one rank sends."""
    if source == target:
        return 0.0
    if source.mesh == target.mesh:
        return redistribute_cost(shape, size, source.mesh, source.spec, target.spec, price)
    return transfer_cost(shape, size, source, target, price=price)


def window_cost(
    shape: tuple[int, ...], size: int, stored: DistAttr, attr: DistAttr, windows: Windows, price: Price
) -> float:
    """Price of what lies in the windows of a layout and not in its blocks."""
    mesh, spec = attr.mesh, attr.spec
    if fetches(stored, attr):
        volume = busiest(halo_tiles(shape, mesh, spec, windows, stored))
    else:
        volume = halo_volume(shape, mesh, spec, windows)
    axes = tuple(axis for dim, _ in windows for axis in spec.dims[dim])
    return price("permute", float(size * volume), mesh.count(axes), mesh, axes) if volume else 0.0


def copy_cost(shape: tuple[int, ...], size: int, stored: DistAttr, attr: DistAttr) -> float:
    """What a rank copies to itself where a value goes to the same ranks in another order."""
    if stored.mesh == attr.mesh or stored.mesh.rank_set != attr.mesh.rank_set:
        return 0.0
    return TOUCH * size * math.prod(attr.spec.local_shape(shape, attr.mesh, attr.mesh.members[0]))
