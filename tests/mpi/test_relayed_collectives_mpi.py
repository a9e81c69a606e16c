"""Collectives of a group with several members on one machine and others elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from distgraph.runtime.launch.mpi_rank import current_transport
from distgraph.runtime.transport.mpi import MpiTransport
from distgraph.runtime.transport.transport import stretches

MACHINES: dict[str, Callable[[int, int], int]] = {
    "pairs": lambda rank, _: rank // 2,
    "alternating": lambda rank, _: rank % 2,
    "one apart": lambda rank, size: int(rank == size - 1),
}
pytestmark = pytest.mark.mpi
LONG, SHORT = 200_001, 50  # elements: messages are passed on; they are not


@pytest.fixture
def transport() -> MpiTransport:
    current = current_transport()
    assert current is not None
    current.barrier()
    return current


@pytest.fixture(params=MACHINES)
def spread(request: pytest.FixtureRequest, transport: MpiTransport, monkeypatch: pytest.MonkeyPatch) -> str:
    """As if the ranks were on several machines."""
    machine_of = tuple(MACHINES[request.param](rank, transport.size) for rank in range(transport.size))
    monkeypatch.setattr(transport._exchange, "_machine_of", machine_of)
    monkeypatch.setattr(transport._exchange, "_relays", {})
    return str(request.param)


def values(rank: int, count: int, dtype: object = "f4") -> np.ndarray:
    """Small whole numbers, whose sums are exact."""
    return ((np.arange(count) * 7 + 3 * rank) % 16).astype(dtype)


@pytest.mark.usefixtures("spread")
@pytest.mark.parametrize("dtype", ["f4", "i8", ml_dtypes.bfloat16])
def test_all_reduces_of_several_lengths_in_flight(transport: MpiTransport, dtype: object) -> None:
    """Long and short ones in turns, and the last ones waited for first."""
    group = tuple(reversed(range(transport.size)))
    counts = [LONG, SHORT, LONG + 1, LONG, SHORT]
    buffers = [values(transport.rank + turn, count, dtype) for turn, count in enumerate(counts)]
    requests = [transport.all_reduce(x, "max" if i == 3 else "sum", group) for i, x in enumerate(buffers)]
    for request in reversed(requests):
        request.wait()
    for turn, (count, x) in enumerate(zip(counts, buffers, strict=True)):
        terms = [values(rank + turn, count, "f8") for rank in group]
        expected = np.max(terms, axis=0) if turn == 3 else np.sum(terms, axis=0)
        np.testing.assert_array_equal(x.astype("f8"), expected)


@pytest.mark.usefixtures("spread")
@pytest.mark.parametrize("dtype", ["f8", ml_dtypes.bfloat16])
def test_bits_do_not_depend_on_the_size_of_a_message(transport: MpiTransport, dtype: object) -> None:
    """Of values of very different size: whole, and in short pieces."""
    group = tuple(range(transport.size))
    random = np.random.default_rng(transport.rank)
    whole = (random.standard_normal(LONG) * 10.0 ** random.integers(-9, 9, LONG)).astype(dtype)
    pieces, scattered = whole.copy(), np.empty(LONG // transport.size, dtype)
    counts = [scattered.size] * transport.size
    transport.reduce_scatter(whole[: sum(counts)].copy(), scattered, counts, "sum", group).wait()
    transport.all_reduce(whole, "sum", group).wait()
    for start in range(0, LONG, 1000):
        transport.all_reduce(pieces[start : start + 1000], "sum", group).wait()
    np.testing.assert_array_equal(whole, pieces)
    np.testing.assert_array_equal(scattered, whole[stretches(counts)[transport.rank]])


@pytest.mark.usefixtures("spread")
def test_sums_of_16_bits_are_rounded_once(transport: MpiTransport) -> None:
    """1 and many halves of its last bit, each of which would be lost if added by itself."""
    group = tuple(range(transport.size))
    x = np.full(LONG, 1.0 if transport.rank == 0 else 2.0**-8, ml_dtypes.bfloat16)
    transport.all_reduce(x, "sum", group).wait()
    expected = np.float32(1 + (transport.size - 1) * 2.0**-8).astype(ml_dtypes.bfloat16)
    assert (x == expected).all()


@pytest.mark.usefixtures("spread")
@pytest.mark.parametrize("empty", [False, True])
def test_uneven_parts(transport: MpiTransport, empty: bool) -> None:
    """Of an all_gather and a reduce_scatter at once; the first rank has nothing in one case."""
    size = transport.size
    counts = [(rank if empty else rank + 1) * LONG // size for rank in range(size)]
    group = tuple(range(size))
    places = stretches(counts)
    mine = values(transport.rank, counts[transport.rank])
    gathered, whole = np.zeros(sum(counts), "f4"), values(transport.rank, sum(counts))
    reduced = np.zeros(counts[transport.rank], "f4")
    requests = [
        transport.all_gather(mine, gathered, counts, group),
        transport.reduce_scatter(whole, reduced, counts, "sum", group),
    ]
    for request in requests:
        request.wait()
    for rank, place in enumerate(places):
        np.testing.assert_array_equal(gathered[place], values(rank, counts[rank]))
    total = np.sum([values(rank, sum(counts)) for rank in group], axis=0)
    np.testing.assert_array_equal(reduced, total[places[transport.rank]])
    np.testing.assert_array_equal(whole, values(transport.rank, sum(counts)))


@pytest.mark.usefixtures("spread")
def test_broadcasts_from_the_first_and_the_last_rank(transport: MpiTransport) -> None:
    group = tuple(range(transport.size))
    buffers = {root: values(transport.rank, LONG) for root in (0, transport.size - 1)}
    requests = [transport.broadcast(buffer, root, group) for root, buffer in buffers.items()]
    for request in requests:
        request.wait()
    for root, buffer in buffers.items():
        np.testing.assert_array_equal(buffer, values(root, LONG))


@pytest.mark.usefixtures("spread")
def test_a_part_of_the_ranks(transport: MpiTransport) -> None:
    """Every rank but the first, and all of them, at once."""
    everyone = tuple(range(transport.size))
    one, all_ones = np.ones(LONG, "f4"), np.ones(LONG, "f4")
    requests = [transport.all_reduce(all_ones, "sum", everyone)]
    if transport.rank:
        requests.append(transport.all_reduce(one, "sum", everyone[1:]))
    for request in requests:
        request.wait()
    assert (all_ones == transport.size).all()
    assert (one == (transport.size - 1 if transport.rank else 1)).all()


@pytest.mark.usefixtures("spread")
@pytest.mark.parametrize(
    ("counts", "broadcasts"),
    [
        ([60_000, 50, 60_000], ()),
        ([500_000, 10_000], ()),  # of 22 to 128 KiB for 4 ranks: in parts, but not passed on
        ([2_000_000, 50, 40_000], ()),
        ([2_000_000, 0, 40_000], ()),
        ([2_000_000, 50, 40_000], (1,)),
        ([500_000, 10_000], (0,)),
    ],
    ids=str,
)
def test_ranks_that_wait_in_opposite_orders(
    transport: MpiTransport, counts: list[int], broadcasts: tuple[int, ...]
) -> None:
    """Operations of one group with different numbers of steps, of which the later ones may finish first."""
    group = tuple(range(transport.size))
    for _ in range(10):
        requests = []
        buffers = [np.full(n, (transport.rank + 1) * 10.0**i, "f4") for i, n in enumerate(counts)]
        for i, x in enumerate(buffers):
            in_turn = transport.broadcast(x, 0, group) if i in broadcasts else None
            requests.append(in_turn or transport.all_reduce(x, "sum", group))
        for request in requests[:: -1 if transport.rank % 2 else 1]:
            request.wait()
        for i, x in enumerate(buffers):
            terms = 1 if i in broadcasts else transport.size * (transport.size + 1) // 2
            assert (x == np.float32(10.0**i * terms)).all()


REDUCE: dict[str, Any] = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}


def drawn(rank: int, count: int, turn: int, dtype: Any, op: str) -> np.ndarray:
    """Whole numbers whose reductions are exact in 16 bits."""
    number = np.arange(count) * 7 + 3 * rank + 5 * turn
    return (number % (3 if op == "prod" else 11)).astype(dtype)


def start_random(transport: MpiTransport, draw: random.Random, turn: int) -> tuple[Any, Any, Any] | None:
    """Start an operation: its request, where its result lands, and that result; None outside the group."""
    members = draw.sample(range(transport.size), transport.size)
    group = tuple(members[: draw.choice([transport.size, max(2, transport.size - 1)])])
    count, op = draw.choice([0, 1, 50, 7000, 9000, 33_000, 60_001, 400_000]), draw.choice(list(REDUCE))
    kind, root = draw.choice(["all_reduce", "broadcast", "all_gather", "reduce_scatter"]), draw.choice(group)
    dtype = draw.choice(["f4", "f8", "i2", "u1", ml_dtypes.bfloat16])
    cuts = sorted(draw.randrange(count + 1) for _ in group[1:])
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    if transport.rank not in group:
        return None
    place = stretches(counts)[group.index(transport.rank)]
    terms = [drawn(rank, count, turn, dtype, op) for rank in group]
    x = drawn(transport.rank, count, turn, dtype, op)
    if kind == "broadcast":
        return transport.broadcast(x, root, group), x, drawn(root, count, turn, dtype, op)
    if kind == "all_gather":
        out = np.zeros(count, dtype)
        parts = [term[part] for term, part in zip(terms, stretches(counts), strict=True)]
        return transport.all_gather(x[place].copy(), out, counts, group), out, np.concatenate(parts)
    wide = np.float64 if dtype in ("f4", "f8", ml_dtypes.bfloat16) else dtype
    total = REDUCE[op]([term.astype(wide) for term in terms], axis=0).astype(wide).astype(dtype)
    if kind == "all_reduce":
        return transport.all_reduce(x, op, group), x, total
    out = np.zeros(counts[group.index(transport.rank)], dtype)
    return transport.reduce_scatter(x, out, counts, op, group), out, total[place]


def test_random_operations_in_flight(transport: MpiTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random groups on random machines, waited for in another order on every rank."""
    draw, own = random.Random(7), random.Random(100 + transport.rank)
    for _ in range(40):
        machine_of = tuple(draw.randrange(draw.choice([2, 3])) for _ in range(transport.size))
        transport.barrier()
        monkeypatch.setattr(transport._exchange, "_machine_of", machine_of)
        monkeypatch.setattr(transport._exchange, "_relays", {})
        started = [start_random(transport, draw, turn) for turn in range(draw.randrange(2, 9))]
        mine = [each for each in started if each is not None]
        own.shuffle(mine)
        for request, _, _ in mine:
            request.wait()
        for _, x, expected in mine:
            np.testing.assert_array_equal(x, expected)
