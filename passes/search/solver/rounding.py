"""Dives: strategies of more and more nodes are decided as rounding takes them, and the dual is improved in
between, so that the rounding of the other nodes follows.

A strategy that is given up is not taken out of the network but made so expensive that no better choice takes
it. Deciding can therefore be wrong without leaving a node nothing: what messages pull from the other end of
an edge shows it, and another node gives way.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from distgraph.passes.search.solver.flat_problem import Flat, Ints
from distgraph.passes.search.solver.lagrangian_dual import Dual, Mask
from distgraph.passes.search.solver.problem import Floats

__all__ = ["dive"]

_STEPS = 12  # of the dual between decisions


def dive(
    dual: Dual, prices: Floats, part: float, see: Callable[[Ints], float], left: Callable[[], float]
) -> None:
    """Decide a part of the undecided nodes at a time, those first on which rounding agrees with itself.

    Args:
        dual: its messages are where the dive starts from; it is not changed.
        prices: of memory, to start from.
        part: of the undecided nodes, decided at a time.
        see: is told of every choice [nodes] on the way; returns the cost that choices must be below.
        left: seconds left.
    """
    flat = dual.flat
    inner = Dual(flat, dual.messages.vectors.copy(), prices)
    mask = np.ones(len(flat.cost), dtype=bool)
    penalty = max(flat.ceiling - dual.bound, 0.0) + 1.0
    cutoff = math.inf
    while True:
        for _ in range(_STEPS):
            for choice in inner.step(cutoff):
                cutoff = see(choice)
            if inner.bound >= cutoff or left() <= 0:
                return
        least = inner.least()
        strategy, undecided = _most_agreed(flat, inner.counts, least, mask)
        if not len(undecided):
            return
        decided = undecided[: max(1, round(part * len(undecided)))]
        kept = mask & (least < cutoff)
        kept[np.isin(flat.owner, decided)] = False
        kept[strategy] |= mask[strategy]
        inner.price_out(kept | ~mask, penalty)
        mask = kept


def _most_agreed(flat: Flat, counts: Floats, least: Floats, mask: Mask) -> tuple[Ints, Ints]:
    """Of every node the strategy in the mask that rounding takes most often, and the nodes with several in
    the mask, those that rounding decides alike most often first."""
    taken, low = np.where(mask, counts, 0.0), np.where(mask, least, math.inf)
    share = taken / np.maximum(np.add.reduceat(taken, flat.first[:-1]), 1e-9)[flat.owner]
    strategy = np.lexsort((low, -share, flat.owner))[flat.first[:-1]]
    other = low.copy()
    other[strategy] = math.inf
    margin = np.minimum.reduceat(other, flat.first[:-1]) - low[strategy]
    undecided = np.flatnonzero(np.add.reduceat(mask, flat.first[:-1], dtype=np.int64) > 1)
    order = np.lexsort((-margin[undecided], -share[strategy][undecided]))
    return strategy, undecided[order]
