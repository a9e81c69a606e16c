"""A NumPy machine for redistribution steps and tiles: one array a rank, groups as a transport sees them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from distgraph.ir.collective_registry import Step
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import REDUCTIONS, DistAttr, ShardSpec
from distgraph.passes.redistribution.tiles import Tile, tiles_between

Blocks = dict[int, np.ndarray]

REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
IDENTITY = {"sum": 0.0, "prod": 1.0}


def every_spec(mesh: ProcessMesh, ndim: int, kinds: Sequence[str] = REDUCTIONS) -> list[ShardSpec]:
    """Every layout: each axis idle, on any dim behind or before others, or partial in any given way."""
    found: dict[ShardSpec, None] = {}
    places = [None, *range(ndim), *kinds]
    for order in itertools.permutations(mesh.axes):
        for put in itertools.product(places, repeat=len(order)):
            dims: list[list[str]] = [[] for _ in range(ndim)]
            partial = {}
            for axis, place in zip(order, put, strict=True):
                if isinstance(place, int):
                    dims[place].append(axis)
                elif place is not None:
                    partial[axis] = place
            found[ShardSpec.of([tuple(d) for d in dims], partial)] = None
    return list(found)


def scatter(value: np.ndarray, mesh: ProcessMesh, spec: ShardSpec, seed: int = 0) -> Blocks:
    """Blocks of a layout. Partial ones differ on every rank and reduce to the value exactly."""
    rng = np.random.default_rng(seed)
    parts = {(): value}
    for axis, kind in reversed(spec.partial):  # the last one is outermost: split the value along it first
        parts = {
            (i, *at): part
            for at, whole in parts.items()
            for i, part in enumerate(_split(whole, mesh.axis_size(axis), kind, rng))
        }
    blocks = {}
    for rank in mesh.members:
        at = tuple(mesh.index(rank, (axis,)) for axis, _ in spec.partial)
        blocks[rank] = parts[at][spec.slices(value.shape, mesh, rank)].copy()
    return blocks


def _split(whole: np.ndarray, count: int, kind: str, rng: np.random.Generator) -> list[np.ndarray]:
    noise = [rng.integers(1, 5, whole.shape).astype(float) for _ in range(count - 1)]
    if kind == "sum":
        parts = [*noise, whole - sum(noise)]
    elif kind == "prod":
        powers = [2.0**part for part in noise]
        parts = [*powers, whole / np.prod(powers, axis=0)] if powers else [whole]
    else:
        sign = -1 if kind == "max" else 1
        parts = [whole, *(whole + sign * part for part in noise)]
    return [parts[i] for i in rng.permutation(count)]


def assemble(blocks: Blocks, shape: tuple[int, ...], mesh: ProcessMesh, spec: ShardSpec) -> Iterator[tuple]:
    """(rank, bounds, true value of its block), pending reductions done in the order of the spec."""
    values = {mesh.coordinates(rank): block for rank, block in blocks.items()}
    for axis, kind in spec.partial:
        where = mesh.axes.index(axis)
        values = {
            at: REDUCE[kind].reduce(
                [values[(*at[:where], i, *at[where + 1 :])] for i in range(mesh.shape[where])]
            )
            for at in values
        }
    for rank in blocks:
        yield rank, spec.slices(shape, mesh, rank), values[mesh.coordinates(rank)]


def check_layout(blocks: Blocks, value: np.ndarray, mesh: ProcessMesh, spec: ShardSpec, label: str) -> None:
    """Asserts that blocks of a layout stand for the value, replicas included."""
    assert sorted(blocks) == sorted(mesh.members), label
    for rank, block in blocks.items():
        assert block.shape == spec.local_shape(value.shape, mesh, rank), f"{label}: rank {rank}"
    for rank, where, got in assemble(blocks, value.shape, mesh, spec):
        if not np.array_equal(got, value[where]):  # faster than the assertion, which says where
            np.testing.assert_array_equal(got, value[where], err_msg=f"{label}: rank {rank}")


def run_step(step: Step, blocks: Blocks, shape: tuple[int, ...], mesh: ProcessMesh) -> tuple[Blocks, int]:
    """Blocks after a step, and the most elements that one rank must send (receive, for a permute)."""
    if step.kind == "permute":
        tiles = tiles_between(shape, DistAttr(mesh, step.source), DistAttr(mesh, step.target))
        received = dict.fromkeys(mesh.members, 0)
        for tile in tiles:
            received[tile.target_rank] += 0 if tile.local else tile.volume
        return move_tiles(tiles, blocks, shape, mesh, step.source, mesh, step.target), max(received.values())
    after, sent = {}, 0
    for rank in mesh.members:
        group = mesh.group(rank, step.axes)
        held = [blocks[r] for r in group]
        me = group.index(rank)
        if step.kind == "slice":
            after[rank] = blocks[rank][_inside(step, shape, mesh, rank, rank)]
        elif step.kind == "mask":
            keep = me == 0 or step.reduction in ("max", "min")
            after[rank] = blocks[rank] if keep else np.full_like(blocks[rank], IDENTITY[step.reduction])
        elif step.kind == "all_gather":
            after[rank] = np.concatenate(held, axis=step.dim)
            sent = max(sent, after[rank].size - blocks[rank].size)
        elif step.kind == "all_reduce":
            after[rank] = REDUCE[step.reduction].reduce(held)
        elif step.kind == "reduce_scatter":
            after[rank] = REDUCE[step.reduction].reduce(held)[_inside(step, shape, mesh, rank, rank)]
            sent = max(sent, blocks[rank].size - after[rank].size)
        elif step.kind == "all_to_all":
            pieces = [blocks[r][_inside(step, shape, mesh, r, rank, step.to_dim)] for r in group]
            after[rank] = np.concatenate(pieces, axis=step.dim)
            sent = max(sent, blocks[rank].size - pieces[me].size)
        else:
            raise AssertionError(step.kind)
    return after, sent


def _inside(
    step: Step, shape: tuple[int, ...], mesh: ProcessMesh, holder: int, getter: int, only: int | None = None
) -> tuple[slice, ...]:
    """The getter's new block inside the block that the holder has; on one dim only, or on all."""
    old, new = step.source.bounds(shape, mesh, holder), step.target.bounds(shape, mesh, getter)
    cut = []
    for dim, ((first, last), (start, stop)) in enumerate(zip(old, new, strict=True)):
        if only is not None and dim != only:
            cut.append(slice(None))
            continue
        assert start == stop or first <= start <= stop <= last, f"{step} is not exact on shape {shape}"
        cut.append(slice(start - first, stop - first) if start < stop else slice(0, 0))
    return tuple(cut)


def move_tiles(
    tiles: Sequence[Tile],
    blocks: Blocks,
    shape: tuple[int, ...],
    mesh: ProcessMesh,
    spec: ShardSpec,
    target_mesh: ProcessMesh,
    target_spec: ShardSpec,
) -> Blocks:
    """Blocks after the tiles; asserts that they fill every target block exactly once."""
    after = {r: np.zeros(target_spec.local_shape(shape, target_mesh, r)) for r in target_mesh.members}
    seen = {rank: np.zeros(block.shape, dtype=int) for rank, block in after.items()}
    for tile in tiles:
        old = spec.bounds(shape, mesh, tile.source_rank)
        new = target_spec.bounds(shape, target_mesh, tile.target_rank)
        take = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(tile.bounds, old, strict=True))
        put = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(tile.bounds, new, strict=True))
        after[tile.target_rank][put] = blocks[tile.source_rank][take]
        seen[tile.target_rank][put] += 1
    assert all((count == 1).all() for count in seen.values()), "tiles overlap or leave a hole"
    return after
