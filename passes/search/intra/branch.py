"""Branch and bound on the Lagrangian dual: every node of the tree is a smaller flat network.

At a node the dual is improved from where its parent left it; strategies that cannot be part of a choice below
the cutoff are struck out, and the network shrinks with them (`restrict`). What then remains undecided is split
in two: for one node of the network, the strategies with the memory that rounding takes most often, and the
others. The search plunges into the half that rounding prefers and keeps the other for later, lowest bound first.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from distgraph.passes.search.intra.dual import Dual
from distgraph.passes.search.intra.flat import Flat, Ints
from distgraph.passes.search.intra.restrict import Mask, restrict
from distgraph.passes.search.problem import Floats

__all__ = ["Best", "Tree", "dive"]

_ROUNDING = 1e-9  # of the cutoff: a choice must be better by more than rounding
_CHECK = 12  # steps of the dual between two rounds of striking out
_LEAST_PART = 1e-3  # of the nodes: a dive that cannot decide as many gives up
_SHRUNK = 0.9  # part of the strategies below which a network is copied


@dataclass(slots=True)
class Best:
    """The best choice of the network that all flat networks here began with."""

    objective: float = math.inf
    choice: Ints | None = None
    told: Callable[[Best], None] | None = None

    @property
    def cutoff(self) -> float:
        """What a choice must cost less than to be worth finding."""
        return self.objective - _ROUNDING * abs(self.objective) if self.objective < math.inf else math.inf

    def see(self, flat: Flat, choice: Ints) -> bool:
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
    flat: Flat = field(compare=False)
    vectors: Floats = field(compare=False)
    prices: Floats = field(compare=False)
    mask: Mask = field(compare=False)


class Tree:
    """The search tree over one flat network."""

    def __init__(self, flat: Flat, best: Best, vectors: Floats, prices: Floats, mask: Mask) -> None:
        self.best = best
        self._turn = count()
        self._waiting = [_Open(-math.inf, next(self._turn), flat, vectors, prices, mask)]
        self._visiting = math.inf
        self.visited = 0

    @property
    def bound(self) -> float:
        """No choice below the cutoff costs less; the cutoff where the search has ended."""
        waiting = self._waiting[0].bound if self._waiting else math.inf
        return min(self.best.cutoff, waiting, self._visiting)

    @property
    def ended(self) -> bool:
        """Whether the best choice is proved to be optimal, or that there is none below the cutoff."""
        return self.bound >= self.best.cutoff

    def search(
        self, left: Callable[[], float], steps: int, root_steps: int, visits: int = sys.maxsize
    ) -> None:
        """Search until the tree is exhausted, no seconds are left or some nodes of it have been visited.

        Args:
            left: seconds left.
            steps: of the dual, at every node.
            root_steps: of the dual, at the first node.
            visits: nodes to visit.
        """
        last = self.visited + visits
        while not self.ended and left() > 0 and self.visited < last:
            node: _Open | None = heapq.heappop(self._waiting)
            while node is not None and node.bound < self.best.cutoff:
                self._visiting = node.bound  # stays when an interrupt leaves this loop
                if left() <= 0 or self.visited >= last:
                    heapq.heappush(self._waiting, node)
                    break
                node = self._visit(node, left, root_steps if self.visited == 0 else steps)
            self._visiting = math.inf

    def _visit(self, node: _Open, left: Callable[[], float], steps: int) -> _Open | None:
        """Improve, strike out and branch at a node; the child to visit next, if any."""
        self.visited += 1
        state = restrict(node.flat, node.mask, node.vectors, node.prices)
        if state is None:
            return None
        flat, vectors, prices = state
        bound = node.bound
        done = 0
        while True:
            if flat.nodes == 0:
                self.best.see(flat, np.zeros(0, dtype=np.int64))
                return None
            dual = Dual(flat, vectors, prices)
            least = None
            while done < steps:
                for choice in dual.step(self.best.objective):
                    self.best.see(flat, choice)
                done += 1
                if max(bound, dual.bound) >= self.best.cutoff:
                    return None
                if done % _CHECK == 0 or done == steps:
                    least = dual.least()
                    mask = least < self.best.cutoff
                    if mask.mean() < _SHRUNK:
                        break
                if left() <= 0:
                    break
            bound = max(bound, dual.bound)
            dual.restore()
            vectors, prices = dual.messages.vectors, dual.prices
            least = dual.least() if least is None else least
            mask = least < self.best.cutoff
            if mask.mean() < _SHRUNK or (done >= steps and not mask.all()):
                state = restrict(flat, mask, vectors, prices)
                if state is None:
                    return None
                flat, vectors, prices = state
                if done < steps:
                    continue
                if flat.nodes == 0:
                    continue
                dual = Dual(flat, vectors, prices)
                dual.step(self.best.objective)
                least = dual.least()
                dual.restore()
            break
        return self._branch(flat, dual, least, bound)

    def _branch(self, flat: Flat, dual: Dual, least: Floats, bound: float) -> _Open:
        preferred, others = _split(flat, dual, least)
        children = []
        for mask in (preferred, others):
            own = max(bound, float(np.where(mask, least, math.inf)[_node_of(mask, flat)].min()))
            children.append(_Open(own, next(self._turn), flat, dual.messages.vectors, dual.prices, mask))
        heapq.heappush(self._waiting, children[1])
        return children[0]


def _node_of(mask: Mask, flat: Flat) -> slice:
    """The strategies of the node at which a mask splits."""
    i = int(flat.owner[np.flatnonzero(~mask)[0]])
    return slice(int(flat.first[i]), int(flat.first[i + 1]))


def _split(flat: Flat, dual: Dual, least: Floats) -> tuple[Mask, Mask]:
    """Masks of the two halves of a network, the preferred one first."""
    share = dual.counts / np.maximum(np.add.reduceat(dual.counts, flat.first[:-1]), 1e-9)[flat.owner]
    floor = np.minimum.reduceat(least, flat.first[:-1])
    above = least - floor[flat.owner]
    rent = flat.priced(dual.prices) - flat.cost
    best_score, chosen = -1.0, (0, np.ones(1, dtype=bool))
    for i in range(flat.nodes):
        own = slice(int(flat.first[i]), int(flat.first[i + 1]))
        top = int(np.argmax(share[own] - 1e-12 * above[own]))
        group = np.zeros(own.stop - own.start, dtype=bool)
        group[top] = True
        if flat.use_first[i + 1] > flat.use_first[i]:
            level = np.isclose(rent[own], rent[own][top], rtol=1e-9, atol=0.0)
            if not level.all():
                group = level
        score = (1.0 - float(share[own][group].sum())) * (
            1e-6 * abs(dual.bound) + float(above[own][~group].min()) + float(np.ptp(rent[own]))
        )
        if score > best_score:
            best_score, chosen = score, (i, group)
    i, group = chosen
    preferred = np.ones(len(flat.cost), dtype=bool)
    others = preferred.copy()
    own = slice(int(flat.first[i]), int(flat.first[i + 1]))
    preferred[own], others[own] = group, ~group
    return preferred, others


def dive(
    flat: Flat,
    best: Best,
    vectors: Floats,
    prices: Floats,
    left: Callable[[], float],
    steps: int,
    part: float,
) -> bool:
    """Look for a choice below the cutoff by deciding a part of the nodes at a time, those first on which rounding
    agrees with itself.

    Args:
        flat: the network.
        best: told of every choice on the way.
        vectors: messages to start from.
        prices: of memory, to start from.
        left: seconds left.
        steps: of the dual between decisions.
        part: of the nodes, decided at a time.

    Returns:
        Whether all nodes were decided; not so where that could give nothing below the cutoff.
    """
    while flat.nodes and left() > 0:
        dual = Dual(flat, vectors, prices)
        for _ in range(steps):
            for choice in dual.step(best.objective):
                best.see(flat, choice)
            if dual.bound >= best.cutoff or left() <= 0:
                return False
        least = dual.least()
        state = None
        wanted = part
        while state is None and wanted > _LEAST_PART:
            mask = (least < best.cutoff) & _confident(flat, dual, least, wanted)
            state = restrict(flat, mask, dual.messages.vectors, dual.prices)
            wanted *= 0.25
        if state is None:
            return False
        flat, vectors, prices = state
    if not flat.nodes:
        best.see(flat, np.zeros(0, dtype=np.int64))
    return not flat.nodes


def _confident(flat: Flat, dual: Dual, least: Floats, part: float) -> Mask:
    """A mask that decides a part of the nodes: those that rounding decides alike most often."""
    total = np.add.reduceat(dual.counts, flat.first[:-1])
    share = dual.counts / np.maximum(total, 1e-9)[flat.owner]
    top = np.maximum.reduceat(share, flat.first[:-1])
    chosen = np.flatnonzero(share == top[flat.owner])
    order = chosen[np.lexsort((least[chosen], flat.owner[chosen]))]
    strategy = order[np.unique(flat.owner[order], return_index=True)[1]]
    other = least.copy()
    other[strategy] = np.inf
    margin = np.minimum.reduceat(other, flat.first[:-1]) - least[strategy]
    decided = np.lexsort((-margin, -top))[: max(1, round(part * flat.nodes))]
    mask = np.ones(len(flat.cost), dtype=bool)
    mask[np.isin(flat.owner, decided)] = False
    mask[strategy[decided]] = True
    return mask
