"""Seconds that a collective takes on a group of devices, from what its routes put on the links.

The time is the least over the algorithms that apply (`collective_algorithms.algorithms`) of

    launch + sum over stages of steps * latency of the longest route + bytes on the most loaded link / its
    bandwidth

so that a NIC shared by the ranks of one machine, an oversubscribed switch, a narrow PCIe bridge and the axes
of a torus are modelled in the same way: as a link with a load. Groups that communicate at the same time are
given as `concurrent`; their loads add up. Collectives on rings and blocks of a torus of devices with
measured numbers for its rings cost what `ring_cost` says instead.

A measured table of the cluster for the shape (machines, devices per machine) takes precedence: first a table
for exactly these groups at once; then a table for any group, unless another group uses the same links at the
same time; then a table for these groups and others at once.

Devices of one machine that move their messages themselves (`HostTimes.message`) do not compute in the
meantime, whether or not the program overlaps the collective with computation (see `benchmarks/HISTORY.md`).
Between machines the same holds for the part of the time that `HostTimes.network_busy` states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, zip_longest
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from distgraph.errors import ResourceError
from distgraph.ir.collectives import COLLECTIVES
from distgraph.resources.cluster import Cluster, Link, MeasuredTable
from distgraph.resources.collective_algorithms import (
    Flow,
    Group,
    Line,
    Stages,
    algorithms,
    priced_kinds,
)
from distgraph.resources.host_times import busy_seconds, busy_share
from distgraph.resources.ring_cost import RingCost
from distgraph.resources.routing import Router
from distgraph.resources.units import format_bytes, format_si

# Groups up to this size list every pair of an all_to_all; larger ones on a tree are counted.
_EXACT_PAIRS = 64


def wire_bytes(kind: str, group_size: int, nbytes: float) -> float:
    """Bytes that one rank sends under the bandwidth-optimal (ring) algorithm; 0 in a group of one.

    Args:
        kind: a collective, such as all_reduce.
        nbytes: bytes of the larger of a rank's blocks before and after it.
    Raises:
        ResourceError: an unknown kind, or an empty group.
    Example:
        >>> wire_bytes("all_reduce", 4, 1000)
        1500.0
    """
    _check_kind(kind)
    if group_size < 1:
        raise ResourceError(f"{kind}: a group has at least 1 rank, got {group_size}; name the ranks")
    return COLLECTIVES[kind].sent_share(group_size) * nbytes


def held_bytes(kind: str, group_size: int, sent: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bytes on one rank where it sends `sent`: the inverse of `wire_bytes`.

    Example:
        >>> held_bytes("all_reduce", 4, np.array([1500.0]))
        array([1000.])
    """
    unit = wire_bytes(kind, group_size, 1.0)
    return sent / unit if unit else np.zeros_like(sent)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of one collective and where they come from; `busy`: those in which its devices are at work."""

    kind: str
    group: Group
    nbytes: float
    seconds: float
    algorithm: str
    bottleneck: Link | None
    busy: float = 0.0

    def __str__(self) -> str:
        link = "" if self.bottleneck is None else f", bottleneck {self.bottleneck}"
        return (
            f"{self.kind} of {format_bytes(self.nbytes)} on {len(self.group)} devices: "
            f"{format_si(self.seconds, 's')} ({self.algorithm}{link})"
        )


class CollectiveCost:
    """Costs of collectives on one cluster, cached per group.

    Example:
        >>> from distgraph.resources.load import load_cluster
        >>> cost = CollectiveCost(load_cluster("dgx_a100_pod"))
        >>> inside = cost.time("all_gather", range(8), 2**30)
        >>> inside < cost.time("all_gather", range(0, 64, 8), 2**30)  # one device in each of 8 machines
        True
    """

    def __init__(self, cluster: Cluster, tables: Iterable[MeasuredTable] = ()) -> None:
        """Args: tables: measured tables in addition to those of the cluster; the first that fits is used."""
        self.cluster = cluster
        self.router = Router(cluster)
        self.rings = RingCost(self.router)
        self._tables = tuple(tables) + cluster.measured
        self._placed = [
            (table.collective, _sets(table.collective, table.groups), table)
            for table in self._tables
            if table.groups is not None
        ]
        self._curves: dict[tuple[int, str], NDArray[np.float64]] = {}
        self._lines: dict[tuple[str, Group, tuple[Group, ...]], tuple[Line, ...]] = {}
        self._plain: dict[tuple[str, Group, tuple[Group, ...]], tuple[Line, ...]] = {}
        self._latencies: dict[tuple[int, int], float] = {}

    def time(
        self, kind: str, group: Iterable[int], nbytes: float, concurrent: Iterable[Sequence[int]] = ()
    ) -> float:
        """Seconds of one collective; see `estimate`."""
        return self.estimate(kind, group, nbytes, concurrent).seconds

    def estimate(
        self, kind: str, group: Iterable[int], nbytes: float, concurrent: Iterable[Sequence[int]] = ()
    ) -> Estimate:
        """Seconds of one collective, the algorithm and the link that decides.

        Args:
            kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast (from group[0]), reduce (to
                group[0]), permute (each to the next of the group, the last to the first), send (from
                group[0] to group[1]).
            group: device numbers. nbytes: as in `wire_bytes`.
            concurrent: other groups that run the same collective at the same time over the same links.
        Raises:
            ResourceError: unknown kind or device, send not between two devices, no route, or a bandwidth,
                latency or launch time that the resource file does not state.
        """
        _check_kind(kind)
        members = self.cluster.check_group(group)
        others = tuple(self.cluster.check_group(other) for other in concurrent)
        if not members or (kind == "send" and len(members) != 2):
            need = "2 devices, source and target" if kind == "send" else "at least 1 device"
            raise ResourceError(f"{kind}: needs {need}, got {len(members)}; name the devices")
        if not nbytes >= 0:
            raise ResourceError(
                f"{kind}: a size is not negative, got {nbytes} bytes; check the shape and dtype"
            )
        if len(members) == 1:
            return Estimate(kind, members, nbytes, 0.0, "nothing to do", None)
        table, share = self._table(kind, members, others), self._busy_share(members)
        if table is not None:
            seconds = float(self._measured(table, "times", nbytes))
            measured = None if table.busy is None else float(self._measured(table, "busy", nbytes))
            busy = busy_seconds(seconds, measured, share)
            return Estimate(kind, members, nbytes, seconds, "measured", None, busy)
        best = min(self.lines(kind, members, others), key=lambda line: float(line.seconds(nbytes)))
        seconds = float(best.seconds(nbytes))
        busy = busy_seconds(seconds, None, share)
        return Estimate(kind, members, nbytes, seconds, best.algorithm, best.bottleneck, busy)

    def times(
        self,
        kind: str,
        group: Iterable[int],
        sizes: NDArray[np.float64],
        concurrent: Iterable[Sequence[int]] = (),
    ) -> NDArray[np.float64]:
        """Seconds of one collective for many sizes [bytes] at once; see `estimate`."""
        key = kind, tuple(group), tuple(map(tuple, concurrent))
        if key not in self._plain:
            estimate = self.estimate(kind, group, float(np.min(sizes, initial=0.0)), concurrent)
            members, others = estimate.group, key[2]
            if len(members) == 1 or not sizes.size:
                return np.zeros(sizes.shape)
            table = self._table(kind, members, others)
            if table is not None:
                return self._measured(table, "times", sizes)
            self._plain[key] = self.lines(kind, members, others)
        lines = self._plain[key]
        best: NDArray[np.float64] = np.min([line.seconds(sizes) for line in lines], axis=0)
        return best

    def exchange(self, flows: Mapping[tuple[int, int], float]) -> float:
        """Seconds of messages between pairs of devices that all start together.

        Args:
            flows: (source device, target device) -> bytes.
        Raises:
            ResourceError: no route, or a bandwidth, latency or launch time that the file does not state.
        """
        sent = [(source, target, size) for (source, target), size in flows.items() if source != target]
        if not sent:
            return 0.0
        ring = self.rings.exchange(sent)
        if ring is not None:
            return ring.alpha + ring.beta
        permute = self._measured_permute(flows)
        if permute is not None:
            return permute.seconds
        latency = max(self._latency("send", source, target) for source, target, _ in sent)
        return self._launch("send") + latency + self._slowest("send", self._load(sent))[0]

    def _measured_permute(self, flows: Mapping[tuple[int, int], float]) -> Estimate | None:
        """The cost of messages of one size that go round rings of devices, where a table states it."""
        following = dict(flows.keys())  # device -> the one that it sends to
        equal = len(set(flows.values())) == 1 and len(following) == len(flows)
        if not equal or following.keys() != set(following.values()):
            return None
        groups: list[Group] = []
        while following:
            ring = [min(following)]
            while (after := following.pop(ring[-1])) != ring[0]:
                ring.append(after)
            groups.append(tuple(ring))
        if min(map(len, groups)) == 1 or self._table("permute", groups[0], tuple(groups[1:])) is None:
            return None
        return self.estimate("permute", groups[0], next(iter(flows.values())), groups[1:])

    def exchange_busy(self, flows: Mapping[tuple[int, int], float]) -> float:
        """The part of the seconds of `exchange` for which its devices cannot compute.

        Messages inside machines and between them are moved at the same time, so the larger part counts.

        Args:
            flows: (source device, target device) -> bytes.
        Raises:
            ResourceError: as `exchange`.
        """
        permute = self._measured_permute(flows)
        if permute is not None:
            return permute.busy
        by_share: dict[float, dict[tuple[int, int], float]] = {}
        for pair, size in flows.items():
            by_share.setdefault(self._busy_share(pair), {})[pair] = size
        return max((share * self.exchange(part) for share, part in by_share.items() if share), default=0.0)

    def link_seconds(self, flows: Mapping[tuple[int, int], float]) -> dict[int, float]:
        """Directed link -> seconds for which messages between pairs of devices occupy it together.

        The largest of them is the part of `exchange` that depends on the bytes.

        Args:
            flows: (source device, target device) -> bytes.
        Raises:
            ResourceError: no route, or a bandwidth that the file does not state.
        """
        sent = [(source, target, size) for (source, target), size in flows.items() if source != target]
        load = self._load(sent) if sent else {}
        return {
            link: size / (self.rings.send_bandwidth(link) or self._bandwidth("send", self.router.link(link)))
            for link, size in load.items()
        }

    def lines(self, kind: str, group: Group, concurrent: tuple[Group, ...] = ()) -> tuple[Line, ...]:
        """Every algorithm's line; the time is their lower envelope."""
        if not COLLECTIVES[kind].ordered:
            group, concurrent = tuple(sorted(group)), tuple(tuple(sorted(other)) for other in concurrent)
        key = (kind, group, concurrent)
        lines = self._lines.get(key)
        if lines is None:
            lines = self._compute_lines(kind, group, concurrent)
            self._lines[key] = lines
        return lines

    def _compute_lines(self, kind: str, group: Group, concurrent: tuple[Group, ...]) -> tuple[Line, ...]:
        rings = self.rings.lines(kind, group, concurrent)
        if rings:
            return rings
        launch = self._launch(kind)
        everyone = (group, *concurrent)
        if kind == "all_to_all" and max(map(len, everyone)) > _EXACT_PAIRS and self._is_tree():
            return (self._counted_all_to_all(group, concurrent, launch),)
        stages_by_name = [algorithms(self.router, kind, member) for member in everyone]
        lines = []
        for name, stages in stages_by_name[0].items():
            # Another group that cannot run this algorithm runs its plain one.
            chosen = [
                stages,
                *(other.get(name) or next(iter(other.values())) for other in stages_by_name[1:]),
            ]
            lines.append(self._line(kind, name, chosen, launch))
        return tuple(lines)

    def _launch(self, kind: str) -> float:
        launch = self.cluster.launch
        if launch is None:
            raise ResourceError(
                f"{self.cluster.source}: launch: missing, needed to price {kind}; add the seconds "
                'that starting a collective costs, such as "10 us", or run distgraph profile'
            )
        return launch

    def _line(self, kind: str, name: str, chosen: Sequence[Stages], launch: float) -> Line:
        alpha, beta, worst, bottleneck = launch, 0.0, 0.0, None
        for together in zip_longest(*chosen):
            stage_of_group = together[0]
            if stage_of_group is None:  # this group has finished; concurrent ones have more stages
                break
            load = self._load([flow for stage in together if stage is not None for flow in stage.flows])
            alpha += stage_of_group.steps * max(self._latency(kind, a, b) for a, b, _ in stage_of_group.flows)
            cost, link = self._slowest(kind, load)
            beta += cost
            if cost > worst:
                worst, bottleneck = cost, link
        return Line(name, alpha, beta, bottleneck, launch=launch)

    def _load(self, flows: Sequence[Flow]) -> dict[int, float]:
        """Directed link -> what flows put on it, in order of first use."""
        ways = [self.router.route(source, target) for source, target, _ in flows]
        links = np.fromiter(chain.from_iterable(ways), dtype=np.intp)
        shares = np.repeat([share for _, _, share in flows], [len(way) for way in ways])
        used, first, place = np.unique(links, return_index=True, return_inverse=True)
        load, order = np.bincount(place, weights=shares), np.argsort(first)
        return dict(zip(used[order].tolist(), load[order].tolist(), strict=True))

    def _add_load(self, load: dict[int, float], flows: Iterable[Flow]) -> None:
        for source, target, share in flows:
            for directed in self.router.route(source, target):
                load[directed] = load.get(directed, 0.0) + share

    def _slowest(self, kind: str, load: dict[int, float]) -> tuple[float, Link | None]:
        worst, bottleneck = 0.0, None
        for directed, share in load.items():
            link = self.router.link(directed)
            seconds = share / self._bandwidth(kind, link)
            if seconds > worst:
                worst, bottleneck = seconds, link
        return worst, bottleneck

    def _bandwidth(self, kind: str, link: Link) -> float:
        if link.bandwidth is None:
            raise self._missing(kind, link, "bandwidth", "25 GB/s")
        return link.bandwidth

    def _latency(self, kind: str, source: int, target: int) -> float:
        cached = self._latencies.get((source, target))
        if cached is not None:
            return cached
        total = 0.0
        for directed in self.router.route(source, target):
            link = self.router.link(directed)
            if link.latency is None:
                raise self._missing(kind, link, "latency", "2 us")
            total += link.latency
        self._latencies[source, target] = total
        return total

    def _missing(self, kind: str, link: Link, number: str, example: str) -> ResourceError:
        return ResourceError(
            f"{self.cluster.source}: {link.origin}.{number}: missing, needed to price {kind} over {link}; "
            f'add {number} such as "{example}", or run distgraph profile on these machines'
        )

    def _is_tree(self) -> bool:
        return self.cluster.network.topology in ("none", "switch", "tree")

    def _counted_all_to_all(self, group: Group, concurrent: tuple[Group, ...], launch: float) -> Line:
        """The same loads as every pair's route would give, by counting the devices below each link."""
        load: dict[int, float] = {}
        for members in (group, *concurrent):
            self._count_pairs(load, members)
        latency = max(self._latency("all_to_all", group[0], other) for other in group[1:])
        beta, bottleneck = self._slowest("all_to_all", load)
        return Line("pairwise", launch + (len(group) - 1) * latency, beta, bottleneck, launch=launch)

    def _count_pairs(self, load: dict[int, float], members: Group) -> None:
        size = len(members)
        below: dict[int, int] = {}
        by_machine: dict[int, list[int]] = {}
        for device in members:
            by_machine.setdefault(self.cluster.devices[device].machine, []).append(device)
        for part in by_machine.values():
            self._add_load(load, ((a, b, 1.0 / size) for a in part for b in part if a != b))
            if len(part) == size:
                return
            for device in part:
                inside, upward = self.router.way_up(device)
                for directed in inside:
                    for way in (directed, directed ^ 1):
                        load[way] = load.get(way, 0.0) + (size - len(part)) / size
                for directed in upward[:1]:  # the NIC's own link: nothing for devices of the same machine
                    for way in (directed, directed ^ 1):
                        load[way] = load.get(way, 0.0) + (size - len(part)) / size
                for directed in upward[1:]:
                    below[directed] = below.get(directed, 0) + 1
        for directed, count in below.items():
            # Traffic between devices below a switch does not cross its way up.
            for way in (directed, directed ^ 1):
                load[way] = load.get(way, 0.0) + count * (size - count) / size

    def _table(self, kind: str, group: Group, others: tuple[Group, ...]) -> MeasuredTable | None:
        """The measured table for these groups at once, see the module's text."""
        if not self._tables:
            return None
        models = {self.cluster.devices[device].model for device in group}
        group_set = _sets(kind, (group, *others))
        nearest: tuple[int, MeasuredTable] | None = None
        for collective, groups, table in self._placed:
            fits = (
                collective == kind
                and group_set <= groups
                and (table.model is None or models == {table.model})
            )
            if fits and (nearest is None or len(groups) < nearest[0]):
                nearest = len(groups), table
        if nearest is not None and nearest[0] == len(group_set):
            return nearest[1]
        device_counts = Counter(self.cluster.devices[device].machine for device in group)
        if len(set(device_counts.values())) == 1 and self._apart(group, others):
            shape = (kind, len(device_counts), next(iter(device_counts.values())))
            for table in self._tables:
                fits = (table.collective, table.machines, table.devices_per_machine) == shape
                if fits and table.groups is None and (table.model is None or models == {table.model}):
                    return table
        return None if nearest is None else nearest[1]

    def _busy_share(self, group: Iterable[int]) -> float:
        """The part of a communication between devices for which they cannot compute, without a table."""
        devices = [self.cluster.devices[device] for device in group]
        one_machine = len({device.machine for device in devices}) == 1
        return busy_share([device.compute.host for device in devices], one_machine=one_machine)

    def _apart(self, group: Group, others: tuple[Group, ...]) -> bool:
        """Whether no link between neighbours of the group carries bytes of another group."""
        return all(self.rings.links(group).isdisjoint(self.rings.links(other)) for other in others)

    def _measured(self, table: MeasuredTable, column: str, nbytes: Any) -> NDArray[np.float64]:
        """Seconds interpolated on the monotone curve nearest to the table.

        Below the first size the time is constant, above the last it is proportional to the size.
        """
        sizes = np.array(table.sizes)
        curve = self._curves.get((id(table), column))
        if curve is None:
            optimize = import_module("scipy.optimize")  # slow to load, and few clusters have tables
            curve = np.asarray(optimize.isotonic_regression(np.array(getattr(table, column))).x)
            self._curves[id(table), column] = curve
        beyond = np.maximum(1.0, np.asarray(nbytes) / max(sizes[-1], 1.0))
        seconds: NDArray[np.float64] = np.interp(nbytes, sizes, curve) * beyond
        return seconds


def _sets(kind: str, groups: Iterable[Sequence[int]]) -> set[object]:
    """Groups as a set; their members too, unless the order of members matters for the collective."""
    return {tuple(group) if COLLECTIVES[kind].ordered else frozenset(group) for group in groups}


_shared: WeakValueDictionary[int, CollectiveCost] = WeakValueDictionary()


def shared_cost(cluster: Cluster) -> CollectiveCost:
    """The collective costs of a cluster, shared by all users while any of them holds the object."""
    cost = _shared.get(id(cluster))
    if cost is None:
        cost = _shared[id(cluster)] = CollectiveCost(cluster)
    return cost


def _check_kind(kind: str) -> None:
    kinds = priced_kinds()
    if kind not in kinds:
        raise ResourceError(f"collective {kind}: unknown; use one of {', '.join(kinds)}")
