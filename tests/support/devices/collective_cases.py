"""What every transport must do, as functions of one rank's transport: run on threads, under mpiexec and with
NCCL.

Every rank makes the data of all ranks from the same seeds, so each knows what NumPy says the answer is.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from distgraph.errors import RuntimeFault
from distgraph.runtime.transport import collectives
from distgraph.runtime.transport.transport import Group, Transport

DTYPES = ("float64", "float32", "float16", "bfloat16", "int32", "int64", "bool")
OPS = ("sum", "max", "min", "prod")
REFERENCE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def data(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Data of one rank: values whose sums and products stay in the range of f16 but are not exact in it."""
    rng = np.random.default_rng((rank, *shape, len(dtype)))
    if dtype == "bool":
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.startswith("int"):
        return np.asarray(rng.integers(-9, 10, shape)).astype(dtype)
    return np.asarray(rng.standard_normal(shape) + 0.1).astype(dtype_of(dtype))


def groups(size: int) -> list[Group]:
    """All ranks, all in another order, and proper subsets in either order."""
    found = [tuple(range(size)), tuple(reversed(range(size)))]
    if size > 2:
        found += [(2, 0), (0, 1), tuple(range(1, size))]
    return list(dict.fromkeys(found))


def uneven(total: int, parts: int) -> list[int]:
    """Blocks of ceil(total / parts): the last ones are shorter or empty."""
    block = -(-total // parts)
    return [max(0, min(block, total - i * block)) for i in range(parts)]


def with_length(dim: int, length: int) -> tuple[int, ...]:
    shape = [3, 5, 4]
    shape[dim] = length
    return tuple(shape)


def fold(op: str, arrays: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Reduction by position, in f32 for 16-bit floats and rounded once: what the transports promise."""
    dtype = arrays[0].dtype
    wide = np.float32 if dtype.itemsize == 2 else dtype
    result = functools.reduce(REFERENCE[op], [array.astype(wide) for array in arrays])
    return np.asarray(result.astype(dtype))


def same(got: Any, want: np.ndarray[Any, Any]) -> None:
    got = got if isinstance(got, np.ndarray) else got.get()
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want, strict=True)


def reductions() -> list[tuple[str, str]]:
    return [pair for pair in itertools.product(DTYPES, OPS) if pair != ("bool", "sum")]


def all_reduce_case(transport: Transport, dtype: str, op: str) -> None:
    for group in groups(transport.size):
        # small and large take different ways over MPI; 70001 is not divisible by 2, 3 or 4
        for shape in [(), (0, 3), (5, 7), (70001,)]:
            if transport.rank not in group:
                continue
            x = data(transport.rank, shape, dtype)
            before = x.copy()
            want = fold(op, [data(rank, shape, dtype) for rank in group])
            same(collectives.all_reduce(transport, x, group, op), want)
            same(x, before)
            assert collectives.all_reduce(transport, x, group, op, out=x) is x
            same(x, want)


def all_gather_case(transport: Transport, dtype: str) -> None:
    for group in groups(transport.size):
        if transport.rank not in group:
            continue
        for dim, total in itertools.product(range(3), (7, 2, 0)):
            sizes = uneven(total, len(group))
            shapes = [with_length(dim, n) for n in sizes]
            parts = [data(rank, shape, dtype) for rank, shape in zip(group, shapes, strict=True)]
            x = parts[group.index(transport.rank)]
            same(collectives.all_gather(transport, x, dim, sizes, group), np.concatenate(parts, axis=dim))


def reduce_scatter_case(transport: Transport, dtype: str, op: str) -> None:
    for group in groups(transport.size):
        if transport.rank not in group:
            continue
        me = group.index(transport.rank)
        for dim, total in itertools.product(range(3), (7, 2, 0)):
            sizes = uneven(total, len(group))
            shape = with_length(dim, total)
            whole = fold(op, [data(rank, shape, dtype) for rank in group])
            want = np.split(whole, np.cumsum(sizes)[:-1], axis=dim)[me]
            x = data(transport.rank, shape, dtype)
            same(collectives.reduce_scatter(transport, x, dim, sizes, op, group), want)
            same(x, data(transport.rank, shape, dtype))


def pieces_case(transport: Transport) -> None:
    """One message of several tensors moves what a message for each of them does; all may then be written."""
    shapes, dims = [(7, 3), (2, 5), (4,), (0, 2)], (0, 1, 0, 0)
    for group in groups(transport.size):
        if transport.rank not in group:
            continue
        me = group.index(transport.rank)
        sizes = [uneven(shape[dim], len(group)) for shape, dim in zip(shapes, dims, strict=True)]
        wholes = [data(transport.rank, shape, "float32") for shape in shapes]
        parts = [
            collectives.reduce_scatter(transport, x, dim, lengths, "sum", group)
            for x, dim, lengths in zip(wholes, dims, sizes, strict=True)
        ]
        outs = [np.empty_like(part) for part in parts]
        given = [x.copy() for x in wholes]
        handle = collectives.reduce_scatter_pieces_start(transport, given, dims, sizes, "sum", group, outs)
        for x in given:
            x[...] = np.nan
        handle.wait()
        assert all(out.shape[dim] == n[me] for out, dim, n in zip(outs, dims, sizes, strict=True))
        for out, part in zip(outs, parts, strict=True):
            same(out, part)
        gathered = [np.empty_like(x) for x in wholes]
        collectives.all_gather_pieces_start(transport, parts, dims, sizes, group, gathered).wait()
        for out, part, dim, lengths in zip(gathered, parts, dims, sizes, strict=True):
            same(out, collectives.all_gather(transport, part, dim, lengths, group))


def all_to_all_case(transport: Transport, dtype: str) -> None:
    """A global tensor sharded in one dim becomes the same tensor sharded in another."""
    for group in groups(transport.size):
        if transport.rank not in group:
            continue
        me, k = group.index(transport.rank), len(group)
        for shape in [(5, 7, 3), (1, 4, 6), (2, 0, 3)]:
            whole = data(99, shape, dtype)
            for split, concat in itertools.permutations(range(3), 2):
                after, before = uneven(shape[split], k), uneven(shape[concat], k)
                x = np.split(whole, np.cumsum(before)[:-1], axis=concat)[me]  # not contiguous in general
                want = np.split(whole, np.cumsum(after)[:-1], axis=split)[me]
                got = collectives.all_to_all(transport, x, split, after, concat, before, group)
                same(got, want)


def broadcast_case(transport: Transport, dtype: str) -> None:
    for group in groups(transport.size):
        if transport.rank not in group:
            continue
        for root, shape in itertools.product(group, [(), (0,), (5, 7), (70001,)]):
            x = data(transport.rank, shape, dtype)
            want = data(root, shape, dtype)
            same(collectives.broadcast(transport, x, root, group), want)
            same(collectives.broadcast(transport, x, root, group, out=x), want)


def permute_case(transport: Transport, dtype: str) -> None:
    """A ring of arrays of different shapes, then a shift that drops out at the ends."""
    rank, size = transport.rank, transport.size

    def shape(of: int) -> tuple[int, int]:
        return (of, 3)  # that of rank 0 is empty

    after, before = (rank + 1) % size, (rank - 1) % size
    got = np.zeros(shape(before), dtype_of(dtype))
    whole = (slice(None), slice(None))
    x = data(rank, shape(rank), dtype)
    collectives.exchange(transport, x, [(after, whole)], [(before, whole)], got)
    same(got, data(before, shape(before), dtype))
    up = rank + 1 if rank + 1 < size else None
    down = rank - 1 if rank > 0 else None
    got = None if down is None else np.zeros(4, dtype_of(dtype))
    sends, recvs = ([] if other is None else [(other, (slice(None),))] for other in (up, down))
    collectives.exchange(transport, data(rank, (4,), dtype), sends, recvs, got)
    if down is not None:
        same(got, data(down, (4,), dtype))


def exchange_case(transport: Transport, dtype: str) -> None:
    """Rows over all ranks become columns over all ranks in reverse order, tile by tile, with empty tiles."""
    rank, size = transport.rank, transport.size
    whole = data(99, (5, 7), dtype)

    def bounds(total: int, position: int) -> slice:
        block = -(-total // size)
        return slice(min(total, position * block), min(total, (position + 1) * block))

    x, columns = whole[bounds(5, rank)], bounds(7, size - 1 - rank)
    out = np.zeros((5, columns.stop - columns.start), whole.dtype)
    sends = [(dest, (slice(None), bounds(7, size - 1 - dest))) for dest in range(size)]
    recvs = [(source, (bounds(5, source), slice(None))) for source in range(size)]
    assert collectives.exchange(transport, x, sends, recvs, out) is out
    same(out, whole[:, columns])


def early_start_case(transport: Transport) -> None:
    """Many operations under way at once, of overlapping groups, waited for in the opposite order."""
    started = []
    for turn in range(6):
        for group in groups(transport.size):
            if transport.rank in group:
                n = 20000 * (turn % 3) + 11
                x = data(transport.rank + 10 * turn, (n,), "float32")
                want = fold("sum", [data(rank + 10 * turn, (n,), "float32") for rank in group])
                started.append((collectives.all_reduce_start(transport, x, group, "sum"), want))
                parts = [data(rank, (3,), "int64") for rank in group]
                mine = parts[group.index(transport.rank)]
                handle = collectives.all_gather_start(transport, mine, 0, [3] * len(group), group)
                started.append((handle, np.concatenate(parts)))
    for handle, want in reversed(started):
        same(handle.wait(), want)


def mixed_waits_case(transport: Transport) -> None:
    """Rank 0 waits for a collective, then sends what the others want before they wait for the collective."""
    everyone = tuple(range(transport.size))
    x = np.full(100_000, 1.0)
    handle = collectives.all_reduce_start(transport, x, everyone, "sum")
    note = np.zeros(3)
    if transport.rank == 0:
        handle.wait()
        for request in [transport.send(note + 5, dest, 3) for dest in everyone[1:]]:
            request.wait()
    else:
        transport.recv(note, 0, 3).wait()
        assert (note == 5).all()
    assert (handle.wait() == transport.size).all()


def messages_case(transport: Transport) -> None:
    """Matching by source and tag, first come first served, also with oneself; `done` drives them on."""
    rank, size = transport.rank, transport.size
    inbox = {
        (source, tag, turn): np.zeros(4, np.int64)
        for source in range(size)
        for tag in (7, 1)
        for turn in (0, 1)
    }
    requests = [transport.recv(buffer, source, tag) for (source, tag, _), buffer in inbox.items()]
    for dest, turn, tag in itertools.product(range(size), (0, 1), (1, 7)):
        requests.append(transport.send(np.array([rank, dest, tag, turn]), dest, tag))
    while requests:
        requests = [request for request in requests if not request.done()]
    for (source, tag, turn), buffer in inbox.items():
        assert buffer.tolist() == [source, rank, tag, turn]


def objects_case(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    for root in range(size):
        gathered = transport.gather_objects({"rank": rank, "text": "x" * rank}, root)
        expected = [{"rank": r, "text": "x" * r} for r in range(size)]
        assert gathered == (expected if rank == root else None)
        assert transport.broadcast_object([root, rank], root) == [root, root]
    transport.barrier()
    for group in groups(size):
        if rank in group:
            transport.barrier(group)


def refusals_case(transport: Transport) -> None:
    """A rank's own mistakes, found before anything moves."""
    rank, everyone = transport.rank, tuple(range(transport.size))
    x = np.zeros((4, 6), np.float32)
    with pytest.raises(RuntimeFault, match="reduction 'mean' is unknown"):
        collectives.all_reduce(transport, x, everyone, "mean")
    with pytest.raises(RuntimeFault, match="sum of bool"):
        collectives.all_reduce(transport, x.astype(bool), everyone, "sum")
    with pytest.raises(RuntimeFault, match="not C-contiguous"):
        transport.all_reduce(x.T, "sum", everyone)
    with pytest.raises(RuntimeFault, match="dim 2 but the array has 2 dims"):
        collectives.all_gather(transport, x, 2, [4] * len(everyone), everyone)
    with pytest.raises(RuntimeFault, match=f"rank {rank} has length 4"):
        collectives.all_gather(transport, x, 0, [5] * len(everyone), everyone)
    with pytest.raises(RuntimeFault, match="sum to"):
        collectives.reduce_scatter(transport, x, 1, [7] * len(everyone), "sum", everyone)
    with pytest.raises(RuntimeFault, match="both 1"):
        collectives.all_to_all(transport, x, 1, [6], 1, [6], everyone)
    with pytest.raises(RuntimeFault, match=r"but out is float32\(6, 4\)"):
        collectives.all_reduce(transport, x, everyone, "sum", out=np.zeros((6, 4), np.float32))
    with pytest.raises(RuntimeFault, match="is not in the group"):
        transport.all_reduce(x, "sum", (transport.size + 1,))
    with pytest.raises(RuntimeFault, match="rank"):
        transport.send(x, transport.size, 0)
    with pytest.raises(RuntimeFault, match="sends itself 1 tiles but expects 0"):
        collectives.exchange(transport, x, [(rank, (slice(0, 1),))], [], None)


PLAIN = (pieces_case, early_start_case, mixed_waits_case, messages_case, objects_case, refusals_case)
TYPED = (all_gather_case, all_to_all_case, broadcast_case, permute_case, exchange_case)
REDUCING = (all_reduce_case, reduce_scatter_case)
