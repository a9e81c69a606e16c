"""Moves: every single step from one layout to another on the same mesh; `g` is the size of the group.

    kind            what it does                                    bytes that one rank sends
    slice           keeps a part of the own block                   0
    mask            replicated -> partial: keeps the value where    0
                    the axes are at 0, the identity of the
                    reduction elsewhere (max, min: all keep it)
    all_gather      undoes trailing axes of a dim                   (g-1)/g x block after
    reduce_scatter  partial axes become trailing axes of a dim      (g-1)/g x block before
    all_reduce      partial axes become replicated                  2(g-1)/g x block before
    all_to_all      trailing axes of one dim move to another's end  (g-1)/g x block before
    permute         any exchange of tiles (`tiles.exchange_tiles`)  the larger of block before and after

The largest rank's block counts; where a group's blocks are uneven, a rank sends up to g-1 of the largest of
them, but never more than all there is.

*Invariant:* every move is exact. Blocks are ceil(n / parts) long, so the four blocks of 5 over x*y (2, 2, 1,
0) do not nest in the two over x (3, 2): a move along trailing axes is made only where the blocks nest; where
they do not, a permute, or an all_gather of the whole dim and a slice, takes its place. Axes with weights
count as their units.

Reductions over several axes apply in the order of `spec.partial`, the first innermost. Equal ones commute and
are done by one collective; an axis with an unequal one before it waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec

Dims = tuple[tuple[str, ...], ...]

LOCAL_KINDS = ("slice", "mask")


@dataclass(frozen=True, slots=True)
class Step:
    """One move from a layout to the next.

    Args:
        kind: slice, mask, all_gather, reduce_scatter, all_reduce, all_to_all or permute.
        axes: mesh axes of the group, major to minor: `mesh.group(rank, axes)` lists its ranks in the order of
            the blocks. For a permute, whose partners are in `exchange_tiles`, all axes that change place.
        dim: dim that is sliced, gathered or scattered; for all_to_all the dim that gives the axes away.
        to_dim: for all_to_all, the dim that gets the axes.
        reduction: sum, max, min or prod, where the kind reduces or masks.
        source: layout before.
        target: layout after.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int | None
    to_dim: int | None
    reduction: str | None
    source: ShardSpec
    target: ShardSpec

    @property
    def local(self) -> bool:
        """True when nothing is sent."""
        return self.kind in LOCAL_KINDS

    def __str__(self) -> str:
        where = "" if self.dim is None else f" dim {self.dim}"
        where += "" if self.to_dim is None else f"->{self.to_dim}"
        what = ", ".join(self.axes) + ("" if self.reduction in (None, "sum") else f":{self.reduction}")
        return f"{self.kind}({what}){where}: {self.source} -> {self.target}"


@dataclass(frozen=True, slots=True)
class Space:
    """What stays the same during one search.

    `working` are the axes that may be used, none of size 1. Unless `wide`, moves that lead away from the goal
    are left out: where all blocks nest they are seldom on a cheapest path.
    """

    shape: tuple[int, ...]
    mesh: ProcessMesh
    working: tuple[str, ...]
    goal: ShardSpec
    wide: bool

    def nests(self, dim: int, axes: tuple[str, ...], keep: int) -> bool:
        """True when the blocks over `axes` lie inside those over the first `keep` of them."""
        if keep == 0 or keep == len(axes):
            return True
        return _nests(self.shape[dim], self.mesh.units(axes[:keep]), self.mesh.units(axes[keep:]))

    def leads_to(self, axes: tuple[str, ...], dim: int) -> bool:
        """True when the goal has one of the axes on this dim."""
        return self.wide or any(axis in self.goal.dims[dim] for axis in axes)

    def worth_scattering(self, dim: int, axes: tuple[str, ...]) -> bool:
        """True on the way to the goal, or for axes that no dim of the goal has: any dim does for these."""
        return self.leads_to(axes, dim) or not any(axis in other for axis in axes for other in self.goal.dims)

    def worth_slicing(self, spec: ShardSpec, dim: int, axes: tuple[str, ...]) -> bool:
        """True when all axes belong on this dim, or can leave it together with others that must leave it."""
        if self.wide or all(axis in self.goal.dims[dim] for axis in axes):
            return True
        here = spec.dims[dim]
        if not here or here == self.goal.dims[dim][: len(here)]:
            return False
        return all(any(axis in other for other in self.goal.dims) for axis in axes)


@lru_cache(maxsize=65536)
def _nests(size: int, parts: int, split: int) -> bool:
    block, small = -(-size // parts), -(-size // (parts * split))
    return all(min(size, i * block) == min(size, i * split * small) for i in range(parts))


def moves(space: Space, spec: ShardSpec) -> Iterator[Step]:
    """Every exact move out of a layout that can be on a cheapest path."""
    used = spec.axes
    free = tuple(axis for axis in space.working if axis not in used)
    yield from _gathers(space, spec)
    yield from _all_to_alls(space, spec)
    if free:
        yield from _slices(space, spec, free)
        yield from _masks(space, spec, free)
    if spec.partial:
        yield from _reductions(space, spec)
    yield from _permutes(space, spec)


def with_dim(dims: Dims, dim: int, axes: tuple[str, ...]) -> Dims:
    """The same dims but for one."""
    return (*dims[:dim], axes, *dims[dim + 1 :])


def _gathers(space: Space, spec: ShardSpec) -> Iterator[Step]:
    for dim, axes in enumerate(spec.dims):
        for keep in range(len(axes)):
            if space.nests(dim, axes, keep):
                after = ShardSpec(with_dim(spec.dims, dim, axes[:keep]), spec.partial)
                yield Step("all_gather", axes[keep:], dim, None, None, spec, after)


def _slices(space: Space, spec: ShardSpec, free: tuple[str, ...]) -> Iterator[Step]:
    for dim, axes in enumerate(spec.dims):
        for more in selections(free):
            if space.worth_slicing(spec, dim, more) and space.nests(dim, axes + more, len(axes)):
                after = ShardSpec(with_dim(spec.dims, dim, axes + more), spec.partial)
                yield Step("slice", more, dim, None, None, spec, after)


def _all_to_alls(space: Space, spec: ShardSpec) -> Iterator[Step]:
    for dim, axes in enumerate(spec.dims):
        for keep in range(len(axes)):
            if not space.nests(dim, axes, keep):
                continue
            for to_dim, others in enumerate(spec.dims):
                grown = others + axes[keep:]
                if to_dim == dim or not space.leads_to(axes[keep:], to_dim):
                    continue
                if space.nests(to_dim, grown, len(others)):
                    dims = with_dim(with_dim(spec.dims, dim, axes[:keep]), to_dim, grown)
                    yield Step(
                        "all_to_all", axes[keep:], dim, to_dim, None, spec, ShardSpec(dims, spec.partial)
                    )


def _reductions(space: Space, spec: ShardSpec) -> Iterator[Step]:
    kind = spec.partial[0][1]
    ready = tuple(axis for axis, _ in itertools.takewhile(lambda pair: pair[1] == kind, spec.partial))
    for axes in selections(tuple(axis for axis in space.mesh.axes if axis in ready)):
        left = tuple(pair for pair in spec.partial if pair[0] not in axes)
        if axes == tuple(axis for axis in space.mesh.axes if axis in axes):
            yield Step("all_reduce", axes, None, None, kind, spec, ShardSpec(spec.dims, left))
        for dim, others in enumerate(spec.dims):
            if space.worth_scattering(dim, axes) and space.nests(dim, others + axes, len(others)):
                after = ShardSpec(with_dim(spec.dims, dim, others + axes), left)
                yield Step("reduce_scatter", axes, dim, None, kind, spec, after)


def _masks(space: Space, spec: ShardSpec, free: tuple[str, ...]) -> Iterator[Step]:
    wanted = [(axis, kind) for axis, kind in space.goal.partial if axis in free]
    for kind in dict.fromkeys(kind for _, kind in wanted):
        axes = tuple(axis for axis, other in wanted if other == kind)
        for count in range(1, len(axes) + 1):
            for some in itertools.combinations(axes, count):
                partial = spec.partial + tuple((axis, kind) for axis in some)
                after = ShardSpec(spec.dims, partial)
                if kind != "prod" or not _sums_ones(after):
                    yield Step("mask", some, None, None, kind, spec, after)


def _sums_ones(spec: ShardSpec) -> bool:
    """True when a sum lies inside a product: it would add up the ones that a mask puts beside the value."""
    kinds = [kind for _, kind in spec.partial]
    return "prod" in kinds and "sum" in kinds[: len(kinds) - kinds[::-1].index("prod")]


def _permutes(space: Space, spec: ShardSpec) -> Iterator[Step]:
    """Exchanges to the goal's dims, or to these with more axes that a gather takes off again.

    Only to as many parts as now, where tiles go one for one; straight to the goal where blocks do not nest.
    The order of axes that come off again is of no account: as they stand now, or that of the mesh.
    """
    busy = {axis for axis, _ in spec.partial}
    if not any(space.goal.dims):
        return
    if busy and any(axis in busy for dim in space.goal.dims for axis in dim):
        return
    parts = space.mesh.count(axis for dim in spec.dims for axis in dim)
    spare = tuple(a for a in space.working if a not in busy and not any(a in dim for dim in space.goal.dims))
    for refined in refinements(space.goal.dims, spare):
        dims = _as_now(spec.dims, refined, space.goal.dims)
        if dims == spec.dims:
            continue
        even = space.mesh.count(axis for dim in dims for axis in dim) == parts
        if even or (dims == space.goal.dims and _stuck(space, spec.dims)):
            pairs = zip(spec.dims, dims, strict=True)
            moved = {axis for before, after in pairs if before != after for axis in before + after}
            axes = tuple(axis for axis in space.mesh.axes if axis in moved)
            yield Step("permute", axes, None, None, None, spec, ShardSpec(dims, spec.partial))


def _as_now(now: Dims, refined: Dims, goal: Dims) -> Dims:
    """The same refinement of a goal, its spare axes in the present order where a dim has the same ones."""
    return tuple(
        before if before[: len(wanted)] == wanted and set(before) == set(after) else after
        for before, after, wanted in zip(now, refined, goal, strict=True)
    )


def _stuck(space: Space, dims: Dims) -> bool:
    """True when a dim keeps some axes and the blocks on either side do not nest in the blocks over these."""
    for dim, (before, after) in enumerate(zip(dims, space.goal.dims, strict=True)):
        same = 0
        while before[same : same + 1] == after[same : same + 1] != ():
            same += 1
        if not (space.nests(dim, before, same) and space.nests(dim, after, same)):
            return True
    return False


@lru_cache(maxsize=1024)
def selections(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """All ordered non-empty selections: `(x, y)` -> `(x,), (y,), (x, y), (y, x)`."""
    return tuple(some for count in range(1, len(axes) + 1) for some in itertools.permutations(axes, count))


@lru_cache(maxsize=65536)
def refinements(dims: Dims, spare: tuple[str, ...]) -> tuple[Dims, ...]:
    """All ways to put spare axes, or none of them, behind those that split the dims already, in one order."""
    found = []
    for places in itertools.product(range(len(dims) + 1), repeat=len(spare)):
        own = [
            [axis for axis, at in zip(spare, places, strict=True) if at == dim] for dim in range(len(dims))
        ]
        found.append(tuple(axes + tuple(more) for axes, more in zip(dims, own, strict=True)))
    return tuple(found)
