"""Seconds that a collective takes on a ring of chips, as the tuner of matrix products prices it.

    T(P, shard) = launch + (P - 1) * (step + bytes(shard) / bandwidth)            and 0 for P = 1

(Nam et al., "MeshSlice", ISCA 2025, equation 5). Mesh axis 0 ("rows") is the one along which the row index
changes: a ring of it joins the chips of one column. Mesh axis 1 ("cols") joins the chips of one row. The two
directions of a torus use different links, so that neither slows the other down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from distgraph.errors import ResourceError

AXES = ("rows", "cols")
"""Names of mesh axes 0 and 1."""


@dataclass(frozen=True, slots=True)
class CommunicationSeconds:
    """Seconds of communication by cause.

    Attributes:
        launch: starting the operations.
        sync: synchronisation of neighbours, once for each step of a ring.
        transfer: bytes on the links.

    Example:
        >>> (CommunicationSeconds(1.0, 2.0, 3.0) + CommunicationSeconds(1.0, 0.0, 0.0)).times(2).total
        14.0
    """

    launch: float = 0.0
    sync: float = 0.0
    transfer: float = 0.0

    @property
    def total(self) -> float:
        """Their sum."""
        return self.launch + self.sync + self.transfer

    def __add__(self, other: CommunicationSeconds) -> CommunicationSeconds:
        return CommunicationSeconds(
            self.launch + other.launch, self.sync + other.sync, self.transfer + other.transfer
        )

    def times(self, count: int) -> CommunicationSeconds:
        """The same operation `count` times."""
        return CommunicationSeconds(self.launch * count, self.sync * count, self.transfer * count)


@dataclass(frozen=True, slots=True)
class Ring:
    """Price of one kind of communication on the rings of one mesh axis.

    Attributes:
        launch: seconds to start one operation.
        step: seconds in which neighbours synchronise, once a step.
        bandwidth: bytes/s of one direction of a ring.

    Raises:
        ResourceError: a negative or infinite time, or a bandwidth that is not a positive number.

    Example:
        >>> Ring(launch=13e-6, step=5e-6, bandwidth=1e9).seconds(5, 1000)
        CommunicationSeconds(launch=1.3e-05, sync=2e-05, transfer=4e-06)
    """

    launch: float
    step: float
    bandwidth: float

    def __post_init__(self) -> None:
        for field in ("launch", "step"):
            value = getattr(self, field)
            if not 0 <= value < math.inf:
                raise ResourceError(f"ring: {field} is {value} s but must be a finite time from 0 s up")
        if not 0 < self.bandwidth < math.inf:
            raise ResourceError(
                f"ring: bandwidth is {self.bandwidth} bytes/s but must be a finite number above 0"
            )

    def seconds(self, chips: int, shard_bytes: float) -> CommunicationSeconds:
        """All chips of a ring pass a shard on, P - 1 times: an all_gather or a reduce_scatter.

        Args:
            chips: P, chips of the ring. Two make one step: a shift to the neighbour.
            shard_bytes: bytes that a chip sends in a step.
        """
        if chips == 1:
            return CommunicationSeconds()
        steps = chips - 1
        return CommunicationSeconds(self.launch, steps * self.step, steps * shard_bytes / self.bandwidth)

    def stream_seconds(self, chips: int, nbytes: float) -> CommunicationSeconds:
        """One chip of a ring streams `nbytes` to all others, or all to one: a broadcast or a reduce.

        The bytes are sent in D packets, which takes D + P - 1 stages of (step + packet / bandwidth)
        (MeshSlice, figure 3); D is the number of packets with the least seconds, of one byte or more.
        """
        if chips == 1:
            return CommunicationSeconds()
        transfer = nbytes / self.bandwidth
        smallest = max(1, math.ceil(nbytes))  # packets of one byte
        best = math.sqrt((chips - 1) * transfer / self.step) if self.step else smallest
        options = []
        for packets in sorted({math.floor(best), math.ceil(best)}):
            packets = min(max(1, packets), smallest)
            stages = packets + chips - 1
            options.append(CommunicationSeconds(self.launch, stages * self.step, stages * transfer / packets))
        return min(options, key=lambda seconds: seconds.total)


class RingPrices(Protocol):
    """What the tuner asks about a cluster."""

    def ring(self, kind: str, axis: int, mesh: tuple[int, int]) -> Ring:
        """The price of a kind of communication on the rings of mesh axis 0 (rows) or 1 (cols).

        Args:
            kind: all_gather, reduce_scatter, send_receive, broadcast or reduce.
            axis: of the mesh.
            mesh: rows and columns of chips.
        """
