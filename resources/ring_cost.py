"""Seconds of collectives on rings along an axis of a torus of devices, from measured numbers.

A group is a ring if its devices differ in one coordinate and stand at consecutive places of that axis: a
whole row or column, or a part of one. On P devices, with the numbers of `Network.rings` for the collective:

    all_gather, reduce_scatter   launch + (P - 1) * (step + bytes of a shard / bandwidth)
    all_reduce                   a reduce_scatter and an all_gather of its result
    broadcast, reduce            launch + (D + P - 1) * (step + bytes / D / bandwidth), pipelined in the best
                                 whole number D of packets
    send, permute                launch + step + most bytes on a link / bandwidth

(Nam et al., "MeshSlice", 2025, section 3.2.2; the stages of a pipelined broadcast are those of SUMMA, van de
Geijn and Watts, 1997.) A bandwidth is divided by the number of groups that use the same link at the same
time. Rings along different axes have no link in common. Other groups, and collectives without numbers, have
no ring cost: `collective_algorithms` applies to them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from distgraph.resources.collective_algorithms import Flow, Group, Line
from distgraph.resources.routing import Router


@dataclass(frozen=True, slots=True)
class Ring:
    """A group along one axis of the torus, in the order of that axis; `closed` if it is the whole axis."""

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
        self._used: dict[Group, frozenset[int]] = {}

    def ring(self, group: Group) -> Ring | None:
        """The group as a ring along one axis of a torus of devices, None if it is none."""
        if group not in self._rings:
            self._rings[group] = self._find_ring(group)
        return self._rings[group]

    def _find_ring(self, group: Group) -> Ring | None:
        if not self._place:
            return None
        places = [self._place[device] for device in group]
        varying = [axis for axis in range(len(self._shape)) if len({place[axis] for place in places}) > 1]
        if len(varying) != 1:
            return None
        axis = varying[0]
        length = self._shape[axis]
        device_at = {place[axis]: device for place, device in zip(places, group, strict=True)}
        starts = [at for at in sorted(device_at) if (at - 1) % length not in device_at]
        if len(starts) > 1:
            return None
        first = starts[0] if starts else 0
        return Ring(axis, tuple(device_at[(first + step) % length] for step in range(len(group))), not starts)

    def line(self, kind: str, group: Group, concurrent: Sequence[Group] = ()) -> Line | None:
        """The cost of a collective on a ring, None where the collective or the group has no ring cost.

        Args:
            kind: name of the collective.
            group: devices, the root or the source first.
            concurrent: groups that run the same collective at the same time.
        """
        if not self.rates:
            return None
        if kind in ("send", "permute"):
            own = _flows(kind, group)
            return self.exchange(own, [flow for other in concurrent for flow in _flows(kind, other)])
        parts = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
        rates = [self.rates[part] for part in parts if part in self.rates]
        ring = self.ring(group) if len(rates) == len(parts) else None
        if ring is None:
            return None
        links = self.links(group)
        users = Counter(link for other in concurrent for link in self.links(other) if link in links)
        sharing = 1 + max(users.values(), default=0)
        bottleneck = self.router.link(self.router.route(ring.order[0], ring.order[1]).links[0])
        steps = len(group) - 1
        alpha = sum(rate.launch + steps * rate.step for rate in rates)
        per_byte = sum(sharing / rate.bandwidth[ring.axis] for rate in rates)
        if kind in ("broadcast", "reduce"):
            return Line("axis", alpha, per_byte, bottleneck, rates[0].step, steps * per_byte)
        return Line("axis", alpha, steps / len(group) * per_byte, bottleneck)

    def exchange(self, flows: Sequence[Flow], concurrent: Sequence[Flow] = ()) -> Line | None:
        """The cost of messages that are sent at the same time, each along one axis.

        Args:
            flows: (source, target, fraction of the size) of each message.
            concurrent: other messages that are sent at the same time.

        Returns:
            None where no numbers of send are stated, or one of `flows` does not follow one axis.
        """
        rate = self.rates.get("send")
        if rate is None or not flows:
            return None
        axes = [self.axis(source, target) for source, target, _ in flows]
        if None in axes:
            return None
        load: dict[int, float] = defaultdict(float)
        for source, target, share in (*flows, *concurrent):
            for link in self.router.route(source, target).links:
                load[link] += share
        worst, slowest = max(
            (load[link] / rate.bandwidth[axis], link)
            for (source, target, _), axis in zip(flows, axes, strict=True)
            if axis is not None
            for link in self.router.route(source, target).links
        )
        return Line("axis", rate.launch + rate.step, worst, self.router.link(slowest))

    def axis(self, source: int, target: int) -> int | None:
        """The one axis in which two devices differ, None if they differ in several."""
        pairs = zip(self._place[source], self._place[target], strict=True)
        differing = [axis for axis, (a, b) in enumerate(pairs) if a != b]
        return differing[0] if len(differing) == 1 else None

    def links(self, group: Group) -> frozenset[int]:
        """Directed links between neighbours of a group, both ways; a ring in the order of its axis."""
        if group not in self._used:
            self._used[group] = self._find_links(group)
        return self._used[group]

    def _find_links(self, group: Group) -> frozenset[int]:
        ring = self.ring(group)
        order = group if ring is None else ring.order
        pairs = list(pairwise(order))
        if ring is None or ring.closed:
            pairs.append((order[-1], order[0]))
        return self.router.links(way for a, b in pairs for way in ((a, b), (b, a)))


def _flows(kind: str, group: Group) -> list[Flow]:
    if kind == "send":
        return [(group[0], group[1], 1.0)]
    return [(a, b, 1.0) for a, b in zip(group, (*group[1:], group[0]), strict=True)]
