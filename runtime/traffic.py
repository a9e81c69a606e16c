"""Seconds of the communication of a lowered graph on the devices of a cluster.

*In:* communication ops, a device for every rank.
*Out:* `Message`: seconds, bytes and the link that
decides.
*Invariant:* all groups of a collective run at the same time and their loads add up; the slowest
group decides. Groups that share no machine do not meet, and machines of one kind behind a non-blocking
network are the same, so that each pattern of groups is priced once however large the mesh is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from distgraph.dtypes import itemsize
from distgraph.graph import Graph, Op
from distgraph.mesh import ProcessMesh
from distgraph.passes.halo import halo_tiles
from distgraph.passes.partition import LocalOp, RankProgram
from distgraph.passes.tiles import crossing_tiles, exchange_tiles
from distgraph.resources import Cluster, CollectiveCost
from distgraph.runtime.storage import nbytes

Groups = tuple[tuple[int, ...], ...]
Flows = dict[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Message:
    """One communication.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, or send for pieces from rank to rank.
        seconds: from its start to its end on the slowest group.
        wire: bytes that all ranks together send (ring algorithms).
        link: kind of the link that decides; "" where nothing is sent.
    """

    kind: str
    seconds: float
    wire: float
    link: str


class TrafficCost:
    """Costs of the communication of one lowered graph.

    Args:
        graph: the lowered graph.
        cluster: what it runs on.
        devices: device number of every rank.
    """

    def __init__(self, graph: Graph, cluster: Cluster, devices: Sequence[int]) -> None:
        self.graph, self.cluster, self.devices = graph, cluster, devices
        self.cost = CollectiveCost(cluster)
        self._patterns: dict[tuple[ProcessMesh, tuple[str, ...]], tuple[Groups, ...]] = {}
        self._messages: dict[object, tuple[float, str]] = {}
        self._exchanges: dict[object, Message] = {}

    def collective(self, program: RankProgram, local: LocalOp) -> Message:
        """A collective on the groups of one mesh, with the sizes of one rank."""
        op = local.op
        kind = local.mode.removeprefix("comm.")
        before, after = nbytes(program, op.operands[0].name), nbytes(program, op.result.name)
        size = after if kind in ("all_reduce", "all_gather") else before
        mesh = self.graph.attrs[op.operands[0].name].mesh
        seconds, link = 0.0, ""
        if len(local.attrs["group"]) > 1 and size:
            for groups in self.patterns(mesh, tuple(op.attrs["axes"])):
                found = self._priced(kind, groups, size)
                seconds, link = max((seconds, link), found)
        return Message(kind, seconds, mesh.size * float(local.attrs["wire"]), link)

    def exchange(self, op: Op) -> Message:
        """Pieces from rank to rank: a permute, a halo, a transfer between meshes."""
        source, target = self.graph.attrs[op.operands[0].name], self.graph.attrs[op.result.name]
        key = (op.kind, op.result.shape, op.result.dtype, source, target, op.attrs.get("windows", ()))
        if key not in self._exchanges:
            flows = self.flows(op)
            placed: dict[tuple[int, int], float] = defaultdict(float)
            for (a, b), size in flows.items():
                placed[self.devices[a], self.devices[b]] += size
            self._exchanges[key] = Message(
                "send", self.cost.exchange(placed), float(sum(flows.values())), self._link(placed)
            )
        return self._exchanges[key]

    def flows(self, op: Op) -> Flows:
        """(source rank, target rank) -> bytes of a permute, halo or transfer; no local copies."""
        source, target = self.graph.attrs[op.operands[0].name], self.graph.attrs[op.result.name]
        shape, size = op.result.shape, itemsize(op.result.dtype)
        if op.kind == "comm.halo":
            tiles = halo_tiles(shape, source.mesh, source.spec, op.attrs["windows"])
        elif op.kind == "comm.permute":
            tiles = exchange_tiles(shape, source.mesh, source.spec, target.spec)
        else:
            tiles = crossing_tiles(shape, source.mesh, source.spec, target.mesh, target.spec)
        found: Flows = defaultdict(int)
        for tile in tiles:
            if not tile.local:
                found[tile.source_rank, tile.target_rank] += size * tile.volume
        return dict(found)

    def _link(self, placed: dict[tuple[int, int], float]) -> str:
        """Kind of the narrowest link on the way of the largest message."""
        if not placed:
            return ""
        route = self.cost.router.route(*max(placed, key=lambda pair: placed[pair]))
        links = [self.cost.router.link(directed) for directed in route.links]
        return min(links, key=lambda link: link.bandwidth or 0.0).kind if links else ""

    def _priced(self, kind: str, groups: Groups, size: int) -> tuple[float, str]:
        key = (kind, groups, size)
        if key not in self._messages:
            found = self.cost.estimate(kind, groups[0], size, groups[1:])
            link = found.bottleneck.kind if found.bottleneck is not None else found.algorithm
            self._messages[key] = (found.seconds, link)
        return self._messages[key]

    def patterns(self, mesh: ProcessMesh, axes: tuple[str, ...]) -> tuple[Groups, ...]:
        """The different patterns of groups of devices along some axes: groups that meet, the widest first."""
        key = (mesh, axes)
        if key not in self._patterns:
            placed = [tuple(self.devices[rank] for rank in group) for group in mesh.groups(axes)]
            together = self._meeting(placed)
            if self.cluster.network.topology in ("none", "switch"):
                together = [self._moved(groups) for groups in together]
            ordered = [tuple(sorted(groups, key=lambda g: (-self._spread(g), g))) for groups in together]
            self._patterns[key] = tuple(dict.fromkeys(ordered))
        return self._patterns[key]

    def _spread(self, group: tuple[int, ...]) -> int:
        return len({self.cluster.devices[device].machine for device in group})

    def _meeting(self, placed: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        """Groups joined when they share a machine; all of them unless the network is one switch."""
        if self.cluster.network.topology not in ("none", "switch"):
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
                first = owner.setdefault(self.cluster.devices[device].machine, number)
                parent[root(number)] = root(first)
        found: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for number, group in enumerate(placed):
            found[root(number)].append(group)
        return list(found.values())

    def _moved(self, groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The same pattern on the first machines of each kind."""
        template: dict[int, list[int]] = defaultdict(list)
        for machine in self.cluster.machines:
            template[machine.template].append(machine.index)
        stands: dict[int, int] = {}
        used: dict[int, int] = defaultdict(int)
        moved = []
        for group in groups:
            new = []
            for device in group:
                found = self.cluster.devices[device]
                kind = self.cluster.machines[found.machine].template
                if found.machine not in stands:
                    stands[found.machine] = template[kind][used[kind]]
                    used[kind] += 1
                new.append(self.cluster.machines[stands[found.machine]].devices[found.local])
            moved.append(tuple(new))
        return moved
