"""Seconds of the communication of a lowered graph on the devices of a cluster.

*In:* communication ops, a device for every rank.
*Out:* `Message`: seconds, bytes and the bottleneck link.
*Invariant:* collectives cost what `MeshCommunication` says. Messages between stages with equivalent
placements (the same places of interchangeable machines) are priced once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from distgraph.ir.collective_registry import wire_dtype
from distgraph.ir.collectives import collective_of
from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import Graph, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.partition import LocalOp, RankProgram
from distgraph.passes.redistribution.halo import halo_tiles
from distgraph.passes.redistribution.tiles import link_bytes, renumbered, tiles_between
from distgraph.resources import Cluster
from distgraph.resources.mesh_communication import MeshCommunication, machine_count, representative_devices
from distgraph.runtime.program.storage import nbytes

_LONG = 2.0**30
"""Bytes of a very long message: its time is that of its bytes."""
_Exchange = tuple[str, tuple[int, ...], str, DistAttr, DistAttr, object]
"""Kind, shape and dtype of an exchange, both layouts on ranks numbered from 0, and the windows of a halo."""


@dataclass(frozen=True, slots=True)
class Message:
    """One communication.

    Attributes:
        kind: name of the collective; send for pieces from rank to rank.
        seconds: from its start to its end on the slowest group.
        wire: bytes that all ranks together send (ring algorithms).
        link: kind of the bottleneck link; "" if nothing is sent.
        busy: part of `seconds` for which the ranks themselves work for the message.
        between: whether it is sent between machines.
        startup: part of `seconds` in which it does not occupy its links; its bytes take the rest, at the rate
            of a very long message.
    """

    kind: str
    seconds: float
    wire: float
    link: str
    busy: float = 0.0
    between: bool = False
    startup: float = 0.0

    @property
    def transfer(self) -> float:
        """Seconds for which it occupies its links."""
        return self.seconds - self.startup


class TrafficCost:
    """Costs of the communication of one lowered graph."""

    def __init__(self, graph: Graph, cluster: Cluster, devices: Sequence[int]) -> None:
        self.graph, self.cluster, self.devices = graph, cluster, devices
        self.communication = MeshCommunication(cluster, devices)
        self._exchanges: dict[object, Message] = {}
        self._exchange_bytes: dict[_Exchange, dict[tuple[int, int], int]] = {}
        self._exchange_links: dict[str, frozenset[int]] = {}
        self._shape_links: dict[tuple[_Exchange, tuple[int, ...]], frozenset[int]] = {}
        self._group_links: dict[tuple[ProcessMesh, tuple[str, ...]], frozenset[int]] = {}
        self._representatives: dict[tuple[int, ...], tuple[int, ...]] = {}  # of devices, by ranks

    def of_body(self, graph: Graph) -> TrafficCost:
        """Costs of the communication in the body of a loop."""
        return TrafficCost(graph, self.cluster, self.devices)

    def collective(self, program: RankProgram, local: LocalOp) -> Message:
        """A collective on the groups of one mesh, with the sizes of one rank."""
        op, declared = local.op, local.collective
        assert declared is not None
        larger = op.results if declared.growth > 0 else op.operands
        narrow = itemsize(wire_dtype(op)) / itemsize(op.results[0].dtype)
        size = narrow * sum(nbytes(program, value.name) for value in larger)
        mesh = self.graph.attrs[op.operands[0].name].mesh
        seconds, link, between, busy, startup = 0.0, "", False, 0.0, 0.0
        if len(local.attrs["group"]) > 1 and size:
            axes = tuple(op.attrs["axes"])
            seconds, link, between, busy = self.communication.estimate(declared.name, mesh, axes, size)
            long, *_ = self.communication.estimate(declared.name, mesh, axes, _LONG)
            startup = max(0.0, seconds - size / _LONG * long)
        wire = mesh.size * float(local.attrs["wire"])
        return Message(declared.name, seconds, wire, link, busy, between, startup)

    def exchange(self, op: Op) -> Message:
        """Pieces from rank to rank: a permute, a halo, a transfer between meshes."""
        shape, ranks = self._shape(op)
        if ranks not in self._representatives:
            placed_on = [self.devices[rank] for rank in ranks]
            self._representatives[ranks] = representative_devices(self.cluster, placed_on)
        devices = self._representatives[ranks]
        key = shape, devices
        if key not in self._exchanges:
            sizes = self._sizes(op, shape)
            placed: dict[tuple[int, int], float] = defaultdict(float)
            for (a, b), size in sizes.items():
                placed[devices[a], devices[b]] += size
            cost = self.communication.cost
            seconds, wire = cost.exchange(placed), float(sum(sizes.values()))
            busy = cost.exchange_busy(placed)
            largest = max(placed, key=lambda pair: placed[pair], default=None)
            link = "" if largest is None else self.communication.narrowest(*largest)
            between = any(machine_count(self.cluster, pair) > 1 for pair in placed)
            self._exchanges[key] = Message("send", seconds, wire, link, busy, between)
        return self._exchanges[key]

    def link_seconds(self, op: Op) -> dict[int, float]:
        """Directed link -> seconds for which an exchange occupies it, on the devices that it really has."""
        shape, ranks = self._shape(op)
        devices = [self.devices[rank] for rank in ranks]
        placed = {(devices[a], devices[b]): float(size) for (a, b), size in self._sizes(op, shape).items()}
        return self.communication.cost.link_seconds(placed)

    def _shape(self, op: Op) -> tuple[_Exchange, tuple[int, ...]]:
        """What an exchange sends between which places of its meshes, and the rank at each place."""
        source, target = self.graph.attrs[op.operands[0].name], self.graph.attrs[op.result.name]
        start, goal, ranks = renumbered(source, target)
        return (op.kind, op.result.shape, op.result.dtype, start, goal, op.attrs.get("windows", ())), ranks

    def _sizes(self, op: Op, shape: _Exchange) -> dict[tuple[int, int], int]:
        """`message_bytes` between places."""
        if shape not in self._exchange_bytes:
            self._exchange_bytes[shape] = message_bytes(op, shape[3], shape[4])
        return self._exchange_bytes[shape]

    def share_links(self, first: Op, second: Op) -> bool:
        """Whether two communications put bytes on the same link in the same direction.

        Args:
            first, second: collectives or exchanges. One that is not in the graph may use any link.
        """
        ends = (value.name for op in (first, second) for value in (op.operands[0], op.results[0]))
        if any(name not in self.graph.attrs for name in ends):
            return True
        return not self._links(first).isdisjoint(self._links(second))

    def _links(self, op: Op) -> frozenset[int]:
        """Directed links that all ranks of a communication use together."""
        declared = collective_of(op.kind)
        if declared is None or not declared.grouped:
            if op.name not in self._exchange_links:
                self._exchange_links[op.name] = self._links_of_shape(op, *self._shape(op))
            return self._exchange_links[op.name]
        key = self.graph.attrs[op.operands[0].name].mesh, tuple(op.attrs["axes"])
        if key not in self._group_links:
            self._group_links[key] = self.communication.links(*key)
        return self._group_links[key]

    def _links_of_shape(self, op: Op, shape: _Exchange, ranks: tuple[int, ...]) -> frozenset[int]:
        """Directed links of an exchange; the layers of a model exchange the same shapes."""
        if (shape, ranks) not in self._shape_links:
            pairs = ((self.devices[ranks[a]], self.devices[ranks[b]]) for a, b in self._sizes(op, shape))
            self._shape_links[shape, ranks] = self.communication.cost.router.links(pairs)
        return self._shape_links[shape, ranks]


def message_bytes(op: Op, source: DistAttr, target: DistAttr) -> dict[tuple[int, int], int]:
    """(source rank, target rank) -> bytes of a permute, halo or transfer; no local copies.

    Args:
        op: the op.
        source, target: layouts of its operand and its result, perhaps on other ranks than its own.
    """
    shape, size = op.result.shape, itemsize(op.result.dtype)
    if op.kind == "comm.halo":
        tiles = halo_tiles(shape, target.mesh, target.spec, op.attrs["windows"], source)
    else:
        tiles = tiles_between(shape, source, target)
    return link_bytes(tiles, size)
