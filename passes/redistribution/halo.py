"""Halos: what ranks read of a split dim beyond, or instead of, their own block.

*In:* a tensor's layout and the stretch of positions that every part of a split dim needs (`Windows`). *Out:*
the tiles that ranks hand each other, and their volume. *Invariant:* every rank ends up with just its window;
a position that it holds already comes from itself.

    [x] on x=2, shape (8,), windows 0:5, 3:8     1->0 [4:5]; 0->1 [3:4]; the rest is copied

A window may reach below 0 or past the end of the dim: it wraps around, and is never longer than the dim.

Where the windows are other ranks' blocks (a reversal, a shift by whole blocks) the op had better be computed
on a mesh with its ranks in another order, under which every rank reads what it holds: `nearest`. The windows
are then fetched straight from where the tensor is stored, on the same ranks in the old order.

    [x] on mesh(x=2; 0,1), windows 4:8, 0:4      0->1 [0:4]; 1->0 [4:8]
    the same on mesh(x=2; 1,0), fetched from [x] on mesh(x=2; 0,1)     nothing is sent
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module

import numpy as np

from distgraph.ir.graph import Op
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import Windows, operand_layout, operand_windows, window_bounds
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.passes.redistribution.tiles import (
    Bounds,
    Need,
    Tile,
    assign,
    holders,
    overlaps,
    without_unit_axes,
)


@lru_cache(maxsize=4096)
def halo_tiles(
    shape: tuple[int, ...], mesh: ProcessMesh, spec: ShardSpec, windows: Windows, held: DistAttr | None = None
) -> tuple[Tile, ...]:
    """Tiles that bring every rank's windows together, in global positions; pending reductions stay.

    Args:
        shape: of the tensor.
        mesh, spec: layout that the windows belong to.
        windows: see `operand_windows`.
        held: where the tensor is stored, if not there; on the same ranks, with the same pending reductions.

    Example:
        >>> mesh = ProcessMesh.grid(x=2)
        >>> tiles = halo_tiles((8,), mesh, ShardSpec.parse("[x]"), ((0, ((0, 5), (3, 8))),))
        >>> [str(tile) for tile in tiles if not tile.local]
        ['1->0 [4:5]', '0->1 [3:4]']
    """
    source = mesh if held is None else held.mesh
    plain = without_unit_axes(spec if held is None else held.spec, source)
    blocks = [source.blocks(size, axes) for size, axes in zip(shape, plain.dims, strict=True)]
    held_by, needs = holders(source, plain), []
    for rank in mesh.members:
        bounds = window_bounds(shape, mesh, spec, windows, rank)
        pending = tuple(mesh.index(rank, (axis,)) for axis, _ in plain.partial)
        pieces = (
            list(_pieces(start, stop, size, stored))
            for (start, stop), size, stored in zip(bounds, shape, blocks, strict=True)
        )
        for piece in itertools.product(*pieces):
            parts = tuple(part for part, _ in piece) + pending
            needs.append(Need(rank, tuple(where for _, where in piece), held_by[parts]))
    return assign(needs)


def _pieces(start: int, stop: int, size: int, blocks: Bounds) -> Iterator[tuple[int, tuple[int, int]]]:
    """A window of one dim cut at the borders of blocks and where it wraps: (block, global positions)."""
    while start < stop:
        offset = start % size
        end = min(offset + stop - start, size)
        yield from overlaps(blocks, offset, end)
        start += end - offset


def inside_window(tile: Tile, window: Bounds, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Where a tile lies in a window."""
    starts = [
        (a - start) % max(1, size)
        for (a, _), (start, _), size in zip(tile.bounds, window, shape, strict=True)
    ]
    return tuple(slice(offset, offset + b - a) for offset, (a, b) in zip(starts, tile.bounds, strict=True))


@lru_cache(maxsize=1 << 16)
def halo_volume(shape: tuple[int, ...], mesh: ProcessMesh, spec: ShardSpec, windows: Windows) -> int:
    """Most elements that one rank sends or receives, replicas not shared out; made without the tiles.

    Example:
        >>> halo_volume((8, 3), ProcessMesh.grid(x=2), ShardSpec.parse("[x, _]"), ((0, ((0, 5), (3, 8))),))
        3
    """
    if not windows:
        return 0
    split = dict(windows)
    others = math.prod(
        mesh.longest(size, axes)
        for dim, (size, axes) in enumerate(zip(shape, spec.dims, strict=True))
        if dim not in split
    )
    most = 0
    traffic = (_traffic(shape[dim], mesh.blocks(shape[dim], spec.dims[dim]), read) for dim, read in windows)
    for parts in itertools.product(*traffic):
        read_size, given, local = (math.prod(numbers) for numbers in zip(*parts, strict=True))
        most = max(most, read_size - local, given - local)
    return others * most


def _traffic(size: int, blocks: Bounds, read: Bounds) -> list[tuple[int, int, int]]:
    """For every part of a dim: positions of its window, those that windows take from it, those it has."""
    given, local = [0] * len(read), [0] * len(read)
    for part, (start, stop) in enumerate(read):
        for owner, (first, last) in _pieces(start, stop, size, blocks):
            given[owner] += last - first
            local[part] += (last - first) * (owner == part)
    return list(zip((stop - start for start, stop in read), given, local, strict=True))


def nearest(op: Op, layout: OpLayout) -> ProcessMesh:
    """The mesh with its ranks in the order in which they hold most of what an op reads under a layout.

    The mesh itself where no order is better.
    """
    mesh, orders = layout.mesh, dict[tuple[str, ...], tuple[int, ...]]()
    for position, value in enumerate(op.operands):
        spec = operand_layout(op, position, layout)
        for dim, read in operand_windows(op, position, layout):
            axes, size = spec.dims[dim], value.shape[dim]
            orders.setdefault(axes, _order(size, mesh.blocks(size, axes), read))
    for axes, order in orders.items():
        if order != tuple(range(len(order))):
            mesh = mesh.reordered(axes, order)
    return mesh


@lru_cache(maxsize=4096)
def _order(size: int, blocks: Bounds, read: Bounds) -> tuple[int, ...]:
    """For every window the part whose holder should read it, so that most positions stay where they are.

    An assignment problem; its answer is taken where it beats every part reading its own window.

    Example:
        >>> _order(8, ((0, 2), (2, 4), (4, 6), (6, 8)), ((6, 8), (4, 6), (2, 4), (0, 2)))
        (3, 2, 1, 0)
        >>> _order(8, ((0, 4), (4, 8)), ((-1, 5), (3, 9)))
        (0, 1)
    """
    parts = len(read)
    local = np.zeros((parts, parts), np.int64)
    for part, (start, stop) in enumerate(read):
        for owner, (first, last) in _pieces(start, stop, size, blocks):
            local[part, owner] += last - first
    optimize = import_module("scipy.optimize")  # slow to load, and few programs have windows
    rows, owners = optimize.linear_sum_assignment(local, maximize=True)
    better = local[rows, owners].sum() > local.trace()
    return tuple(int(owner) for owner in owners) if better else tuple(range(parts))
