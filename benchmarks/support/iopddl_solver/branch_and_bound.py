"""Branch and bound on the Lagrangian dual: every node of the tree is a smaller flat network.

At a node the dual is improved from where its parent left it; strategies that cannot be part of a choice
below the cutoff are struck out, and the network shrinks with them (`restrict`). What then remains undecided
is split in two: for one node of the network, the strategies with the memory that rounding takes most often,
and the others. The search plunges into the half that rounding prefers and keeps the other for later, lowest
bound first.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from benchmarks.support.iopddl_solver.subproblem import Mask, PartDual, Subproblem, restrict
from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.solver.flat_problem import Ints

__all__ = ["Best", "Tree"]

_ROUNDING = 1e-9  # of the cutoff: a choice must be better by more than rounding
_CHECK = 12  # steps of the dual between two rounds of striking out
_SHRUNK = 0.9  # part of the strategies below which a network is copied


@dataclass(slots=True)
class Best:
    """The best choice of the network that all flat networks here began with.

    Attributes:
        objective: its cost.
        ceiling: no choice that is permitted costs more.
        choice: [nodes]; None where the objective is that of a choice from elsewhere, or inf.
        told: called when there is a better one.
    """

    objective: float = math.inf
    ceiling: float = math.inf
    choice: Ints | None = None
    told: Callable[[Best], None] | None = None

    @property
    def cutoff(self) -> float:
        """What a choice must cost less than to be worth finding."""
        if self.objective < math.inf:
            return self.objective - _ROUNDING * abs(self.objective)
        return self.ceiling + _ROUNDING * abs(self.ceiling) + 1.0

    def see(self, flat: Subproblem, choice: Ints) -> bool:
        """Take a choice of a network if it is better and fits; whether it was taken."""
        objective = flat.objective(choice)
        if not objective < self.cutoff or not flat.fits(choice):
            return False
        self.objective, self.choice = objective, flat.expand(choice)
        if self.told is not None:
            self.told(self)
        return True


@dataclass(order=True, slots=True)
class _Open:
    """A node of the tree that waits."""

    bound: float
    turn: int
    flat: Subproblem = field(compare=False)
    vectors: Floats = field(compare=False)
    prices: Floats = field(compare=False)
    mask: Mask = field(compare=False)


class Tree:
    """The search tree over the strategies in a mask of a flat network.

    Attributes:
        visited: nodes of the tree that have been visited.
        plunges: how often the search has come to the end of a plunge.
    """

    def __init__(self, flat: Subproblem, best: Best, vectors: Floats, prices: Floats, mask: Mask) -> None:
        self.best = best
        self.visited = self.plunges = 0
        self._turn = count()
        self._waiting = [_Open(-math.inf, next(self._turn), flat, vectors, prices, mask)]
        self._next: _Open | None = None  # where the search goes on

    @property
    def bound(self) -> float:
        """No choice below the cutoff costs less; the cutoff where the search has ended."""
        waiting = self._waiting[0].bound if self._waiting else math.inf
        going_on = self._next.bound if self._next is not None else math.inf
        return min(self.best.cutoff, waiting, going_on)

    @property
    def ended(self) -> bool:
        """Whether the best choice is proved to be optimal, or that there is none below the cutoff."""
        return self.bound >= self.best.cutoff

    def search(self, left: Callable[[], float], steps: int, visits: int = sys.maxsize) -> None:
        """Search until the tree is exhausted, no seconds are left or some nodes of it have been visited.

        Args:
            left: seconds left.
            steps: of the dual, at every node.
            visits: nodes to visit.
        """
        last = self.visited + visits
        while not self.ended:
            if self._next is None:
                self._next = heapq.heappop(self._waiting)
            while self._next is not None and self._next.bound < self.best.cutoff:
                if left() <= 0 or self.visited >= last:
                    return
                self._next = self._visit(self._next, left, steps)
            self.plunges += 1
            self._next = None

    def _visit(self, node: _Open, left: Callable[[], float], steps: int) -> _Open | None:
        """Improve, strike out and branch at a node; the child to visit next, if any."""
        self.visited += 1
        bound, mask = node.bound, node.mask
        state: tuple[Subproblem, Floats, Floats] = (node.flat, node.vectors, node.prices)
        while True:
            smaller = restrict(state[0], mask, *state[1:])
            if smaller is None:
                return None
            if smaller[0].nodes == 0:
                self.best.see(smaller[0], np.zeros(0, dtype=np.int64))
                return None
            dual = PartDual(*smaller)
            steps -= self._ascend(dual, min(_CHECK, steps), left)
            least = dual.least()
            mask = least < self.best.cutoff
            while steps > 0 and left() > 0 and dual.bound < self.best.cutoff and mask.mean() >= _SHRUNK:
                steps -= self._ascend(dual, min(_CHECK, steps), left)
                least = dual.least()
                mask = least < self.best.cutoff
            bound = max(bound, dual.bound)
            if bound >= self.best.cutoff or not np.logical_or.reduceat(mask, dual.flat.first[:-1]).all():
                return None
            if steps <= 0 or left() <= 0:
                return self._branch(dual, least, mask, bound)
            state = (dual.flat, dual.messages.vectors, dual.prices)

    def _ascend(self, dual: PartDual, steps: int, left: Callable[[], float]) -> int:
        """Some steps of the dual; how many."""
        for done in range(1, steps + 1):
            for choice in dual.step(self.best.objective):
                self.best.see(dual.flat, choice)
            if dual.bound >= self.best.cutoff or left() <= 0:
                return done
        return steps

    def _branch(self, dual: PartDual, least: Floats, mask: Mask, bound: float) -> _Open:
        """Split a node of the tree, of which the strategies in a mask remain; the half to visit next."""
        if mask.sum() == dual.flat.nodes:
            turn = next(self._turn)
            return _Open(bound, turn, dual.flat, dual.messages.vectors, dual.prices, mask)
        group, own = _split(dual, least, mask)
        rest = mask.copy()
        rest[own] &= ~group
        preferred = mask.copy()
        preferred[own] &= group
        if rest[own].any():
            heapq.heappush(self._waiting, self._child(dual, least, rest, own, bound))
        return self._child(dual, least, preferred, own, bound)

    def _child(self, dual: PartDual, least: Floats, mask: Mask, own: slice, bound: float) -> _Open:
        bound = max(bound, float(least[own][mask[own]].min()))
        return _Open(bound, next(self._turn), dual.flat, dual.messages.vectors, dual.prices, mask)


def _split(dual: PartDual, least: Floats, mask: Mask) -> tuple[Mask, slice]:
    """The group of strategies of one node to be tried first, among the strategies of that node.

    Of the node that rounding decides differently most often, weighted by what the other strategies would cost
    more: all strategies with the memory of the strategy taken most often, or that strategy alone.
    """
    flat = dual.flat
    counts = np.where(mask, dual.counts, 0.0)
    share = counts / np.maximum(np.add.reduceat(counts, flat.first[:-1]), 1e-9)[flat.owner]
    above = np.where(mask, least - np.minimum.reduceat(least, flat.first[:-1])[flat.owner], math.inf)
    rent = flat.priced(dual.prices) - flat.cost
    best_score, chosen, of = -1.0, np.ones(1, dtype=bool), slice(0, 1)
    for i in np.flatnonzero(np.add.reduceat(mask, flat.first[:-1], dtype=np.int64) > 1).tolist():
        own = slice(int(flat.first[i]), int(flat.first[i + 1]))
        group = _group(share[own], above[own], rent[own], mask[own])
        others = mask[own] & ~group
        gain = 1e-6 * abs(dual.bound) + float(above[own][others].min()) + float(np.ptp(rent[own][mask[own]]))
        score = (1.0 - float(share[own][group].sum())) * gain
        if score > best_score:
            best_score, chosen, of = score, group, own
    return chosen, of


def _group(share: Floats, above: Floats, rent: Floats, mask: Mask) -> Mask:
    """The strategies to be tried first at one node, never all that the mask has."""
    top = int(np.lexsort((above, -share))[0])
    level: Mask = mask & np.isclose(rent, rent[top], rtol=1e-9, atol=0.0)
    if rent[mask].any() and (level != mask).any():
        return level
    alone = np.zeros(len(mask), dtype=bool)
    alone[top] = True
    return alone
