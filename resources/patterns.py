"""Patterns of groups: which groups of devices can be told apart when all of them communicate at once.

Groups that share no machine do not meet, and machines of one kind behind a non-blocking network are the same,
so that each pattern of groups is priced once however large the mesh is.
"""

from __future__ import annotations

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
    template: dict[int, list[int]] = defaultdict(list)
    for machine in cluster.machines:
        template[machine.template].append(machine.index)
    stands: dict[int, int] = {}
    used: dict[int, int] = defaultdict(int)
    moved = []
    for group in groups:
        new = []
        for device in group:
            found = cluster.devices[device]
            kind = cluster.machines[found.machine].template
            if found.machine not in stands:
                stands[found.machine] = template[kind][used[kind]]
                used[kind] += 1
            new.append(cluster.machines[stands[found.machine]].devices[found.local])
        moved.append(tuple(new))
    return moved
