"""Rank placement: the device of a cluster that runs each rank of a program."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from distgraph.errors import InfeasibleError, ShardingError
from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.plan.placement import PlacedRanks
from distgraph.resources import Cluster, RankMapping, Requirement, map_ranks
from distgraph.resources.rank_mapping import GIVEN, check_devices
from distgraph.resources.units import SIZE, parse
from distgraph.runtime.forecast.traffic_matrix import exchanged_bytes
from distgraph.runtime.program.build import ReshardedProgram


def place_ranks(
    program: ReshardedProgram,
    serial: Graph,
    cluster: Cluster,
    devices: Sequence[int] | None = None,
    device: str | None = None,
) -> RankMapping:
    """Map ranks to devices, so that ranks which exchange many bytes are near each other.

    Args:
        program: the program. Its changes of layout count as the collectives that send least; its parameters,
            states and inputs are the least memory that a rank needs.
        serial: the graph with the user's meshes, which say what devices they need.
        cluster: the devices.
        devices: device of every rank, if a plan has decided them.
        device: type of device of ranks whose meshes need none of a certain type. It counts in a cluster that
            has devices of this type and of others.

    Raises:
        ResourceError: the cluster has fewer devices than the program has ranks.
        InfeasibleError: a rank needs more memory than any device has, or another type of device than there
            is, or than the plan gives to it.
        ShardingError: two meshes of a rank need different types of devices.
    """
    lowered = program.lower()
    traffic = exchanged_bytes(lowered)
    stated = _stated(serial, lowered)
    if devices is None:
        ranks = max(rank for mesh in lowered.meshes for rank in mesh.members) + 1
        default = Requirement(type=device if device in _choices(cluster) else None)
        typed = {
            rank: need if need.type else replace(need, type=default.type) for rank, need in stated.items()
        }
        resident = _resident(lowered, ranks)
        needs = [_with_memory(typed.get(rank, default), resident[rank]) for rank in range(ranks)]
        return map_ranks(ranks, traffic, cluster, needs)
    check_devices(devices, stated, cluster)
    machine = [cluster.devices[device].machine for device in devices]
    crossing = sum(sent for (a, b), sent in traffic.items() if machine[a] != machine[b])
    required = tuple(Requirement(memory=nbytes) for nbytes in _resident(lowered, len(devices)))
    return RankMapping(cluster, tuple(devices), "bytes", crossing, None, None, GIVEN, traffic, required)


def needed_types(serial: Graph, lowered: Graph) -> dict[int, str]:
    """Rank -> type of device that its meshes need; ranks whose meshes need none of a certain type are left
    out.

    Raises:
        ShardingError: two meshes of a rank need different types.
    """
    return {rank: need.type for rank, need in _stated(serial, lowered).items() if need.type}


def placement_of(cluster: Cluster, devices: Sequence[int]) -> tuple[PlacedRanks, ...]:
    """The placement that a plan states: the device of every rank as a device of a named machine."""
    groups: dict[tuple[int, str, str, float], list[tuple[int, int]]] = {}
    for rank, number in enumerate(devices):
        device = cluster.devices[number]
        group = groups.setdefault((device.machine, device.type, device.model, device.memory), [])
        group.append((rank, number))
    parts = []
    for (machine, kind, model, memory), pairs in sorted(groups.items()):
        equal = [n for n in cluster.machines[machine].devices if cluster.devices[n].type == kind]
        parts.append(
            PlacedRanks(
                machine=cluster.machines[machine].name,
                type=kind,
                model=model,
                memory=int(memory),
                count=len(equal),
                ranks=tuple(rank for rank, _ in pairs),
                devices=tuple(equal.index(number) for _, number in pairs),
            )
        )
    return tuple(parts)


def devices_in_rank_order(serial: Graph, cluster: Cluster, usable: int) -> tuple[int, ...]:
    """All devices of a cluster, so that rank n of the user's meshes may run on the n-th.

    Ranks whose meshes need devices of a type or memory get such devices, consecutive ranks near each other;
    all other devices follow in order. Where no mesh needs any, the devices are in order.

    Args:
        serial: the graph with the user's meshes.
        cluster: the devices.
        usable: how many devices may be used, the first ones of the cluster.

    Raises:
        InfeasibleError: the usable devices do not have what the ranks need.
        ResourceError: the cluster has fewer devices than the meshes have ranks.
        ShardingError: two meshes of a rank need different types of devices.
    """
    stated, every = _stated(serial), range(len(cluster.devices))
    if not stated:
        return tuple(every)
    meshes = {*serial.placements.values(), *(attr.mesh for attr in serial.attrs.values())}
    ranks = 1 + max(rank for mesh in meshes for rank in mesh.members)
    needs = [stated.get(rank, Requirement()) for rank in range(ranks)]
    chain = {(rank, rank + 1): 1.0 for rank in range(ranks - 1)}
    chosen = map_ranks(ranks, chain, cluster, needs).devices
    for rank, device in enumerate(chosen):
        if device >= usable:
            raise InfeasibleError(
                f"rank {rank} needs {needs[rank]}, which is device {device} "
                f"({cluster.devices[device].node}), but the search may use the first {usable} devices; let "
                "it use more, or change what the mesh needs"
            )
    return (*chosen, *(device for device in every if device not in set(chosen)))


def _stated(*graphs: Graph) -> dict[int, Requirement]:
    """What the meshes of graphs need of the devices of their ranks; ranks without such needs are left out.

    Raises:
        ShardingError: two meshes of a rank need different types; a memory is no size.
    """
    attrs = [attr.mesh for graph in graphs for attr in graph.attrs.values()]
    placements = [mesh for graph in graphs for mesh in graph.placements.values()]
    needs: dict[int, Requirement] = {}
    for mesh in {id(mesh): mesh for mesh in (*attrs, *placements)}.values():  # equal ones may differ in needs
        if mesh.device_type is None and mesh.memory is None:
            continue
        memory = _bytes_of(mesh)
        for rank in mesh.members:
            before, kind = needs.get(rank, Requirement()), mesh.device_type_of(rank)
            if before.type and kind and before.type != kind:
                raise ShardingError(
                    f"rank {rank} is on a mesh of {before.type} devices and on {mesh} of {kind} "
                    "devices; a rank has one device: give both meshes the same device_type, or other ranks"
                )
            needs[rank] = Requirement(type=before.type or kind, memory=max(before.memory, memory))
    return needs


def _choices(cluster: Cluster) -> set[str]:
    """Types of devices of a cluster with several, between which the mapping can choose."""
    types = {device.type for device in cluster.devices}
    return types if len(types) > 1 else set()


def _bytes_of(mesh: ProcessMesh) -> float:
    try:
        nbytes = parse(mesh.memory, SIZE) if isinstance(mesh.memory, str) else float(mesh.memory or 0)
    except (ValueError, TypeError) as error:
        raise ShardingError(f"memory of {mesh} is {mesh.memory!r} but must be {error}") from None
    if not 0 <= nbytes < math.inf:
        raise ShardingError(f"memory of {mesh} is {mesh.memory!r} but must be a size such as 16 GiB")
    return nbytes


def _with_memory(stated: Requirement | None, resident: float) -> Requirement:
    needed = stated or Requirement()
    return replace(needed, memory=max(needed.memory, resident))


def _resident(graph: Graph, ranks: int) -> list[float]:
    """Bytes of parameters, states and inputs on every rank. Equal tensors are looked at once."""
    sources = graph.sources("param", "state", "input")
    equal = Counter((op.result.shape, op.result.dtype, graph.attrs[op.name]) for op in sources)
    totals = [0.0] * ranks
    for (shape, dtype, attr), count in equal.items():
        for rank in attr.mesh.members:
            local = attr.spec.local_shape(shape, attr.mesh, rank)
            totals[rank] += count * math.prod(local) * itemsize(dtype)
    return totals
