"""Equivalence of groups of devices that run the same collective at the same time.

Groups that share no machine do not contend for links, and machines of one template behind a non-blocking
network are interchangeable. Each equivalence class of groups is therefore priced once, however large the mesh
is.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable

from distgraph.resources.cluster import Cluster

Groups = tuple[tuple[int, ...], ...]


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
        tuple(sorted(members, key=lambda g: (-_machine_count(cluster, g), g))) for members in contending
    ]
    return tuple(dict.fromkeys(ordered))


def _machine_count(cluster: Cluster, group: tuple[int, ...]) -> int:
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
