"""Departures: ranks that have reached the end of their script while others may still wait for them.

A rank that departs sends the others the number of collectives that it has started in each group, and of
messages that it has exchanged with each rank. A rank that waits for one more than that would wait forever,
and fails at once. A rank that waits for anything else goes on: reaching the end first, after the same calls,
is no mistake.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

from distgraph.runtime.transport.transport import Group

_DEPARTED = 3  # tag on the control communicator

Need = tuple[str, Group, int]
"""(kind, ranks, N): what a wait needs other ranks to do. The ranks of a group have to start their
"collective" number N, or one peer its "send", "recv", "object" or "received object" number N; numbers count
from 1. It is a plain tuple because one is made for every operation."""


def _no_operations() -> dict[str, dict[Any, int]]:
    return {"collective": {}, "send": {}, "recv": {}, "object": {}, "received object": {}}


@dataclass(slots=True)
class Departures:
    """Counts the operations of this rank, and holds the counts of ranks that have departed.

    Attributes:
        counts: kind -> group or peer -> number of operations of this rank.
        departed: rank that has departed -> its counts.
    """

    mpi: Any
    comm: Any
    counts: dict[str, dict[Any, int]] = field(default_factory=_no_operations)
    departed: dict[int, dict[str, dict[Any, int]]] = field(default_factory=dict)

    def collective(self, group: Group) -> Need:
        """Count a collective that this rank starts. Returns what a wait for it needs."""
        counts = self.counts["collective"]
        counts[group] = number = counts.get(group, 0) + 1
        return "collective", group, number

    def message(self, kind: str, needed: str, peer: int) -> Need:
        """Count a message to or from a peer. Returns what a wait for it needs.

        Args:
            kind: operation of this rank: "send", "recv", "object" or "received object".
            needed: operation that the peer has to do for it.
            peer: rank of the peer.
        """
        counts = self.counts[kind]
        counts[peer] = number = counts.get(peer, 0) + 1
        return needed, (peer,), number

    def announce(self) -> list[Any]:
        """Send to all others that this rank departs. Returns the requests of the messages."""
        data = bytearray(pickle.dumps(self.counts))
        ranks = range(int(self.comm.Get_size()))
        this_rank = int(self.comm.Get_rank())
        return [self.comm.Isend(data, rank, _DEPARTED) for rank in ranks if rank != this_rank]

    def all_received(self) -> bool:
        """Whether all other ranks have announced that they depart; MPI reports messages that nobody reads."""
        self._receive()
        return len(self.departed) == int(self.comm.Get_size()) - 1

    def missing_rank(self, need: Need | None) -> int | None:
        """A rank that has departed without doing what a wait needs; None if there is none yet."""
        self._receive()
        if need is None:
            return None
        kind, ranks, number = need
        key = ranks if kind == "collective" else int(self.comm.Get_rank())
        return next(
            (r for r in ranks if r in self.departed and self.departed[r][kind].get(key, 0) < number), None
        )

    def _receive(self) -> None:
        status = self.mpi.Status()
        while self.comm.Iprobe(self.mpi.ANY_SOURCE, _DEPARTED, status):
            data = bytearray(status.Get_count(self.mpi.BYTE))
            self.comm.Recv(data, status.Get_source(), _DEPARTED)
            self.departed[status.Get_source()] = pickle.loads(bytes(data))
