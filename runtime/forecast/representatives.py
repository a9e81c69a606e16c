"""Which ranks stand for the others of their mesh.

*In:* ranks that run the same tasks.
*Out:* some of them, and whether they stand for the rest exactly.
*Invariant:* exact only where every value is cut into blocks of one size and no contraction is told where
its block lies, so that all ranks do the same work. Otherwise the corners of the meshes stand for the rest:
blocks get shorter with the coordinate, and what an op sees of its neighbours gets more or less with it. Along
an axis with weights, the corners of every run of equal ones do.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from distgraph.ir.graph import Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import freeze, local_attrs, lookup
from distgraph.resources import Cluster
from distgraph.runtime.program.build import Build


def uneven_meshes(build: Build) -> frozenset[ProcessMesh]:
    """Meshes whose ranks do not all do the same work."""
    graph, found = build.lowered, set()
    for op in graph.ops:
        for value in op.results:
            attr = graph.attrs[value.name]
            if attr.mesh not in found and any(
                size % attr.mesh.count(axes) or any(axis in attr.mesh.weights for axis in axes)
                for size, axes in zip(value.shape, attr.spec.dims, strict=True)
                if axes
            ):
                found.add(attr.mesh)
        mesh = None if op.layout is None else op.layout.mesh
        if mesh is not None and mesh not in found and _differs(op, mesh):
            found.add(mesh)
    return frozenset(found)


def _differs(op: Op, mesh: ProcessMesh) -> bool:
    """True when an op gives the ranks of a mesh different work though their blocks have one size."""
    if op.kind in ("comm.halo", "comm.permute"):
        return True
    declared = lookup(op.kind)
    if op.layout is None or not op.layout.axes or declared.cost != "matmul" or declared.localize is None:
        return False
    first, last = (local_attrs(op, rank) for rank in (mesh.members[0], mesh.members[-1]))
    return bool(freeze(first) != freeze(last))


def representatives(
    build: Build,
    ranks: tuple[int, ...],
    uneven: Collection[ProcessMesh],
    cluster: Cluster,
    devices: Sequence[int],
) -> tuple[tuple[int, ...], bool]:
    """Ranks to look at in place of all.

    Args:
        build: the program.
        ranks: ranks that run the same tasks.
        uneven: see `uneven_meshes`.
        cluster: its devices; each kind among them is looked at.
        devices: device number of every rank.

    Returns:
        The chosen ranks, and True when they stand for the others exactly.
    """
    kinds: dict[tuple[str, str], int] = {}
    for rank in ranks:
        device = cluster.devices[devices[rank]]
        kinds.setdefault((device.model, device.origin), rank)
    chosen, members = dict.fromkeys(kinds.values()), set(ranks)
    odd = [mesh for mesh in uneven if ranks[0] in mesh]
    for mesh in odd:
        chosen.update((rank, None) for rank in corners(mesh) if rank in members)
    return tuple(chosen), not odd


def corners(mesh: ProcessMesh) -> tuple[int, ...]:
    """Ranks whose coordinates are on every axis the first or the last of a run of equal weights.

    Example:
        >>> corners(ProcessMesh.grid(x=2, y=3)), corners(ProcessMesh.grid(x=4).weighted(x=(2, 1, 1, 1)))
        ((0, 2, 3, 5), (0, 1, 3))
    """
    ends = [_run_ends(mesh.weights.get(axis, (1,) * size)) for axis, size in mesh.sizes.items()]
    return tuple(int(mesh.ranks[at]) for at in itertools.product(*ends))


def _run_ends(weights: Sequence[int]) -> tuple[int, ...]:
    last = len(weights) - 1
    return tuple(
        i for i, own in enumerate(weights) if i in (0, last) or weights[i - 1] != own or weights[i + 1] != own
    )
