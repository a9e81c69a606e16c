"""Uniform pipelines, which every answer is compared with: equal stages, dp x tp on each.

*In:* an `Oracle` of a cluster of one kind. *Out:* `Proposal`s with their estimates. *Invariant:* all devices
are used; restrictions say what dp may split (see `restrict`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from distgraph.engine.search.candidate import Proposal, StageChoice
from distgraph.engine.search.layout_costs import Oracle
from distgraph.engine.search.restrictions import SAID, Restriction
from distgraph.engine.search.search_space import Shape, shapes_of
from distgraph.engine.search.stage_search import Bordered, Poor, borders
from distgraph.passes.search.inter_op.schedule_costs import makespan
from distgraph.passes.search.inter_op.stage_costs import Config, ProfileCosts
from distgraph.passes.search.inter_op.submesh_placement import SubMesh, place
from distgraph.passes.search.intra_op.formulate import Profile
from distgraph.plan.schedule_policies import ONE_F_ONE_B

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Row:
    """Equal stages on all devices: how many micro-batches, on which devices, in which shape."""

    micro_batches: int
    submesh: SubMesh
    shape: Shape
    devices: tuple[tuple[int, ...], ...]

    @property
    def free(self) -> Shape:
        """The shape with a name for its axis that says nothing, where it has one."""
        return self.shape if len(self.shape.axes) > 1 else Shape((("dp", self.submesh.size),))


def uniform_rows(oracle: Oracle, micro_batches: int, restriction: Restriction) -> Iterator[Proposal]:
    """Every dp x tp x pp that fits by the estimate, layers divided by their work.

    Where it does not fit otherwise, all layers are computed again. None in a cluster of several kinds.

    Args:
        oracle: of the program.
        micro_batches: in a step.
        restriction: what dp may split.
    """
    for row in _rows(oracle, micro_batches):
        found = None if oracle.expired() else _proposed(oracle, row, restriction)
        if found is not None:
            yield found


def best_uniform(
    oracle: Oracle, counts: Sequence[int], restriction: Restriction, poor: Poor = ()
) -> Proposal | None:
    """The row of `uniform_rows` with the least estimate; None where none fits.

    Rows are looked at in the order of what they would take without restriction and with memory enough. A
    restriction takes choices away, so once that is above the best estimate, no other row can be better.

    Args:
        oracle: of the program.
        counts: numbers of micro-batches.
        restriction: what dp may split.
        poor: shapes that are looked at only where no row of others fits.
    """
    rows = [row for count in counts for row in _rows(oracle, count)]
    good = [row for row in rows if (row.submesh, row.free) not in poor]
    found = _best(oracle, good, restriction)
    if found is None and len(good) < len(rows):
        found = _best(oracle, [row for row in rows if (row.submesh, row.free) in poor], restriction)
    return found


def _best(oracle: Oracle, rows: Sequence[_Row], restriction: Restriction) -> Proposal | None:
    best: Proposal | None = None
    for floor, row in sorted(((_floor(oracle, row), row) for row in rows), key=lambda pair: pair[0]):
        if oracle.expired() or (best is not None and floor >= best.estimate):
            break
        found = _proposed(oracle, row, restriction)
        if found is not None and (best is None or found.estimate < best.estimate):
            best = found
    return best


def _rows(oracle: Oracle, micro_batches: int) -> Iterator[_Row]:
    if len(oracle.pools) > 1:
        return
    (pool,) = oracle.pools
    layers = len(oracle.traced(micro_batches).layers)
    for count in range(1, min(layers, pool.size) + 1):
        submesh = SubMesh((pool.size // count,))
        devices = place(oracle.pools, [submesh] * count) if pool.size % count == 0 else None
        if devices is not None:
            for shape in _shapes(oracle, submesh):
                yield _Row(micro_batches, submesh, shape, devices)


def _floor(oracle: Oracle, row: _Row) -> float:
    """Seconds of a step without restriction and with memory enough; of one axis, whatever its name is."""
    if oracle.expired():
        return 0.0
    profile = oracle.variants(row.micro_batches, row.submesh, row.free, "none")[0].profile
    firsts = _divided(profile.forward[:-1] + profile.backward[:-1], len(row.devices))
    if firsts is None:
        return float("inf")
    return _seconds(oracle, ProfileCosts([[Config(profile)]], [np.inf]), row, _choices(row, profile, firsts))


def _proposed(oracle: Oracle, row: _Row, restriction: Restriction) -> Proposal | None:
    """A row without recomputation, or else with it; None where neither fits, or a stage would be empty."""
    variant = oracle.variants(row.micro_batches, row.submesh, row.shape, restriction)[0]
    count, layers = len(row.devices), len(variant.profile.forward) - 1
    firsts = _divided(variant.profile.forward[:-1] + variant.profile.backward[:-1], count)
    if firsts is None:
        return None
    choices = _choices(row, variant.profile, firsts)
    for profile, recompute in ((variant.profile, ()), (variant.recompute, tuple(range(layers)))):
        costs = ProfileCosts([[Config(profile)]], [oracle.memory(row.submesh)])
        seconds = _seconds(oracle, costs, row, choices)
        if np.isfinite(seconds):
            name = f"{SAID[variant.restriction]}: {row.shape}, {count} stage{'s' * (count > 1)}"
            return Proposal(name, row.micro_batches, "1f1b", choices, recompute, variant.restriction, seconds)
    return None


def _choices(row: _Row, profile: Profile, firsts: tuple[int, ...]) -> tuple[StageChoice, ...]:
    layers = len(profile.forward) - 1
    return tuple(
        StageChoice(first, stop, devices, row.shape)
        for (first, stop), devices in zip(pairwise((*firsts, layers)), row.devices, strict=True)
    )


def _seconds(oracle: Oracle, costs: ProfileCosts, row: _Row, choices: tuple[StageChoice, ...]) -> float:
    policy = ONE_F_ONE_B
    bordered = Bordered(costs, borders(oracle, row.micro_batches, [row.submesh]))
    times, steps = [], []
    for position, choice in enumerate(choices):
        stage = np.array([choice.first * bordered.shape[0] + choice.stop - 1])
        live = policy.in_flight(position, len(choices), row.micro_batches)
        times.append(float(bordered.seconds_of(stage, live)[0]))
        steps.append(float(bordered.step_of(stage)[0]))
    return makespan(policy, times, [0.0] * len(times), row.micro_batches, step=steps)


def _shapes(oracle: Oracle, submesh: SubMesh) -> tuple[Shape, ...]:
    """dp x tp meshes: one axis for either, or both."""
    (pool,) = oracle.pools
    shapes = shapes_of(pool, submesh.size)
    inside = 1 < submesh.size <= pool.machine
    return (*shapes, Shape((("tp", submesh.size),))) if inside else shapes


def _divided(work: Floats, count: int) -> tuple[int, ...] | None:
    """First layer of each of `count` runs of about the same work; None where one would be empty."""
    total = np.cumsum(work)
    firsts = [0, *(int(np.searchsorted(total, total[-1] * k / count - 1e-12)) + 1 for k in range(1, count))]
    firsts = [min(first, len(work) - count + i) for i, first in enumerate(firsts)]
    return tuple(firsts) if all(a < b for a, b in pairwise(firsts)) else None
