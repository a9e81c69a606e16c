"""Bytes that every rank sends to every other in a step.

*In:* a build, the ranks that stand for others.
*Out:* (sender, receiver) -> bytes.
*Invariant:* collectives go round as rings, or from each to all alike, as they are declared
(`Collective.traffic`); moves from rank to rank go as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from distgraph.passes.partition import LocalOp
from distgraph.resources import Cluster
from distgraph.runtime.forecast.communication_cost import message_bytes
from distgraph.runtime.program.build import Build

Matrix = dict[tuple[int, int], float]


def exchanged_bytes(build: Build, covers: Mapping[int, Collection[int]] | None = None) -> Matrix:
    """Bytes between ranks.

    Args:
        build: a compiled program.
        covers: ranks that are looked at -> those that send as much as they do; by default every rank is
            looked at.
    """
    matrix: Matrix = defaultdict(float)
    counted: set[tuple[str, str]] = set()
    graph = build.lowered
    for rank, equal_ranks in (covers or {rank: (rank,) for rank in build.ranks}).items():
        for task in build.program(rank).tasks:
            for local in task.ops:
                times = graph.micro_batches if task.per_micro and not local.tail else 1
                if len(local.attrs.get("group", ())) > 1 and local.attrs.get("wire"):
                    _add_groups(matrix, build, local, set(equal_ranks), times)
                elif local.mode in ("send", "exchange") and (task.name, local.op.name) not in counted:
                    counted.add((task.name, local.op.name))  # of all its ranks at once
                    source, target = graph.attrs[local.op.operands[0].name], graph.attrs[local.op.result.name]
                    for pair, size in message_bytes(local.op, source, target).items():
                        matrix[pair] += times * size
    return {pair: size for pair, size in matrix.items() if size}


def _add_groups(matrix: Matrix, build: Build, local: LocalOp, ranks: set[int], times: int) -> None:
    """A collective of all groups along its axes: to the next of the ring, or to all others alike."""
    mesh, sent = build.lowered.attrs[local.op.operands[0].name].mesh, times * float(local.attrs["wire"])
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
