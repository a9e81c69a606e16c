"""Which links the bytes between two devices cross.

Inside a machine: fewest links, then the fastest, never through a NIC, and through other devices only where no
switch or bridge joins the two. Between machines: device - NIC - network - NIC - device. The topology of the
network determines the part between the NICs: up and down a tree, dimension by dimension on a torus, the
shortest path on a list of links. Routes are fixed: the cost of a collective is the load that its routes put
on the links.

A directed link is 2 * (position in Cluster.links) + (0 source to target | 1 back).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from distgraph.errors import ResourceError
from distgraph.resources.cluster import Cluster, Link, Machine

if TYPE_CHECKING:
    import networkx as nx

Path = tuple[int, ...]


class Router:
    """Routes of one cluster, computed on demand and cached.

    packings: cache of ring packings by (machine template, places in the machine); see
    `collective_algorithms.packed_rings`.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.packings: dict[tuple[int, tuple[int, ...]], list[tuple[tuple[int, ...], float]] | None] = {}
        self._routes: dict[tuple[int, int], Path] = {}
        self._inside: dict[tuple[int, str, str], tuple[tuple[int, int], ...] | None] = {}
        self._machine_graphs: dict[int, nx.Graph[str]] = {}
        self._up: dict[str, tuple[str, int]] = {}
        self._edge: dict[tuple[str, str], int] = {}
        self._link_graph: nx.Graph[str] | None = None
        network = cluster.network
        self._place = {member: position for position, member in enumerate(network.members)}
        first = sum(machine.link_count for machine in cluster.machines)
        for position in range(first, len(cluster.links)):
            link = cluster.links[position]
            self._edge[link.source, link.target] = 2 * position
            self._edge[link.target, link.source] = 2 * position + 1
            if network.topology in (
                "switch",
                "tree",
            ):  # generated from the leaves up: the source is the lower end
                self._up[link.source] = (link.target, 2 * position)

    def link(self, directed: int) -> Link:
        """The link that a directed link belongs to."""
        return self.cluster.links[directed // 2]

    def links(self, pairs: Iterable[tuple[int, int]]) -> frozenset[int]:
        """All directed links on the routes between pairs of devices (source, target)."""
        return frozenset(link for source, target in pairs for link in self.route(source, target))

    def route(self, source: int, target: int) -> Path:
        """The route from device `source` to device `target`.

        Raises:
            ResourceError: nothing connects them.
        """
        route = self._routes.get((source, target))
        if route is None:
            route = self._compute_route(source, target)
            self._routes[source, target] = route
        return route

    def way_up(self, device: int) -> tuple[Path, Path]:
        """In a network of switches: the links from the device to its NIC, and from there to the root."""
        machine, hardware = self.cluster.machine_of(device), self.cluster.devices[device]
        nic = machine.nic_of[hardware.local]
        inside = None if nic is None else self._within(machine, hardware.node, nic)
        if nic is None or inside is None:
            raise ResourceError(
                f"{self.cluster.source}: {hardware.node} has no way to a NIC; add nics to "
                f"machines[{machine.template}]"
            )
        upward: list[int] = []
        node = nic
        while node in self._up:
            node, directed = self._up[node]
            upward.append(directed)
        return inside, tuple(upward)

    def _compute_route(self, source: int, target: int) -> Path:
        cluster = self.cluster
        here, there = cluster.devices[source], cluster.devices[target]
        crosses = here.machine != there.machine
        path: Path | None
        if source == target:
            path = ()
        elif cluster.network.topology == "links":
            path = self._shortest(here.node, there.node)
        elif cluster.network.over == "devices":
            path = self._along_axes(source, target, [device.node for device in cluster.devices])
        elif not crosses:
            path = self._within(cluster.machines[here.machine], here.node, there.node)
        else:
            path = self._across(source, target)
        if path is None:
            raise ResourceError(
                f"{cluster.source}: nothing connects device {source} ({here.node}) to device "
                f"{target} ({there.node}); "
                + ("add a network or links between the machines" if crosses else "add inside to the machine")
            )
        return path

    def _within(self, machine: Machine, source: str, target: str) -> Path | None:
        """Path inside a machine. Machines of one template have equal links, so one search serves all."""
        prefix = len(machine.name)
        key = (machine.template, source[prefix:], target[prefix:])
        if key not in self._inside:
            self._inside[key] = self._search_machine(machine, source, target)
        steps = self._inside[key]
        return (
            None if steps is None else tuple(2 * (machine.first_link + index) + back for index, back in steps)
        )

    def _search_machine(
        self, machine: Machine, source: str, target: str
    ) -> tuple[tuple[int, int], ...] | None:
        graph = self._machine_graphs.get(machine.index)
        if graph is None:
            graph = import_module("networkx").Graph()  # slow to load, and not every run asks for routes
            links = self.cluster.links[machine.first_link : machine.first_link + machine.link_count]
            for index, link in enumerate(links):
                graph.add_edge(
                    link.source, link.target, index=index, source=link.source, weight=_weight(link)
                )
            self._machine_graphs[machine.index] = graph
        devices = {self.cluster.devices[device].node for device in machine.devices}
        nodes = _path(graph, source, target, devices | set(machine.nics))
        nodes = nodes or _path(graph, source, target, set(machine.nics))
        if nodes is None:
            return None
        return tuple(
            (graph.edges[a, b]["index"], int(graph.edges[a, b]["source"] != a))
            for a, b in itertools.pairwise(nodes)
        )

    def _across(self, source: int, target: int) -> Path | None:
        cluster = self.cluster
        here, there = cluster.machine_of(source), cluster.machine_of(target)
        local, remote = cluster.devices[source].local, cluster.devices[target].local
        out, into = here.nic_of[local], there.nic_of[remote]
        if out is None or into is None:
            return None
        middle: Path | None
        if cluster.network.over == "machines" and cluster.network.topology in ("ring", "torus"):
            plane = here.nics.index(out)
            into = there.nics[plane]
            middle = self._along_axes(
                here.index, there.index, [machine.nics[plane] for machine in cluster.machines]
            )
        else:
            middle = self._up_and_down(out, into)
        first = self._within(here, cluster.devices[source].node, out)
        last = self._within(there, into, cluster.devices[target].node)
        if first is None or middle is None or last is None:
            return None
        return first + middle + last

    def _up_and_down(self, source: str, target: str) -> Path | None:
        seen: dict[str, int] = {source: 0}
        upward: list[int] = []
        node = source
        while node in self._up:
            node, directed = self._up[node]
            upward.append(directed)
            seen[node] = len(upward)
        descent: list[int] = []
        node = target
        while node not in seen:
            if node not in self._up:
                return None
            node, directed = self._up[node]
            descent.append(directed ^ 1)
        return (*upward[: seen[node]], *reversed(descent))

    def _along_axes(self, source: int, target: int, nodes: list[str]) -> Path:
        """Dimension-ordered route on a torus, the shorter way round each axis.

        Where both ways are equally long, it goes forward from even places and backward from odd ones.
        """
        network = self.cluster.network
        shape = network.shape
        place, goal = self._place[source], self._place[target]
        links: list[int] = []
        for axis, length in enumerate(shape):
            stride = math.prod(shape[axis + 1 :])
            here, there = place // stride % length, goal // stride % length
            forward = (there - here) % length
            half = 2 * forward == length
            step = 1 if 2 * forward < length or (half and here % 2 == 0) else -1
            while here != there:
                onward = (here + step) % length
                beyond = place + (onward - here) * stride
                links.append(self._edge[nodes[network.members[place]], nodes[network.members[beyond]]])
                place, here = beyond, onward
        return tuple(links)

    def _shortest(self, source: str, target: str) -> Path | None:
        nx = import_module("networkx")
        if self._link_graph is None:
            self._link_graph = nx.Graph()
            for link in self.cluster.links:
                self._link_graph.add_edge(link.source, link.target, weight=_weight(link))
        graph = self._link_graph
        inside = {*self.cluster.graph.nodes} - {d.node for d in self.cluster.devices} | {source, target}
        try:
            nodes: list[str] = nx.dijkstra_path(graph, source, target)
            if len(nodes) > 2:  # other devices forward only where no bridge or NIC can
                view = graph.subgraph(inside)
                nodes = nx.dijkstra_path(view, source, target) if nx.has_path(view, source, target) else nodes
        except (nx.NetworkXNoPath, nx.NodeNotFound):
            return None
        return tuple(self._edge[a, b] for a, b in itertools.pairwise(nodes))


def _path(graph: nx.Graph[str], source: str, target: str, avoid: set[str]) -> list[str] | None:
    """The shortest path between two nodes that avoids all other nodes of `avoid`; None if there is none."""
    nx = import_module("networkx")
    view = graph.subgraph(node for node in graph if node not in avoid - {source, target})
    try:
        path: list[str] = nx.dijkstra_path(view, source, target)
    except (nx.NetworkXNoPath, nx.NodeNotFound):
        return None
    return path


def _weight(link: Link) -> float:
    """Weight of a link in a shortest path: one hop, and less than one for bandwidth, which breaks ties."""
    return 1.0 + (0.0 if link.bandwidth is None else 1e6 / (1e9 + link.bandwidth))
