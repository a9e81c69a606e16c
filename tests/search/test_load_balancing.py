"""Uneven batch shares: brute force over all whole shares, closed forms, memory."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linprog

from distgraph.engine.search_driver.load_balancing import Member, divide_batch
from distgraph.errors import InfeasibleError


def brute_force(batch: int, members: list[Member]) -> float:
    best = math.inf
    for taken in itertools.product(range(batch + 1), repeat=len(members)):
        fits = all(m.fixed + m.nbytes * n <= m.memory for m, n in zip(members, taken, strict=True) if n)
        if sum(taken) == batch and fits:
            best = min(best, max(m.start + m.seconds * n for m, n in zip(members, taken, strict=True) if n))
    return best


@pytest.mark.parametrize("seed", range(50))
def test_equals_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(1, 13))
    members = [
        Member(
            f"m{i}",
            float(rng.uniform(0.1, 3)) * 1e-3,
            float(rng.choice([0.0, rng.uniform(0, 5e-3)])),
            float(rng.choice([0.0, rng.uniform(0, 2)])),
            float(rng.uniform(0, 3)),
            float(rng.uniform(2, 12)),
        )
        for i in range(int(rng.integers(1, 4)))
    ]
    best = brute_force(batch, members)
    if best == math.inf:
        with pytest.raises(InfeasibleError, match="samples does not fit"):
            divide_batch(batch, members)
        return
    found = divide_batch(batch, members)
    assert sum(found.samples) == batch
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert found.bound <= best
    for member, n in zip(members, found.samples, strict=True):
        assert not n or member.fixed + member.nbytes * n <= member.memory * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(50))
def test_the_bound_is_the_linear_relaxation(seed: int) -> None:
    """Against a solver, with members that start late and members of little memory."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 7))
    members = [
        Member(
            f"m{i}",
            float(rng.choice([1.0, rng.uniform(0.1, 3)])) * 1e-3,
            float(rng.choice([0.0, rng.uniform(0, 0.05)])),
            nbytes=1.0,
            memory=float(rng.choice([0.0, 40.0, 1e6, rng.integers(1, 200)])),
        )
        for i in range(count)
    ]
    capacities = [member.capacity(500) for member in members]
    batch = int(min(500, sum(capacities)) * rng.choice([1.0, 0.5, 0.1]))
    capacities = [member.capacity(batch) for member in members]
    rates = [m.seconds + (m.start / n if n else 0.0) for m, n in zip(members, capacities, strict=True)]
    limits = np.hstack([np.diag(rates), -np.ones((count, 1))])
    shares = np.array([[1.0] * count + [0.0]])
    bounds = [*((0.0, n) for n in capacities), (0.0, None)]
    least = linprog([0.0] * count + [1.0], limits, np.zeros(count), shares, [batch], bounds)
    found = divide_batch(batch, members)
    assert least.status == 0
    assert found.bound == pytest.approx(min(least.fun, found.seconds), rel=1e-7, abs=1e-12)


def test_shares_of_a_large_batch_go_by_speed() -> None:
    members = [Member("a100", 1.0), Member("v100", 2.5), Member("t4", 6.0)]
    found = divide_batch(100_000, members)
    speed = [1 / m.seconds for m in members]
    wanted = [100_000 * s / sum(speed) for s in speed]
    assert found.samples == pytest.approx(wanted, abs=6)
    assert found.bound == pytest.approx(100_000 / sum(speed), rel=1e-6)
    assert found.seconds <= found.bound + 6.0


def test_memory_moves_samples_to_the_slower_device() -> None:
    found = divide_batch(12, [Member("fast", 1.0, nbytes=1.0, memory=5.0), Member("slow", 3.0)])
    assert found.samples == (5, 7)
    assert found.seconds == 21.0


def test_a_member_that_costs_more_than_it_brings_is_left_out() -> None:
    found = divide_batch(4, [Member("fast", 1.0), Member("late", 1.0, start=10.0)])
    assert found.samples == (4, 0)


def test_what_does_not_fit_is_said() -> None:
    members = [Member("a", 1.0, nbytes=1.0, memory=5.0), Member("b", 1.0, fixed=9.0, memory=5.0)]
    with pytest.raises(InfeasibleError, match=r"at most 5 \(a: 5, b: 0\); make it smaller"):
        divide_batch(6, members)
