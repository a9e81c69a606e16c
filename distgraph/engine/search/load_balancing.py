"""Data parallelism across unequal devices: how many samples each position of the axis gets.

*In:* a sub-mesh that spans pools, the number of micro-batches. *Out:* `Shape`s with samples for each
position. *Invariant:* every position gets at least one sample, and together they get the micro-batch.

A position is a device, or a few of one machine that compute its samples together. Its seconds and bytes for a
sample are those of the whole program on one device of its pool; of p stages on as much of every pool, each
computes a p-th of it for up to p micro-batches in flight, so that shares for the whole program are those for
a stage. `shares` finds them, in single samples and in larger units: weights cut other dims too, and more of
these divide by few units than by many. What is best for one stage, `rebalanced` and forecasts tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import gcd

from distgraph.engine.search.layout_costs import Oracle, Variant
from distgraph.engine.search.search_space import Shape
from distgraph.errors import InfeasibleError
from distgraph.passes.search.inter_op.submesh_placement import SubMesh
from distgraph.passes.search.inter_op.uneven_shares import Member, Shares, shares

_MOST_INNER = 8
"""Devices that compute a sample together, at most."""
_COARSER = 1.2
"""Shares in the largest units may take this much longer than those in samples."""


def shared_shapes(oracle: Oracle, micro_batches: int, submesh: SubMesh) -> tuple[Shape, ...]:
    """Logical meshes across pools, with and without an inner axis that lies inside machines.

    Args:
        oracle: of the program.
        micro_batches: in a step.
        submesh: takes devices of two pools or more.
    """
    pools = [(pool, size) for pool, size in zip(oracle.pools, submesh.sizes, strict=True) if size]
    common = gcd(*(gcd(size, pool.machine) for pool, size in pools))
    inner = [n for n in range(1, min(common, _MOST_INNER) + 1) if common % n == 0]
    found = []
    for n in inner:
        axes = (("dp", submesh.size // n), *([("tp", n)] if n > 1 else []))
        every = dict.fromkeys(_samples(oracle, micro_batches, submesh, n))
        found += [Shape(axes, samples if len(set(samples)) > 1 else ()) for samples in every]
    return tuple(found)


def _samples(oracle: Oracle, micro_batches: int, submesh: SubMesh, inner: int) -> list[tuple[int, ...]]:
    """Samples of every position, in units of one and in larger ones; empty where one would have none."""
    batch = oracle.training.size // micro_batches
    if batch < submesh.size // inner:
        return []
    alone = [_alone(oracle, micro_batches, number) for number, size in enumerate(submesh.sizes) if size]
    counts = [size // inner for size in submesh.sizes if size]
    for member in (partial(_member, again=False), partial(_member, again=True), _timed):
        kinds = [member(oracle, variant, batch * inner) for variant in alone]
        members = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
        finest = _shared(batch, members, 1)
        if finest is not None:
            return [finest.samples, _coarsest(batch, members, finest).samples]
    return []


def _coarsest(batch: int, members: Sequence[Member], finest: Shares) -> Shares:
    """Shares in the largest units that do not take much longer."""
    for unit in range(batch // len(members), 1, -1):
        found = _shared(batch, members, unit) if batch % unit == 0 else None
        if found is not None and found.seconds <= _COARSER * finest.seconds:
            return found
    return finest


def _shared(batch: int, members: Sequence[Member], unit: int) -> Shares | None:
    """Shares in units of some samples; None where they do not fit, or a member would have none."""
    scaled = [replace(m, seconds=unit * m.seconds, nbytes=unit * m.nbytes) for m in members]
    try:
        found = shares(batch // unit, scaled)
    except InfeasibleError:
        return None
    samples = tuple(unit * n for n in found.samples)
    return replace(found, samples=samples) if min(samples) else None


def _alone(oracle: Oracle, micro_batches: int, number: int) -> Variant:
    """All layers on one device of a pool."""
    one = SubMesh(tuple(int(i == number) for i in range(len(oracle.pools))))
    return oracle.variants(micro_batches, one, Shape((("dp", 1),)), "none", (0.0,))[0]


def _timed(oracle: Oracle, alone: Variant, parts: int) -> Member:
    """A member that has memory enough, as states may be split over all of them."""
    seconds = float((alone.profile.forward + alone.profile.backward).sum())
    return Member(str(alone.submesh), seconds / parts)


def _member(oracle: Oracle, alone: Variant, parts: int, *, again: bool) -> Member:
    """A member that holds all states, without recomputation or with it."""
    profile = alone.recompute if again else alone.profile
    seconds = float((profile.forward + profile.backward).sum())
    inner = parts // (oracle.training.size // alone.micro_batches)
    return Member(
        str(alone.submesh),
        seconds / parts,
        nbytes=float(profile.activations.sum()) / parts,
        fixed=float(profile.fixed.sum()) / inner,
        memory=oracle.memory(alone.submesh),
    )


def rebalanced(shape: Shape, kinds: Sequence[int]) -> Iterator[Shape]:
    """Shapes in which the positions on one kind of device have one sample less at most, others more.

    Args:
        shape: with samples.
        kinds: of every position.

    Example:
        >>> shape = Shape((("dp", 3),), (5, 5, 2))
        >>> [found.samples for found in rebalanced(shape, (0, 0, 1))]
        [(4, 4, 4), (6, 5, 1)]
    """
    totals = {kind: sum(n for n, k in zip(shape.samples, kinds, strict=True) if k == kind) for kind in kinds}
    for giver in totals:
        for taker in totals:
            less = _one_less(totals[giver], list(kinds).count(giver))
            if giver != taker and less >= list(kinds).count(giver):
                after = {**totals, giver: less, taker: totals[taker] + totals[giver] - less}
                yield Shape(shape.axes, _dealt(after, kinds))


def _one_less(total: int, count: int) -> int:
    """The most samples with which no position of a kind has as many as one has now."""
    return count * (-(-total // count) - 1)


def _dealt(totals: dict[int, int], kinds: Sequence[int]) -> tuple[int, ...]:
    """Samples of every position: equally many on each kind of device, the first ones one more."""
    found, seen = [], dict.fromkeys(totals, 0)
    for kind in kinds:
        each, more = divmod(totals[kind], list(kinds).count(kind))
        found.append(each + (seen[kind] < more))
        seen[kind] += 1
    return tuple(found)
