"""Generators of links: full, ring, torus, tree with oversubscription, PCIe pairs.

Every generator returns links between named nodes and the switches that it needed on the way. A ring or torus
axis of length 2 has one link, not two: the neighbour on the left is the neighbour on the right.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from distgraph.resources.cluster import Count, Link
from distgraph.resources.units import Seconds
from distgraph.serialization.fields import Limits, documented


@dataclass(frozen=True, slots=True)
class Wire:
    """Common properties of the links of one generator: bytes/s per direction, and seconds of latency."""

    kind: str
    bandwidth: float | None
    latency: float | None
    origin: str

    def join(self, source: str, target: str, lanes: int = 1) -> Link:
        """One link of `lanes` parallel wires."""
        bandwidth = None if self.bandwidth is None else self.bandwidth * lanes
        return Link(source, target, self.kind, bandwidth, self.latency, self.origin)


@documented(complete=False)
@dataclass(frozen=True, slots=True)
class TreeLevel:
    """A level of switches with `children` nodes each and an uplink of their sum / oversubscription."""

    children: Count
    oversubscription: Annotated[float, Limits(ge=1e-6, le=1e6, strict=True)] = 1.0
    latency: Seconds | None = None


Wiring = tuple[list[Link], list[str]]


def star(nodes: Sequence[str], switch: str, wire: Wire) -> Wiring:
    """Every node on one non-blocking switch (NVSwitch, a small network)."""
    return [wire.join(node, switch) for node in nodes], [switch]


def torus(nodes: Sequence[str], shape: Sequence[int], wire: Wire) -> Wiring:
    """Nodes in row-major order on a torus of any number of dimensions; a ring is a torus of one."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    links = []
    for position in itertools.product(*(range(length) for length in shape)):
        here = sum(index * stride for index, stride in zip(position, strides, strict=True))
        for axis, length in enumerate(shape):
            if length == 1 or (length == 2 and position[axis] == 1):
                continue
            step = (position[axis] + 1) % length - position[axis]
            links.append(wire.join(nodes[here], nodes[here + step * strides[axis]]))
    return links, []


def tree(
    nodes: Sequence[str],
    bandwidths: Sequence[float | None],
    levels: Sequence[TreeLevel],
    prefix: str,
    wire: Wire,
) -> Wiring:
    """A tree of switches over the nodes. The links of the first level have the bandwidth of their leaf; a
    root switch joins the switches of the last level.

    Args:
        nodes: the leaves. bandwidths: bytes/s of each leaf's link.
        levels: from the leaves up. wire: latency of the leaves' links, kind and origin of all.
    """
    links: list[Link] = []
    switches: list[str] = []
    below, speeds, latency = list(nodes), list(bandwidths), wire.latency
    for depth, level in enumerate([*levels, None]):
        width = len(below) if level is None else level.children
        above: list[str] = []
        above_speeds: list[float | None] = []
        for start in range(0, len(below), width):
            switch = f"{prefix}{depth}_{start // width}"
            above.append(switch)
            stated = [speed for speed in speeds[start : start + width] if speed is not None]
            complete = level is not None and len(stated) == len(speeds[start : start + width])
            above_speeds.append(
                sum(stated) / level.oversubscription if level is not None and complete else None
            )
            links.extend(
                Link(node, switch, wire.kind, speed, latency, wire.origin)
                for node, speed in zip(
                    below[start : start + width], speeds[start : start + width], strict=True
                )
            )
        switches.extend(above)
        if len(above) == 1:
            break
        below, speeds = above, above_speeds
        latency = None if level is None else level.latency
    return links, switches


def pcie_pairs(nodes: Sequence[str], prefix: str, wire: Wire, host_bandwidth: float | None) -> Wiring:
    """Two devices per PCIe switch, and the switches on one host bridge over links of `host_bandwidth`."""
    host = f"{prefix}host"
    links: list[Link] = []
    switches = [host]
    for start in range(0, len(nodes), 2):
        switch = f"{prefix}pcie{start // 2}"
        switches.append(switch)
        links.extend(wire.join(node, switch) for node in nodes[start : start + 2])
        links.append(Link(switch, host, wire.kind, host_bandwidth, wire.latency, wire.origin))
    return links, switches
