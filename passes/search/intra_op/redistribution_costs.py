"""Cheapest changes of layout between all pairs of layouts of a tensor at once, for many sizes at once.

*In:* the shape of a tensor and a mesh. *Out:* `Routes`: a graph of single steps whose shortest paths are
those that `redistribute` finds. *Invariant:* the same steps, bytes and goal-directed pruning as there.

What a step sends is a fraction of the tensor that depends on the layouts only, as long as blocks divide
evenly: one `Routes` serves all shapes of a kind (`representatives`), and prices come in later, as one number
a kind of step and fraction. With d(s, t) the least seconds from layout s to layout t, and E(t) the steps on
the way to t (`route_steps`),

    d(t, t) = 0,     d(s, t) = min over steps (s -> r) in E(t) of seconds(s -> r) + d(r, t),

iterated over all s, t and sizes together (Bellman-Ford); a path has few steps, and so has the iteration.
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
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.search.intra_op.redistribution_steps import Layouts, copies_of, permutes, steps

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Axes = tuple[str, ...]
StepSeconds = Callable[[str, Axes, Floats], Floats]


@dataclass(frozen=True, eq=False)
class Routes:
    """Single steps between layouts, one copy of the layouts for every goal and set of axes in use.

    Attributes:
        states: layouts; number: their positions.
        kinds: (kind, axes, fractions) of steps: what a rank sends, in bytes a byte of the tensor.
        start, stop: copies at the ends of every step, sorted by start.
        price: of every step the position of its kind and fraction, one kind after the other.
        first: position of the first step of every copy that has one; busy: these copies.
        goals: copies that are goals.
        where: for every pair of layouts the copy of the first in the graph of the second; with dims of one
            size exchanged, one graph serves several.
        copies: their number.
    """

    states: tuple[ShardSpec, ...]
    number: dict[ShardSpec, int]
    kinds: tuple[tuple[str, Axes, Floats], ...]
    start: Ints
    stop: Ints
    price: Ints
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
        best = np.full((len(nbytes), self.copies), np.inf)
        best[:, self.goals] = 0.0
        prices = [of_step(kind, axes, nbytes[:, None] * each) for kind, axes, each in self.kinds]
        costs = np.concatenate([best[:, :0], *prices], axis=1)[:, self.price]
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


@lru_cache(maxsize=1024)
def _counts(mesh: ProcessMesh) -> frozenset[int]:
    """Numbers of parts that axes of a mesh make."""
    sizes = [n for n in mesh.shape if n > 1]
    sets = (some for k in range(1, len(sizes) + 1) for some in itertools.combinations(sizes, k))
    return frozenset(math.prod(some) for some in sets)


@cached_until_registration(maxsize=1024)
def routes(sizes: tuple[int, ...], mesh: ProcessMesh) -> Routes:
    """Steps between all layouts of a tensor with sums pending.

    Args:
        sizes: see `representatives`.
        mesh: only its axes and their sizes count.
    """
    layouts = Layouts(sizes, mesh, even=all(_is_even(size, mesh) for size in sizes))
    copies, count = copies_of(layouts), len(layouts.states)
    parts = steps(layouts, copies), permutes(layouts, copies)
    copy, source, target = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("copy", "source", "target")
    )
    prices = sum(len(fractions) for _, _, fractions in parts[0].kinds)
    price = np.concatenate([parts[0].price, parts[1].price + prices])
    start, stop = copy * count + source, copy * count + target
    order = np.argsort(start, kind="stable")
    busy, first = np.unique(start[order], return_index=True)
    return Routes(
        layouts.states,
        {state: i for i, state in enumerate(layouts.states)},
        parts[0].kinds + parts[1].kinds,
        start[order],
        stop[order],
        price[order],
        first,
        busy,
        np.arange(len(copies.goal)) * count + copies.goal,
        copies.where,
        len(copies.goal) * count,
    )
