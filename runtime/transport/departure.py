"""Ranks that have come to the end of their script, while others may wait for them.

A rank that leaves tells the others how many collectives it has started in each group, and how many messages
it has exchanged with each rank. Whoever waits for one more than that waits in vain, and can say so at once; a
rank that waits for something else goes on: to come to the end first, after the same calls, is no mistake.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

from distgraph.runtime.transport.transport import Group

_DEPARTED = 3  # tag on the control communicator

Need = tuple[str, Group, int]
"""What a wait is for: operation number N, from 1, of a kind: "collective" in a group; or what a peer must
have done: "send", "recv", "object" or "received object". A plain tuple: one is made for every operation."""


def _nothing() -> dict[str, dict[Any, int]]:
    return {"collective": {}, "send": {}, "recv": {}, "object": {}, "received object": {}}


@dataclass(slots=True)
class Departures:
    """What this rank has taken part in, and what is known of ranks that have left.

    Args:
        mpi: the module mpi4py.MPI.
        comm: the control communicator.

    Attributes:
        counts: kind -> group, or peer -> how many.
        left: rank -> its counts.
    """

    mpi: Any
    comm: Any
    counts: dict[str, dict[Any, int]] = field(default_factory=_nothing)
    left: dict[int, dict[str, dict[Any, int]]] = field(default_factory=dict)

    def collective(self, group: Group) -> Need:
        """Count a collective that this rank starts; what the wait for it needs."""
        counts = self.counts["collective"]
        counts[group] = number = counts.get(group, 0) + 1
        return "collective", group, number

    def message(self, kind: str, needed: str, peer: int) -> Need:
        """Count a message to or from a peer.

        Args:
            kind: "send", "recv", "object" or "received object": what this rank does.
            needed: what the peer has to do for it.
            peer: its rank.
        """
        counts = self.counts[kind]
        counts[peer] = number = counts.get(peer, 0) + 1
        return needed, (peer,), number

    def tell(self) -> list[Any]:
        """Tell all others that this rank leaves; the requests of the messages."""
        data = bytearray(pickle.dumps(self.counts))
        ranks = range(int(self.comm.Get_size()))
        own = int(self.comm.Get_rank())
        return [self.comm.Isend(data, rank, _DEPARTED) for rank in ranks if rank != own]

    def absent(self, need: Need | None) -> int | None:
        """A rank that has left without what a wait needs; None while there may be hope."""
        self._receive()
        if need is None:
            return None
        kind, ranks, number = need
        key = ranks if kind == "collective" else int(self.comm.Get_rank())
        return next((r for r in ranks if r in self.left and self.left[r][kind].get(key, 0) < number), None)

    def _receive(self) -> None:
        status = self.mpi.Status()
        while self.comm.Iprobe(self.mpi.ANY_SOURCE, _DEPARTED, status):
            data = bytearray(status.Get_count(self.mpi.BYTE))
            self.comm.Recv(data, status.Get_source(), _DEPARTED)
            self.left[status.Get_source()] = pickle.loads(bytes(data))
