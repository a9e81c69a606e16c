"""Packing of blocks into one piece of memory: against brute force and the bound of what is alive together."""

from itertools import pairwise, permutations

import numpy as np
import pytest
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


def one_by_one(found: list[tuple[int, int, int]]) -> list[int]:
    """Offsets by the rule itself: the largest first, each in the smallest gap beside what is placed."""
    placed: dict[int, tuple[int, int]] = {}
    for i in sorted(range(len(found)), key=lambda i: (-found[i][0], found[i][1])):
        n, a, b = found[i]
        beside = sorted(placed[j] for j in placed if found[j][1] <= b and a <= found[j][2])
        gaps, at = [], 0
        for low, high in beside:
            if low - at >= n:
                gaps.append((low - at, at))
            at = max(at, high)
        here = min(gaps)[1] if gaps else at
        placed[i] = here, here + n
    return [placed[i][0] for i in range(len(found))]


@pytest.mark.parametrize("most", [5, 100, 1500], ids=["short", "both", "long"])
def test_places_are_those_of_the_rule(most: int) -> None:
    rng = np.random.default_rng(most)
    starts, lengths = rng.integers(0, 2000, 300), rng.integers(0, most, 300)
    sizes = rng.integers(1, 9, 300) * 64
    found = [(int(n), int(a), int(a + d)) for n, a, d in zip(sizes, starts, lengths, strict=True)]
    blocks = [Block(*entry) for entry in found]
    pack(blocks)
    assert [block.offset for block in blocks] == one_by_one(found)


@settings(max_examples=200, deadline=None)
@given(BLOCKS)
def test_blocks_needed_at_the_same_time_do_not_overlap(found: list[tuple[int, int, int]]) -> None:
    blocks = [Block(*entry) for entry in found]
    total = pack(blocks)
    assert total == max((b.offset + b.nbytes for b in blocks), default=0)
    for time in range(12):
        here = sorted((b.offset, b.offset + b.nbytes) for b in blocks if b.start <= time <= b.stop)
        assert all(first[1] <= second[0] for first, second in pairwise(here))
    assert alive(found) <= best(found) <= total <= sum(n for n, _, _ in found)


def test_blocks_alive_at_different_times_share_memory() -> None:
    chain = [Block(64, i, i + 1) for i in range(10)]
    assert pack(chain) == 128
    assert pack([]) == 0
