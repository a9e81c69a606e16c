"""Solve the intra-operator problem with all that the machine has, as the contest asks for.

In order:

1. The product's reductions, and its dual, every pass of which is rounded to a choice.
2. `diving`: decide more and more nodes, and take them out of the network.
3. `branch_and_bound` with the dual's bound. Where the tree does not end, `large_neighbourhood` improves the
   choice, in turns with the tree; a second process does so too where there is a second core.
4. The product's exact model in SCIP, in a process of its own, once little is left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import count

import numpy as np

from benchmarks.support.iopddl_solver.branch_and_bound import Best, Tree
from benchmarks.support.iopddl_solver.diving import dive
from benchmarks.support.iopddl_solver.large_neighbourhood import Neighbourhoods
from benchmarks.support.iopddl_solver.parallel_search import Team
from benchmarks.support.iopddl_solver.subproblem import PartDual, Subproblem, restrict
from distgraph.errors import GraphError
from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.solver.incumbent import Incumbent
from distgraph.passes.search.solver.problem import Problem, Solution
from distgraph.passes.search.solver.reduced_problem import Network
from distgraph.passes.search.solver.reductions import reduce_network
from distgraph.passes.search.solver.work import Work

__all__ = ["solve"]

_REDUCE_SHARE = 0.4  # of the seconds, for reductions
_DUAL_SHARE = 0.15  # of the seconds, for the dual before anything is branched on
_TURN_SHARE = 0.08  # of the seconds, for one turn of the tree or of neighbourhoods
_SHORTEST = 0.2  # seconds of a turn
_LEAST_PART = 0.1  # of a turn, for neighbourhoods that find nothing any more
_PATIENCE = 40.0  # turns that a visit for every node of the network may take, or else the tree is left alone
_LONGER = 3.0  # turns, for neighbourhoods, in that case
_PARTS = (0.3, 0.1)  # of the nodes, decided at a time in the first dives
_DEARER = 20  # dives with prices twice as high each time
_DIVE_STEPS = 12  # of the dual between decisions of a dive
_STEPS = 40  # of the dual at a node of the tree


def solve(problem: Problem, *, seconds: float = 60.0, threads: int = 1, seed: int = 0) -> Solution:
    """The best choice that can be found in some time, with a bound that tells how good it is.

    A keyboard interrupt ends the search early and returns the best choice so far.

    Args:
        problem: what to solve.
        seconds: wall-clock limit; the product's `solve` has a limit of work instead.
        threads: 1 or 2 processor cores to use.
        seed: of what is random.

    Raises:
        GraphError: where an argument makes no sense.
    """
    if not seconds >= 0 or threads < 1:
        raise GraphError(
            f"{problem.name}: seconds={seconds} must be 0 or more and threads={threads} 1 or more"
        )
    search = _Search(problem, seconds, threads, seed)
    try:
        search.run()
    except KeyboardInterrupt:
        known = filter(None, ["interrupted: the best choice so far", search.incumbent.message])
        search.incumbent.message = "; ".join(known)
    return search.incumbent.solution()


class _WallClock(Work):
    """The seconds of a search on the wall clock, which limit it instead of the work that it does."""

    def __init__(self, budget: float) -> None:
        super().__init__(budget)
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self._began

    def left(self) -> float:
        """Seconds until the limit."""
        return self.budget - self.seconds


class _Search:
    """One search: what is known so far, and the phases that add to it."""

    def __init__(self, problem: Problem, seconds: float, threads: int, seed: int) -> None:
        self.threads, self.total = threads, seconds
        self.generator = np.random.default_rng(seed)
        self.incumbent = Incumbent(problem, _WallClock(seconds), 0.0)
        self.left, self.until = self.incumbent.left, self.incumbent.until
        self.phase, self.prove = self.incumbent.phase, self.incumbent.prove

    def run(self) -> None:
        """All phases, until the problem is solved or time is up."""
        with self.phase("obvious"):
            self.incumbent.see_obvious(None)
        if self.left() <= 0:
            return
        with self.phase("reduce"):
            self.network = Network.of(self.incumbent.problem)
            reduce_network(self.network, self.until(_REDUCE_SHARE * self.left()))
        if self.network.dead:
            self.incumbent.prove_infeasible()
            return
        flat = Subproblem.of(self.network)
        best = Best(self.incumbent.objective, flat.ceiling, told=self.take)
        state = restrict(
            flat, np.isfinite(flat.cost), np.zeros(int(flat.side_first[-1])), np.zeros(len(flat.room))
        )
        if state is None:
            self.incumbent.prove_infeasible()
            return
        self.flat, vectors, prices = state
        self.search(self.flat.rebased(), vectors, prices, best)

    def search(self, flat: Subproblem, vectors: Floats, prices: Floats, best: Best) -> None:
        """Dual, tree and neighbourhoods on the reduced network."""
        if flat.nodes == 0:
            best.see(flat, np.zeros(0, dtype=np.int64))
            self.incumbent.prove_none_below(best.objective)
            return
        with self.phase("dual"):
            dual = PartDual(flat, vectors, prices)
            self.ascend(dual, best, self.until(_DUAL_SHARE * self.left()))
        if dual.bound >= best.cutoff:
            self.incumbent.prove_none_below(best.objective)
            return
        with self.phase("dive"):
            self.dive(dual, best)
        if self.left() > 0:
            self.alternate(flat, dual, best)

    def dive(self, dual: PartDual, best: Best) -> None:
        """A few dives; while nothing that fits is known more of them, with ever higher prices of memory."""
        half = self.until(0.5 * self.left())
        for part in _PARTS:
            dive(dual.flat, best, dual.messages.vectors, dual.prices, half, _DIVE_STEPS, part)
        dearer = dual.prices + dual.prices.mean() if len(dual.prices) else dual.prices
        for _ in range(_DEARER):
            if best.objective < math.inf or half() <= 0:
                return
            dearer = 2.0 * dearer
            part = float(self.generator.uniform(0.02, 0.3))
            dive(dual.flat, best, dual.messages.vectors, dearer, half, _DIVE_STEPS, part)

    def alternate(self, flat: Subproblem, dual: PartDual, best: Best) -> None:
        """The tree and neighbourhoods in turns, beside a second process where there may be one."""
        permitted = dual.least() < best.cutoff
        vectors, prices = dual.messages.vectors.copy(), dual.prices
        tree = Tree(flat, best, vectors, prices, permitted)
        neighbours = Neighbourhoods(flat, best, vectors, prices, self.generator)
        team = Team(flat, vectors, prices, best, self.threads, int(self.generator.integers(1 << 30)))
        turn, part = max(_SHORTEST, _TURN_SHARE * self.total), 1.0
        a_step = self.incumbent.seconds["dual"] / max(1, dual.steps)
        small = flat.nodes * _STEPS * a_step < _PATIENCE * turn
        try:
            for turns in count():
                if self.left() <= 0 or tree.ended:
                    break
                if small or best.choice is None:
                    with self.phase("tree"):
                        tree.search(self.until(turn if best.choice is not None else math.inf), _STEPS)
                        self.prove(tree.bound)
                elif turns:
                    with self.phase("dual"):
                        dual.resume()
                        self.ascend(dual, best, self.until(turn))
                if best.choice is None or tree.ended:
                    continue
                permitted = dual.least() < best.cutoff
                with self.phase("exact"):
                    team.exact(permitted, self.left(), self.until(turn))
                    self.prove(team.bound)
                with self.phase("neighbourhoods"):
                    ends = self.until(part * turn if small else _LONGER * turn)
                    before = best.objective
                    while ends() > 0:
                        neighbours.improve(permitted, ends)
                        team.exchange(permitted, self.left())
                        self.prove(team.bound)
                    part = 1.0 if best.objective < before else max(_LEAST_PART, 0.5 * part)
        finally:
            self.incumbent.message = team.close()
        if tree.ended:
            self.incumbent.prove_none_below(best.objective)

    def ascend(self, dual: PartDual, best: Best, left: Callable[[], float]) -> None:
        """Improve the dual and look at all choices that it is rounded to."""
        while left() > 0 and not dual.converged and dual.bound < best.cutoff:
            for choice in dual.step(best.objective):
                best.see(dual.flat, choice)
            self.prove(min(dual.bound, best.cutoff))
        dual.restore()

    def take(self, best: Best) -> None:
        """A better choice of the reduced network."""
        assert best.choice is not None
        names = sorted(self.network.costs)
        reduced = self.flat.expand(best.choice)
        self.incumbent.see(self.network.expand(dict(zip(names, reduced.tolist(), strict=True))))
