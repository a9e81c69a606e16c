r"""The Lagrangian dual: a price for every unit of memory at every time, and message passing for the rest.

For prices p(t) >= 0,

    L(p) = min over choices of [cost + sum_t p(t) (use(t) - room(t))]

is a lower bound on the cost of every choice that fits, and message passing bounds L(p) from below. Prices
move along the use of the rounded choices less the room, with the step of Polyak towards the best known cost.

Source: Held, Wolfe and Crowder, "Validation of subgradient optimization" (1974); Polyak (1969).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.solver.flat_problem import Flat, Ints
from distgraph.passes.search.solver.message_passing import Messages
from distgraph.passes.search.solver.work import Work

__all__ = ["Dual"]

Mask = NDArray[np.bool_]

_WARM = 10  # passes in both directions before prices move: rounding says little earlier
_PATIENCE = 20  # steps without a better bound until the step is shortened
_GUESS = 1.05  # of the bound: what is aimed at while nothing that fits is known
_LEAST_STEP = 1e-4  # shortest step length at which going on is worth while


class Dual:
    """Prices and messages of one flat network, improved step by step.

    Attributes:
        flat: the network; `price_out` gives it other costs.
        bound: the best lower bound so far, the network's constant included.
        choice: [nodes], rounded in the last step; may break the limit or a pair.
        counts: [strategies], how often rounding took each, older steps less.
        steps: how many there have been.
        work: where they are counted, if anywhere.
    """

    def __init__(
        self,
        flat: Flat,
        vectors: Floats | None = None,
        prices: Floats | None = None,
        work: Work | None = None,
    ) -> None:
        self.flat, self.work = flat, work
        self.messages = Messages(flat, vectors)
        self.prices = np.zeros(len(flat.room)) if prices is None else prices
        self.bound = -math.inf
        self.choice: Ints = np.zeros(flat.nodes, dtype=np.int64)
        self.counts = np.zeros(len(flat.cost))
        self._best = (self.prices, self.messages.vectors)
        self._length, self._idle, self.steps = 1.0, 0, _WARM if self.prices.any() else 0

    @property
    def converged(self) -> bool:
        """Whether steps have become too short to change anything; without memory there is only one length."""
        return self._length < (_LEAST_STEP if len(self.prices) else 1.0)

    def step(self, target: float) -> Ints:
        """One pass in both directions and a move of the prices towards a cost that is known to be possible
        (inf for none); returns the two rounded choices, [2, nodes]."""
        flat, before = self.flat, self.bound
        rounded = np.zeros((2, flat.nodes), dtype=np.int64)
        cost = flat.priced(self.prices)
        bound = -math.inf
        for backward in (False, True):
            bound = self.messages.sweep(cost, rounded[int(backward)], backward=backward)
        bound += flat.constant - float(self.prices @ flat.room)
        self.choice = rounded[1]
        self.counts *= 0.95
        np.add.at(self.counts, (flat.first[:-1] + rounded).ravel(), 0.5)
        if bound > before:
            self.bound = bound
            self._best = (self.prices, self.messages.vectors.copy())
        self._idle = 0 if bound > before + 1e-5 * abs(before) or before == -math.inf else self._idle + 1
        self.steps += 1
        if self.work is not None:
            self.work.add_pass(2 * len(flat.table) + len(flat.amount))
        if self._idle > _PATIENCE:
            self._length, self._idle = self._length * 0.7, 0
            self.prices, self.messages.vectors = self._best[0], self._best[1].copy()
        if self.steps > _WARM and len(flat.room):
            self._move(target)
        return rounded

    def price_out(self, mask: Mask, penalty: float) -> None:
        """Add a penalty to the costs [strategies] outside a mask; the bound is reset."""
        self.flat = replace(self.flat, cost=np.where(mask, self.flat.cost, self.flat.cost + penalty))
        self.bound, self._length, self._idle = -math.inf, 1.0, 0

    def restore(self) -> None:
        """Go back to the prices and messages of the best bound."""
        self.prices, self.messages.vectors = self._best[0], self._best[1].copy()

    def least(self) -> Floats:
        """For every strategy a lower bound on the cost of all choices that fit and take it, [strategies].

        Uses the prices and messages of the best bound.
        """
        flat = self.flat
        self.restore()
        cost = flat.priced(self.prices)
        scratch = np.zeros(flat.nodes, dtype=np.int64)
        self.messages.sweep(cost, scratch, backward=False)
        self.messages.sweep(cost, scratch, backward=True)
        total = self.messages.least(cost)
        return total + (flat.constant - float(self.prices @ flat.room))

    def least_of_pairs(self) -> Floats:
        """As `least`, for every pair of strategies of an edge; laid out as `flat.table`."""
        flat = self.flat
        node_costs, table = self.messages.reparametrised(flat.priced(self.prices))
        if not len(table):
            return table
        minima = np.minimum.reduceat(node_costs, flat.first[:-1])
        of_edges = np.minimum.reduceat(table, flat.table_first[:-1])
        edge, row, column = flat.pairs
        above = node_costs - minima[flat.owner]
        lower, upper = flat.first[flat.ends[edge]].T
        total = flat.constant + float(minima.sum() + of_edges.sum() - self.prices @ flat.room)
        bounds: Floats = total + (table - of_edges[edge]) + above[lower + row] + above[upper + column]
        return bounds

    def _move(self, target: float) -> None:
        flat = self.flat
        excess = flat.used(self.choice) - flat.room
        excess[(self.prices <= 0) & (excess < 0)] = 0.0
        norm = float(excess @ excess)
        if norm == 0:
            return
        if not math.isfinite(target):
            target = _GUESS * self.bound
        ahead = max(target - self.bound, 1e-4 * abs(self.bound))
        self.prices = np.maximum(0.0, self.prices + self._length * ahead / norm * excess)
