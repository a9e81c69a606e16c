"""Which ranks stand for the others of their mesh.

*In:* ranks that run the same tasks. *Out:* some of them, and whether they stand for the rest exactly.
*Invariant:* exact only where every value is cut into blocks of one size and no contraction is told where its block
lies, so that all ranks do the same work. Otherwise the corners of the meshes stand for the rest: blocks get shorter
with the coordinate, and what an op sees of its neighbours gets more or less with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from distgraph.mesh import ProcessMesh
from distgraph.ops.registry import freeze, local_attrs, lookup
from distgraph.resources import Cluster
from distgraph.runtime.build import Build


def representatives(
    build: Build, ranks: tuple[int, ...], cluster: Cluster, devices: Sequence[int]
) -> tuple[tuple[int, ...], bool]:
    """Ranks to look at in place of all.

    Args:
        build: the program.
        ranks: ranks that run the same tasks.
        cluster: its devices; each kind among them is looked at.
        devices: device number of every rank.

    Returns:
        The chosen ranks, and True when they stand for the others exactly.
    """
    kinds: dict[tuple[str, str], int] = {}
    for rank in ranks:
        device = cluster.devices[devices[rank]]
        kinds.setdefault((device.model, device.origin), rank)
    meshes = {part.mesh for part in build.parts.tasks if ranks[0] in part.mesh}
    uneven = [mesh for mesh in meshes if not _is_even(build, mesh)]
    chosen = dict.fromkeys(kinds.values())
    if uneven:
        members = set(ranks)
        for mesh in uneven:
            chosen.update((rank, None) for rank in corners(mesh) if rank in members)
    return tuple(chosen), not uneven


def corners(mesh: ProcessMesh) -> tuple[int, ...]:
    """Ranks whose coordinates are the first or the last on every axis.

    Example:
        >>> corners(ProcessMesh.grid(x=2, y=3))
        (0, 2, 3, 5)
    """
    ends = [(0, size - 1) if size > 1 else (0,) for size in mesh.shape]
    return tuple(int(mesh.ranks[at]) for at in itertools.product(*ends))


def _is_even(build: Build, mesh: ProcessMesh) -> bool:
    graph = build.lowered
    for op in graph.ops:
        for value in op.results:
            attr = graph.attrs[value.name]
            if attr.mesh == mesh and any(
                size % mesh.count(axes)
                for size, axes in zip(value.shape, attr.spec.dims, strict=True)
                if axes
            ):
                return False
        if op.layout is None or op.layout.mesh != mesh:
            continue
        if op.kind in ("comm.halo", "comm.permute"):
            return False
        if op.layout.axes and lookup(op.kind).cost == "matmul" and lookup(op.kind).localize is not None:
            first, last = (local_attrs(op, rank) for rank in (mesh.members[0], mesh.members[-1]))
            if freeze(first) != freeze(last):
                return False
    return True
