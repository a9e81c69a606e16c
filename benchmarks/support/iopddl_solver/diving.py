"""Diving: decide more and more nodes as rounding takes them, and improve the dual in between."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.support.iopddl_solver.branch_and_bound import Best
from benchmarks.support.iopddl_solver.subproblem import Mask, PartDual, Subproblem, restrict
from distgraph.ir.float_arrays import Floats

__all__ = ["dive"]

_LEAST_PART = 1e-3  # of the nodes: a dive that cannot decide as many gives up


def dive(
    flat: Subproblem,
    best: Best,
    vectors: Floats,
    prices: Floats,
    left: Callable[[], float],
    steps: int,
    part: float,
) -> bool:
    """Look for a choice below the cutoff by deciding a part of the nodes at a time, those first on which
    rounding agrees with itself.

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
        dual = PartDual(flat, vectors, prices)
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


def _confident(flat: Subproblem, dual: PartDual, least: Floats, part: float) -> Mask:
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
