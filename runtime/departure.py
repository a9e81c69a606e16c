"""Ranks that have come to the end of their script, while others may wait for them.

A rank that leaves tells the others how many collectives it has started in each group, and how many messages
it has exchanged with each rank. Whoever waits for one more than that waits in vain, and can say so at once; a
rank that waits for something else goes on: to come to the end first, after the same calls, is no mistake.
"""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distgraph.runtime.transport import Group

_DEPARTED = 3  # tag on the control communicator


class Need(NamedTuple):
    """What a wait is for: operation number `number` of a kind, from 1.

    Attributes:
        kind: "collective" in a group; or what a peer must have done: "send", "recv" or "object".
        ranks: the group, or the peer.
        number: of such operations.
    """

    kind: str
    ranks: Group
    number: int


@dataclass(slots=True)
class Departures:
    """What this rank has taken part in, and what is known of ranks that have left.

    Args:
        mpi: the module mpi4py.MPI.
        comm: the control communicator.
    """

    mpi: Any
    comm: Any
    counts: Counter[tuple[str, Group]] = field(default_factory=Counter)
    left: dict[int, Counter[tuple[str, Group]]] = field(default_factory=dict)

    def collective(self, group: Group) -> Need:
        """Count a collective that this rank starts; what the wait for it needs."""
        self.counts["collective", group] += 1
        return Need("collective", group, self.counts["collective", group])

    def message(self, kind: str, needed: str, peer: int) -> Need:
        """Count a message to or from a peer.

        Args:
            kind: "send", "recv" or "object": what this rank does.
            needed: what the peer has to do for it.
        """
        self.counts[kind, (peer,)] += 1
        return Need(needed, (peer,), self.counts[kind, (peer,)])

    def tell(self) -> list[Any]:
        """Tell all others that this rank leaves; the requests of the messages."""
        data = bytearray(pickle.dumps(dict(self.counts)))
        ranks = range(int(self.comm.Get_size()))
        own = int(self.comm.Get_rank())
        return [self.comm.Isend(data, rank, _DEPARTED) for rank in ranks if rank != own]

    def absent(self, need: Need | None) -> int | None:
        """A rank that has left without what a wait needs; None while there may be hope."""
        self._receive()
        if need is None:
            return None
        own = int(self.comm.Get_rank())
        for rank in need.ranks:
            key = (need.kind, need.ranks if need.kind == "collective" else (own,))
            if rank in self.left and self.left[rank][key] < need.number:
                return rank
        return None

    def _receive(self) -> None:
        status = self.mpi.Status()
        while self.comm.Iprobe(self.mpi.ANY_SOURCE, _DEPARTED, status):
            data = bytearray(status.Get_count(self.mpi.BYTE))
            self.comm.Recv(data, status.Get_source(), _DEPARTED)
            self.left[status.Get_source()] = Counter(pickle.loads(bytes(data)))
