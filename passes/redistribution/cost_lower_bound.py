"""A lower bound of the cost of a change of layout, computed without planning its collectives.

Each rank of the target holds a block at the end. What of it the rank did not hold before, it received; where
the source is partial, all of it, for no element is final on any rank. Whatever the steps are, the busiest
rank of each sends at least what a rank receives on average in it, so that

    price >= itemsize * (sum over target ranks of elements received) / (ranks of the larger mesh)

in bytes, and one collective is started where anything is received.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.sharding_spec import DistAttr

Blocks = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def received(shape: tuple[int, ...], source: DistAttr, target: DistAttr) -> float:
    """Elements that a rank receives on average, at least, in a change of layout.

    0 for a partial target, which a mask or a slice may make of what is there.

    Example:
        >>> from distgraph.ir.mesh import ProcessMesh
        >>> from distgraph.ir.sharding_spec import ShardSpec
        >>> mesh, spec = ProcessMesh.grid(x=2, y=2), ShardSpec.parse
        >>> received((8, 8), DistAttr(mesh, spec("[x, _]")), DistAttr(mesh, spec("[_, x]")))
        16.0
    """
    if target.spec.partial or source == target:
        return 0.0
    ranks, start, stop = _blocks(shape, target)
    others = max(source.mesh.size, target.mesh.size)
    total = int((stop - start).prod(axis=1).sum())
    if any(source.mesh.axis_size(axis) > 1 for axis, _ in source.spec.partial):
        return total / others
    held, held_start, held_stop = _blocks(shape, source)
    if held is not ranks and not np.array_equal(held, ranks):
        _, mine, theirs = np.intersect1d(ranks, held, assume_unique=True, return_indices=True)
        start, stop, held_start, held_stop = start[mine], stop[mine], held_start[theirs], held_stop[theirs]
    overlap = np.minimum(stop, held_stop) - np.maximum(start, held_start)
    return (total - int(overlap.clip(min=0).prod(axis=1).sum())) / others


@lru_cache(maxsize=1 << 14)
def _blocks(shape: tuple[int, ...], attr: DistAttr) -> Blocks:
    """The ranks, ascending, with the (start, stop) of the block of each on every dim."""
    ranks = sorted(attr.mesh.members)
    bounds = np.array([attr.spec.bounds(shape, attr.mesh, rank) for rank in ranks], np.int64)
    bounds = bounds.reshape(len(ranks), len(shape), 2)
    return np.array(ranks), bounds[:, :, 0], bounds[:, :, 1]
