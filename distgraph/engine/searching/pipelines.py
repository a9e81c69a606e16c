"""From costs by layer to proposals: the best row of stages, and the uniform rows it is compared with.

*In:* variants of an `Oracle`. *Out:* `Proposal`s with their estimates. *Invariant:* a proposal fits memory by
the estimate; only a forecast says whether it really does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from distgraph.engine.searching.oracle import Oracle, Variant
from distgraph.engine.searching.proposal import Proposal, StageChoice
from distgraph.engine.searching.restrict import Restriction
from distgraph.engine.searching.space import Shape, shapes_of
from distgraph.passes.search.costs import Config, ProfileCosts
from distgraph.passes.search.placing import SubMesh, place
from distgraph.passes.search.schedules import schedule_policy
from distgraph.passes.search.stages import StageProblem, Stages, find_stages

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Front:
    """All variants for one number of micro-batches, by sub-mesh."""

    micro_batches: int
    submeshes: tuple[SubMesh, ...]
    variants: tuple[tuple[Variant, ...], ...]


def front(
    oracle: Oracle, micro_batches: int, submeshes: Sequence[SubMesh], restriction: Restriction = "none"
) -> Front:
    """Solve every shape of some sub-meshes.

    Args:
        oracle: of the program.
        micro_batches: in a step.
        submeshes: each in one pool.
        restriction: what layouts may not be.
    """
    rows: list[tuple[Variant, ...]] = []
    kept: list[SubMesh] = []
    for submesh in submeshes:
        if rows and oracle.expired():
            break
        pool = next(p for p, size in zip(oracle.pools, submesh.sizes, strict=True) if size)
        shapes = shapes_of(pool, submesh.size)
        row = [v for shape in shapes for v in oracle.variants(micro_batches, submesh, shape, restriction)]
        kept.append(submesh)
        rows.append(tuple(row))
    return Front(micro_batches, tuple(kept), tuple(rows))


def transfers(oracle: Oracle, micro_batches: int, submeshes: Sequence[SubMesh]) -> Floats | None:
    """Seconds [layers - 1, before, behind] of a border between stages, for one micro-batch, both ways.

    Every rank of the smaller stage sends its share to one of the other stage at the same time. Two stages lie
    in one machine where they fit there together.
    """
    crossing = oracle.traced(micro_batches).crossing
    if not len(crossing):
        return None
    found = np.zeros((len(crossing), len(submeshes), len(submeshes)))
    sizes = np.unique(crossing)
    for (i, a), (j, b) in product(enumerate(submeshes), repeat=2):
        pairs = _pairs(oracle, a, b)
        if pairs is None:
            continue
        alone = oracle.collective.times("send", pairs[0], sizes / len(pairs), tuple(pairs[1:]))
        found[:, i, j] = np.where(crossing > 0, alone[np.searchsorted(sizes, crossing)], 0.0)
    return found


def _pairs(oracle: Oracle, a: SubMesh, b: SubMesh) -> list[tuple[int, int]] | None:
    """Which devices of two neighbouring stages exchange; None where both do not fit into the cluster."""
    placed = place(oracle.pools, [a, b])
    if placed is None:
        return None
    left, right = placed
    count = min(len(left), len(right))
    return list(zip(left[:count], right[:count], strict=True))


def best_row(
    oracle: Oracle, found: Front, *, slack: float = 1.0, schedule: str = "1f1b"
) -> tuple[Proposal, Stages]:
    """The best stages by dynamic programme.

    Args:
        oracle: of the program.
        found: costs.
        slack: share of a device's memory that may be used by the estimate.
        schedule: name.

    Raises:
        InfeasibleError: nothing fits.
    """
    problem = StageProblem(
        ProfileCosts(
            [[Config(v.profile, v.recompute) for v in row] for row in found.variants],
            [slack * oracle.memory(submesh) for submesh in found.submeshes],
        ),
        oracle.pools,
        found.submeshes,
        found.micro_batches,
        schedule_policy(schedule),
        transfers(oracle, found.micro_batches, found.submeshes),
        whole=False,
    )
    stages = find_stages(problem, runner_up=False)
    return _proposal(oracle, found, stages, schedule), stages


def _proposal(oracle: Oracle, found: Front, stages: Stages, schedule: str) -> Proposal:
    choices, recompute = [], []
    for stage in stages.stages:
        variant = found.variants[stage.submesh][stage.config]
        choices.append(
            StageChoice(stage.first, stage.stop, stage.devices, variant.shape, variant.memory_price)
        )
        recompute += stage.recomputed
    return Proposal(
        "search",
        found.micro_batches,
        schedule,
        tuple(choices),
        tuple(sorted(recompute)),
        "none",
        stages.seconds,
    )


def uniform_rows(oracle: Oracle, micro_batches: int, restriction: Restriction) -> Iterator[Proposal]:
    """Equal stages on all devices of a cluster of one kind: every dp x tp x pp, layers divided by their work.

    Where it does not fit otherwise, all layers are computed again.
    """
    if len(oracle.pools) > 1:
        return
    (pool,) = oracle.pools
    layers = len(oracle.traced(micro_batches).layers)
    policy = schedule_policy("1f1b")
    for count in range(1, min(layers, pool.size) + 1):
        submesh = SubMesh((pool.size // count,))
        if pool.size % count or place(oracle.pools, [submesh] * count) is None:
            continue
        rows = place(oracle.pools, [submesh] * count)
        assert rows is not None
        for shape in uniform_shapes(oracle, submesh):
            variant = oracle.variants(micro_batches, submesh, shape, restriction)[0]
            firsts = _divided(variant.profile.forward[:-1] + variant.profile.backward[:-1], count)
            if firsts is None:
                continue
            choices = tuple(
                StageChoice(a, b, row, shape)
                for a, b, row in zip(firsts, (*firsts[1:], layers), rows, strict=True)
            )
            costs = ProfileCosts(
                [[Config(variant.profile)], [Config(variant.recompute)]], [oracle.memory(submesh)] * 2
            )
            for again in (0, 1):
                seconds, fits = 0.0, True
                times, steps = [], []
                for position, choice in enumerate(choices):
                    live = policy.live(position, count, micro_batches)
                    at = costs.at(live)
                    times.append(float(at.seconds[choice.first, choice.stop - 1, again, 0]))
                    steps.append(float(at.step[choice.first, choice.stop - 1, again, 0]))
                fits = bool(np.isfinite(times).all())
                if fits:
                    rounds = micro_batches - policy.fill
                    seconds = policy.fill * sum(times) + max(
                        rounds * t + s for t, s in zip(times, steps, strict=True)
                    )
                    recompute = tuple(range(layers)) if again else ()
                    name = f"uniform {shape}, {count} stage{'s' * (count > 1)}"
                    yield Proposal(name, micro_batches, "1f1b", choices, recompute, restriction, seconds)
                    break


def uniform_shapes(oracle: Oracle, submesh: SubMesh) -> tuple[Shape, ...]:
    """dp x tp meshes: one axis for either, or both."""
    (pool,) = oracle.pools
    shapes = shapes_of(pool, submesh.size)
    inside = submesh.size <= pool.machine and submesh.size > 1
    return (*shapes, Shape((("tp", submesh.size),))) if inside else shapes


def _divided(work: Floats, count: int) -> tuple[int, ...] | None:
    """First layer of each of `count` runs of about the same work; None where one would be empty."""
    total = np.cumsum(work)
    firsts = [0, *(int(np.searchsorted(total, total[-1] * k / count - 1e-12)) + 1 for k in range(1, count))]
    firsts = [min(first, len(work) - count + i) for i, first in enumerate(firsts)]
    return tuple(firsts) if all(a < b for a, b in zip(firsts, firsts[1:], strict=False)) else None
