"""Schedules as they were published, sizes of sub-meshes, and their places on devices."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.paths import DATA
from support.search.stage_problems import packs, sizes

from distgraph.errors import GraphError, ResourceError
from distgraph.passes.search.inter_op.schedule_costs import makespan
from distgraph.passes.search.inter_op.submesh_placement import (
    Pool,
    chains,
    place,
    pool_sizes,
)
from distgraph.plan.pipeline_schedules import GPIPE, ONE_F_ONE_B, schedule_names, schedule_policy


def test_schedules_say_what_was_published() -> None:
    text = (DATA / "schedules.txt").read_text()
    assert "max in flight GPipe 8 8 8 8; 1F1B 4 3 2 1" in text
    assert [GPIPE.in_flight(i, 4, 8) for i in range(4)] == [8, 8, 8, 8]
    assert [ONE_F_ONE_B.in_flight(i, 4, 8) for i in range(4)] == [4, 3, 2, 1]
    facts = re.findall(r"credits n=(\d+) m=(\d+) makespan=(\d+) peak=([\d,]+)", text)
    assert len(facts) == 3
    for stages, micro, span, peak in facts:
        n, m = int(stages), int(micro)
        assert makespan(ONE_F_ONE_B, [1.0] * n, [2.0] * n, m) == float(span)
        assert [ONE_F_ONE_B.in_flight(i, n, m) for i in range(n)] == [int(x) for x in peak.split(",")]
    assert ONE_F_ONE_B.in_flight(0, 4, 2) == 2
    # clocks = 2 (n + m - 1) at equal times
    assert makespan(schedule_policy("gpipe"), [1.0] * 3, [1.0] * 3, 4) == 12
    with pytest.raises(
        GraphError, match=f"schedule 'eager' does not exist; choose one of {', '.join(schedule_names())}$"
    ):
        schedule_policy("eager")


def test_a_step_waits_for_borders_and_for_what_is_done_once() -> None:
    policy = ONE_F_ONE_B
    assert makespan(policy, [1.0, 2.0], [0.0, 0.0], 5, [0.5], [9.0, 0.0]) == 3.5 + 4 + 9
    assert makespan(policy, [1.0, 1.0], [0.0, 0.0], 5, [3.0]) == 5 + 12


def test_sizes_of_machines_that_are_no_powers_of_two() -> None:
    assert pool_sizes(Pool.grid("a", 3, 6)) == (1, 2, 3, 6, 12, 18)
    assert pool_sizes(Pool.grid("a", 4, 3), machines=[2, 4, 8]) == (1, 3, 6, 12)
    assert chains([1, 2, 3, 4, 6, 12]) == ((1, 2, 4, 12), (1, 2, 6, 12), (1, 3, 6, 12))
    with pytest.raises(ResourceError, match=r"machines of \[1, 2\] devices"):
        Pool("mixed", ((0,), (1, 2)))


@pytest.mark.parametrize("seed", range(60))
def test_placement_finds_a_place_where_there_is_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = Pool.grid("a", int(rng.integers(1, 4)), int(rng.integers(2, 8)))
    choice = [*range(1, pool.machine + 1), 2 * pool.machine]
    wanted: list[int] = []
    while sum(wanted) < pool.size:
        wanted.append(int(rng.choice(choice)))
    wanted.pop()
    found = place([pool], sizes(*wanted))
    assert (found is not None) == packs(len(pool.machines), pool.machine, wanted)
    if found is None:
        return
    assert [len(d) for d in found] == wanted
    every = [d for devices in found for d in devices]
    assert len(set(every)) == len(every) <= pool.size
    for devices in found:
        machines = {next(i for i, m in enumerate(pool.machines) if d in m) for d in devices}
        assert len(machines) == max(1, len(devices) // pool.machine)


def test_neighbours_lie_side_by_side() -> None:
    pool = Pool.grid("a", 2, 4)
    assert place([pool], sizes(2, 2, 1, 1, 2)) == ((0, 1), (2, 3), (4,), (5,), (6, 7))
    # a pair does not start at an odd device: pairs first, in order, then the single ones
    assert place([pool], sizes(1, 2, 2, 1, 2)) == ((6,), (0, 1), (2, 3), (7,), (4, 5))
    assert place([pool], sizes(2, 4, 2)) == ((4, 5), (0, 1, 2, 3), (6, 7))
