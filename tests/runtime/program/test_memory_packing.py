"""Packing of blocks into one piece of memory: against brute force and the bound of what is alive together."""

from itertools import pairwise, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from distgraph.runtime.program.memory_packing import Block, pack

BLOCKS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 6), st.integers(0, 4)).map(
        lambda t: (t[0], t[1], t[1] + t[2])
    ),
    max_size=5,
)


def alive(found: list[tuple[int, int, int]]) -> int:
    """Most bytes at any time."""
    return max((sum(n for n, a, b in found if a <= time <= b) for time in range(12)), default=0)


def best(found: list[tuple[int, int, int]]) -> int:
    """Least bytes over all orders of putting every block at the lowest place that is free."""
    least = sum(n for n, _, _ in found)
    for order in permutations(found):
        placed: list[tuple[int, int, int, int]] = []
        for n, a, b in order:
            taken = sorted((o, o + m) for m, c, d, o in placed if c <= b and a <= d)
            at = 0
            for low, high in taken:
                if low - at >= n:
                    break
                at = max(at, high)
            placed.append((n, a, b, at))
        least = min(least, max((o + n for n, _, _, o in placed), default=0))
    return least


@settings(max_examples=200, deadline=None)
@given(BLOCKS)
def test_blocks_that_are_needed_together_do_not_overlap(found: list[tuple[int, int, int]]) -> None:
    blocks = [Block(*entry) for entry in found]
    total = pack(blocks)
    assert total == max((b.offset + b.nbytes for b in blocks), default=0)
    for time in range(12):
        here = sorted((b.offset, b.offset + b.nbytes) for b in blocks if b.start <= time <= b.stop)
        assert all(first[1] <= second[0] for first, second in pairwise(here))
    assert alive(found) <= best(found) <= total <= sum(n for n, _, _ in found)


def test_what_is_alive_at_different_times_shares_memory() -> None:
    chain = [Block(64, i, i + 1) for i in range(10)]
    assert pack(chain) == 128
    assert pack([]) == 0
