"""Dives: strategies of more and more nodes are decided as rounding takes them, and the dual is improved in
between, so that the rounding of the other nodes follows. Dives into neighbourhoods of a choice decide some
nodes anew, connected ones, while the others keep their strategy.

A strategy that is given up is not taken out of the network but made so expensive that no better choice takes
it. Deciding can therefore be wrong without leaving a node nothing: what messages pull from the other end of
an edge shows it, and another node gives way.

Source: neighbourhoods: Shaw, "Using constraint programming and local search methods to solve vehicle routing
    problems" (1998).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np

from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.solver.flat_problem import Flat, Ints
from distgraph.passes.search.solver.lagrangian_dual import Dual, Mask

__all__ = ["dive", "dive_into_neighbourhoods"]

_STEPS = 12  # of the dual between decisions
_SHARES = (0.2, 0.4, 0.6, 0.8)  # of the nodes, in a neighbourhood
_PART = 0.2  # of the undecided nodes, decided at a time in a neighbourhood
_IDLE = 32  # neighbourhoods without a better choice, after which the search ends


def dive(
    dual: Dual,
    prices: Floats,
    part: float,
    see: Callable[[Ints], float],
    left: Callable[[], float],
    mask: Mask | None = None,
) -> None:
    """Decide a part of the undecided nodes at a time, those first on which rounding agrees with itself.

    Args:
        dual: its messages are where the dive starts from; it is not changed.
        prices: of memory, to start from.
        part: of the undecided nodes, decided at a time.
        see: receives every choice [nodes] on the way; returns the cost that choices must be below.
        left: seconds left.
        mask: [strategies], true for those that may be taken; all of them where there is none.
    """
    flat = dual.flat
    inner = Dual(flat, dual.messages.vectors.copy(), prices, dual.work)
    penalty = max(flat.ceiling - dual.bound, 0.0) + 1.0
    mask = np.ones(len(flat.cost), dtype=bool) if mask is None else mask
    inner.price_out(mask, penalty)
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
        open_strategies = mask & (least < cutoff)
        open_strategies[np.isin(flat.owner, decided)] = False
        open_strategies[strategy] |= mask[strategy]
        inner.price_out(open_strategies | ~mask, penalty)
        mask = open_strategies


def dive_into_neighbourhoods(
    dual: Dual, best: Callable[[], Ints], see: Callable[[Ints], float], left: Callable[[], float]
) -> None:
    """Improve the `best` choice until many neighbourhoods of it give nothing better; see `dive`."""
    flat, generator, idle = dual.flat, np.random.default_rng(0), 0
    near: list[list[int]] = [[] for _ in range(flat.nodes)]
    for u, v in flat.ends.tolist():
        near[u].append(v)
        near[v].append(u)
    while idle < _IDLE and left() > 0:
        before = best()
        free = np.zeros(flat.nodes, dtype=bool)
        free[_connected(near, generator, int(generator.choice(_SHARES) * flat.nodes))] = True
        mask = free[flat.owner]
        mask[flat.first[:-1] + before] = True
        dive(dual, dual.prices, _PART, see, left, mask)
        idle = idle + 1 if best() is before else 0


def _connected(near: list[list[int]], generator: np.random.Generator, count: int) -> list[int]:
    """Nodes around a random one, nearest first."""
    reached = {int(generator.integers(len(near))): None}
    queue = deque(reached)
    while queue and len(reached) < count:
        around = near[queue.popleft()]
        new = [node for node in generator.permutation(around).tolist() if node not in reached]
        reached |= dict.fromkeys(new)
        queue.extend(new)
    return list(reached)[: max(1, count)]


def _most_agreed(flat: Flat, counts: Floats, least: Floats, mask: Mask) -> tuple[Ints, Ints]:
    """Of every node the strategy in the mask that rounding takes most often, and the nodes with several in
    the mask, those that rounding decides in the same way most often first."""
    agreed, low = np.where(mask, counts, 0.0), np.where(mask, least, math.inf)
    share = agreed / np.maximum(np.add.reduceat(agreed, flat.first[:-1]), 1e-9)[flat.owner]
    strategy = np.lexsort((low, -share, flat.owner))[flat.first[:-1]]
    other = low.copy()
    other[strategy] = math.inf
    margin = np.minimum.reduceat(other, flat.first[:-1]) - low[strategy]
    undecided = np.flatnonzero(np.add.reduceat(mask, flat.first[:-1], dtype=np.int64) > 1)
    order = np.lexsort((-margin[undecided], -share[strategy][undecided]))
    return strategy, undecided[order]
