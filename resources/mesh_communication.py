"""Seconds of collectives along the axes of meshes on a cluster: the only cost model of communication.

*In:* a cluster and the device of every rank. *Out:* seconds, by the bytes that a rank sends or holds.
*Invariant:* all groups along some axes run the collective at the same time and their loads add up; the
slowest group decides. Groups that share no machine do not contend for links, and machines of one template
behind a non-blocking network are interchangeable: each equivalence class of groups (`patterns`) is priced
once, however large the mesh is.

The planner of redistributions, the search and the forecast all use this model, so that the forecast of a plan
agrees with the costs by which it was chosen.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from distgraph.ir.collectives import COLLECTIVES
from distgraph.ir.float_arrays import Floats
from distgraph.ir.mesh import ProcessMesh
from distgraph.resources.cluster import Cluster
from distgraph.resources.collective_cost import held_bytes, shared_cost

Groups = tuple[tuple[int, ...], ...]

TIE_SECONDS = 1e-9
"""Seconds for every byte of `Collective.tie_break`: orders equally expensive steps, decides nothing else."""


class MeshCommunication:
    """Seconds of collectives along the axes of meshes.

    Args:
        cluster: with launch time, bandwidths and latencies.
        devices: device of every rank; rank i on device i by default.
    """

    def __init__(self, cluster: Cluster, devices: Sequence[int] | None = None) -> None:
        self.cluster = cluster
        self.devices = None if devices is None else tuple(devices)
        self.cost = shared_cost(cluster)
        self._patterns: dict[tuple[ProcessMesh, tuple[str, ...]], tuple[Groups, ...]] = {}
        self._alike: dict[ProcessMesh, ProcessMesh] = {}
        self._first_alike: dict[object, ProcessMesh] = {}
        self._prices: dict[tuple[str, float, tuple[Groups, ...]], float] = {}
        self._estimates: dict[tuple[str, Groups, float], tuple[tuple[float, str, bool], float]] = {}

    def device(self, rank: int) -> int:
        """Number of the device of a rank."""
        return rank if self.devices is None else self.devices[rank]

    def patterns(self, mesh: ProcessMesh, axes: tuple[str, ...]) -> tuple[Groups, ...]:
        """Representatives of the groups of devices along some axes."""
        key = (mesh, axes)
        if key not in self._patterns:
            groups = [tuple(self.device(rank) for rank in group) for group in mesh.groups(axes)]
            self._patterns[key] = patterns(self.cluster, groups)
        return self._patterns[key]

    def mesh_alike(self, mesh: ProcessMesh) -> ProcessMesh:
        """The first mesh so far with the same axes, on devices between which messages take as long."""
        if mesh not in self._alike:
            devices = (self.device(int(rank)) for rank in mesh.ranks.flat)
            places = representative_devices(self.cluster, devices)
            key = mesh.axes, mesh.shape, tuple(mesh.weights.items()), places
            self._alike[mesh] = self._first_alike.setdefault(key, mesh)
        return self._alike[mesh]

    def price(
        self, kind: str, sent: float, group_size: int, mesh: ProcessMesh, axes: tuple[str, ...]
    ) -> float:
        """Seconds of a collective; what `redistribute`, `lower` and `build` take as `price`.

        Args:
            kind: name of the collective.
            sent: bytes that one rank sends.
            group_size: ranks in a group.
            mesh, axes: of the groups.
        """
        if group_size == 1 or not sent:
            return 0.0
        key = (kind, sent, self.patterns(mesh, axes))
        if key not in self._prices:
            self._prices[key] = float(self.prices(kind, mesh, axes, np.array([sent]))[0])
        return self._prices[key]

    def prices(self, kind: str, mesh: ProcessMesh, axes: tuple[str, ...], sent: Floats) -> Floats:
        """Seconds of collectives along some axes, for many numbers of bytes that a rank sends."""
        sizes = held_bytes(kind, mesh.count(axes), sent)
        seconds = np.zeros_like(sizes)
        for groups in self.patterns(mesh, axes):
            seconds = np.maximum(seconds, self.cost.times(kind, groups[0], sizes, groups[1:]))
        return np.where(sent > 0, seconds + COLLECTIVES[kind].tie_break * TIE_SECONDS, 0.0)

    def estimate(
        self, kind: str, mesh: ProcessMesh, axes: tuple[str, ...], nbytes: float
    ) -> tuple[float, str, bool, float]:
        """Seconds of the slowest group, the kind of its bottleneck link, whether it is on several machines,
        and the most seconds a rank is busy.

        Args:
            kind: name of the collective.
            mesh, axes: of the groups.
            nbytes: its size, see `distgraph.resources.collective_cost.wire_bytes`.
        """
        slowest, busy = (0.0, "", False), 0.0
        for groups in self.patterns(mesh, axes):
            key = (kind, groups, nbytes)
            if key not in self._estimates:
                result = self.cost.estimate(kind, groups[0], nbytes, groups[1:])
                ends = groups[0][0], groups[0][-1]
                link = self.narrowest(*ends) if result.bottleneck is None else result.bottleneck.kind
                between = machine_count(self.cluster, groups[0]) > 1
                self._estimates[key] = (result.seconds, link, between), result.busy
            estimate, work = self._estimates[key]
            slowest, busy = max(slowest, estimate), max(busy, work)
        return *slowest, busy

    def links(self, mesh: ProcessMesh, axes: tuple[str, ...]) -> frozenset[int]:
        """Directed links that all groups along some axes use together."""
        groups = (tuple(self.device(rank) for rank in group) for group in mesh.groups(axes))
        return frozenset().union(*map(self.cost.rings.links, groups))

    def narrowest(self, source: int, target: int) -> str:
        """Kind of the link with the least bandwidth between two devices; "" where they share memory."""
        links = [self.cost.router.link(directed) for directed in self.cost.router.route(source, target)]
        return min(links, key=lambda link: link.bandwidth or 0.0).kind if links else ""


def patterns(cluster: Cluster, groups: Iterable[tuple[int, ...]]) -> tuple[Groups, ...]:
    """One representative of every equivalence class of contending groups: the groups, most machines first.

    Args:
        cluster: its machines and network.
        groups: groups of device numbers that run the same collective at the same time.
    """
    contending = _groups_in_contention(cluster, list(groups))
    if cluster.network.topology in ("none", "switch"):
        contending = [_canonical_groups(cluster, members) for members in contending]
    ordered = [
        tuple(sorted(members, key=lambda g: (-machine_count(cluster, g), g))) for members in contending
    ]
    return tuple(dict.fromkeys(ordered))


def machine_count(cluster: Cluster, group: Iterable[int]) -> int:
    """Number of the machines of some devices."""
    return len({cluster.devices[device].machine for device in group})


def _groups_in_contention(cluster: Cluster, groups: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Connected components of groups that share a machine; all groups unless the network is one switch."""
    if cluster.network.topology not in ("none", "switch"):
        return [groups]
    parent = list(range(len(groups)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    owner: dict[int, int] = {}
    for number, group in enumerate(groups):
        for device in group:
            first = owner.setdefault(cluster.devices[device].machine, number)
            parent[root(number)] = root(first)
    components: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for number, group in enumerate(groups):
        components[root(number)].append(group)
    return list(components.values())


def _canonical_groups(cluster: Cluster, groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The same groups on the first machines of each template."""
    devices = iter(_canonical_devices(cluster, itertools.chain.from_iterable(groups)))
    return [tuple(itertools.islice(devices, len(group))) for group in groups]


def representative_devices(cluster: Cluster, devices: Iterable[int]) -> tuple[int, ...]:
    """Representatives of devices: messages between them take as long as between the given ones.

    They are at the same places of the first machines of each template, in order of first use. Where machines
    are not interchangeable, they are the devices themselves.

    Args:
        cluster: the machines and the network.
        devices: device numbers. Devices that share a machine have representatives that share one.

    Example:
        >>> from distgraph.resources.load import load_cluster
        >>> representative_devices(load_cluster("dgx_a100_pod"), (17, 19, 9, 18))  # machines 2, 2, 1, 2
        (1, 3, 9, 2)
    """
    if cluster.network.topology not in ("none", "switch"):
        return tuple(devices)
    return _canonical_devices(cluster, devices)


def _canonical_devices(cluster: Cluster, devices: Iterable[int]) -> tuple[int, ...]:
    machines_of_template: dict[int, list[int]] = defaultdict(list)
    for machine in cluster.machines:
        machines_of_template[machine.template].append(machine.index)
    representative: dict[int, int] = {}  # of every machine that is used
    used: dict[int, int] = defaultdict(int)
    canonical = []
    for number in devices:
        device = cluster.devices[number]
        template = cluster.machines[device.machine].template
        if device.machine not in representative:
            representative[device.machine] = machines_of_template[template][used[template]]
            used[template] += 1
        canonical.append(cluster.machines[representative[device.machine]].devices[device.local])
    return tuple(canonical)
