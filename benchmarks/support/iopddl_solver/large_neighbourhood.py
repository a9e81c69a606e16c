"""Large-neighbourhood search: most nodes keep their strategy, the others are decided anew by branch and
bound.

A neighbourhood grows along edges, and along the times at which memory is short, from a random node. Of
several sizes the one that gains most per second is tried most.

Source: Shaw, "Using constraint programming and local search methods to solve vehicle routing problems"
    (1998).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from benchmarks.support.iopddl_solver.branch_and_bound import Best, Tree
from benchmarks.support.iopddl_solver.diving import dive
from benchmarks.support.iopddl_solver.subproblem import Mask, Subproblem, shrink
from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.solver.flat_problem import Ints

__all__ = ["Neighbourhoods"]

_VISITS = 12  # nodes of the search tree over one neighbourhood
_STEPS = 24  # steps of the dual at each
_TREE_NODES = 48  # nodes above which a neighbourhood is dived into instead of searched
_DIVE_STEPS = 8
_PARTS = (0.1, 0.2, 0.4)  # of the nodes, decided at a time in a dive
_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)  # nodes of a neighbourhood
_CURIOSITY = 0.3  # part of the neighbourhoods whose size is random
_MEMORY = 0.9  # weight of what a size gained before
_BRANCHING = 12  # neighbours of one node that a neighbourhood takes in at most
_TIGHT = 0.9  # used part of the room at which memory is short


class Neighbourhoods:
    """Improves the best choice of a network, neighbourhood by neighbourhood.

    Args:
        flat: the network that the best choice belongs to.
        best: holds a choice; is told of better ones.
        vectors: messages to start from.
        prices: of memory, to start from.
        generator: of what is random.
    """

    def __init__(
        self, flat: Subproblem, best: Best, vectors: Floats, prices: Floats, generator: np.random.Generator
    ) -> None:
        self.flat, self.best = flat, best
        self.vectors, self.prices, self.generator = vectors, prices, generator
        self._sizes = [size for size in _SIZES if size <= max(_SIZES[0], flat.nodes)]
        self._gained, self._seconds = np.zeros(len(self._sizes)), np.zeros(len(self._sizes))
        self.tried = 0
        self._near: list[list[int]] = [[] for _ in range(flat.nodes)]
        for u, v in flat.ends.tolist():
            self._near[u].append(v)
            self._near[v].append(u)

    def improve(self, permitted: Mask, left: Callable[[], float]) -> bool:
        """Search one neighbourhood with the strategies of a mask; whether it was searched to its end."""
        flat, best = self.flat, self.best
        assert best.choice is not None
        arm = self._pick()
        began, before, taken = time.perf_counter(), best.objective, flat.first[:-1] + best.choice
        free = np.zeros(flat.nodes, dtype=bool)
        free[self._grow(best.choice, self._sizes[arm])] = True
        mask = permitted & free[flat.owner]
        mask[taken] = True
        small, vectors, prices = shrink(flat, mask, self.vectors, self.prices)
        ended = False
        if small.nodes > _TREE_NODES:
            dive(small, best, vectors, prices, left, _DIVE_STEPS, self.generator.choice(_PARTS))
        else:
            tree = Tree(small, best, vectors, prices, np.ones(len(small.cost), dtype=bool))
            tree.search(left, _STEPS, visits=_VISITS)
            ended = tree.ended
        self.tried += 1
        self._learn(arm, before - best.objective, time.perf_counter() - began)
        return ended

    def _pick(self) -> int:
        """The size to try next: the one that gains most per second lately, now and then any other."""
        untried = np.flatnonzero(self._seconds == 0)
        if len(untried):
            return int(untried[0])
        if self.generator.random() < _CURIOSITY:
            return int(self.generator.integers(len(self._sizes)))
        return int(np.argmax((self._gained + 1e-9) / self._seconds))

    def _learn(self, arm: int, gained: float, seconds: float) -> None:
        self._gained[arm] = _MEMORY * self._gained[arm] + gained
        self._seconds[arm] = _MEMORY * self._seconds[arm] + max(seconds, 1e-6)

    def _grow(self, choice: Ints, size: int) -> list[int]:
        """Nodes of a random neighbourhood."""
        wanted = max(2, int(size * self.generator.uniform(0.5, 1.5)))
        shape = self.generator.random()
        if shape < 0.2:
            middle = int(self.generator.integers(self.flat.nodes))
            return list(range(max(0, middle - wanted // 2), min(self.flat.nodes, middle + wanted // 2 + 1)))
        if shape < 0.6 and len(self.flat.room):
            return self._along_edges(self._users(choice, max(2, wanted // 3)), wanted)
        return self._along_edges([int(self.generator.integers(self.flat.nodes))], wanted)

    def _users(self, choice: Ints, wanted: int) -> list[int]:
        """Some nodes that may use memory at a time at which it is short."""
        flat = self.flat
        weight = self.prices + 1e-9
        weight = weight * (flat.used(choice) >= _TIGHT * flat.room) + 1e-12
        t = int(self.generator.choice(len(weight), p=weight / weight.sum()))
        users = np.unique(flat.user[(flat.span[:, 0] <= t) & (t < flat.span[:, 1])])
        if not len(users):
            return [int(self.generator.integers(flat.nodes))]
        picked = self.generator.permutation(users)[:wanted]
        return [int(node) for node in picked]

    def _along_edges(self, seeds: list[int], wanted: int) -> list[int]:
        """Nodes around some seeds, nearest first."""
        found = dict.fromkeys(seeds)
        frontier = list(found)
        while frontier and len(found) < wanted:
            reached: list[int] = []
            for node in frontier:
                near = [v for v in self._near[node] if v not in found]
                if len(near) > _BRANCHING:
                    near = self.generator.choice(near, size=_BRANCHING, replace=False).tolist()
                for v in near:
                    if len(found) < wanted:
                        found[v] = None
                        reached.append(v)
            frontier = reached
        return list(found)
