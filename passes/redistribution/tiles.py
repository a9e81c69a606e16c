"""Tiles: which rank sends which piece of a tensor to which rank, from one layout to another.

*In:* a shape and two layouts, on one mesh or on two. *Out:* a tuple of `Tile`, a piece that one rank hands to
another. *Invariant:* the tiles of one target rank cover its block exactly once; a rank that holds a piece
already is its own source, and only then are source and target rank equal.

    [x, _] -> [_, x] on x=2, shape (4, 4): 0->0 [0:2, 0:2]; 1->0 [2:4, 0:2]; 0->1 [0:2, 2:4]; 1->1 [2:4, 2:4]
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

import numpy as np

from distgraph.errors import ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, ShardSpec

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """A piece of a tensor, `bounds` (start, stop) a dim in global positions, that a rank hands to another."""

    source_rank: int
    target_rank: int
    bounds: Bounds

    @property
    def local(self) -> bool:
        """True when nothing is sent: the rank copies the piece from its own block."""
        return self.source_rank == self.target_rank

    @property
    def volume(self) -> int:
        """Number of elements."""
        return volume(self.bounds)

    def __str__(self) -> str:
        body = ", ".join(f"{start}:{stop}" for start, stop in self.bounds)
        return f"{self.source_rank}->{self.target_rank} [{body}]"


@dataclass(frozen=True, slots=True)
class Need:
    """A piece that a target rank needs, and the ranks that hold it."""

    target_rank: int
    bounds: Bounds
    holders: tuple[int, ...]


def volume(bounds: Bounds) -> int:
    """Number of elements between bounds (1 for a scalar)."""
    return math.prod(stop - start for start, stop in bounds)


@lru_cache(maxsize=4096)
def tiles_between(shape: tuple[int, ...], source: DistAttr, target: DistAttr) -> tuple[Tile, ...]:
    """The tiles of a move from one layout to another, on one mesh or between two.

    Pending reductions stay: a piece comes from a rank with the same coordinates on the partial axes. Partial
    over one rank is whole.

    Raises:
        ShardingError: a spec does not fit the shape or mesh, or the two have other pending reductions.

    Example:
        >>> mesh = ProcessMesh.grid(x=2, y=2)
        >>> first, second = (DistAttr(mesh, ShardSpec.parse(text)) for text in ("[x]", "[y]"))
        >>> [str(tile) for tile in tiles_between((4,), first, second) if not tile.local]
        ['2->1 [2:4]', '0->2 [0:2]']
    """
    start, goal, ranks = renumbered(source, target)
    return moved(_tiles_between(tuple(shape), start, goal), ranks)


@lru_cache(maxsize=4096)
def _tiles_between(shape: tuple[int, ...], source: DistAttr, target: DistAttr) -> tuple[Tile, ...]:
    source.spec.check(shape, source.mesh, "source of a move")
    target.spec.check(shape, target.mesh, "target of a move")
    start, goal = without_unit_axes(source.spec, source.mesh), without_unit_axes(target.spec, target.mesh)
    if start.partial != goal.partial:
        raise ShardingError(f"move from {start} to {goal} changes what is partial; reduce or mask first")
    return assign(needs(shape, DistAttr(source.mesh, start), DistAttr(target.mesh, goal)))


def renumbered(source: DistAttr, target: DistAttr) -> tuple[DistAttr, DistAttr, tuple[int, ...]]:
    """Two layouts with the ranks of their meshes numbered from 0 in order, and the rank behind each number.

    What holds between two stages of a pipeline holds between the next two as well, under other numbers.

    Example:
        >>> first, second = (DistAttr(ProcessMesh.grid(n, x=2), ShardSpec.parse("[x]")) for n in (6, 2))
        >>> first, second, ranks = renumbered(first, second)
        >>> first.mesh.members, second.mesh.members, ranks
        ((2, 3), (0, 1), (2, 3, 6, 7))
    """
    first, second, ranks = _renumbered_meshes(source.mesh, target.mesh)
    return DistAttr(first, source.spec), DistAttr(second, target.spec), ranks


@lru_cache(maxsize=4096)
def _renumbered_meshes(
    first: ProcessMesh, second: ProcessMesh
) -> tuple[ProcessMesh, ProcessMesh, tuple[int, ...]]:
    ranks = np.union1d(first.ranks, second.ranks)
    one, other = (mesh.renumbered(np.searchsorted(ranks, mesh.ranks)) for mesh in (first, second))
    return one, other, tuple(int(rank) for rank in ranks)


def moved(tiles: Iterable[Tile], ranks: Sequence[int]) -> tuple[Tile, ...]:
    """Tiles between other ranks: number i is `ranks[i]`."""
    return tuple(Tile(ranks[t.source_rank], ranks[t.target_rank], t.bounds) for t in tiles)


@lru_cache(maxsize=2048)
def tiles_by_rank(
    shape: tuple[int, ...], source: DistAttr, target: DistAttr
) -> Mapping[int, tuple[Tile, ...]]:
    """Rank -> those of `tiles_between` that it sends, receives or keeps."""
    return by_rank(tiles_between(shape, source, target))


def by_rank(tiles: Iterable[Tile]) -> dict[int, tuple[Tile, ...]]:
    """Rank -> the tiles that it sends, receives or keeps, in their order.

    Example:
        >>> tiles = (Tile(0, 1, ((0, 2),)), Tile(1, 1, ((2, 4),)))
        >>> {rank: [str(tile) for tile in own] for rank, own in by_rank(tiles).items()}
        {0: ['0->1 [0:2]'], 1: ['0->1 [0:2]', '1->1 [2:4]']}
    """
    tiles_of: dict[int, list[Tile]] = defaultdict(list)
    for tile in tiles:
        tiles_of[tile.source_rank].append(tile)
        if not tile.local:
            tiles_of[tile.target_rank].append(tile)
    return {rank: tuple(owned) for rank, owned in tiles_of.items()}


def without_unit_axes(spec: ShardSpec, mesh: ProcessMesh) -> ShardSpec:
    """The same layout with no mention of mesh axes of size 1."""
    if all(mesh.axis_size(axis) > 1 for axis in spec.axes):
        return spec
    dims = tuple(tuple(axis for axis in dim if mesh.axis_size(axis) > 1) for dim in spec.dims)
    return ShardSpec(dims, tuple((axis, kind) for axis, kind in spec.partial if mesh.axis_size(axis) > 1))


def needs(shape: tuple[int, ...], source: DistAttr, target: DistAttr) -> list[Need]:
    """Every intersection of a target rank's block with a source block; empty ones are left out."""
    held_by = holders(source.mesh, source.spec)
    blocks = [source.mesh.blocks(size, axes) for size, axes in zip(shape, source.spec.dims, strict=True)]
    result: list[Need] = []
    for rank in target.mesh.members:
        bounds = target.spec.bounds(shape, target.mesh, rank)
        if volume(bounds) == 0:
            continue
        pending = tuple(target.mesh.index(rank, (axis,)) for axis, _ in target.spec.partial)
        pieces = (list(overlaps(block, *b)) for b, block in zip(bounds, blocks, strict=True))
        for piece in itertools.product(*pieces):
            parts = tuple(part for part, _ in piece)
            result.append(Need(rank, tuple(where for _, where in piece), held_by[parts + pending]))
    return result


def overlaps(blocks: Bounds, start: int, stop: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """The blocks of a dim that overlap start:stop, and where they do.

    Example:
        >>> list(overlaps(((0, 3), (3, 4), (4, 4)), 1, 4))
        [(0, (1, 3)), (1, (3, 4))]
    """
    first = bisect_right(blocks, start, key=itemgetter(0)) - 1
    for number, (begin, end) in enumerate(blocks[first:], first):
        if begin >= stop:
            return
        if max(start, begin) < min(stop, end):
            yield number, (max(start, begin), min(stop, end))


@lru_cache(maxsize=4096)
def holders(mesh: ProcessMesh, spec: ShardSpec) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Block number on every dim and coordinate on every partial axis -> the ranks that hold that block."""
    keys = (*spec.dims, *((axis,) for axis, _ in spec.partial))
    ranks_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in mesh.members:
        ranks_of[tuple(mesh.index(rank, axes) for axes in keys)].append(rank)
    return {key: tuple(ranks) for key, ranks in ranks_of.items()}


def assign(needs: Iterable[Need]) -> tuple[Tile, ...]:
    """A sender for every need: the rank itself, else the holder that has least to send.

    Longest first; then pieces move from the most loaded rank to another holder while that lowers the most
    that a rank sends. A local optimum of the min-max load, exact where pieces are of one size and every
    holder holds them all.
    """
    todo = list(needs)
    sizes = [volume(need.bounds) for need in todo]
    sender: dict[int, int] = {}
    choices: dict[int, tuple[int, ...]] = {}
    sent: dict[int, int] = defaultdict(int)
    for i in sorted(range(len(todo)), key=lambda i: -sizes[i]):
        need, size = todo[i], sizes[i]
        if need.target_rank in need.holders:
            sender[i] = need.target_rank
            continue
        if len(need.holders) > 1:
            choices[i] = need.holders
        sender[i] = min(need.holders, key=lambda rank: sent[rank])
        sent[sender[i]] += size
    _even_out(sizes, choices, sender, sent)
    return tuple(Tile(sender[i], need.target_rank, need.bounds) for i, need in enumerate(todo))


def _even_out(
    sizes: Sequence[int], choices: Mapping[int, tuple[int, ...]], sender: dict[int, int], sent: dict[int, int]
) -> None:
    """Lower the largest load by moving one piece at a time between ranks."""
    for _ in range(len(choices)):
        worst = max(sent, key=lambda rank: sent[rank])
        moves = [
            (max(sent[worst] - sizes[i], sent[other] + sizes[i]), i, other)
            for i, others in choices.items()
            if sender[i] == worst
            for other in others
            if other != worst
        ]
        if not moves or min(moves)[0] >= sent[worst]:
            return
        _, i, other = min(moves)
        sent[worst] -= sizes[i]
        sent[other] += sizes[i]
        sender[i] = other


def link_bytes(tiles: Iterable[Tile], itemsize: int) -> dict[tuple[int, int], int]:
    """(source rank, target rank) -> bytes sent; local copies are not in it."""
    nbytes: dict[tuple[int, int], int] = defaultdict(int)
    for tile in tiles:
        if not tile.local:
            nbytes[tile.source_rank, tile.target_rank] += tile.volume * itemsize
    return dict(nbytes)


def busiest(tiles: Iterable[Tile]) -> int:
    """Most elements that one rank sends or receives."""
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for tile in tiles:
        if not tile.local:
            sent[tile.source_rank] += tile.volume
            received[tile.target_rank] += tile.volume
    return max((*sent.values(), *received.values()), default=0)
