"""Bytes that every rank sends to every other in a step.

*In:* a lowered graph, the ranks that stand for others.
*Out:* (sender, receiver) -> bytes.
*Invariant:* collectives go round as rings, or from each to all alike, as they are declared
(`Collective.traffic`); moves from rank to rank go as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.analysis.redistribution_cost import multiplicity
from distgraph.passes.partition import LocalOp, communication
from distgraph.resources import Cluster
from distgraph.runtime.forecast.communication_cost import message_bytes

Matrix = dict[tuple[int, int], float]


def exchanged_bytes(lowered: Graph, covers: Mapping[int, Collection[int]] | None = None) -> Matrix:
    """Bytes between ranks.

    Args:
        lowered: every change of layout is a collective.
        covers: ranks that are looked at -> those that send as much as they do; by default every rank is
            looked at.
    """
    matrix: Matrix = defaultdict(float)
    counted: set[str] = set()
    times = multiplicity(lowered)
    changes = [op for op in lowered.ops if op.kind.startswith("comm.")]
    ranks = sorted({rank for mesh in lowered.meshes for rank in mesh.members})
    for rank, equal_ranks in (covers or {rank: (rank,) for rank in ranks}).items():
        for op in changes:
            source, target = lowered.attrs[op.operands[0].name], lowered.attrs[op.result.name]
            if rank not in source.mesh or op.name in counted:
                continue
            local = communication(lowered, op, rank)
            if len(local.attrs.get("group", ())) > 1 and local.attrs.get("wire"):
                _add_groups(matrix, source.mesh, local, set(equal_ranks), times[op.name])
            elif local.mode in ("send", "exchange"):
                counted.add(op.name)  # of all its ranks at once
                for pair, size in message_bytes(op, source, target).items():
                    matrix[pair] += times[op.name] * size
    return {pair: size for pair, size in matrix.items() if size}


def _add_groups(matrix: Matrix, mesh: ProcessMesh, local: LocalOp, ranks: set[int], times: int) -> None:
    """A collective of all groups along its axes: to the next of the ring, or to all others alike."""
    sent = times * float(local.attrs["wire"])
    pairs = local.collective is not None and local.collective.traffic == "pairs"
    axes = tuple(local.op.attrs["axes"])
    for rank in ranks:
        group = mesh.group(rank, axes)
        if pairs:
            for other in group:
                if other != rank:
                    matrix[rank, other] += sent / (len(group) - 1)
        else:
            matrix[rank, group[(group.index(rank) + 1) % len(group)]] += sent


def by_machine(matrix: Matrix, cluster: Cluster, devices: tuple[int, ...]) -> Matrix:
    """Bytes between machines, and inside them."""
    found: Matrix = defaultdict(float)
    for (a, b), size in matrix.items():
        found[cluster.devices[devices[a]].machine, cluster.devices[devices[b]].machine] += size
    return dict(found)
