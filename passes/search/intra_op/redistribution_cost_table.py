"""Least costs of changes of layout between all pairs of layouts of a tensor, for many sizes at once.

*In:* the shape of a tensor and a mesh. *Out:* `StepGraph`: a graph of single steps whose shortest paths are
those that `redistribution.planner` finds. *Invariant:* steps, bytes and pruning by goal are the planner's.

The fraction of the tensor that a step sends depends on the layouts only, as long as blocks divide evenly. One
`StepGraph` therefore serves all shapes of a class (`representatives`), and seconds are applied later, one
number for each kind of step and fraction. With d(s, t) the least seconds from layout s to layout t, and E(t)
the steps that may lead to t (`redistribution_steps`),

    d(t, t) = 0,     d(s, t) = min over steps (s -> r) in E(t) of seconds(s -> r) + d(r, t),

iterated over all s, t and sizes together (Bellman-Ford); paths are short, and so is the iteration.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.collective_registry import cached_until_registration
from distgraph.ir.float_arrays import Floats
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.search.intra_op.redistribution_steps import LayoutTable, goal_copies, permutes, steps

Ints = NDArray[np.intp]
Axes = tuple[str, ...]
StepSeconds = Callable[[str, Axes, Floats], Floats]


@dataclass(frozen=True, eq=False)
class StepGraph:
    """Single steps between layouts, with one copy of all layouts for every goal and set of axes in use.

    A vertex of the graph is a layout in one of the copies.

    Attributes:
        states: the layouts.
        index_of: layout -> its index in `states`.
        kinds: (kind, axes, fractions) of steps; a fraction is the bytes that a rank sends per byte of tensor.
        start, stop: vertices at the ends of every step, sorted by start.
        cost_index: for every step the index of its kind and fraction, counted over all kinds.
        first_step: for every vertex in `with_steps` the index of its first step.
        with_steps: the vertices from which steps start.
        goals: the vertices that are goals.
        vertex_of: [states, states] the vertex of the first layout in the copy whose goal is the second.
            Copies that differ only by an exchange of dims of equal size are one copy.
        vertices: number of vertices.
    """

    states: tuple[ShardSpec, ...]
    index_of: dict[ShardSpec, int]
    kinds: tuple[tuple[str, Axes, Floats], ...]
    start: Ints
    stop: Ints
    cost_index: Ints
    first_step: Ints
    with_steps: Ints
    goals: Ints
    vertex_of: Ints
    vertices: int

    def seconds(self, nbytes: Floats, step_seconds: StepSeconds) -> Floats:
        """Least seconds [sizes, states, states] from the layout of the second index to that of the third.

        Args:
            nbytes: bytes of the whole tensor, one for each size.
            step_seconds: (kind, axes, bytes that a rank sends [sizes, steps]) -> seconds of each step.
        """
        best = np.full((len(nbytes), self.vertices), np.inf)
        best[:, self.goals] = 0.0
        by_kind = [step_seconds(kind, axes, nbytes[:, None] * part) for kind, axes, part in self.kinds]
        costs = np.concatenate([best[:, :0], *by_kind], axis=1)[:, self.cost_index]
        while self.with_steps.size:
            through = np.minimum.reduceat(costs + best[:, self.stop], self.first_step, axis=1)
            better = np.minimum(best[:, self.with_steps], through)
            if np.array_equal(better, best[:, self.with_steps]):
                break
            best[:, self.with_steps] = better
        pairs: Floats = best[:, self.vertex_of]
        return pairs


@lru_cache(maxsize=1 << 16)
def representative(size: int, mesh: ProcessMesh) -> int:
    """The least size of a dim that every layout splits in the same way; `size` itself if a block is shorter.

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
    """The sizes of the representative shape, whose `step_graph` serves a shape.

    If a dim has shorter blocks, a path may lead over layouts with empty blocks; then only dims that the whole
    mesh divides have a representative. Otherwise such paths are left out, even if one is slightly cheaper.
    """
    if all(_is_even(size, mesh) for size in shape):
        return tuple(representative(size, mesh) for size in shape)
    return tuple(mesh.size if size and size % mesh.size == 0 else size for size in shape)


def _is_even(size: int, mesh: ProcessMesh) -> bool:
    """Whether every number of parts that a dim may be split into divides its size."""
    return all(size % count == 0 for count in _counts(mesh) if count <= size)


@lru_cache(maxsize=1024)
def _counts(mesh: ProcessMesh) -> frozenset[int]:
    """The numbers of parts into which subsets of the axes of a mesh split a dim."""
    sizes = [n for n in mesh.shape if n > 1]
    subsets = (subset for k in range(1, len(sizes) + 1) for subset in itertools.combinations(sizes, k))
    return frozenset(math.prod(subset) for subset in subsets)


@cached_until_registration(maxsize=1024)
def step_graph(sizes: tuple[int, ...], mesh: ProcessMesh) -> StepGraph:
    """Steps between all layouts of a tensor, those with partial sums included.

    Args:
        sizes: see `representatives`.
        mesh: only its axes and their sizes count.
    """
    layouts = LayoutTable(sizes, mesh, even=all(_is_even(size, mesh) for size in sizes))
    copies, count = goal_copies(layouts), len(layouts.states)
    parts = steps(layouts, copies), permutes(layouts, copies)
    copy, source, target = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("copy", "source", "target")
    )
    costs = sum(len(fractions) for _, _, fractions in parts[0].kinds)
    cost_index = np.concatenate([parts[0].cost_index, parts[1].cost_index + costs])
    start, stop = copy * count + source, copy * count + target
    order = np.argsort(start, kind="stable")
    with_steps, first_step = np.unique(start[order], return_index=True)
    return StepGraph(
        layouts.states,
        {state: i for i, state in enumerate(layouts.states)},
        parts[0].kinds + parts[1].kinds,
        start[order],
        stop[order],
        cost_index[order],
        first_step,
        with_steps,
        np.arange(len(copies.goal)) * count + copies.goal,
        copies.vertex_of,
        len(copies.goal) * count,
    )
