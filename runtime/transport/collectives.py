"""Collectives on tensors: what generated rank programs call.

They handle dims and uneven shards; transports move flat buffers.

The `*_start` form of a collective returns a `Handle`, whose `wait()` returns the array; the other form
waits. Start early and wait late. `group` is a tuple of global ranks in order; `sizes[i]` is the local length
of the dim in question on member i, may differ between members and may be 0. Arrays are of NumPy or of the
namespace of a device (`register_arrays`); `out` must be C-contiguous and is returned.

Data is packed only where the layout needs it: with the dim in front (or only dims of length 1 before it)
the shards are stretches of memory already, and `x` and `out` are the transport's buffers themselves.

Invariant: the input is not changed, except by `all_reduce(x, out=x)`, and must not be written before `wait`
returned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec

from distgraph.errors import RuntimeFault
from distgraph.runtime.transport.transport import (
    Array,
    Group,
    Request,
    Transport,
    namespace_of,
    position_in,
    stretches,
)
from distgraph.runtime.transport.watchdog import MESSAGE_TAGS

Slices = tuple[slice, ...]
Call = ParamSpec("Call")


class Handle:
    """A started collective."""

    __slots__ = ("_finish", "_in_flight", "_out", "_requests")

    def __init__(
        self,
        requests: Sequence[Request],
        out: Array,
        finish: Callable[[], None] | None = None,
        in_flight: Sequence[Array] = (),
    ) -> None:
        self._requests, self._out, self._finish = list(requests), out, finish
        self._in_flight = in_flight  # packed buffers that are being sent

    def wait(self) -> Array:
        """Wait for the result and return it.

        Raises:
            RuntimeFault: another rank failed, or the transport's time limit passed without progress.
        """
        while self._requests:
            self._requests[-1].wait()
            self._requests.pop()
        if self._finish is not None:
            self._finish()
            self._finish = None
        self._in_flight = ()
        return self._out

    def done(self) -> bool:
        """Whether `wait` would return at once; lets the operation make progress."""
        open_requests = [request for request in self._requests if not request.done()]
        return not open_requests


def finish(handles: list[Handle]) -> None:
    """Wait for all handles, then remove them from the list."""
    for handle in handles:
        handle.wait()
    handles.clear()


def _waited(start: Callable[Call, Handle]) -> Callable[Call, Array]:
    """The form of a collective that waits: it returns the array itself."""

    @wraps(start)
    def call(*args: Call.args, **kwargs: Call.kwargs) -> Array:
        return start(*args, **kwargs).wait()

    return call


def all_reduce_start(
    transport: Transport, x: Array, group: Group, op: str, out: Array | None = None, wire: Any = None
) -> Handle:
    """Reduction of `x` over the members, on each of them. `out=x` works in place.

    Args:
        op: "sum" | "max" | "min" | "prod".
        wire: 16-bit dtype to which terms and result are rounded where they are sent; None for that of `x`.
    """
    out = _result(out, x, x.shape, "all_reduce")
    if wire is not None:
        packed = _rounded(x, wire)
        return Handle([transport.all_reduce(packed, op, group)], out, lambda: _widen(packed, out))
    if out is not x:
        out[...] = x
    return Handle([transport.all_reduce(out, op, group)], out)


all_reduce = _waited(all_reduce_start)


def all_gather_start(
    transport: Transport, x: Array, dim: int, sizes: Sequence[int], group: Group, out: Array | None = None
) -> Handle:
    """Concatenation of the members' shards along `dim`.

    Returns: array of x's shape but with length sum(sizes) in `dim`.
    """
    _check_dim("all_gather", transport, x, dim, sizes, group)
    out = _result(out, x, _with_length(x.shape, dim, sum(sizes)), "all_gather")
    counts = _counts(x.shape, dim, sizes)
    send = _contiguous(x)
    if _leads(x.shape, dim):
        return Handle([transport.all_gather(send, out, counts, group)], out, in_flight=[send])
    packed = _empty(x, sum(counts))
    request = transport.all_gather(send, packed, counts, group)
    return Handle([request], out, lambda: _unpack(packed, out, dim, sizes), [send])


all_gather = _waited(all_gather_start)


def reduce_scatter_start(
    transport: Transport,
    x: Array,
    dim: int,
    sizes: Sequence[int],
    op: str,
    group: Group,
    out: Array | None = None,
    wire: Any = None,
) -> Handle:
    """This member's stretch of `dim` of the reduction of `x` over the members; `wire` as in `all_reduce`.

    Returns: array of x's shape but with this member's length of `sizes` in `dim`.
    """
    _check_whole("reduce_scatter", x, dim, sizes, group)
    length = sizes[position_in(group, transport.rank, "reduce_scatter")]
    out = _result(out, x, _with_length(x.shape, dim, length), "reduce_scatter")
    counts = _counts(x.shape, dim, sizes)
    send = _pack(x, dim, sizes)
    if wire is not None:
        packed, received = _rounded(send, wire), _empty(x, out.shape, wire)
        request = transport.reduce_scatter(packed, received, counts, op, group)
        return Handle([request], out, lambda: _widen(received, out), [packed])
    return Handle([transport.reduce_scatter(send, out, counts, op, group)], out, in_flight=[send])


reduce_scatter = _waited(reduce_scatter_start)


def all_gather_pieces_start(
    transport: Transport,
    xs: Sequence[Array],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int]],
    group: Group,
    outs: Sequence[Array],
) -> Handle:
    """`all_gather` of several tensors in one message, which packs for each member its shards of all.

    Args:
        xs, dims, sizes, outs: of each tensor. The shards in `xs` may be written when this returns.
    """
    for x, dim, lengths in zip(xs, dims, sizes, strict=True):
        _check_dim("all_gather", transport, x, dim, lengths, group)
    pieces = _pieces_by_member(outs, dims, sizes)
    counts = [sum(piece.size for piece in of_member) for of_member in pieces]
    send, packed = _empty(xs[0], sum(x.size for x in xs)), _empty(xs[0], sum(counts))
    _copy_in(xs, send)
    request = transport.all_gather(send, packed, counts, group)
    return Handle([request], outs[0], lambda: _copy_out(packed, itertools.chain(*pieces)), [send])


def reduce_scatter_pieces_start(
    transport: Transport,
    xs: Sequence[Array],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int]],
    op: str,
    group: Group,
    outs: Sequence[Array],
    wire: Any = None,
) -> Handle:
    """`reduce_scatter` of several tensors in one message, which packs for each member its stretches of all.

    Args:
        xs, dims, sizes, outs: of each tensor. The tensors `xs` may be written when this returns.
    """
    for x, dim, lengths in zip(xs, dims, sizes, strict=True):
        _check_whole("reduce_scatter", x, dim, lengths, group)
    pieces = _pieces_by_member(xs, dims, sizes)
    counts = [sum(piece.size for piece in of_member) for of_member in pieces]
    send, received = (_empty(xs[0], n, wire) for n in (sum(counts), sum(out.size for out in outs)))
    _copy_in(itertools.chain(*pieces), send)
    request = transport.reduce_scatter(send, received, counts, op, group)
    return Handle([request], outs[0], lambda: _copy_out(received, outs), [send])


def all_to_all_start(
    transport: Transport,
    x: Array,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: Group,
    out: Array | None = None,
) -> Handle:
    """Move the sharding of a tensor from `concat_dim` to `split_dim`.

    Args:
        split_sizes: length of `split_dim` that each member has afterwards; they sum to that of `x`.
        concat_sizes: length of `concat_dim` that each member had; this member's is that of `x`.
    """
    if split_dim == concat_dim:
        raise RuntimeFault(
            f"all_to_all: split and concat dim are both {split_dim}; use exchange to move tiles in one dim"
        )
    _check_whole("all_to_all", x, split_dim, split_sizes, group)
    _check_dim("all_to_all", transport, x, concat_dim, concat_sizes, group)
    length = split_sizes[position_in(group, transport.rank, "all_to_all")]
    received_shape = _with_length(x.shape, split_dim, length)
    out = _result(out, x, _with_length(received_shape, concat_dim, sum(concat_sizes)), "all_to_all")
    send = _pack(x, split_dim, split_sizes)
    send_counts, recv_counts = (
        _counts(x.shape, split_dim, split_sizes),
        _counts(received_shape, concat_dim, concat_sizes),
    )
    if _leads(received_shape, concat_dim):
        return Handle(
            [transport.all_to_all(send, out, send_counts, recv_counts, group)], out, in_flight=[send]
        )
    packed = _empty(x, sum(recv_counts))
    request = transport.all_to_all(send, packed, send_counts, recv_counts, group)
    return Handle([request], out, lambda: _unpack(packed, out, concat_dim, concat_sizes), [send])


all_to_all = _waited(all_to_all_start)


def exchange_start(
    transport: Transport | None,
    x: Array | None,
    sends: Sequence[tuple[int, Slices]],
    recvs: Sequence[tuple[int, Slices]],
    out: Array | None,
    tag: int = 0,
) -> Handle:
    """Move arbitrary tiles: cross-mesh and irregular resharding. In a program of one rank, which has no
    transport, all tiles stay on the rank.

    Args:
        x: local source; None where this rank only receives.
        sends: (destination rank, slices of x); tiles for one rank in the order in which it lists them.
        recvs: (source rank, slices of out), likewise. Tiles of a rank for itself are copied.
        out: local result, written only where tiles land; None where this rank only sends.
        tag: 0 <= tag < 2**27; unfinished exchanges between the same two ranks must have different tags or
            start in the same order on both.
    """
    rank = 0 if transport is None else transport.rank
    if (x is None and sends) or (out is None and recvs):
        raise RuntimeFault(
            f"exchange: rank {rank} has {'no array to send from' if x is None else 'no out to receive in'}"
        )
    if transport is None:
        _exchange_here(rank, x, sends, recvs, out)
        return Handle([], out)
    requests: list[Request] = []
    landing: list[tuple[Array, Array]] = []
    in_flight: list[Array] = []
    for source, tile in recvs:
        if (
            source != rank and out is not None and (target := out[(*tile, ...)]).size
        ):  # with ..., a tile of no dims is a view as well
            buffer = target if target.flags.c_contiguous else _empty(target, target.size)
            requests.append(transport.recv(buffer, source, MESSAGE_TAGS + tag))
            if buffer is not target:
                landing.append((target, buffer))
    for dest, tile in sends:
        if dest != rank and x is not None and (piece := x[(*tile, ...)]).size:
            in_flight.append(_contiguous(piece))
            requests.append(transport.send(in_flight[-1], dest, MESSAGE_TAGS + tag))
    _exchange_here(rank, x, sends, recvs, out)

    def finish() -> None:
        for target, buffer in landing:
            target[...] = buffer.reshape(target.shape)

    return Handle(requests, out, finish, in_flight)


exchange = _waited(exchange_start)


def _exchange_here(
    rank: int,
    x: Array | None,
    sends: Sequence[tuple[int, Slices]],
    recvs: Sequence[tuple[int, Slices]],
    out: Array | None,
) -> None:
    """Copy the tiles that stay on their rank."""
    sent = [tile for dest, tile in sends if dest == rank]
    received = [tile for source, tile in recvs if source == rank]
    if len(sent) != len(received):
        raise RuntimeFault(
            f"exchange: rank {rank} sends itself {len(sent)} tiles but expects {len(received)}"
        )
    for source_tile, target_tile in zip(sent, received, strict=True):
        if x is not None and out is not None:
            out[target_tile] = x[source_tile]


def broadcast_start(
    transport: Transport, x: Array, root: int, group: Group, out: Array | None = None
) -> Handle:
    """`x` of the global rank `root`, on every member; elsewhere only the shape and dtype of `x` count."""
    out = _result(out, x, x.shape, "broadcast")
    if transport.rank == root and out is not x:
        out[...] = x
    return Handle([transport.broadcast(out, root, group)], out)


broadcast = _waited(broadcast_start)


def reduce_start(
    transport: Transport, x: Array, root: int, op: str, group: Group, out: Array | None = None
) -> Handle:
    """Reduction of `x` over the members, on the global rank `root`; elsewhere the result is undefined."""
    out = _result(out, x, x.shape, "reduce")
    position = position_in(group, root, "reduce")
    counts = [x.size if member == position else 0 for member in range(len(group))]
    send = _contiguous(x)
    received = out if transport.rank == root else _empty(x, 0)
    return Handle([transport.reduce_scatter(send, received, counts, op, group)], out, in_flight=[send])


reduce = _waited(reduce_start)


def _empty(like: Array, shape: int | Sequence[int], dtype: Any = None) -> Array:
    """Uninitialised array of the library of `like`, and of its dtype if none is given."""
    return namespace_of(like).empty(shape, like.dtype if dtype is None else dtype)


def _rounded(x: Array, dtype: Any) -> Array:
    """A flat copy of an array in another dtype."""
    copy = _empty(x, x.size, dtype)
    _copy_in([x], copy)
    return copy


def _widen(packed: Array, out: Array) -> None:
    """Copy a flat array into one of another shape and dtype."""
    _copy_out(packed, [out])


def _contiguous(x: Array) -> Array:
    return x if x.flags.c_contiguous else x.copy(order="C")


def _result(out: Array | None, like: Array, shape: Sequence[int], what: str) -> Array:
    if out is None:
        return _empty(like, shape)
    if tuple(out.shape) != tuple(shape) or out.dtype != like.dtype or not out.flags.c_contiguous:
        raise RuntimeFault(
            f"{what}: result is {like.dtype}{tuple(shape)} but out is {out.dtype}{tuple(out.shape)}"
            f"{'' if out.flags.c_contiguous else ', not C-contiguous'}; pass a matching out or none"
        )
    return out


def _with_length(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])


def _counts(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> list[int]:
    """Elements of each shard, given the other dims of `shape`."""
    others = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    return [size * others for size in sizes]


def _leads(shape: Sequence[int], dim: int) -> bool:
    """Whether shards along `dim` are stretches of memory."""
    return math.prod(shape[:dim]) == 1


def _pack(x: Array, dim: int, sizes: Sequence[int]) -> Array:
    """Shards along `dim`, one after the other in memory."""
    if _leads(x.shape, dim):
        return _contiguous(x)
    packed = _empty(x, x.size)
    for place, part in zip(stretches(_counts(x.shape, dim, sizes)), stretches(sizes), strict=True):
        shard = x[(slice(None),) * dim + (part,)]
        packed[place].reshape(shard.shape)[...] = shard
    return packed


def _unpack(packed: Array, out: Array, dim: int, sizes: Sequence[int]) -> None:
    """Inverse of `_pack` into `out`."""
    for place, part in zip(stretches(_counts(out.shape, dim, sizes)), stretches(sizes), strict=True):
        shard = out[(slice(None),) * dim + (part,)]
        shard[...] = packed[place].reshape(shard.shape)


def _pieces_by_member(
    arrays: Sequence[Array], dims: Sequence[int], sizes: Sequence[Sequence[int]]
) -> list[list[Array]]:
    """For each member its stretches of all arrays, as views."""
    members = zip(*(stretches(lengths) for lengths in sizes), strict=True)
    return [
        [x[(slice(None),) * dim + (part,)] for x, dim, part in zip(arrays, dims, parts, strict=True)]
        for parts in members
    ]


def _copy_in(parts: Iterable[Array], packed: Array) -> None:
    """Copy arrays into memory, one after the other."""
    offset = 0
    for part in parts:
        packed[offset : offset + part.size].reshape(part.shape)[...] = part
        offset += part.size


def _copy_out(packed: Array, parts: Iterable[Array]) -> None:
    """Inverse of `_copy_in`."""
    offset = 0
    for part in parts:
        part[...] = packed[offset : offset + part.size].reshape(part.shape)
        offset += part.size


def _check_whole(what: str, x: Array, dim: int, sizes: Sequence[int], group: Group) -> None:
    """`x` is whole along `dim`, and `sizes` cut it."""
    if not 0 <= dim < x.ndim:
        raise RuntimeFault(f"{what}: dim {dim} but the array has {x.ndim} dims")
    if len(sizes) != len(group) or sum(sizes) != x.shape[dim]:
        raise RuntimeFault(
            f"{what}: dim {dim} has length {x.shape[dim]} but sizes {list(sizes)} over {len(group)} members "
            f"sum to {sum(sizes)}"
        )


def _check_dim(
    what: str, transport: Transport, x: Array, dim: int, sizes: Sequence[int], group: Group
) -> None:
    """`x` is this member's shard along `dim`."""
    if not 0 <= dim < x.ndim:
        raise RuntimeFault(f"{what}: dim {dim} but the array has {x.ndim} dims")
    position = position_in(group, transport.rank, what)
    if len(sizes) != len(group) or sizes[position] != x.shape[dim]:
        raise RuntimeFault(
            f"{what}: rank {transport.rank} has length {x.shape[dim]} in dim {dim} but sizes {list(sizes)} "
            f"of group {group} say otherwise"
        )


CALLS: dict[str, Callable[..., Handle]] = {}
"""Collective -> the call that starts it: (transport, x, its parameters, out) -> `Handle`."""


def register_call(name: str, start: Callable[..., Handle]) -> None:
    """Name the call by which rank programs start a collective (`Collective.parameters` says its arguments).

    Args:
        name: of the collective, see `distgraph.ir.collective_registry`.
        start: (transport, x, *parameters, out) -> `Handle`; x is the operand's block, out the result's.

    Raises:
        RuntimeFault: the collective has a call already.
    """
    if name in CALLS:
        raise RuntimeFault(f"collective {name} has two calls; choose another name")
    CALLS[name] = start


register_call("all_reduce", all_reduce_start)
register_call("all_gather", all_gather_start)
register_call("reduce_scatter", reduce_scatter_start)
register_call("all_gather_pieces", all_gather_pieces_start)
register_call("reduce_scatter_pieces", reduce_scatter_pieces_start)
register_call("all_to_all", all_to_all_start)
register_call("broadcast", broadcast_start)
register_call("reduce", reduce_start)
register_call("exchange", exchange_start)
