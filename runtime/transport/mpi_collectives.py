"""Collectives written as non-blocking sends and receives of MPI.

Each collective is a generator of steps: it posts messages, yields their MPI requests, and is resumed when
those are complete. The operations of one group must take their steps in the order in which they were started,
so that messages with equal tags match in order.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from distgraph.errors import RuntimeFault
from distgraph.runtime.transport.transport import (
    Array,
    Group,
    even_counts,
    position_in,
    reduce_in_order,
    stretches,
)

TAG_BITS: Final = 28
"""Bits of a message's tag, of which MPICH has 29. The lowest bit is the phase of a collective."""
_WHOLE_EXCHANGE_BYTES: Final = 1 << 16
"""Up to this size, each member of an all_reduce sends its whole buffer to all others."""
_FLAT_BROADCAST_BYTES: Final = 1 << 16
"""Up to this size, the root of a broadcast sends the whole buffer to every member."""

_PART_BYTES: Final = 1 << 20
"""A longer message between machines is sent in parts.

MPI sends a long message once the receiver has agreed. Over TCP this answer waits behind the bytes that the
receiver itself is sending, so that two long messages in opposite directions would follow one another.
"""

Steps = Iterator[list[Any]]
_Message = tuple[int, Array]


class Exchange:
    """Sends and receives the messages of one rank's collectives, on a communicator of their own.

    Args:
        comm: mpi4py communicator of all ranks, used for nothing else.
        near: ranks on the machine of this one.
    """

    def __init__(self, comm: Any, near: frozenset[int] = frozenset()) -> None:
        self._comm, self._near = comm, near
        self._rank = int(comm.Get_rank())
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
            ordered = [mine if rank == self._rank else pieces[rank] for rank in group]
            reduce_in_order(ordered, op, mine)
            self._release(pieces.values())
            return
        places = stretches(even_counts(mine.size, len(group)))
        own_part = mine[places[position]]
        pieces = {peer: self._scratch_array(own_part.size, mine.dtype) for peer in others}
        by_rank = dict(zip(group, places, strict=True))
        yield self._exchange([(p, mine[by_rank[p]]) for p in others], list(pieces.items()), tag)
        reduce_in_order([own_part if rank == self._rank else pieces[rank] for rank in group], op, own_part)
        self._release(pieces.values())
        yield self._exchange(
            [(p, own_part) for p in others], [(p, mine[by_rank[p]]) for p in others], tag + 1
        )

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int], group: Group) -> Steps:
        _, others = self._peers(group)
        by_rank = dict(zip(group, stretches(counts), strict=True))
        recv[by_rank[self._rank]] = send
        if others:
            receives = [(p, recv[by_rank[p]]) for p in others]
            yield self._exchange([(p, send) for p in others], receives, self._tag(group))

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int], op: str, group: Group) -> Steps:
        _, others = self._peers(group)
        by_rank = dict(zip(group, stretches(counts), strict=True))
        pieces = {peer: self._scratch_array(recv.size, recv.dtype) for peer in others}
        if others:
            sends = [(p, send[by_rank[p]]) for p in others]
            yield self._exchange(sends, list(pieces.items()), self._tag(group))
        own_part = send[by_rank[self._rank]]
        reduce_in_order([own_part if rank == self._rank else pieces[rank] for rank in group], op, recv)
        self._release(pieces.values())

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
        receivers = [rank for rank in group if rank != root]
        places = stretches(even_counts(buffer.size, len(receivers)))
        by_rank = {rank: buffer[place] for rank, place in zip(receivers, places, strict=True)}
        if self._rank == root:
            yield self._exchange(list(by_rank.items()), [], tag)
            return
        mine = by_rank[self._rank]
        yield self._exchange([], [(root, mine)], tag)
        peers = [rank for rank in receivers if rank != self._rank]
        yield self._exchange([(p, mine) for p in peers], [(p, by_rank[p]) for p in peers], tag + 1)

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
        if whole.size <= _PART_BYTES or peer in self._near:
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
        """An even tag made from the members of a group; the odd tag above it is for second phases."""
        tag = self._tags.get(group)
        if tag is None:
            tag = (zlib.crc32(np.asarray(group, np.int64).tobytes()) & ((1 << (TAG_BITS - 1)) - 1)) << 1
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
