r"""Solve the intra-operator problem of `distgraph.passes.search.solver.problem`.

The programme (choices x, pairs y, limit on memory at every time) is stated there. In order:

1. `reductions` make it smaller without changing its optimum.
2. `lagrangian_dual`: with a price p(t) >= 0 for memory at every time, and vectors a_e that move costs between
   an edge and its ends,

       max over p, a of   sum_i min_s  [c_i(s) + sum_t p(t) u_i(s, t) + sum_e a_e,i(s)]
                        + sum_e min_ss' [c_e(s, s') - a_e,i(s) - a_e,j(s')]  -  sum_t p(t) room(t)

   is the dual of the linear relaxation (0 <= x, y <= 1), so every p and a give a bound. Prices move by
   subgradient steps, vectors by message passing, and every pass is rounded to a choice.
3. `rounding`: dives along the dual give better choices.
4. Strategies and pairs whose own bound is no better than the best choice by the gap are forbidden, and all
   this is done again on what is left, as long as it becomes much smaller.
5. `scip_model`: SCIP solves what is left, where that is small, with the costs that the vectors have moved.
   Where it is larger, dives into neighbourhoods of the best choice come first, and if they improve it, there
   is another round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from distgraph.errors import GraphError
from distgraph.passes.search.solver.flat_problem import Flat, Ints
from distgraph.passes.search.solver.incumbent import Incumbent
from distgraph.passes.search.solver.lagrangian_dual import Dual
from distgraph.passes.search.solver.problem import Problem, Solution
from distgraph.passes.search.solver.reduced_problem import Network
from distgraph.passes.search.solver.reductions import reduce_network
from distgraph.passes.search.solver.rounding import dive, dive_into_neighbourhoods
from distgraph.passes.search.solver.scip_model import ExactModel, missing_scip
from distgraph.passes.search.solver.work import Work

__all__ = ["solve"]

_REDUCE_SHARE = 0.4  # of the seconds left, for reductions
_DUAL_SHARE = 0.5  # of the seconds left, for the dual
_DIVE_SHARE = 0.5  # of the seconds left, for dives
_PARTS = (0.1, 0.03, 0.03, 0.03, 0.03, 0.03)  # of the nodes, decided at a time in the dives of every round
_SHRUNK = 0.8  # part of the strategies that another round must leave for one more
_REMEMBERED = 1 << 24  # bytes of choices that were seen
_DEARER = 20  # dives with prices twice as high each time, while no choice fits
_FEW_PAIRS = 5_000  # permitted pairs of strategies up to which SCIP is given the network at once
_PAIRS = 20_000  # the same, where neighbourhoods have given nothing better


def solve(
    problem: Problem,
    *,
    seconds: float = 60.0,
    start: Sequence[int] | None = None,
    gap: float = 0.0,
    explained: bool = True,
    exact: bool = True,
) -> Solution:
    """The best choice that can be found in some time, with a bound that tells how good it is.

    A keyboard interrupt ends the search early and returns the best choice so far.

    Args:
        problem: what to solve.
        seconds: limit, in seconds of work that is counted (`work`), so that the choice is the same beside any
            load; 0 for the best of some obvious choices. The wall clock ends a search that takes many times
            as long, and the solution says so.
        start: a choice to be at least as good as; ignored where it is not feasible.
        gap: stop when (objective - bound) / |objective| is at most this.
        explained: whether to find out why a problem has no choice, which may take longer than the proof.
        exact: whether SCIP may solve what is left; what it does before its first linear program is not
            counted, and may take seconds.

    Returns:
        The solution; `status` says what is proved.

    Raises:
        GraphError: where an argument makes no sense.

    Example:
        >>> a, b = np.array([1.0, 5.0]), np.array([4.0, 2.0])
        >>> solution = solve(Problem("two", (a, b), ((0, 1),), (np.array([[9.0, 0.0], [0.0, 9.0]]),)))
        >>> solution.choice, solution.objective, solution.status
        ((0, 1), 3.0, 'optimal')
    """
    if not seconds >= 0 or not gap >= 0:
        raise GraphError(f"{problem.name}: seconds={seconds} and gap={gap} must be 0 or more")
    incumbent = Incumbent(problem, Work(seconds), gap, explained, exact)
    try:
        with incumbent.phase("obvious"):
            incumbent.see_obvious(start)
        if incumbent.left() > 0:
            _search(incumbent)
    except KeyboardInterrupt:
        incumbent.interrupted = True
        notes = filter(None, ["interrupted: the best choice so far", incumbent.message])
        incumbent.message = "; ".join(notes)
    return incumbent.solution()


def _search(incumbent: Incumbent) -> None:
    """Rounds of reductions, dual and dives, each on what the one before leaves; SCIP on the rest."""
    network = Network.of(incumbent.problem)
    size = math.inf
    for number, part in enumerate(_PARTS, start=1):
        cutoff = incumbent.cutoff
        with incumbent.phase("reduce"):
            reduce_network(network, incumbent.until(_REDUCE_SHARE * incumbent.left()), incumbent.work)
        if network.dead:
            incumbent.prove_none_below(cutoff)
            return
        if not network.costs:
            incumbent.see(network.expand({}))
            incumbent.prove_none_below(min(cutoff, incumbent.objective))
            return
        current = _Round(network, incumbent)
        current.ascend()
        if incumbent.left() > 0:
            current.dive(part)
        if incumbent.left() <= 0:
            return
        strategies = len(current.flat.cost)
        last_round = number == len(_PARTS) or strategies > _SHRUNK * size
        if last_round and current.solve_exactly(_FEW_PAIRS):
            return
        if last_round and (not current.improve() or number == len(_PARTS)):
            current.solve_exactly(_PAIRS)
            return
        size = strategies
        current.forbid()


class _Round:
    """What is left of a problem, in the form of one round, with its dual."""

    def __init__(self, network: Network, incumbent: Incumbent) -> None:
        self.network, self.incumbent = network, incumbent
        self.names = sorted(network.costs)
        self.flat = Flat.of(network)
        self.dual = Dual(self.flat, work=incumbent.work)
        self.choice: Ints = np.zeros(0, dtype=np.int64)
        self.objective = math.inf
        self._seen: set[bytes] = set()

    @property
    def cutoff(self) -> float:
        """What a choice must cost less than to be worth finding: no permitted one costs more than the
        ceiling."""
        ceiling = self.flat.ceiling
        return min(self.incumbent.cutoff, ceiling + 1e-9 * abs(ceiling) + 1.0)

    def see(self, choice: Ints) -> float:
        """Take a choice [nodes] if it is better; the cutoff after that.

        One that was seen before is not better: nearly all choices of the dual are.
        """
        key = choice.tobytes()
        if key in self._seen:
            return self.cutoff
        if len(self._seen) * len(key) > _REMEMBERED:
            self._seen.clear()
        self._seen.add(key)
        objective = self.flat.objective(choice)
        if objective < self.objective and self.flat.fits(choice):
            self.choice, self.objective = choice.copy(), objective
            strategies = dict(zip(self.names, choice.tolist(), strict=True))
            self.incumbent.see(self.network.expand(strategies))
        return self.cutoff

    def ascend(self) -> None:
        """Improve the dual until it settles or its bound and the best choice are close."""
        dual, incumbent = self.dual, self.incumbent
        left = incumbent.until(_DUAL_SHARE * incumbent.left())
        with incumbent.phase("dual"):
            while left() > 0 and not dual.converged:
                for choice in dual.step(incumbent.objective):
                    self.see(choice)
                if self.take_bound(dual.bound):
                    return
            dual.restore()

    def take_bound(self, bound: float) -> bool:
        """Take a bound on all choices that are left; whether it leaves none worth finding."""
        if bound < self.cutoff:
            self.incumbent.prove(bound)
            return False
        self.incumbent.prove_none_below(self.incumbent.cutoff)
        return True

    def dive(self, part: float) -> None:
        """One dive; while nothing that fits is known more of them, with ever higher prices of memory."""
        incumbent, prices = self.incumbent, self.dual.prices
        left = incumbent.until(_DIVE_SHARE * incumbent.left())
        with incumbent.phase("dive"):
            dive(self.dual, prices, part, self.see, left)
            dearer = prices + prices.mean() if len(prices) else prices
            for _ in range(_DEARER if len(prices) else 0):
                if incumbent.choice is not None or left() <= 0:
                    return
                dearer = 2.0 * dearer
                dive(self.dual, dearer, part, self.see, left)

    def forbid(self) -> None:
        """Forbid the strategies and pairs that no choice worth finding takes."""
        flat, cutoff = self.flat, self.cutoff
        least, pairs = self.dual.least(), self.dual.least_of_pairs()
        for i, name in enumerate(self.names):
            strategies = slice(flat.first[i], flat.first[i + 1])
            self.network.costs[name] = np.where(least[strategies] < cutoff, flat.cost[strategies], np.inf)
        table = np.where(pairs < cutoff, flat.table, np.inf)
        for e, (u, v) in enumerate(flat.ends.tolist()):
            left, right = self.names[u], self.names[v]
            strategies = slice(flat.table_first[e], flat.table_first[e + 1])
            shape = self.network.near[left][right].shape
            self.network.near[left][right] = table[strategies].reshape(shape)
            self.network.near[right][left] = self.network.near[left][right].T

    def solve_exactly(self, pairs: int) -> bool:
        """Give SCIP what is left where that has few pairs and is not solved; whether it has few."""
        incumbent = self.incumbent
        if incumbent.left() <= 0:
            return True
        if not incumbent.exact:
            return False
        incumbent.message = missing_scip()
        if incumbent.message:
            return False
        with incumbent.phase("exact"):
            model = ExactModel(self.dual, self.cutoff, 0.99 * incumbent.gap * max(self.dual.bound, 0.0))
            if model.size <= pairs:
                self.take_bound(model.solve(incumbent.left, self.see, incumbent.work))
        return model.size <= pairs

    def improve(self) -> bool:
        """Dive into neighbourhoods of the best choice; whether one was found that is better by the gap."""
        before = self.incumbent.cutoff
        if math.isfinite(self.objective):
            with self.incumbent.phase("neighbourhoods"):
                dive_into_neighbourhoods(self.dual, lambda: self.choice, self.see, self.incumbent.left)
        return self.incumbent.objective < before and self.incumbent.left() > 0
