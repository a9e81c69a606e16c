"""Seconds of collectives along the axes of meshes on a cluster: the only cost model of communication.

*In:* a cluster and the device of every rank. *Out:* seconds, by the bytes that a rank sends or holds.
*Invariant:* all groups along some axes run the collective at the same time and their loads add up; the
slowest group decides. Each pattern of groups (`group_symmetry.patterns`) is priced once however large the
mesh is.

The planner of redistributions, the search and the forecast all use this model, so that the forecast of a plan
agrees with the costs by which it was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.collectives import COLLECTIVES
from distgraph.ir.mesh import ProcessMesh
from distgraph.resources.cluster import Cluster
from distgraph.resources.collective_cost import held_bytes, shared_cost
from distgraph.resources.group_symmetry import Groups, patterns

Floats = NDArray[np.float64]

TIE_SECONDS = 1e-9
"""Seconds for every byte of `Collective.tie_break`: orders equally expensive steps, decides nothing else."""


class MeshCommunication:
    """Seconds of collectives along the axes of meshes.

    Args:
        cluster: with launch time, bandwidths and latencies.
        devices: device of every rank; rank i on device i by default.
    """

    def __init__(self, cluster: Cluster, devices: Sequence[int] | None = None) -> None:
        self.cluster = cluster
        self.devices = None if devices is None else tuple(devices)
        self.cost = shared_cost(cluster)
        self._patterns: dict[tuple[ProcessMesh, tuple[str, ...]], tuple[Groups, ...]] = {}
        self._prices: dict[tuple[str, float, tuple[Groups, ...]], float] = {}
        self._estimates: dict[tuple[str, Groups, float], tuple[float, str, float]] = {}

    def device(self, rank: int) -> int:
        """Number of the device of a rank."""
        return rank if self.devices is None else self.devices[rank]

    def patterns(self, mesh: ProcessMesh, axes: tuple[str, ...]) -> tuple[Groups, ...]:
        """Representatives of the groups of devices along some axes; see `group_symmetry.patterns`."""
        key = (mesh, axes)
        if key not in self._patterns:
            groups = [tuple(self.device(rank) for rank in group) for group in mesh.groups(axes)]
            self._patterns[key] = patterns(self.cluster, groups)
        return self._patterns[key]

    def price(
        self, kind: str, sent: float, group_size: int, mesh: ProcessMesh, axes: tuple[str, ...]
    ) -> float:
        """Seconds of a collective; what `redistribute`, `lower` and `build` take as `price`.

        Args:
            kind: name of the collective.
            sent: bytes that one rank sends.
            group_size: ranks in a group.
            mesh, axes: of the groups.
        """
        if group_size == 1 or not sent:
            return 0.0
        key = (kind, sent, self.patterns(mesh, axes))
        if key not in self._prices:
            self._prices[key] = float(self.prices(kind, mesh, axes, np.array([sent]))[0])
        return self._prices[key]

    def prices(self, kind: str, mesh: ProcessMesh, axes: tuple[str, ...], sent: Floats) -> Floats:
        """Seconds of collectives along some axes, for many numbers of bytes that a rank sends."""
        sizes = held_bytes(kind, mesh.count(axes), sent)
        seconds = np.zeros_like(sizes)
        for groups in self.patterns(mesh, axes):
            seconds = np.maximum(seconds, self.cost.times(kind, groups[0], sizes, groups[1:]))
        return np.where(sent > 0, seconds + COLLECTIVES[kind].tie_break * TIE_SECONDS, 0.0)

    def estimate(
        self, kind: str, mesh: ProcessMesh, axes: tuple[str, ...], nbytes: float
    ) -> tuple[float, str, float]:
        """Seconds of the slowest group, the kind of its bottleneck link, and the most seconds a rank is busy.

        Args:
            kind: name of the collective.
            mesh, axes: of the groups.
            nbytes: its size, see `distgraph.resources.collective_cost.wire_bytes`.
        """
        slowest, busy = (0.0, ""), 0.0
        for groups in self.patterns(mesh, axes):
            key = (kind, groups, nbytes)
            if key not in self._estimates:
                result = self.cost.estimate(kind, groups[0], nbytes, groups[1:])
                ends = groups[0][0], groups[0][-1]
                link = self.narrowest(*ends) if result.bottleneck is None else result.bottleneck.kind
                self._estimates[key] = result.seconds, link, result.busy
            seconds, link, work = self._estimates[key]
            slowest, busy = max(slowest, (seconds, link)), max(busy, work)
        return *slowest, busy

    def links(self, mesh: ProcessMesh, axes: tuple[str, ...]) -> frozenset[int]:
        """Directed links that all groups along some axes use together."""
        groups = (tuple(self.device(rank) for rank in group) for group in mesh.groups(axes))
        return frozenset().union(*map(self.cost.rings.links, groups))

    def narrowest(self, source: int, target: int) -> str:
        """Kind of the link with the least bandwidth between two devices; "" where they share memory."""
        links = [self.cost.router.link(directed) for directed in self.cost.router.route(source, target)]
        return min(links, key=lambda link: link.bandwidth or 0.0).kind if links else ""
