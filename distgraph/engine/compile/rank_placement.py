"""A program on a cluster: which device runs which rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from distgraph.ir.dtypes import itemsize
from distgraph.resources import Cluster, RankMapping, Requirement, map_ranks
from distgraph.resources.mapping import GIVEN
from distgraph.runtime.forecast.traffic_matrix import exchanged_bytes
from distgraph.runtime.program.build import Build


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
    volume = exchanged_bytes(build)
    needs = [Requirement(memory=_resident(build, rank)) for rank in range(ranks)]
    return map_ranks(ranks, volume, cluster, needs)


def placed_on(build: Build, cluster: Cluster, devices: Sequence[int]) -> RankMapping:
    """A mapping that is decided already: the device of every rank, with what crosses machines under it."""
    volume = exchanged_bytes(build)
    machine = [cluster.devices[device].machine for device in devices]
    crossing = sum(sent for (a, b), sent in volume.items() if machine[a] != machine[b])
    needs = tuple(Requirement(memory=_resident(build, rank)) for rank in range(len(devices)))
    return RankMapping(cluster, tuple(devices), "bytes", crossing, None, None, GIVEN, volume, needs)


def _resident(build: Build, rank: int) -> float:
    """Bytes of parameters, states and inputs on a rank."""
    graph, total = build.lowered, 0.0
    for op in graph.sources("param", "state", "input"):
        attr = graph.attrs[op.name]
        if rank in attr.mesh:
            shape = attr.spec.local_shape(op.result.shape, attr.mesh, rank)
            total += math.prod(shape) * itemsize(op.result.dtype)
    return total
