"""Seconds of collectives on the rings of a torus of devices, from measured numbers.

Devices that differ in one coordinate alone are a ring, in the order of that axis: a whole row or column, a
part of one, or every second device of one. On P devices, with the numbers of `Network.rings`:

    all_gather, reduce_scatter   launch + (P - 1) * (step + bytes of a shard / bandwidth)
    all_reduce                   a reduce_scatter and an all_gather of its result
    broadcast, reduce            launch + (D + P - 1) * (step + bytes / D / bandwidth), pipelined in the best
                                 whole number D of packets
    send, permute                launch + step + most of bytes on a link / bandwidth of its axis

(Nam et al., "MeshSlice", 2025, section 3.2.2; the stages of a pipelined broadcast are those of SUMMA, van de
Geijn and Watts, 1997.) A bandwidth is divided by the number of groups that use the same link at the same
time. Rings along different axes have no link in common.

A block of several axes (all devices whose coordinates are among given ones) gathers, scatters or reduces axis
by axis: either the axes follow one another, with a launch each, or the bytes are divided into as many parts
as axes, every part starts with another axis, and each stage takes as long as its slowest part. Other groups,
and collectives without numbers, have no ring cost: `collective_algorithms` applies to them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from distgraph.resources.cluster import Link, RingRate
from distgraph.resources.collective_algorithms import Flow, Group, Line
from distgraph.resources.routing import Router

_MOST_ORDERS = 3
"""Most axes of a block that is priced for every order of its axes."""


@dataclass(frozen=True, slots=True)
class Ring:
    """A group along one axis of the torus, in the order of that axis.

    `closed` if the devices are equally far apart all the way round.
    """

    axis: int
    order: Group
    closed: bool


class RingCost:
    """Costs of collectives along the axes of one cluster's torus."""

    def __init__(self, router: Router) -> None:
        self.router = router
        network = router.cluster.network
        self.rates = {ring.collective: ring for ring in network.rings}
        self._shape = network.shape
        members = network.members if network.over == "devices" else ()
        places = np.array(np.unravel_index(np.arange(len(members)), network.shape or (1,))).T
        self._place = dict(zip(members, map(tuple, places.tolist()), strict=True))
        self._rings: dict[Group, Ring | None] = {}
        self._blocks: dict[Group, dict[int, tuple[Ring, ...]] | None] = {}
        self._used: dict[Group, frozenset[int]] = {}
        self._axes: dict[int, int] = {}

    def ring(self, group: Group) -> Ring | None:
        """The group as a ring along one axis of a torus of devices, None if it is none."""
        if group not in self._rings:
            self._rings[group] = self._find_ring(group)
        return self._rings[group]

    def _find_ring(self, group: Group) -> Ring | None:
        if not self._place or len(group) < 2:
            return None
        places = [self._place[device] for device in group]
        varying = [axis for axis in range(len(self._shape)) if len({place[axis] for place in places}) > 1]
        if len(varying) != 1:
            return None
        axis = varying[0]
        devices = {place[axis]: device for place, device in zip(places, group, strict=True)}
        ordered = sorted(devices)
        gaps = [(b - a) % self._shape[axis] for a, b in pairwise([ordered[-1], *ordered])]  # before each
        start = gaps.index(max(gaps))
        order = tuple(devices[place] for place in (*ordered[start:], *ordered[:start]))
        return Ring(axis, order, len(set(gaps)) == 1)

    def block(self, group: Group) -> dict[int, tuple[Ring, ...]] | None:
        """The rings of a block by axis; None if the group is no block of two or more axes."""
        if group not in self._blocks:
            self._blocks[group] = self._find_block(group)
        return self._blocks[group]

    def _find_block(self, group: Group) -> dict[int, tuple[Ring, ...]] | None:
        if not self._place:
            return None
        places = {self._place[device]: device for device in group}
        along = [sorted({place[axis] for place in places}) for axis in range(len(self._shape))]
        axes = [axis for axis, coordinates in enumerate(along) if len(coordinates) > 1]
        if len(axes) < 2 or math.prod(map(len, along)) != len(group):
            return None
        rings: dict[int, tuple[Ring, ...]] = {}
        for axis in axes:
            others = itertools.product(*(along[other] for other in range(len(along)) if other != axis))
            lines = (
                tuple(places[(*rest[:axis], here, *rest[axis:])] for here in along[axis]) for rest in others
            )
            rings[axis] = tuple(ring for ring in map(self.ring, lines) if ring is not None)
        return rings

    def lines(self, kind: str, group: Group, concurrent: Sequence[Group] = ()) -> tuple[Line, ...]:
        """The costs of a collective on a ring or a block, by algorithm; the least of them counts.

        Args:
            kind: name of the collective.
            group: devices, the root or the source first.
            concurrent: groups that run the same collective at the same time.

        Returns:
            Nothing where the collective or the group has no ring cost.
        """
        if not self.rates or not self._place:
            return ()
        if kind in ("send", "permute"):
            flows = _flows(kind, group)
            line = self.exchange(flows, [flow for other in concurrent for flow in _flows(kind, other)])
            return () if line is None else (line,)
        parts = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
        rates = [self.rates[part] for part in parts if part in self.rates]
        if len(rates) < len(parts):
            return ()
        ring = self.ring(group)
        if ring is not None:
            return (self._ring_line(kind, ring, rates, self._sharing(self.links(group), concurrent)),)
        block = self.block(group)
        if block is None or kind in ("broadcast", "reduce"):
            return ()
        return self._block_lines(block, rates, concurrent)

    def _ring_line(self, kind: str, ring: Ring, rates: Sequence[RingRate], sharing: int) -> Line:
        size, steps, bottleneck = len(ring.order), len(ring.order) - 1, self._first_link(ring)
        launch = sum(rate.launch for rate in rates)
        alpha = launch + sum(steps * rate.step for rate in rates)
        per_byte = sum(sharing / rate.bandwidth[ring.axis] for rate in rates)
        if kind in ("broadcast", "reduce"):
            return Line("axis", alpha, per_byte, bottleneck, rates[0].step, steps * per_byte, launch)
        return Line("axis", alpha, steps / size * per_byte, bottleneck, launch=launch)

    def _block_lines(
        self, block: dict[int, tuple[Ring, ...]], rates: Sequence[RingRate], concurrent: Sequence[Group]
    ) -> tuple[Line, ...]:
        """Axes after one another in every order, and the bytes in parts that start with different axes."""
        size = {axis: len(rings[0].order) for axis, rings in block.items()}
        sharing = {
            axis: self._sharing(frozenset().union(*(self._ring_links(ring) for ring in rings)), concurrent)
            for axis, rings in block.items()
        }
        axes = tuple(block)
        orders = list(itertools.permutations(axes)) if len(axes) <= _MOST_ORDERS else [axes, axes[::-1]]
        turned = [axes[first:] + axes[:first] for first in range(len(axes))]
        slowest = min(axes, key=lambda axis: min(rate.bandwidth[axis] for rate in rates))
        bottleneck = self._first_link(block[slowest][0])

        def seconds_per_byte(order: Sequence[int], stage: int, rate: RingRate) -> float:
            """Of a stage of a reduce_scatter in this order; an all_gather has the same stages backward."""
            axis, left = order[stage], math.prod(size[earlier] for earlier in order[:stage])
            return (size[axis] - 1) / size[axis] / left * sharing[axis] / rate.bandwidth[axis]

        steps = sum(size[axis] - 1 for axis in axes)
        launch = sum(len(axes) * rate.launch for rate in rates)
        alpha = launch + sum(steps * rate.step for rate in rates)
        lines = []
        for order in orders:
            beta = sum(seconds_per_byte(order, stage, rate) for rate in rates for stage in range(len(axes)))
            lines.append(Line("axes", alpha, beta, bottleneck, launch=launch))
        most = len(axes) * max(size[axis] - 1 for axis in axes)
        beta = sum(
            max(seconds_per_byte(order, stage, rate) for order in turned) / len(axes)
            for rate in rates
            for stage in range(len(axes))
        )
        alpha = launch + sum(most * rate.step for rate in rates)
        lines.append(Line("axes at once", alpha, beta, bottleneck, launch=launch))
        return tuple(lines)

    def exchange(self, flows: Sequence[Flow], concurrent: Sequence[Flow] = ()) -> Line | None:
        """The cost of messages that are sent at the same time, each along its route.

        Args:
            flows: (source, target, fraction of the size) of each message.
            concurrent: other messages that are sent at the same time.

        Returns:
            None where no numbers of send are stated, or there is no message.
        """
        rate = self.rates.get("send")
        if rate is None or not flows or not self._place:
            return None
        load: dict[int, float] = defaultdict(float)
        for source, target, share in (*flows, *concurrent):
            for link in self.router.route(source, target):
                load[link] += share
        links = self.router.links((source, target) for source, target, _ in flows)
        worst, slowest = max((load[link] / rate.bandwidth[self._axis(link)], link) for link in links)
        return Line("axis", rate.launch + rate.step, worst, self.router.link(slowest), launch=rate.launch)

    def send_bandwidth(self, link: int) -> float | None:
        """Bytes a second of a message over a directed link; None where no numbers of send are stated."""
        rate = self.rates.get("send")
        return None if rate is None or not self._place else rate.bandwidth[self._axis(link)]

    def links(self, group: Group) -> frozenset[int]:
        """Directed links between neighbours of a group, both ways: of a ring or a block along its axes."""
        if group not in self._used:
            self._used[group] = self._find_links(group)
        return self._used[group]

    def _find_links(self, group: Group) -> frozenset[int]:
        ring, block = self.ring(group), self.block(group)
        if ring is not None:
            return self._ring_links(ring)
        if block is not None:
            return frozenset().union(*(self._ring_links(each) for rings in block.values() for each in rings))
        return self.router.links(_both_ways([*pairwise(group), (group[-1], group[0])]))

    def _ring_links(self, ring: Ring) -> frozenset[int]:
        closing = [(ring.order[-1], ring.order[0])] if ring.closed else []
        return self.router.links(_both_ways([*pairwise(ring.order), *closing]))

    def _sharing(self, links: frozenset[int], concurrent: Sequence[Group]) -> int:
        """Groups that use the busiest of some links at the same time."""
        users = Counter(link for other in concurrent for link in self.links(other) if link in links)
        return 1 + max(users.values(), default=0)

    def _first_link(self, ring: Ring) -> Link:
        return self.router.link(self.router.route(ring.order[0], ring.order[1])[0])

    def _axis(self, directed: int) -> int:
        """The axis of the torus along which a link runs."""
        if not self._axes:
            place = {self.router.cluster.devices[device].node: point for device, point in self._place.items()}
            for number, link in enumerate(self.router.cluster.links):
                ends = zip(place[link.source], place[link.target], strict=True)
                self._axes[number] = next(axis for axis, (a, b) in enumerate(ends) if a != b)
        return self._axes[directed // 2]


def _both_ways(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [way for a, b in pairs for way in ((a, b), (b, a))]


def _flows(kind: str, group: Group) -> list[Flow]:
    if kind == "send":
        return [(group[0], group[1], 1.0)]
    return [(a, b, 1.0) for a, b in zip(group, (*group[1:], group[0]), strict=True)]
