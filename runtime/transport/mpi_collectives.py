"""Collectives written as non-blocking sends and receives of MPI.

Each collective is a generator of steps: it posts messages, yields their MPI requests, and is resumed when
those are complete. Step i of an operation is taken after step i of all operations of its group that were
started before it, and the messages of step i have the tag of the group plus i: so those of one tag match in
order, however many steps an operation has.

Members of a group send to each other directly, except where a group has several members on one machine and
others elsewhere. The bytes between machines then decide, and members pass long messages on (`Relays`): what
several ranks of a machine add up, or receive, crosses the network once.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from distgraph.errors import RuntimeFault
from distgraph.runtime.transport.transport import (
    Array,
    Group,
    accumulation_dtype,
    even_counts,
    position_in,
    reduce_in_order,
    stretches,
)

TAG_BITS: Final = 28
"""Bits of a message's tag, of which MPICH has 29. The lowest two are the step of a collective."""
_WHOLE_EXCHANGE_BYTES: Final = 1 << 16
"""Up to this size, each member of an all_reduce sends its whole buffer to all others."""
_FLAT_BROADCAST_BYTES: Final = 1 << 16
"""Up to this size, the root of a broadcast sends the whole buffer to every member."""

_RELAYED_BYTES: Final = 1 << 17
"""From this size on, members of a group on several machines pass messages on, which takes twice the steps.

Measured at 100 to 10,000 Mbit/s (`benchmarks/HISTORY.md`): from this size on no collective took longer.
"""

_PART_BYTES: Final = 1 << 20
"""A longer message between machines is sent in parts.

MPI sends a long message once the receiver has agreed. Over TCP this answer waits behind the bytes that the
receiver itself is sending, so that two long messages in opposite directions would follow one another.
"""

Steps = Iterator[list[Any]]
_Message = tuple[int, Array]


@dataclass(frozen=True, slots=True)
class Relays:
    """Which members of a group send to other machines for the others on theirs, and receive for them.

    Attributes:
        machines: the members on each machine, in the order of the group.
        here: this rank and the others on its machine.
        served: member on this machine -> ranks elsewhere whose messages to and from this machine it handles.
        peers: for each machine, this rank if it is here, else the member there that handles its messages.
    """

    machines: tuple[Group, ...]
    here: Group
    served: dict[int, Group]
    peers: Group

    @classmethod
    def of(cls, group: Group, rank: int, machine_of: Sequence[int]) -> Relays | None:
        """Those of a group with this rank; None if it is on one machine, or has one member on each."""
        by_machine: dict[int, list[int]] = {}
        for member in group:
            by_machine.setdefault(machine_of[member], []).append(member)
        if len(by_machine) in (1, len(group)):
            return None
        machines = tuple(map(tuple, by_machine.values()))
        here = next(members for members in machines if rank in members)
        served: dict[int, list[int]] = {member: [] for member in here}
        for members in machines:
            for position, member in enumerate(members if members is not here else ()):
                served[here[position % len(here)]].append(member)
        position = here.index(rank)
        peers = (rank if rank in members else members[position % len(members)] for members in machines)
        return cls(machines, here, {m: tuple(ranks) for m, ranks in served.items()}, tuple(peers))


class Exchange:
    """Sends and receives the messages of one rank's collectives, on a communicator of their own.

    Args:
        comm: mpi4py communicator of all ranks, used for nothing else.
        machine_of: for each rank, a number of its machine; by default all are on one.
    """

    def __init__(self, comm: Any, machine_of: Sequence[int] = ()) -> None:
        self._comm = comm
        self._rank = int(comm.Get_rank())
        self._machine_of = tuple(machine_of) or (0,) * int(comm.Get_size())
        self._relays: dict[Group, Relays | None] = {}
        self._tags: dict[Group, int] = {}
        self._groups: dict[int, Group] = {}
        self._scratch: dict[int, list[np.ndarray[Any, Any]]] = {}

    def all_reduce(self, mine: Array, op: str, group: Group) -> Steps:
        position, others = self._peers(group)
        if not others or not mine.size:
            return
        tag = self._tag(group)
        if mine.nbytes * len(others) <= _WHOLE_EXCHANGE_BYTES:
            pieces = {peer: self._scratch_array(mine.size, mine.dtype) for peer in others}
            yield self._exchange([(p, mine) for p in others], list(pieces.items()), tag)
            self._reduce({**pieces, self._rank: mine}, group, op, mine)
            self._release(pieces.values())
            return
        counts = even_counts(mine.size, len(group))
        own_part = mine[stretches(counts)[position]]
        yield from self._scatter(mine, own_part, counts, op, group, tag)
        steps = 1 if self._relayed(group, mine.nbytes) is None else 2
        yield from self._gather(own_part, mine, counts, group, tag + steps)

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int], group: Group) -> Steps:
        position, others = self._peers(group)
        recv[stretches(counts)[position]] = send
        if others:
            yield from self._gather(send, recv, counts, group, self._tag(group))

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int], op: str, group: Group) -> Steps:
        yield from self._scatter(send, recv, counts, op, group, self._tag(group))

    def _gather(self, send: Array, recv: Array, counts: Sequence[int], group: Group, tag: int) -> Steps:
        """Receive the others' parts; between machines, each from one member, which passes it on here."""
        _, others = self._peers(group)
        parts = {rank: recv[place] for rank, place in zip(group, stretches(counts), strict=True)}
        relays = self._relayed(group, recv.nbytes)
        if relays is None:
            yield self._exchange([(p, send) for p in others], [(p, parts[p]) for p in others], tag)
            return
        near = [p for p in others if p in relays.here]
        served = relays.served[self._rank]
        sends = [(p, send) for p in (*near, *relays.peers) if p != self._rank]
        yield self._exchange(sends, [(p, parts[p]) for p in (*near, *served)], tag)
        sends = [(p, parts[r]) for p in near for r in served]
        yield self._exchange(sends, [(p, parts[r]) for p in near for r in relays.served[p]], tag + 1)

    def _scatter(
        self, send: Array, recv: Array, counts: Sequence[int], op: str, group: Group, tag: int
    ) -> Steps:
        """Reduce this rank's part of what all have."""
        _, others = self._peers(group)
        parts = {rank: send[place] for rank, place in zip(group, stretches(counts), strict=True)}
        relays = self._relayed(group, send.nbytes)
        if relays is not None:
            yield from self._scatter_by_machine(parts, recv, op, relays, tag)
            return
        pieces = {peer: self._scratch_array(recv.size, recv.dtype) for peer in others}
        yield self._exchange([(p, parts[p]) for p in others], list(pieces.items()), tag)
        self._reduce({**pieces, self._rank: parts[self._rank]}, group, op, recv)
        self._release(pieces.values())

    def _scatter_by_machine(
        self, parts: dict[int, Array], recv: Array, op: str, relays: Relays, tag: int
    ) -> Steps:
        """As `_scatter`; members of a machine reduce the parts that others elsewhere receive."""
        near = [p for p in relays.here if p != self._rank]
        targets = (self._rank, *relays.served[self._rank])  # whose parts this rank reduces
        pieces = {(p, t): self._scratch_array(parts[t].size, recv.dtype) for p in near for t in targets}
        sends = [(p, parts[target]) for p in near for target in (p, *relays.served[p])]
        yield self._exchange(sends, [(p, piece) for (p, _), piece in pieces.items()], tag)
        wide = accumulation_dtype(recv.dtype)
        sums = {target: self._scratch_array(parts[target].size, wide) for target in targets}
        for target, total in sums.items():
            ordered = [parts[target] if p == self._rank else pieces[p, target] for p in relays.here]
            reduce_in_order(ordered, op, total)
        self._release(pieces.values())
        away = {p: self._scratch_array(recv.size, wide) for p in relays.peers if p != self._rank}
        yield self._exchange([(t, sums[t]) for t in targets[1:]], list(away.items()), tag + 1)
        reduce_in_order([sums[p] if p == self._rank else away[p] for p in relays.peers], op, recv)
        self._release([*sums.values(), *away.values()])

    def _reduce(self, pieces: dict[int, Array], group: Group, op: str, out: Array) -> None:
        """Reduce one array of each member, in the order in which `_scatter_by_machine` does."""
        relays = self._relays_of(group)
        if relays is None:
            reduce_in_order([pieces[rank] for rank in group], op, out)
            return
        sums = [self._scratch_array(out.size, accumulation_dtype(out.dtype)) for _ in relays.machines]
        for members, total in zip(relays.machines, sums, strict=True):
            reduce_in_order([pieces[rank] for rank in members], op, total)
        reduce_in_order(sums, op, out)
        self._release(sums)

    def _relayed(self, group: Group, nbytes: int) -> Relays | None:
        """The relays of a collective of that many bytes in all; None if it takes one step without them."""
        return self._relays_of(group) if nbytes >= _RELAYED_BYTES else None

    def _relays_of(self, group: Group) -> Relays | None:
        if group not in self._relays:
            self._relays[group] = Relays.of(group, self._rank, self._machine_of)
        return self._relays[group]

    def all_to_all(
        self, send: Array, recv: Array, out_of: list[slice], into: list[slice], group: Group
    ) -> Steps:
        here, others = self._peers(group)
        recv[into[here]] = send[out_of[here]]
        position = {rank: i for i, rank in enumerate(group)}
        if others:
            sends = [(p, send[out_of[position[p]]]) for p in others]
            yield self._exchange(sends, [(p, recv[into[position[p]]]) for p in others], self._tag(group))

    def broadcast(self, buffer: Array, root: int, group: Group) -> Steps:
        """Send from the root to all members; a large buffer in parts, one to each, which all_gather joins."""
        _, others = self._peers(group)
        if not others or not buffer.size:
            return
        tag = self._tag(group)
        if len(group) == 2 or buffer.nbytes <= _FLAT_BROADCAST_BYTES:
            if self._rank == root:
                yield self._exchange([(p, buffer) for p in others], [], tag)
            else:
                yield self._exchange([], [(root, buffer)], tag)
            return
        receivers = tuple(rank for rank in group if rank != root)
        counts = even_counts(buffer.size, len(receivers))
        places = zip(receivers, stretches(counts), strict=True)
        by_rank = {rank: buffer[place] for rank, place in places}
        if self._rank == root:
            yield self._exchange(list(by_rank.items()), [], tag)
            return
        mine = by_rank[self._rank]
        yield self._exchange([], [(root, mine)], tag)
        yield from self._gather(mine, buffer, counts, receivers, tag + 1)

    def _exchange(self, sends: Sequence[_Message], receives: Sequence[_Message], tag: int) -> list[Any]:
        """Post messages between members of a group; both sides skip the empty ones."""
        comm = self._comm
        requests = [comm.Irecv(p, peer, tag) for peer, x in receives if x.size for p in self.parts(x, peer)]
        requests += [comm.Isend(p, peer, tag) for peer, x in sends if x.size for p in self.parts(x, peer)]
        return requests

    def parts(self, data: Array, peer: int) -> list[Array]:
        """The bytes of the messages that an array is sent as to a rank, or received as from it.

        There is an odd number of them, so that the first parts of two messages of which one is 2, 4, 8, ...
        times as long as the other differ: a receiver that expects another length learns so at once.
        """
        whole = octets(data)
        if whole.size <= _PART_BYTES or self._machine_of[peer] == self._machine_of[self._rank]:
            return [whole]
        count = -(-whole.size // _PART_BYTES) | 1
        return [whole[part] for part in stretches(even_counts(whole.size, count))]

    def _peers(self, group: Group) -> tuple[int, list[int]]:
        """Position of this rank, and the other members in turn from the next one on.

        So the members do not all send to the first one at once.
        """
        me = position_in(group, self._rank, "collective")
        return me, [*group[me + 1 :], *group[:me]]

    def _tag(self, group: Group) -> int:
        """A multiple of 4 made from the members of a group; it and the next three are for the steps."""
        tag = self._tags.get(group)
        if tag is None:
            tag = (zlib.crc32(np.asarray(group, np.int64).tobytes()) & ((1 << (TAG_BITS - 2)) - 1)) << 2
            other = self._groups.setdefault(tag, group)
            if other != group:
                raise RuntimeFault(
                    f"rank {self._rank}: groups {other} and {group} get the same message tag {tag}; "
                    "number the ranks of the mesh differently"
                )
            self._tags[group] = tag
        return tag

    def _scratch_array(self, count: int, dtype: Any) -> np.ndarray[Any, Any]:
        """Scratch memory, reused because fresh pages cost more time than the addition done in them."""
        nbytes = count * np.dtype(dtype).itemsize
        free = self._scratch.setdefault(nbytes, [])
        return (free.pop() if free else np.empty(nbytes, np.uint8)).view(dtype)

    def _release(self, pieces: Iterable[Array]) -> None:
        for piece in pieces:
            self._scratch[piece.nbytes].append(piece.view(np.uint8))


def octets(data: Array) -> Array:
    """The bytes of a flat array. MPI never computes with the data, so bf16, f16 and bool need no MPI type."""
    return data.view(np.uint8)
