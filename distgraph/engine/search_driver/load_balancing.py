"""Load balancing: how many samples each of several unequal devices computes under data parallelism.

*In:* a sub-mesh that spans pools, the micro-batch count. *Out:* `Shape`s with the samples of each position of
the data-parallel axis. *Invariant:* every position gets at least one sample, together they get the
micro-batch, and every member of the group keeps within its memory.

With b_i samples on member i, which takes a_i seconds to start and c_i more for each sample, and keeps f_i +
g_i b_i of its M_i bytes, `divide_batch` finds

    minimise T  subject to  sum_i b_i = B,  0 <= b_i <= cap_i = floor((M_i - f_i) / g_i),
                            a_i z_i + c_i b_i <= T,  b_i <= cap_i z_i,  z_i in {0, 1},  b_i whole.

The linear relaxation (z_i = b_i / cap_i, b_i real), in closed form, bounds T from below. From there T rises
to the least value at which members can take all samples, sum_i min(cap_i, floor((T - a_i) / c_i)) >= B: as T
is one of the a_i + c_i k, that is exact.

A position is a device, or a few of one machine that compute its samples together. Its seconds and bytes for a
sample are those of the whole program on one device of its pool; of p stages on as much of every pool, each
computes a p-th of it for up to p micro-batches in flight, so that shares for the whole program are those for
a stage. Shares are found in single samples and in larger units: weights cut other dims too, and more of these
divide by few units than by many. Local search (`rebalanced`) and forecasts find the best for one stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.layout_variants import Variant
from distgraph.engine.search_driver.search_space import Shape
from distgraph.errors import InfeasibleError
from distgraph.passes.search.inter_op.submesh_placement import SubMesh

_ROUNDING = 1e-9  # relative: seconds this close are equal
_MOST_INNER = 8
"""Devices that compute a sample together, at most."""
_COARSER = 1.2
"""BatchShares in the largest units may take this much longer than those in samples."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a data-parallel group: a device, or several that compute a sample together.

    Attributes:
        name: for messages.
        seconds: c, of one sample, forward and backward.
        start: a, seconds that a member takes before its first sample.
        nbytes: g, bytes of one sample on each device.
        fixed: f, bytes that are held in any case.
        memory: M, bytes of a device.
    """

    name: str
    seconds: float
    start: float = 0.0
    nbytes: float = 0.0
    fixed: float = 0.0
    memory: float = math.inf

    def capacity(self, batch: int) -> int:
        """Samples that fit into memory, at most the batch."""
        room = self.memory - self.fixed
        if room < 0:
            return 0
        return batch if self.nbytes * batch <= room else math.floor(room / self.nbytes * (1 + _ROUNDING))

    def samples_within(self, seconds: float, batch: int) -> int:
        """Samples that the member computes in some seconds, as far as they fit into memory."""
        left = (seconds - self.start) * (1 + _ROUNDING)
        done = batch if left >= self.seconds * batch else math.floor(left / self.seconds)
        return max(0, min(self.capacity(batch), done))


@dataclass(frozen=True, slots=True)
class BatchShares:
    """The shares of a batch.

    Attributes:
        samples: of each member; 0 where the group is faster without it.
        seconds: of the slowest member.
        bound: seconds that no shares go below.
    """

    samples: tuple[int, ...]
    seconds: float
    bound: float


def divide_batch(batch: int, members: Sequence[Member]) -> BatchShares:
    """Whole shares of a batch with the fastest slowest member; faster members get more, equal ones as many.

    Args:
        batch: B, samples.
        members: one or more; seconds above 0.

    Raises:
        InfeasibleError: the samples do not fit into the memory of all members together.

    Example:
        >>> divide_batch(12, [Member("a100", 1.0), Member("v100", 2.0)]).samples
        (8, 4)
    """
    capacities = [member.capacity(batch) for member in members]
    if batch > sum(capacities):
        room = ", ".join(f"{member.name}: {n}" for member, n in zip(members, capacities, strict=True))
        raise InfeasibleError(
            f"batch of {batch} samples does not fit: members take at most {sum(capacities)} ({room}); make "
            f"it smaller, or give the group more devices"
        )
    bound = _relaxed(batch, members, capacities)
    seconds = _least_seconds(batch, members, bound)
    samples = [member.samples_within(seconds, batch) for member in members]
    for _ in range(sum(samples) - batch):
        slowest = max(range(len(members)), key=lambda i: (samples[i] > 0, members[i].seconds, samples[i]))
        samples[slowest] -= 1
    finish = [m.start + m.seconds * n for m, n in zip(members, samples, strict=True) if n]
    return BatchShares(tuple(samples), max(finish, default=0.0), min(bound, max(finish, default=0.0)))


def _least_seconds(batch: int, members: Sequence[Member], bound: float) -> float:
    """Least time in which the members compute the batch; one of start + samples * seconds of a member."""

    def enough(seconds: float) -> bool:
        return sum(member.samples_within(seconds, batch) for member in members) >= batch

    least = math.inf
    for member in members:
        low = max(0, math.floor((bound - member.start) / member.seconds * (1 - _ROUNDING)))
        high = member.capacity(batch) + 1
        while low < high:
            middle = (low + high) // 2
            if enough(member.start + member.seconds * middle):
                high = middle
            else:
                low = middle + 1
        if low <= member.capacity(batch):
            least = min(least, member.start + member.seconds * low)
    return least if batch else 0.0


def _relaxed(batch: int, members: Sequence[Member], capacities: Sequence[int]) -> float:
    """Seconds of the linear relaxation, which no whole shares go below.

    Members compute until T, or until their memory is full: T is where sum_i min(cap_i, T / rate_i) = B, with
    rate_i = c_i + a_i / cap_i. That sum is the least over all sets of full members, of which only those that
    are full first matter: T is the largest of the times at which each such set and the others take B samples.
    """
    caps: NDArray[np.float64] = np.array(capacities, dtype=np.float64)
    rates = np.array(
        [m.seconds + (m.start / n if n else 0.0) for m, n in zip(members, capacities, strict=True)]
    )
    order = np.argsort(rates * caps, kind="stable")
    caps, rates = caps[order], rates[order]
    left = batch - (np.cumsum(caps) - caps)  # samples that the members from this one on share
    speed = np.cumsum(1 / rates[::-1])[::-1]
    return max(0.0, float((left / speed).max())) * (1 - _ROUNDING)


def shared_shapes(layout_costs: LayoutCosts, micro_batches: int, submesh: SubMesh) -> tuple[Shape, ...]:
    """Logical meshes across pools, with and without an inner axis that lies inside machines."""
    pools = [(pool, size) for pool, size in zip(layout_costs.pools, submesh.sizes, strict=True) if size]
    common = math.gcd(*(math.gcd(size, pool.machine) for pool, size in pools))
    inner = [n for n in range(1, min(common, _MOST_INNER) + 1) if common % n == 0]
    shapes = []
    for n in inner:
        axes = (("dp", submesh.size // n), *([("tp", n)] if n > 1 else []))
        every = dict.fromkeys(_samples(layout_costs, micro_batches, submesh, n))
        shapes += [Shape(axes, samples if len(set(samples)) > 1 else ()) for samples in every]
    return tuple(shapes)


def _samples(
    layout_costs: LayoutCosts, micro_batches: int, submesh: SubMesh, inner: int
) -> list[tuple[int, ...]]:
    """Samples of every position, in units of one and in larger ones; empty where one would have none."""
    batch = layout_costs.request.size // micro_batches
    if batch < submesh.size // inner:
        return []
    single = [
        _on_one_device(layout_costs, micro_batches, number)
        for number, size in enumerate(submesh.sizes)
        if size
    ]
    counts = [size // inner for size in submesh.sizes if size]
    for member in (partial(_member, recompute=False), partial(_member, recompute=True), _member_with_memory):
        kinds = [member(layout_costs, variant, batch * inner) for variant in single]
        members = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
        finest = _divide(batch, members, 1)
        if finest is not None:
            return [finest.samples, _coarsest(batch, members, finest).samples]
    return []


def _coarsest(batch: int, members: Sequence[Member], finest: BatchShares) -> BatchShares:
    """BatchShares in the largest units that do not take much longer."""
    for unit in range(batch // len(members), 1, -1):
        coarse = _divide(batch, members, unit) if batch % unit == 0 else None
        if coarse is not None and coarse.seconds <= _COARSER * finest.seconds:
            return coarse
    return finest


def _divide(batch: int, members: Sequence[Member], unit: int) -> BatchShares | None:
    """BatchShares in units of some samples; None where they do not fit, or a member would have none."""
    scaled = [replace(m, seconds=unit * m.seconds, nbytes=unit * m.nbytes) for m in members]
    try:
        shares = divide_batch(batch // unit, scaled)
    except InfeasibleError:
        return None
    samples = tuple(unit * n for n in shares.samples)
    return replace(shares, samples=samples) if min(samples) else None


def _on_one_device(layout_costs: LayoutCosts, micro_batches: int, number: int) -> Variant:
    """All layers on one device of a pool."""
    one = SubMesh(tuple(int(i == number) for i in range(len(layout_costs.pools))))
    return layout_costs.fastest(micro_batches, one, Shape((("dp", 1),)), "none")


def _member_with_memory(layout_costs: LayoutCosts, single: Variant, parts: int) -> Member:
    """A member that has memory enough, as states may be split over all of them."""
    seconds = float((single.profile.forward + single.profile.backward).sum())
    return Member(str(single.submesh), seconds / parts)


def _member(layout_costs: LayoutCosts, single: Variant, parts: int, *, recompute: bool) -> Member:
    """A member that holds all states, without recomputation or with it."""
    profile = single.recompute if recompute else single.profile
    seconds = float((profile.forward + profile.backward).sum())
    inner = parts // (layout_costs.request.size // single.micro_batches)
    return Member(
        str(single.submesh),
        seconds / parts,
        nbytes=float(profile.activations.sum()) / parts,
        fixed=float(profile.fixed.sum()) / inner,
        memory=layout_costs.memory(single.submesh),
    )


def rebalanced(shape: Shape, kinds: Sequence[int]) -> Iterator[Shape]:
    """Shapes in which the positions on one kind of device have one sample less at most, others more.

    Example:
        >>> shape = Shape((("dp", 3),), (5, 5, 2))
        >>> [other.samples for other in rebalanced(shape, (0, 0, 1))]
        [(4, 4, 4), (6, 5, 1)]
    """
    totals = {kind: sum(n for n, k in zip(shape.samples, kinds, strict=True) if k == kind) for kind in kinds}
    for giver in totals:
        for taker in totals:
            count = list(kinds).count(giver)
            less = count * (-(-totals[giver] // count) - 1)  # no position has as many as one has now
            if giver != taker and less >= count:
                after = {**totals, giver: less, taker: totals[taker] + totals[giver] - less}
                yield Shape(shape.axes, _dealt(after, kinds))


def _dealt(totals: dict[int, int], kinds: Sequence[int]) -> tuple[int, ...]:
    """Samples of every position: equally many on each kind of device, the first ones one more."""
    samples, seen = [], dict.fromkeys(totals, 0)
    for kind in kinds:
        each, more = divmod(totals[kind], list(kinds).count(kind))
        samples.append(each + (seen[kind] < more))
        seen[kind] += 1
    return tuple(samples)
