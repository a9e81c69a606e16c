"""Uniform pipelines, which every answer is compared with: equal stages, dp x tp on each.

*In:* an `Oracle` of a cluster of one kind. *Out:* `Proposal`s with their estimates. *Invariant:* all devices
are used; restrictions say what dp may split (see `restrict`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from distgraph.engine.searching.oracle import Oracle, Variant
from distgraph.engine.searching.pipelines import Bordered, borders
from distgraph.engine.searching.proposal import Proposal, StageChoice
from distgraph.engine.searching.restrict import Restriction
from distgraph.engine.searching.space import Shape, shapes_of
from distgraph.passes.search.costs import Config, ProfileCosts
from distgraph.passes.search.placing import SubMesh, place
from distgraph.passes.search.schedules import OneForwardOneBackward, makespan

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Row:
    """Equal stages on all devices: which layers, on which."""

    submesh: SubMesh
    shape: Shape
    firsts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]


def uniform_rows(oracle: Oracle, micro_batches: int, restriction: Restriction) -> Iterator[Proposal]:
    """Every dp x tp x pp that fits by the estimate, layers divided by their work.

    Where it does not fit otherwise, all layers are computed again. None in a cluster of several kinds.

    Args:
        oracle: of the program.
        micro_batches: in a step.
        restriction: what dp may split.
    """
    if len(oracle.pools) > 1:
        return
    (pool,) = oracle.pools
    layers = len(oracle.traced(micro_batches).layers)
    for count in range(1, min(layers, pool.size) + 1):
        submesh = SubMesh((pool.size // count,))
        devices = place(oracle.pools, [submesh] * count) if pool.size % count == 0 else None
        if devices is None:
            continue
        for shape in _shapes(oracle, submesh):
            if oracle.expired():
                return
            variant = oracle.variants(micro_batches, submesh, shape, restriction)[0]
            firsts = _divided(variant.profile.forward[:-1] + variant.profile.backward[:-1], count)
            if firsts is not None:
                yield from _proposed(oracle, variant, _Row(submesh, shape, firsts, devices))


def _proposed(oracle: Oracle, variant: Variant, row: _Row) -> Iterator[Proposal]:
    """A row without recomputation, or else with it; nothing where neither fits."""
    micro, count = variant.micro_batches, len(row.firsts)
    layers = len(variant.profile.forward) - 1
    choices = tuple(
        StageChoice(first, stop, devices, row.shape)
        for (first, stop), devices in zip(pairwise((*row.firsts, layers)), row.devices, strict=True)
    )
    for profile, recompute in ((variant.profile, ()), (variant.recompute, tuple(range(layers)))):
        seconds = _seconds(
            oracle, ProfileCosts([[Config(profile)]], [oracle.memory(row.submesh)]), row, choices, micro
        )
        if np.isfinite(seconds):
            name = f"{variant.restriction}: {row.shape}, {count} stage{'s' * (count > 1)}"
            yield Proposal(name, micro, "1f1b", choices, recompute, variant.restriction, seconds)
            return


def _seconds(
    oracle: Oracle, costs: ProfileCosts, row: _Row, choices: tuple[StageChoice, ...], micro_batches: int
) -> float:
    policy = OneForwardOneBackward()
    bordered = Bordered(costs, borders(oracle, micro_batches, [row.submesh]))
    times, steps = [], []
    for position, choice in enumerate(choices):
        at = bordered.at(policy.live(position, len(choices), micro_batches))
        times.append(float(at.seconds[choice.first, choice.stop - 1, 0, 0]))
        steps.append(float(at.step[choice.first, choice.stop - 1, 0, 0]))
    return makespan(policy, times, [0.0] * len(times), micro_batches, step=steps)


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
