"""Cheapest changes of layout between all pairs of layouts of a tensor at once, for many sizes at once.

*In:* the shape of a tensor and a mesh. *Out:* `Routes`: a graph of single steps whose shortest paths are
those that `redistribute` finds. *Invariant:* the same steps, bytes and goal-directed pruning as there.

What a step sends is a fraction of the tensor that depends on the layouts only, as long as blocks divide
evenly: one `Routes` serves all shapes of a kind (`representatives`), and prices come in later, as one
number a kind of step. Which steps there are depends then on no more than which axes may share a dim and
whether they are equal, so that they are found once for meshes of all sizes (`_model`). With d(s, t) the
least seconds from layout s to layout t, and E(t) the steps on the way to t,

    d(t, t) = 0,     d(s, t) = min over steps (s -> r) in E(t) of seconds(s -> r) + d(r, t),

iterated over all s, t and sizes together (Bellman-Ford); a path has few steps, and so has the iteration.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from distgraph.mesh import ProcessMesh
from distgraph.passes.moves import Space, moves
from distgraph.passes.redistribute import step_bytes
from distgraph.spec import ShardSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
StepSeconds = Callable[[str, tuple[str, ...], Floats], Floats]


@dataclass(frozen=True, eq=False)
class Routes:
    """Single steps between layouts, one copy of the layouts for every goal and set of axes in use.

    Attributes:
        states: layouts; number: their positions.
        kinds: (kind, axes) of steps.
        start, stop: copies at the ends of every step, sorted by start.
        kind, fraction: of every step: number of its kind, bytes that a rank sends a byte of the tensor.
        first: position of the first step of every copy that has one; busy: these copies.
        goals: copies that are goals.
        where: for every pair of layouts the copy of the first in the graph of the second; with dims of one
            size exchanged, one graph serves several.
    """

    states: tuple[ShardSpec, ...]
    number: dict[ShardSpec, int]
    kinds: tuple[tuple[str, tuple[str, ...]], ...]
    start: Ints
    stop: Ints
    kind: Ints
    fraction: Floats
    first: Ints
    busy: Ints
    goals: Ints
    where: Ints
    copies: int

    def seconds(self, nbytes: Floats, of_step: StepSeconds) -> Floats:
        """Least seconds [sizes, states, states] from the second index to the third.

        Args:
            nbytes: sizes of the whole tensor.
            of_step: (kind, axes, bytes that a rank sends [sizes, steps]) -> seconds of each.
        """
        costs = np.zeros((len(nbytes), len(self.kind)))
        for number, (kind, axes) in enumerate(self.kinds):
            mine = np.flatnonzero(self.kind == number)
            fractions, position = np.unique(self.fraction[mine], return_inverse=True)
            costs[:, mine] = of_step(kind, axes, nbytes[:, None] * fractions)[:, position]
        best = np.full((len(nbytes), self.copies), np.inf)
        best[:, self.goals] = 0.0
        while self.busy.size:
            through = np.minimum.reduceat(costs + best[:, self.stop], self.first, axis=1)
            better = np.minimum(best[:, self.busy], through)
            if np.array_equal(better, best[:, self.busy]):
                break
            best[:, self.busy] = better
        found: Floats = best[:, self.where]
        return found


@lru_cache(maxsize=1 << 16)
def representative(size: int, mesh: ProcessMesh) -> int:
    """The least size that every layout cuts like this one; `size` itself where some block is shorter.

    Example:
        >>> mesh = ProcessMesh.grid(x=8, y=8)
        >>> [representative(size, mesh) for size in (8192, 24, 5, 100)]
        [64, 8, 1, 100]
    """
    if not _is_even(size, mesh):
        return size
    legal = [count for count in _counts(mesh) if count <= size]
    return math.lcm(*legal) if legal else 1


@lru_cache(maxsize=1 << 14)
def representatives(shape: tuple[int, ...], mesh: ProcessMesh) -> tuple[int, ...]:
    """Sizes for which `routes` are those of a shape.

    Beside a dim with shorter blocks a way may lead over empty blocks, so that only dims which the whole mesh
    divides stand for others; elsewhere a way over empty blocks is left out, were it a little cheaper.
    """
    if all(_is_even(size, mesh) for size in shape):
        return tuple(representative(size, mesh) for size in shape)
    return tuple(mesh.size if size and size % mesh.size == 0 else size for size in shape)


def _is_even(size: int, mesh: ProcessMesh) -> bool:
    """Whether a dim divides by every number of parts that it may be cut in."""
    return all(size % count == 0 for count in _counts(mesh) if count <= size)


def _counts(mesh: ProcessMesh) -> set[int]:
    """Numbers of parts that axes of a mesh make."""
    sizes = [n for n in mesh.shape if n > 1]
    return {math.prod(some) for k in range(1, len(sizes) + 1) for some in itertools.combinations(sizes, k)}


@lru_cache(maxsize=1024)
def routes(sizes: tuple[int, ...], mesh: ProcessMesh) -> Routes:
    """Steps between all layouts of a tensor with sums pending.

    Args:
        sizes: see `representatives`.
        mesh: only its axes and their sizes count.
    """
    model = _model(sizes, mesh)
    if model is None:
        return _found(sizes, mesh)
    found = _found(*model)
    return replace(found, fraction=_fractions(found, mesh))


def _model(sizes: tuple[int, ...], mesh: ProcessMesh) -> tuple[tuple[int, ...], ProcessMesh] | None:
    """Sizes on the smallest mesh with the same steps; None where blocks are uneven, or of many axes.

    A dim may be cut by the counts that are no larger than it is: by the smaller axis, by the larger one, by
    both together. Layouts of as many parts can be exchanged for each other, so that equal axes stay equal.
    """
    axes = [n for n in mesh.shape if n > 1]
    if len(axes) > 2 or not all(_is_even(size, mesh) for size in sizes):
        return None
    small = iter([2, 2] if len(set(axes)) < 2 else [2, 4] if axes[0] < axes[1] else [4, 2])
    model = ProcessMesh.grid(**{axis: next(small) if n > 1 else 1 for axis, n in mesh.sizes.items()})
    counts, alike = sorted(_counts(mesh)), [1, *sorted(_counts(model))]
    return tuple(alike[sum(count <= size for count in counts)] for size in sizes), model


def _fractions(found: Routes, mesh: ProcessMesh) -> Floats:
    """Bytes that a rank sends in every step, a byte of the tensor, where blocks are even (`step_bytes`)."""
    parts = [mesh.count(axis for dim in state.dims for axis in dim) for state in found.states]
    block = 1 / np.array(parts, dtype=np.float64)
    before, after = block[found.start % len(parts)], block[found.stop % len(parts)]
    shares = np.zeros(len(found.kind))
    for number, (kind, axes) in enumerate(found.kinds):
        mine, group = found.kind == number, mesh.count(axes)
        if kind == "permute":
            shares[mine] = np.maximum(before, after)[mine]
        elif kind == "all_gather":
            shares[mine] = (group - 1) * before[mine]
        elif axes:  # all_reduce, reduce_scatter, all_to_all; without axes nothing is sent
            shares[mine] = (2 if kind == "all_reduce" else 1) * before[mine] * (group - 1) / group
    return shares


@lru_cache(maxsize=1024)
def _found(sizes: tuple[int, ...], mesh: ProcessMesh) -> Routes:
    """The steps of `routes`, with what each sends."""
    axes = tuple(axis for axis in mesh.axes if mesh.axis_size(axis) > 1)
    states = tuple(_states(sizes, mesh, axes))
    number = {state: i for i, state in enumerate(states)}
    found = _Steps(sizes, mesh, axes, states, number)
    where = np.zeros((len(states), len(states)), dtype=np.intp)
    used = [frozenset(state.axes) for state in states]
    for goal, layout in enumerate(states):
        order = _sorted_dims(sizes, layout)
        alike = [number[ShardSpec(tuple(s.dims[dim] for dim in order), s.partial)] for s in states]
        for source in range(len(states)):
            working = tuple(axis for axis in axes if axis in used[source] | used[goal])
            copy = found.copy(alike[goal], working, found.wide(source, goal))
            where[source, goal] = copy + alike[source]
    return found.finish(where)


def _sorted_dims(sizes: tuple[int, ...], layout: ShardSpec) -> tuple[int, ...]:
    """Dims of one size in the order of what splits them: goals that differ in this alone share copies."""
    order = sorted(range(len(sizes)), key=lambda dim: (sizes[dim], layout.dims[dim]))
    places = sorted(range(len(sizes)), key=lambda dim: sizes[dim])
    found = dict(zip(places, order, strict=True))
    return tuple(found[dim] for dim in range(len(sizes)))


def _states(sizes: tuple[int, ...], mesh: ProcessMesh, axes: tuple[str, ...]) -> Iterator[ShardSpec]:
    """Every layout: each axis on a dim, pending or unused; all orders of the axes of a dim.

    Where blocks are even, no dim has more parts than positions: sizes that are cut alike differ beyond.
    """
    pending = len(sizes) + 1
    even = all(_is_even(size, mesh) for size in sizes)
    for places in itertools.product(range(len(sizes) + 2), repeat=len(axes)):
        split = [tuple(a for a, p in zip(axes, places, strict=True) if p == dim) for dim in range(len(sizes))]
        if even and any(mesh.count(d) > n for d, n in zip(split, sizes, strict=True)):
            continue
        partial = tuple((a, "sum") for a, p in zip(axes, places, strict=True) if p == pending)
        for dims in itertools.product(*(itertools.permutations(d) for d in split)):
            yield ShardSpec(tuple(dims), partial)


class _Steps:
    """Collects the steps; every (goal, axes in use, whether detours count) has its own copy of the states."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        mesh: ProcessMesh,
        axes: tuple[str, ...],
        states: tuple[ShardSpec, ...],
        number: dict[ShardSpec, int],
    ) -> None:
        self.sizes, self.mesh, self.axes, self.states, self.number = sizes, mesh, axes, states, number
        self.copies: dict[tuple[int, tuple[str, ...], bool], int] = {}
        self.kinds: dict[tuple[str, tuple[str, ...]], int] = {}
        self.goals: list[int] = []
        self.shares: dict[tuple[int, int, int], float] = {}  # (state, state, kind) -> bytes sent
        self.steps: list[tuple[int, int, int, float]] = []
        self.volume = math.prod(sizes)

    def wide(self, source: int, goal: int) -> bool:
        """Whether `redistribute` looks at detours: a dim does not divide over the axes at both ends."""
        pairs = zip(self.sizes, self.states[source].dims, self.states[goal].dims, strict=True)
        return any(size % self.mesh.count({*before, *after}) for size, before, after in pairs)

    def copy(self, goal: int, working: tuple[str, ...], wide: bool) -> int:
        """Number of the first state of a copy; made when first asked for."""
        key = (goal, working, wide)
        if key not in self.copies:
            self.copies[key] = len(self.states) * len(self.copies)
            self._add(self.copies[key], goal, working, wide)
        return self.copies[key]

    def _add(self, base: int, goal: int, working: tuple[str, ...], wide: bool) -> None:
        self.goals.append(base + goal)
        space = Space(self.sizes, self.mesh, working, self.states[goal], wide)
        for at, state in enumerate(self.states):
            if at == goal or not set(state.axes) <= set(working):
                continue
            for step in moves(space, state):
                after = self.number.get(step.target)
                if after is not None:
                    kind = self.kinds.setdefault(
                        (step.kind, () if step.local else step.axes), len(self.kinds)
                    )
                    key = at, after, kind
                    if key not in self.shares:
                        self.shares[key] = step_bytes(step, self.sizes, 1, self.mesh) / max(1, self.volume)
                    self.steps.append((base + at, base + after, kind, self.shares[key]))

    def finish(self, where: Ints) -> Routes:
        """The steps as arrays."""
        steps = sorted(self.steps, key=lambda step: step[0])
        start, stop, kind = (np.array([step[i] for step in steps], dtype=np.intp) for i in range(3))
        busy, first = np.unique(start, return_index=True)
        return Routes(
            self.states,
            self.number,
            tuple(self.kinds),
            start,
            stop,
            kind,
            np.array([step[3] for step in steps], dtype=np.float64),
            first,
            busy,
            np.array(self.goals, dtype=np.intp),
            where,
            len(self.states) * len(self.copies),
        )
