"""Bytes that every rank sends to every other in a step.

*In:* a build, the ranks that stand for others.
*Out:* (sender, receiver) -> bytes.
*Invariant:* all collectives but all_to_all go round as rings; moves from rank to rank as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from distgraph.passes.partition import LocalOp
from distgraph.resources import Cluster
from distgraph.runtime.forecast.communication_cost import TrafficCost
from distgraph.runtime.program.build import Build

Matrix = dict[tuple[int, int], float]


def exchanged_bytes(build: Build, covers: Mapping[int, tuple[int, ...]], traffic: TrafficCost) -> Matrix:
    """Bytes between ranks.

    Args:
        build: a compiled program.
        covers: ranks that are looked at -> those that send as much as they do.
        traffic: of the lowered graph.
    """
    found: Matrix = defaultdict(float)
    moved: set[tuple[str, str]] = set()
    micro = build.lowered.micro_batches
    for rank, like in covers.items():
        for task in build.program(rank).tasks:
            for local in task.ops:
                times = micro if task.per_micro and not local.tail else 1
                if len(local.attrs.get("group", ())) > 1 and local.attrs.get("wire"):
                    _add_groups(found, build, local, set(like), times)
                elif local.mode in ("send", "exchange") and (task.name, local.op.name) not in moved:
                    moved.add((task.name, local.op.name))  # of all its ranks at once
                    for pair, size in traffic.flows(local.op).items():
                        found[pair] += times * size
    return {pair: size for pair, size in found.items() if size}


def _add_groups(found: Matrix, build: Build, local: LocalOp, ranks: set[int], times: int) -> None:
    """A collective of all groups along its axes: to the next of the ring, or to all others alike."""
    mesh, sent = build.lowered.attrs[local.op.operands[0].name].mesh, times * float(local.attrs["wire"])
    for group in mesh.groups(tuple(local.op.attrs["axes"])):
        for position, rank in enumerate(group):
            if rank not in ranks:
                continue
            if "split_dim" in local.attrs:
                for other in group:
                    if other != rank:
                        found[rank, other] += sent / (len(group) - 1)
            else:
                found[rank, group[(position + 1) % len(group)]] += sent


def by_machine(matrix: Matrix, cluster: Cluster, devices: tuple[int, ...]) -> Matrix:
    """Bytes between machines, and inside them."""
    found: Matrix = defaultdict(float)
    for (a, b), size in matrix.items():
        found[cluster.devices[devices[a]].machine, cluster.devices[devices[b]].machine] += size
    return dict(found)
