"""Patterns of groups: which groups of devices can be told apart when all of them communicate at once.

Groups that share no machine do not meet, and machines of one kind behind a non-blocking network are the same,
so that each pattern of groups is priced once however large the mesh is.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable

from distgraph.resources.cluster import Cluster

Groups = tuple[tuple[int, ...], ...]


def patterns(cluster: Cluster, placed: Iterable[tuple[int, ...]]) -> tuple[Groups, ...]:
    """The different patterns among groups of devices: groups that meet, the widest of them first.

    Args:
        cluster: its machines and network.
        placed: groups of device numbers that run the same collective at the same time.
    """
    together = _meeting(cluster, list(placed))
    if cluster.network.topology in ("none", "switch"):
        together = [_moved(cluster, groups) for groups in together]
    ordered = [tuple(sorted(groups, key=lambda g: (-_spread(cluster, g), g))) for groups in together]
    return tuple(dict.fromkeys(ordered))


def _spread(cluster: Cluster, group: tuple[int, ...]) -> int:
    return len({cluster.devices[device].machine for device in group})


def _meeting(cluster: Cluster, placed: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Groups joined when they share a machine; all of them unless the network is one switch."""
    if cluster.network.topology not in ("none", "switch"):
        return [placed]
    parent = list(range(len(placed)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    owner: dict[int, int] = {}
    for number, group in enumerate(placed):
        for device in group:
            first = owner.setdefault(cluster.devices[device].machine, number)
            parent[root(number)] = root(first)
    found: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for number, group in enumerate(placed):
        found[root(number)].append(group)
    return list(found.values())


def _moved(cluster: Cluster, groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The same pattern on the first machines of each kind."""
    moved = iter(_on_first_machines(cluster, itertools.chain.from_iterable(groups)))
    return [tuple(itertools.islice(moved, len(group))) for group in groups]


def stand_ins(cluster: Cluster, devices: Iterable[int]) -> tuple[int, ...]:
    """Devices between which everything takes as long as between these: the same places on the first machines
    of each kind, in order of first use; the devices themselves where machines cannot be exchanged.

    Args:
        cluster: its machines and network.
        devices: device numbers; which of them share a machine is kept.

    Example:
        >>> from distgraph.resources.load import load_cluster
        >>> stand_ins(load_cluster("dgx_a100_pod"), (17, 19, 9, 18))  # machines 2, 2, 1, 2
        (1, 3, 9, 2)
    """
    if cluster.network.topology not in ("none", "switch"):
        return tuple(devices)
    return _on_first_machines(cluster, devices)


def _on_first_machines(cluster: Cluster, devices: Iterable[int]) -> tuple[int, ...]:
    template: dict[int, list[int]] = defaultdict(list)
    for machine in cluster.machines:
        template[machine.template].append(machine.index)
    stands: dict[int, int] = {}
    used: dict[int, int] = defaultdict(int)
    moved = []
    for device in devices:
        found = cluster.devices[device]
        kind = cluster.machines[found.machine].template
        if found.machine not in stands:
            stands[found.machine] = template[kind][used[kind]]
            used[kind] += 1
        moved.append(cluster.machines[stands[found.machine]].devices[found.local])
    return tuple(moved)
