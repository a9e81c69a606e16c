"""A program on a cluster: which device runs which rank, and what a collective costs there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from distgraph.ir.collectives import COLLECTIVES
from distgraph.ir.dtypes import itemsize
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.redistribution.planner import TIE_SECONDS, Price
from distgraph.resources import Cluster, RankMapping, Requirement, map_ranks, shared_cost
from distgraph.resources.mapping import GIVEN
from distgraph.runtime.program.build import Build


def price_on(cluster: Cluster, devices: Sequence[int] | None = None) -> Price:
    """Seconds of a collective on a cluster.

    Args:
        cluster: with launch time, bandwidths and latencies.
        devices: device of every rank; rank i on device i by default.
    """
    cost = shared_cost(cluster)

    def price(kind: str, sent: float, group_size: int, mesh: ProcessMesh, axes: tuple[str, ...]) -> float:
        if group_size == 1 or not sent:
            return 0.0
        groups = mesh.groups(axes)
        placed = [tuple(rank if devices is None else devices[rank] for rank in group) for group in groups]
        return (
            cost.time(kind, placed[0], _on_one_rank(kind, sent, group_size), placed[1:])
            + COLLECTIVES[kind].tie_break * TIE_SECONDS
        )

    return price


def place_ranks(build: Build, cluster: Cluster) -> RankMapping:
    """The device of every rank, so that ranks which exchange most are near each other.

    Args:
        build: a compiled program; its parameters, states and inputs are what a rank needs memory for at
            least.
        cluster: the devices.

    Raises:
        ResourceError: the cluster has fewer devices than the program has ranks.
        InfeasibleError: a rank needs more memory than any device has.
    """
    ranks = max(build.ranks) + 1
    volume = exchanged(build)
    needs = [Requirement(memory=_resident(build, rank)) for rank in range(ranks)]
    return map_ranks(ranks, volume, cluster, needs)


def placed_on(build: Build, cluster: Cluster, devices: Sequence[int]) -> RankMapping:
    """A mapping that is decided already: the device of every rank, with what crosses machines under it."""
    volume = exchanged(build)
    machine = [cluster.devices[device].machine for device in devices]
    crossing = sum(sent for (a, b), sent in volume.items() if machine[a] != machine[b])
    needs = tuple(Requirement(memory=_resident(build, rank)) for rank in range(len(devices)))
    return RankMapping(cluster, tuple(devices), "bytes", crossing, None, None, GIVEN, volume, needs)


def exchanged(build: Build) -> dict[tuple[int, int], float]:
    """(sender, receiver) -> bytes in a step: transfers as they are, collectives as rings, all_to_all as
    pairs."""
    found: dict[tuple[int, int], float] = {}
    micro = build.lowered.micro_batches
    for rank in build.ranks:
        for task in build.program(rank).tasks:
            for local in task.ops:
                times = micro if task.per_micro and not local.tail else 1
                sent = times * float(local.attrs.get("wire", 0.0))
                for partner, share in _partners(local.attrs, rank).items():
                    found[rank, partner] = found.get((rank, partner), 0.0) + sent * share
    return found


def _partners(attrs: Mapping[str, Any], rank: int) -> dict[int, float]:
    """Rank that is sent to -> its share of what is sent."""
    group = attrs.get("group", ())
    if len(group) > 1 and "split_dim" in attrs:
        return {other: 1 / (len(group) - 1) for other in group if other != rank}
    if len(group) > 1:
        return {group[(group.index(rank) + 1) % len(group)]: 1.0}
    sends = [to for to, _ in attrs.get("sends", ()) if to != rank]
    return {to: sends.count(to) / len(sends) for to in sends}


def _resident(build: Build, rank: int) -> float:
    """Bytes of parameters, states and inputs on a rank."""
    graph, total = build.lowered, 0.0
    for op in graph.sources("param", "state", "input"):
        attr = graph.attrs[op.name]
        if rank in attr.mesh:
            shape = attr.spec.local_shape(op.result.shape, attr.mesh, rank)
            total += math.prod(shape) * itemsize(op.result.dtype)
    return total


def _on_one_rank(kind: str, sent: float, group_size: int) -> float:
    """Bytes on one rank (see `wire_bytes`) when it sends `sent`."""
    if kind in ("broadcast", "permute", "send"):
        return sent
    share = (group_size - 1) / group_size
    return sent / (2 * share if kind == "all_reduce" else share)
