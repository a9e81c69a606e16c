"""Messages between ranks that a profile times: groups, every collective, and runs behind computation."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from distgraph.runtime.inprocess import connect
from distgraph.runtime.messages import (
    ATTEND,
    KINDS,
    Taken,
    _behind_work,
    axis_groups,
    lengthened,
    measure,
    patterns,
)


def test_groups_of_every_mesh_axis() -> None:
    groups = axis_groups(6)
    assert ((0, 1, 2, 3, 4, 5),) in groups
    assert ((0, 2, 4), (1, 3, 5)) in groups
    assert ((0, 1), (2, 3), (4, 5)) in groups
    assert ((0, 3), (1, 4), (2, 5)) in groups
    assert ((0, 1, 2), (3, 4, 5)) in groups


@pytest.mark.parametrize("shared", [False, True])
def test_every_collective_runs_on_every_pattern(shared: bool) -> None:
    transports = connect(3)
    chosen = [p for p in patterns(3) if p.nbytes <= 4096]
    assert {p.kind for p in chosen} == {*KINDS, ATTEND}

    def rank(at: int) -> list[Taken]:
        return [measure(transports[at], pattern, 2, shared) for pattern in chosen]

    with ThreadPoolExecutor(3) as pool:
        by_rank = list(pool.map(rank, range(3)))
    for pattern, *taken in zip(chosen, *by_rank, strict=True):
        members = {r for group in pattern.groups for r in group}
        assert all((own.seconds > 0) == (r in members) for r, own in enumerate(taken)), pattern.name
        works = shared and pattern.kind != ATTEND
        assert all((own.work > 0) == works for own in taken), pattern.name


def test_a_message_behind_work_takes_what_it_adds() -> None:
    """Two ranks a core: the slowest takes 9 s, of which both works take 2 x 3 s; never nothing or less."""
    found = [Taken(9.0, 2.0), Taken(8.0, 4.0), Taken(0.0, 3.0)]
    assert lengthened(found, 2.0) == 3.0
    assert 0 < lengthened(found, 4.0) < 1e-5
    once = _behind_work(partial(time.sleep, 0.02), 3, 1)
    assert lengthened([once], 1.0) >= 0.02
    there_and_back = _behind_work(partial(time.sleep, 0.02), 3, 2)
    assert lengthened([there_and_back], 1.0) >= 0.01
    assert there_and_back.work < once.work
