"""Stage problems, and all their pipelines."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.inter_op.stage_costs import IntervalCosts, stage_indices
from distgraph.passes.search.inter_op.stages import StageProblem
from distgraph.passes.search.inter_op.submesh_placement import SubMesh


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs [first, last, sub-mesh, config] of every stage; inf and 0 where last < first.

    Attributes:
        seconds: of one micro-batch, forward and backward; inf where the stage does not fit.
        step: once a step.
    """

    seconds: Floats
    step: Floats


def every_stage(costs: IntervalCosts, in_flight: int) -> StageCosts:
    """Costs of all stages as arrays, with `in_flight` micro-batches in flight."""
    layers, submeshes, configs = costs.shape
    stages = stage_indices(costs.shape)
    seconds = np.full((layers, layers, submeshes, configs), np.inf)
    step = np.zeros_like(seconds)
    seconds.reshape(-1)[stages] = costs.seconds_of(stages, in_flight)
    step.reshape(-1)[stages] = costs.step_of(stages)
    return StageCosts(seconds, step)


def sizes(*counts: int) -> tuple[SubMesh, ...]:
    return tuple(SubMesh((n,)) for n in counts)


def rows(problem: StageProblem) -> Iterator[tuple[tuple[int, int, int, int], ...]]:
    """All rows of (first, stop, sub-mesh, config) that devices are enough for."""
    layers, count, configs = problem.costs.shape

    def grow(first: int, left: tuple[int, ...]) -> Iterator[tuple[tuple[int, int, int, int], ...]]:
        if first == layers:
            if not problem.whole or not any(left):
                yield ()
            return
        for stop in range(first + 1, layers + 1):
            for n in range(count):
                rest = tuple(a - b for a, b in zip(left, problem.submeshes[n].sizes, strict=True))
                if min(rest) < 0:
                    continue
                for tail in grow(stop, rest):
                    for config in range(configs):
                        yield ((first, stop, n, config), *tail)

    yield from grow(0, tuple(pool.size for pool in problem.pools))


def packs(machines: int, room: int, wanted: list[int]) -> bool:
    """Whether sizes fit into machines, by trying every machine for every size."""
    whole = [n for n in wanted if n >= room]
    free = [room] * (machines - sum(n // room for n in whole))
    if any(n % room for n in whole) or machines * room < sum(whole):
        return False

    def fit(rest: list[int], free: list[int]) -> bool:
        if not rest:
            return True
        return any(
            fit(rest[1:], [r - rest[0] * (i == at) for i, r in enumerate(free)])
            for at in range(len(free))
            if free[at] >= rest[0]
        )

    return fit(sorted((n for n in wanted if 0 < n < room), reverse=True), free)


@functools.cache
def every(costs: IntervalCosts, live: int) -> StageCosts:
    """Costs of all stages, made once."""
    return every_stage(costs, live)


def seconds_of(problem: StageProblem, row: tuple[tuple[int, int, int, int], ...]) -> float:
    """The objective, written out."""
    m, times, once, passed, held = problem.micro_batches, [], [], [], []
    occupied = problem.transfer if problem.occupied is None else problem.occupied
    for i, (first, stop, n, config) in enumerate(row):
        live = m if problem.schedule.name == "gpipe" else min(m, len(row) - i)
        costs = every(problem.costs, live)
        times.append(costs.seconds[first, stop - 1, n, config])
        once.append(costs.step[first, stop - 1, n, config])
        if i and problem.transfer is not None:
            passed.append(problem.transfer[first - 1, row[i - 1][2], n])
            held.append(occupied[first - 1, row[i - 1][2], n])
    if np.inf in times:
        return np.inf
    slowest = max((m - 1) * t + s for t, s in zip(times, once, strict=True))
    return sum(times) + sum(passed) + max([slowest, *((m - 1) * y for y in held)])


def brute_force(problem: StageProblem) -> float:
    best = np.inf
    for row in rows(problem):
        if problem.most is not None and len(row) > problem.most:
            continue
        if problem.exact and len(row) != problem.most:
            continue
        taken = [problem.submeshes[r[2]].sizes for r in row]
        if all(
            packs(len(pool.machines), pool.machine, [t[p] for t in taken])
            for p, pool in enumerate(problem.pools)
        ):
            best = min(best, seconds_of(problem, row))
    return float(best)


def check(problem: StageProblem, found) -> None:
    """The stages are what they claim to be."""
    assert [s.first for s in found.stages] == [0, *(s.stop for s in found.stages[:-1])]
    assert found.stages[-1].stop == problem.costs.shape[0]
    row = tuple((s.first, s.stop, s.submesh, s.config) for s in found.stages)
    assert seconds_of(problem, row) == pytest.approx(found.seconds, rel=1e-12)
    devices = [d for s in found.stages for d in s.devices]
    assert len(devices) == len(set(devices))
    for stage in found.stages:
        for pool, size in zip(problem.pools, problem.submeshes[stage.submesh].sizes, strict=True):
            own = [m for m in pool.machines for d in stage.devices if d in m]
            assert len(own) == size
            assert len(set(own)) == max(1, size // pool.machine) or not size
