"""A program on a cluster: which device runs which rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import Graph
from distgraph.resources import Cluster, RankMapping, Requirement, map_ranks
from distgraph.resources.rank_mapping import GIVEN
from distgraph.runtime.forecast.traffic_matrix import exchanged_bytes
from distgraph.runtime.program.build import ReshardedProgram


def place_ranks(
    program: ReshardedProgram, cluster: Cluster, devices: Sequence[int] | None = None
) -> RankMapping:
    """The device of every rank, so that ranks which exchange most are near each other.

    Args:
        program: its changes of layout count as the collectives that send least; its parameters, states and
            inputs are what a rank needs memory for at least.
        cluster: the devices.
        devices: of every rank, where they are decided already.

    Raises:
        ResourceError: the cluster has fewer devices than the program has ranks.
        InfeasibleError: a rank needs more memory than any device has.
    """
    lowered = program.lower()
    volume = exchanged_bytes(lowered)
    if devices is None:
        ranks = max(rank for mesh in lowered.meshes for rank in mesh.members) + 1
        needs = [Requirement(memory=_resident(lowered, rank)) for rank in range(ranks)]
        return map_ranks(ranks, volume, cluster, needs)
    machine = [cluster.devices[device].machine for device in devices]
    crossing = sum(sent for (a, b), sent in volume.items() if machine[a] != machine[b])
    given = tuple(Requirement(memory=_resident(lowered, rank)) for rank in range(len(devices)))
    return RankMapping(cluster, tuple(devices), "bytes", crossing, None, None, GIVEN, volume, given)


def _resident(graph: Graph, rank: int) -> float:
    """Bytes of parameters, states and inputs on a rank."""
    total = 0.0
    for op in graph.sources("param", "state", "input"):
        attr = graph.attrs[op.name]
        if rank in attr.mesh:
            shape = attr.spec.local_shape(op.result.shape, attr.mesh, rank)
            total += math.prod(shape) * itemsize(op.result.dtype)
    return total
