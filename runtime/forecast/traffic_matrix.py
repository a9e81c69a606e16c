"""The traffic matrix: bytes that every rank sends to every other rank in a step.

*In:* a lowered graph, and the equivalence classes of its ranks. *Out:* (sender, receiver) -> bytes.
*Invariant:* a collective counts by its declaration (`Collective.traffic`): on a ring each member sends to the
next, otherwise each member sends equal parts to all others. Point-to-point messages count between their
ranks. Equal changes of layout, such as those of equal layers, are looked at once for each rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping

from distgraph.ir.collective_registry import is_collective
from distgraph.ir.graph import Graph, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import freeze
from distgraph.ir.step_phases import multiplicity
from distgraph.passes.partition import LocalOp, communication
from distgraph.resources import Cluster
from distgraph.runtime.forecast.communication_cost import message_bytes

Matrix = dict[tuple[int, int], float]


def exchanged_bytes(lowered: Graph, classes: Mapping[int, Collection[int]] | None = None) -> Matrix:
    """The traffic matrix of a lowered graph.

    Args:
        lowered: the graph, in which every change of layout is a collective.
        classes: representative rank -> the ranks that send as many bytes as it does; by default every rank
            represents itself.
    """
    matrix: Matrix = defaultdict(float)
    counted: set[str] = set()
    changes = _changes(lowered)
    ranks = sorted({rank for mesh in lowered.meshes for rank in mesh.members})
    for rank, equal_ranks in (classes or {rank: (rank,) for rank in ranks}).items():
        for op, times in changes:
            source, target = lowered.attrs[op.operands[0].name], lowered.attrs[op.name]
            if rank not in source.mesh or op.name in counted:
                continue
            local = communication(lowered, op, rank)
            if len(local.attrs.get("group", ())) > 1 and local.attrs.get("wire"):
                _add_groups(matrix, source.mesh, local, set(equal_ranks), times)
            elif local.mode in ("send", "exchange"):
                counted.add(op.name)  # `message_bytes` gives the messages of all ranks
                for pair, size in message_bytes(op, source, target).items():
                    matrix[pair] += times * size
    return {pair: size for pair, size in matrix.items() if size}


def _changes(lowered: Graph) -> list[tuple[Op, int]]:
    """One change of layout of those with equal tensors, layouts and attributes, and how often a step has them
    all."""
    multiplicities = multiplicity(lowered)
    firsts: dict[Hashable, Op] = {}
    times: dict[Hashable, int] = defaultdict(int)
    for op in lowered.ops:
        if is_collective(op):
            tensors = tuple((v.shape, v.dtype, lowered.attrs[v.name]) for v in (*op.operands, *op.results))
            key = op.kind, freeze(op.attrs), tensors
            firsts.setdefault(key, op)
            times[key] += multiplicities[op.name]
    return [(op, times[key]) for key, op in firsts.items()]


def _add_groups(matrix: Matrix, mesh: ProcessMesh, local: LocalOp, ranks: set[int], times: int) -> None:
    """Add the bytes that some ranks send in a collective over the groups along its axes."""
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
    """The traffic between machines, from that between ranks; (m, m) is the traffic inside machine m."""
    between: Matrix = defaultdict(float)
    for (a, b), size in matrix.items():
        between[cluster.devices[devices[a]].machine, cluster.devices[devices[b]].machine] += size
    return dict(between)
