"""Rank placement: the device of a cluster that runs each rank of a program."""

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
    """Map ranks to devices, so that ranks which exchange many bytes are near each other.

    Args:
        program: the program. Its changes of layout count as the collectives that send least; its parameters,
            states and inputs are the least memory that a rank needs.
        cluster: the devices.
        devices: device of every rank, if a plan has decided them.

    Raises:
        ResourceError: the cluster has fewer devices than the program has ranks.
        InfeasibleError: a rank needs more memory than any device has.
    """
    lowered = program.lower()
    traffic = exchanged_bytes(lowered)
    if devices is None:
        ranks = max(rank for mesh in lowered.meshes for rank in mesh.members) + 1
        needs = [Requirement(memory=_resident(lowered, rank)) for rank in range(ranks)]
        return map_ranks(ranks, traffic, cluster, needs)
    machine = [cluster.devices[device].machine for device in devices]
    crossing = sum(sent for (a, b), sent in traffic.items() if machine[a] != machine[b])
    required = tuple(Requirement(memory=_resident(lowered, rank)) for rank in range(len(devices)))
    return RankMapping(cluster, tuple(devices), "bytes", crossing, None, None, GIVEN, traffic, required)


def _resident(graph: Graph, rank: int) -> float:
    """Bytes of parameters, states and inputs on a rank."""
    total = 0.0
    for op in graph.sources("param", "state", "input"):
        attr = graph.attrs[op.name]
        if rank in attr.mesh:
            shape = attr.spec.local_shape(op.result.shape, attr.mesh, rank)
            total += math.prod(shape) * itemsize(op.result.dtype)
    return total
