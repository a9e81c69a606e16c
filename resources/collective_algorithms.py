"""Collective algorithms as loads on links.

An algorithm is a list of stages, one after the other. A stage is a set of flows that run at the same time,
pipelined: it takes (number of sequential steps) x (longest route's latency) + (most loaded link's bytes / its
bandwidth). All bytes are fractions of the collective's size, so a collective's time is a line alpha + beta *
bytes per algorithm. The size is that of the larger of the blocks of a rank before and after it: of an
all_gather the gathered result, of a reduce_scatter the whole input.

Algorithms (Thakur, Rabenseifner, Gropp 2005; NCCL's rings and double binary trees; Jouppi et al. 2023 for the
torus):
  ring          both ways round the devices in global order, half the bytes each way
  rings         as many rings over direct links as fit, the best fractional packing (a linear programme)
  rails         a ring across machines per NIC, each leaving its machine through another NIC
  hierarchical  inside machines, then each device with its peers in other machines, then inside again
  torus         axis by axis, the bytes in as many parts as axes, each part starting with another axis
  tree          two binary trees (chains inside machines), half the bytes on each
  pairwise      all_to_all: everyone to everyone; direct: send, permute
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from distgraph.errors import ResourceError
from distgraph.ir.collectives import COLLECTIVES
from distgraph.resources.cluster import Cluster, Link
from distgraph.resources.routing import Router

Flow = tuple[int, int, float]  # source device, target device, fraction of the size
Group = tuple[int, ...]

_PACKING_LIMIT = 8  # (8 - 1)! = 5,040 directed rings; beyond that the natural ring is used


@dataclass(frozen=True, slots=True)
class Stage:
    """Flows at the same time; steps: how many latencies follow one another."""

    flows: tuple[Flow, ...]
    steps: int


Stages = tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One algorithm's time: alpha (s) + beta (s/byte) * bytes, and the bubbles of a pipeline of packets.

    Attributes:
        algorithm: its name.
        alpha, beta: seconds, and seconds per byte.
        bottleneck: the link that decides beta.
        packet, fill: D packets take D * packet + fill * bytes / D seconds more, with the best whole number D
            of packets of at least a byte. Both are zero where nothing is pipelined.
        launch: the part of alpha that starts the operation; the rest is latency.
    """

    algorithm: str
    alpha: float
    beta: float
    bottleneck: Link | None
    packet: float = 0.0
    fill: float = 0.0
    launch: float = 0.0

    def seconds(self, nbytes: Any) -> Any:
        """Seconds for one size in bytes, or for an array of them."""
        plain = self.alpha + self.beta * nbytes
        if not self.fill:
            return plain
        return plain + np.minimum(
            *(count * self.packet + self.fill * nbytes / count for count in self._packets(nbytes))
        )

    def parts(self, nbytes: float) -> tuple[float, float, float]:
        """Seconds for one size in bytes: of the launch, of latency and synchronisation, of transfer."""
        latency, transfer = self.alpha - self.launch, self.beta * nbytes
        if self.fill:
            packets = [float(count) for count in self._packets(nbytes)]
            best = min(packets, key=lambda count: count * self.packet + self.fill * nbytes / count)
            latency, transfer = latency + best * self.packet, transfer + self.fill * nbytes / best
        return self.launch, latency, transfer

    def _packets(self, nbytes: Any) -> list[Any]:
        """Two whole numbers of packets, of which one is the best."""
        most = np.maximum(1.0, np.floor(nbytes))
        ideal = np.sqrt(self.fill * nbytes / self.packet) if self.packet else most
        return [np.clip(rounded, 1.0, most) for rounded in (np.floor(ideal), np.ceil(ideal))]


Algorithms = Callable[[Router, Group], dict[str, Stages]]

_ALGORITHMS: dict[str, Algorithms] = {}


def register_algorithms(kind: str, make: Algorithms) -> None:
    """Declare how a collective is carried out on a cluster, and by that what it costs there.

    Args:
        kind: a collective, see `distgraph.ir.collective_registry`.
        make: (router of the cluster, group of two or more devices) -> stages of every algorithm that applies,
            by name; the plain one, which always applies, first.

    Raises:
        ResourceError: the collective is not declared, or has its algorithms already.
    """
    if kind not in COLLECTIVES:
        raise ResourceError(f"collective {kind}: not declared; call register_collective first")
    if kind in _ALGORITHMS:
        raise ResourceError(f"collective {kind}: its algorithms are declared twice; choose another name")
    _ALGORITHMS[kind] = make


def priced_kinds() -> tuple[str, ...]:
    """Collectives whose algorithms are declared."""
    return tuple(_ALGORITHMS)


def algorithms(router: Router, kind: str, group: Group) -> dict[str, Stages]:
    """Every algorithm that applies to the collective on this group of two or more devices."""
    return _ALGORITHMS[kind](router, group)


def _ring_algorithms(kind: str) -> Algorithms:
    """All algorithms of all_reduce, all_gather or reduce_scatter."""

    def make(router: Router, group: Group) -> dict[str, Stages]:
        order = tuple(sorted(group))
        stages = {"ring": _both_rings(order, kind)}
        for name, optional in _OPTIONAL:
            applied = optional(router, kind, order)
            if applied is not None:
                stages[name] = applied
        return stages

    return make


def _cycle(order: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(order, [*order[1:], order[0]], strict=True)


def _rings(rings: Sequence[tuple[Sequence[int], float]], kind: str, part: float = 1.0) -> Stages:
    """Rings at the same time, each with its weight (weights sum to 1)."""
    members = len(rings[0][0])
    share = part * COLLECTIVES[kind].sent_share(members)
    flows = tuple((a, b, weight * share) for order, weight in rings for a, b in _cycle(order))
    return (Stage(flows, (2 if kind == "all_reduce" else 1) * (members - 1)),)


def _both_rings(group: Sequence[int], kind: str, part: float = 1.0) -> Stages:
    """A ring in both directions, half the bytes each way."""
    return _rings([(group, 0.5), (group[::-1], 0.5)], kind, part)


def _chains(group: Group) -> Stages:
    """Broadcast from group[0] both ways round the ring, half the bytes each way, pipelined."""
    root, others = group[0], tuple(sorted(group[1:]))
    ways = ((root, *others), (root, *others[::-1]))
    flows = tuple((a, b, 0.5) for way in ways for a, b in itertools.pairwise(way))
    return (Stage(flows, len(group) - 1),)


def _pairwise(group: Group) -> Stages:
    share = 1.0 / len(group)
    return (Stage(tuple((a, b, share) for a, b in itertools.permutations(group, 2)), len(group) - 1),)


def _by_machine(cluster: Cluster, group: Group) -> list[tuple[int, ...]]:
    """The group's devices machine by machine, in order of the group."""
    machines: dict[int, list[int]] = {}
    for device in group:
        machines.setdefault(cluster.devices[device].machine, []).append(device)
    return [tuple(devices) for devices in machines.values()]


def _packed(router: Router, kind: str, group: Group) -> Stages | None:
    weights = packed_rings(router, group)
    return None if weights is None else _rings(weights, kind)


def packed_rings(router: Router, group: Group) -> list[tuple[Group, float]] | None:
    """The directed rings over direct links that together carry most, with weights that sum to 1.

    A linear programme over all rings of the group: maximise the sum of rates under every directed link's
    bandwidth. None where the group is too large, is not joined by direct links only, or has no ring.
    """
    if not 3 <= len(group) <= _PACKING_LIMIT:
        return None
    cluster = router.cluster
    machines = {cluster.devices[device].machine for device in group}
    network = cluster.network
    if len(machines) == 1 and network.topology != "links" and network.over == "machines":
        # Machines of one template have the same wiring: solve once per set of places.
        machine = cluster.machine_of(group[0])
        key = (machine.template, tuple(cluster.devices[device].local for device in group))
        if key not in router.packings:
            router.packings[key] = _solve_packing(router, group, key[1])
        packing = router.packings[key]
        return packing and [(tuple(machine.devices[local] for local in ring), rate) for ring, rate in packing]
    return _solve_packing(router, group, group)


def _solve_packing(router: Router, group: Group, names: Group) -> list[tuple[Group, float]] | None:
    direct: dict[tuple[int, int], float] = {}
    for a, b in itertools.permutations(group, 2):
        links = router.route(a, b)
        if len(links) == 1:
            direct[a, b] = router.link(links[0]).bandwidth or 0.0
    if len(direct) < len(group):
        return None
    first, *rest = group
    rings = [
        (first, *order)
        for order in itertools.permutations(rest)
        if all(hop in direct for hop in _cycle((first, *order)))
    ]
    if not rings or not all(direct.values()):
        return None
    row = {hop: number for number, hop in enumerate(direct)}
    uses = np.zeros((len(direct), len(rings)))
    for column, ring in enumerate(rings):
        uses[[row[hop] for hop in _cycle(ring)], column] = 1.0
    scale = max(direct.values())
    solved = import_module("scipy.optimize").linprog(  # a third of our start-up time; only here is it needed
        -np.ones(len(rings)), A_ub=uses, b_ub=np.array(list(direct.values())) / scale, method="highs"
    )
    best = np.asarray(solved.x)
    rates = best / best.sum()
    rename = dict(zip(group, names, strict=True))
    return [
        (tuple(rename[device] for device in ring), float(rate))
        for ring, rate in zip(rings, rates, strict=True)
        if rate > 1e-9
    ]


def _rails(router: Router, kind: str, group: Group) -> Stages | None:
    """One ring per NIC; ring j starts each machine's part at its j-th device, so that it leaves through
    another NIC.
    """
    parts = _by_machine(router.cluster, group)
    channels = _channels(router.cluster, parts)
    if len(parts) < 2 or channels < 2:
        return None
    rings: list[tuple[Group, float]] = []
    for channel in range(channels):
        order: list[int] = []
        for part in parts:
            start = channel * len(part) // channels
            order += part[start:] + part[:start]
        rings += [(tuple(order), 0.5 / channels), (tuple(order[::-1]), 0.5 / channels)]
    return _rings(rings, kind)


def _channels(cluster: Cluster, parts: Sequence[Group]) -> int:
    """NICs that the parts can use at the same time: the most on any machine."""
    return max(len({cluster.machine_of(d).nic_of[cluster.devices[d].local] for d in part}) for part in parts)


def _hierarchical(router: Router, kind: str, group: Group) -> Stages | None:
    parts = _by_machine(router.cluster, group)
    size = len(parts[0])
    if len(parts) < 2 or size < 2 or any(len(part) != size for part in parts):
        return None
    rails = [tuple(part[place] for part in parts) for place in range(size)]

    def inside(half: str) -> Stage:
        stages = [(_packed(router, half, part) or _both_rings(part, half))[0] for part in parts]
        return Stage(tuple(flow for stage in stages for flow in stage.flows), stages[0].steps)

    def across(what: str) -> Stage:
        stages = [_both_rings(rail, what, 1.0 / size)[0] for rail in rails]
        return Stage(tuple(flow for stage in stages for flow in stage.flows), stages[0].steps)

    if kind == "all_reduce":
        return (inside("reduce_scatter"), across("all_reduce"), inside("all_gather"))
    if kind == "reduce_scatter":
        return (inside(kind), across(kind))
    return (across(kind), inside(kind))


def _torus(router: Router, kind: str, group: Group) -> Stages | None:
    """Axis by axis; part p of the bytes takes the axes in the order p, p + 1, ..."""
    grid = _grid(router.cluster, group)
    if grid is None:
        return None
    axes = [axis for axis, length in enumerate(grid.shape) if length > 1]
    if len(axes) < 2:
        return None
    scatter = [_axis_stage(grid, axes, position, "reduce_scatter") for position in range(len(axes))]
    gather = [_axis_stage(grid, axes, position, "all_gather") for position in reversed(range(len(axes)))]
    if kind == "all_reduce":
        return (*scatter, *gather)
    return tuple(scatter if kind == "reduce_scatter" else gather)


def _axis_stage(
    grid: np.ndarray[tuple[int, ...], np.dtype[np.int64]], axes: list[int], position: int, kind: str
) -> Stage:
    flows: list[Flow] = []
    steps = 0
    for part in range(len(axes)):
        remaining = 1.0 / len(axes)
        for earlier in range(position):
            remaining /= grid.shape[axes[(part + earlier) % len(axes)]]
        axis = axes[(part + position) % len(axes)]
        lines = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])
        for line in lines.tolist():
            stage = _both_rings(line, kind, remaining)[0]
            flows.extend(stage.flows)
            steps = max(steps, stage.steps)
    return Stage(tuple(flows), steps)


def _grid(cluster: Cluster, group: Group) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None:
    """The group as a block of the network's torus of devices, None where it is not one."""
    network = cluster.network
    if network.over != "devices" or network.topology != "torus":
        return None
    member_at = np.array(network.members).reshape(network.shape)
    chosen = np.isin(member_at, group)
    per_axis = [
        np.flatnonzero(chosen.any(axis=tuple(other for other in range(chosen.ndim) if other != axis)))
        for axis in range(chosen.ndim)
    ]
    block: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = member_at[np.ix_(*per_axis)]
    return block if block.size == len(group) else None


def _tree(router: Router, kind: str, group: Group) -> Stages | None:
    return _trees(router.cluster, group, down_only=False) if kind == "all_reduce" else None


def _trees(cluster: Cluster, group: Group, *, down_only: bool) -> Stages:
    """Two binary trees over machines per NIC, the second in reversed order; a chain inside each machine.

    In one machine the trees are over its devices. A broadcast's root is group[0].
    """
    parts = _by_machine(cluster, group)
    channels = _channels(cluster, parts) if len(parts) > 1 else 1
    flows: list[Flow] = []
    depth = 0
    for channel in range(channels):
        turned = [
            part[channel * len(part) // channels :] + part[: channel * len(part) // channels]
            for part in parts
        ]
        chains: list[Group] = list(turned) if len(parts) > 1 else [(device,) for device in group]
        if down_only and len(parts) > 1:  # the root heads every tree
            chains[0] = parts[0]
        for orientation in (chains, [chains[0], *chains[:0:-1]]):
            edges, longest = _binary_tree(orientation)
            depth = max(depth, longest)
            part_size = 0.5 / channels
            flows += [(parent, child, part_size) for parent, child in edges]
            if not down_only:
                flows += [(child, parent, part_size) for parent, child in edges]
    return (Stage(tuple(flows), depth if down_only else 2 * depth),)


def _binary_tree(chains: Sequence[Group]) -> tuple[list[tuple[int, int]], int]:
    """Edges (parent, child) of a binary heap of the chains' heads, each head leading its chain; and the
    longest way.
    """
    edges = [(chains[(child - 1) // 2][0], chains[child][0]) for child in range(1, len(chains))]
    edges += [hop for chain in chains for hop in itertools.pairwise(chain)]
    return edges, (len(chains)).bit_length() - 1 + max(len(chain) for chain in chains) - 1


_OPTIONAL: tuple[tuple[str, Callable[[Router, str, Group], Stages | None]], ...] = (
    ("rings", _packed),
    ("rails", _rails),
    ("hierarchical", _hierarchical),
    ("torus", _torus),
    ("tree", _tree),
)


def _direct(router: Router, group: Group) -> dict[str, Stages]:
    return {"direct": (Stage(tuple((a, b, 1.0) for a, b in _cycle(group)), 1),)}


def _one_message(router: Router, group: Group) -> dict[str, Stages]:
    return {"direct": (Stage(((group[0], group[1], 1.0),), 1),)}


def _broadcasts(router: Router, group: Group) -> dict[str, Stages]:
    return {"ring": _chains(group), "tree": _trees(router.cluster, group, down_only=True)}


def _reductions(router: Router, group: Group) -> dict[str, Stages]:
    """To group[0]: the ways of a broadcast, back."""
    return {name: tuple(map(_reversed, stages)) for name, stages in _broadcasts(router, group).items()}


def _reversed(stage: Stage) -> Stage:
    return Stage(tuple((target, source, share) for source, target, share in stage.flows), stage.steps)


for _kind, _make in {
    "all_reduce": _ring_algorithms("all_reduce"),
    "all_gather": _ring_algorithms("all_gather"),
    "reduce_scatter": _ring_algorithms("reduce_scatter"),
    "all_to_all": lambda router, group: {"pairwise": _pairwise(group)},
    "broadcast": _broadcasts,
    "reduce": _reductions,
    "permute": _direct,
    "send": _one_message,
}.items():
    register_algorithms(_kind, _make)
