"""Seconds of the communication of a lowered graph on the devices of a cluster.

*In:* communication ops, a device for every rank.
*Out:* `Message`: seconds, bytes and the link that
decides.
*Invariant:* all groups of a collective run at the same time and their loads add up; the slowest
group decides. Each pattern of groups (`resources.patterns`) is priced once however large the mesh is, and so
are messages between stages that lie alike: in the same places of machines that can be exchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import Graph, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.partition import LocalOp, RankProgram
from distgraph.passes.redistribution.halo import halo_tiles
from distgraph.passes.redistribution.tiles import crossing_tiles, exchange_tiles, link_bytes, renumbered
from distgraph.resources import Cluster, shared_cost
from distgraph.resources.group_symmetry import Groups, patterns, stand_ins
from distgraph.runtime.program.memory_plan import nbytes

Flows = dict[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Message:
    """One communication.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, or send for pieces from rank to rank.
        seconds: from its start to its end on the slowest group.
        wire: bytes that all ranks together send (ring algorithms).
        link: kind of the link that decides; "" where nothing is sent.
        busy: of `seconds`, those in which the ranks themselves are at work, whenever they wait for it.
    """

    kind: str
    seconds: float
    wire: float
    link: str
    busy: float = 0.0


class TrafficCost:
    """Costs of the communication of one lowered graph.

    Args:
        graph: the lowered graph.
        cluster: what it runs on.
        devices: device number of every rank.
    """

    def __init__(self, graph: Graph, cluster: Cluster, devices: Sequence[int]) -> None:
        self.graph, self.cluster, self.devices = graph, cluster, devices
        self.cost = shared_cost(cluster)
        self._patterns: dict[tuple[ProcessMesh, tuple[str, ...]], tuple[Groups, ...]] = {}
        self._messages: dict[object, tuple[float, str, float]] = {}
        self._exchanges: dict[object, Message] = {}
        self._places: dict[tuple[ProcessMesh, ProcessMesh], tuple[int, ...]] = {}

    def collective(self, program: RankProgram, local: LocalOp) -> Message:
        """A collective on the groups of one mesh, with the sizes of one rank."""
        op = local.op
        kind = local.mode.removeprefix("comm.")
        before, after = nbytes(program, op.operands[0].name), nbytes(program, op.result.name)
        size = after if kind in ("all_reduce", "all_gather") else before
        mesh = self.graph.attrs[op.operands[0].name].mesh
        found = [(0.0, "", 0.0)]
        if len(local.attrs["group"]) > 1 and size:
            groups = self.patterns(mesh, tuple(op.attrs["axes"]))
            found += [self._priced(kind, pattern, size) for pattern in groups]
        seconds, link, _ = max(found)
        busy = max(each[2] for each in found)
        return Message(kind, seconds, mesh.size * float(local.attrs["wire"]), link, busy)

    def exchange(self, op: Op) -> Message:
        """Pieces from rank to rank: a permute, a halo, a transfer between meshes."""
        source, target = self.graph.attrs[op.operands[0].name], self.graph.attrs[op.result.name]
        first, second, _ = renumbered(source.mesh, target.mesh)
        places = self._placed(source.mesh, target.mesh)
        start, goal = DistAttr(first, source.spec), DistAttr(second, target.spec)
        key = (op.kind, op.result.shape, op.result.dtype, start, goal, op.attrs.get("windows", ()), places)
        if key not in self._exchanges:
            flows = _flows(op, start, goal)
            placed: dict[tuple[int, int], float] = defaultdict(float)
            for (a, b), size in flows.items():
                placed[places[a], places[b]] += size
            seconds, wire = self.cost.exchange(placed), float(sum(flows.values()))
            busy = seconds if self.cost.at_work({device for pair in placed for device in pair}) else 0.0
            self._exchanges[key] = Message("send", seconds, wire, self._link(placed), busy)
        return self._exchanges[key]

    def _placed(self, first: ProcessMesh, second: ProcessMesh) -> tuple[int, ...]:
        """Devices that stand for those of the ranks of two meshes, ascending by rank."""
        if (first, second) not in self._places:
            ranks = renumbered(first, second)[2]
            self._places[first, second] = stand_ins(self.cluster, [self.devices[rank] for rank in ranks])
        return self._places[first, second]

    def flows(self, op: Op) -> Flows:
        """(source rank, target rank) -> bytes of a permute, halo or transfer; no local copies."""
        return _flows(op, self.graph.attrs[op.operands[0].name], self.graph.attrs[op.result.name])

    def _link(self, placed: Mapping[tuple[int, int], float]) -> str:
        """Kind of the narrowest link on the way of the largest message."""
        if not placed:
            return ""
        route = self.cost.router.route(*max(placed, key=lambda pair: placed[pair]))
        links = [self.cost.router.link(directed) for directed in route.links]
        return min(links, key=lambda link: link.bandwidth or 0.0).kind if links else ""

    def _priced(self, kind: str, groups: Groups, size: int) -> tuple[float, str, float]:
        key = (kind, groups, size)
        if key not in self._messages:
            found = self.cost.estimate(kind, groups[0], size, groups[1:])
            ends = {(groups[0][0], groups[0][-1]): 1.0}
            link = found.bottleneck.kind if found.bottleneck is not None else self._link(ends)
            self._messages[key] = (found.seconds, link, found.busy)
        return self._messages[key]

    def patterns(self, mesh: ProcessMesh, axes: tuple[str, ...]) -> tuple[Groups, ...]:
        """The different patterns of groups of devices along some axes: groups that meet, the widest first."""
        key = (mesh, axes)
        if key not in self._patterns:
            placed = [tuple(self.devices[rank] for rank in group) for group in mesh.groups(axes)]
            self._patterns[key] = patterns(self.cluster, placed)
        return self._patterns[key]


def _flows(op: Op, source: DistAttr, target: DistAttr) -> Flows:
    """Bytes from rank to rank of an op between two layouts, which may be on other ranks than its own."""
    shape, size = op.result.shape, itemsize(op.result.dtype)
    if op.kind == "comm.halo":
        tiles = halo_tiles(shape, target.mesh, target.spec, op.attrs["windows"], source)
    elif op.kind == "comm.permute":
        tiles = exchange_tiles(shape, source.mesh, source.spec, target.spec)
    else:
        tiles = crossing_tiles(shape, source.mesh, source.spec, target.mesh, target.spec)
    return link_bytes(tiles, size)
