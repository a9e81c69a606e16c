r"""Solve the intra-operator problem of `distgraph.passes.search.solver.problem`.

The programme (choices x, pairs y, limit on memory at every time) is stated there. In order:

1. `reductions` make it smaller without changing its optimum.
2. `dual`: with a price p(t) >= 0 for memory at every time, and vectors a_e that move costs between an edge
   and its ends,

       max over p, a of   sum_i min_s  [c_i(s) + sum_t p(t) u_i(s, t) + sum_e a_e,i(s)]
                        + sum_e min_ss' [c_e(s, s') - a_e,i(s) - a_e,j(s')]  -  sum_t p(t) room(t)

   is the dual of the linear relaxation (0 <= x, y <= 1), so every p and a give a bound. Prices move by
   subgradient steps, vectors by message passing, and every pass is rounded to a choice.
3. Strategies whose own bound is no better than the best choice are struck out (`restrict`).
4. `branch`: branch and bound with that bound; its first plunge gives a good choice. Where it does not end,
   `neighbourhood` improves the choice, in turns with the tree.
5. `exact`: SCIP solves what is left where that is small.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import numpy as np

from distgraph.errors import GraphError
from distgraph.passes.search.solver.branch_and_bound import Best, Tree
from distgraph.passes.search.solver.diving import dive
from distgraph.passes.search.solver.flat_problem import Flat
from distgraph.passes.search.solver.infeasible_problem import explain_shortage
from distgraph.passes.search.solver.lagrangian_dual import Dual
from distgraph.passes.search.solver.large_neighbourhood import Neighbourhoods
from distgraph.passes.search.solver.parallel_search import Team
from distgraph.passes.search.solver.problem import Floats, Problem, Solution, Status, gap_of
from distgraph.passes.search.solver.reduced_problem import Network
from distgraph.passes.search.solver.reductions import reduce_network
from distgraph.passes.search.solver.subproblem import restrict

__all__ = ["solve"]

_ROUNDING = 1e-9  # gap below which a choice counts as optimal: sums of floats are no more exact
_RESERVE = 0.02  # of the seconds, for what is under way when they are over
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


def solve(
    problem: Problem,
    *,
    seconds: float = 60.0,
    start: Sequence[int] | None = None,
    gap: float = 0.0,
    on_incumbent: Callable[[Solution], None] | None = None,
    threads: int = 1,
    seed: int = 0,
) -> Solution:
    """The best choice that can be found in some time, with a bound that tells how good it is.

    A keyboard interrupt ends the search early and returns the best choice so far.

    Args:
        problem: what to solve.
        seconds: wall-clock limit; 0 for the best of some obvious choices. One step of the search at a time is
            not interrupted, so large problems may take a little longer.
        start: a choice to be at least as good as; ignored where it is not feasible.
        gap: stop when (objective - bound) / |objective| is at most this.
        on_incumbent: called with every better choice.
        threads: 1 or 2 processor cores to use.
        seed: of what is random.

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
    if not seconds >= 0 or not gap >= 0 or threads < 1:
        raise GraphError(
            f"{problem.name}: seconds={seconds} and gap={gap} must be 0 or more, threads={threads} 1 or more"
        )
    search = _Search(problem, seconds, gap, on_incumbent, threads, seed)
    try:
        search.run(start)
    except KeyboardInterrupt:
        search.message = "; ".join(filter(None, ["interrupted: the best choice so far", search.message]))
    return search.solution()


class _Search:
    """One search: what is known so far, and the phases that add to it."""

    def __init__(
        self,
        problem: Problem,
        seconds: float,
        gap: float,
        on_incumbent: Callable[[Solution], None] | None,
        threads: int,
        seed: int,
    ) -> None:
        self.threads = threads
        self.problem, self.gap, self.on_incumbent = problem, gap, on_incumbent
        self.generator = np.random.default_rng(seed)
        self.began = time.perf_counter()
        self.limit = (1 - _RESERVE) * seconds
        self.seconds: dict[str, float] = {}
        self.choice: tuple[int, ...] | None = None
        self.objective, self.bound = math.inf, -math.inf
        self.infeasible = False
        self.short: tuple[int, float] | None = None
        self.message = ""
        self.network: Network | None = None

    def left(self) -> float:
        """Seconds until the limit; 0 when the gap is reached."""
        if gap_of(self.objective, self.bound) <= max(self.gap, _ROUNDING):
            return 0.0
        return self.limit - (time.perf_counter() - self.began)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def run(self, start: Sequence[int] | None) -> None:
        """All phases, until the problem is solved or time is up."""
        with self.phase("obvious"):
            self.look_at_obvious(start)
        if self.infeasible or self.left() <= 0:
            return
        with self.phase("reduce"):
            network = self.network = Network.of(self.problem)
            reduce_network(network, self.until(_REDUCE_SHARE * self.left()))
        if network.dead:
            self.no_choice()
            return
        flat = Flat.of(network)
        best = Best(self.objective, flat.ceiling, told=self.take)
        state = restrict(
            flat, np.isfinite(flat.cost), np.zeros(int(flat.side_first[-1])), np.zeros(len(flat.room))
        )
        if state is None:
            self.no_choice()
            return
        self.flat, vectors, prices = state
        self.search(self.flat.rebased(), vectors, prices, best)

    def search(self, flat: Flat, vectors: Floats, prices: Floats, best: Best) -> None:
        """Dual, tree and neighbourhoods on the reduced network."""
        if flat.nodes == 0:
            best.see(flat, np.zeros(0, dtype=np.int64))
            self.finish(best)
            return
        with self.phase("dual"):
            dual = Dual(flat, vectors, prices)
            self.ascend(dual, best, self.until(_DUAL_SHARE * self.left()))
        if dual.bound >= best.cutoff:
            self.finish(best)
            return
        with self.phase("dive"):
            self.dive(dual, best)
        if self.left() > 0:
            self.alternate(flat, dual, best)

    def dive(self, dual: Dual, best: Best) -> None:
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

    def alternate(self, flat: Flat, dual: Dual, best: Best) -> None:
        """The tree and neighbourhoods in turns, beside a second process where there may be one."""
        permitted = dual.least() < best.cutoff
        vectors, prices = dual.messages.vectors.copy(), dual.prices
        tree = Tree(flat, best, vectors, prices, permitted)
        neighbours = Neighbourhoods(flat, best, vectors, prices, self.generator)
        team = Team(flat, vectors, prices, best, self.threads, int(self.generator.integers(1 << 30)))
        turn, part = max(_SHORTEST, _TURN_SHARE * self.limit), 1.0
        a_step = self.seconds["dual"] / max(1, dual.steps)
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
            self.message = team.close()
        if tree.ended:
            self.finish(best)

    def ascend(self, dual: Dual, best: Best, left: Callable[[], float]) -> None:
        """Improve the dual and look at all choices that it is rounded to."""
        while left() > 0 and not dual.settled and dual.bound < best.cutoff:
            for choice in dual.step(best.objective):
                best.see(dual.flat, choice)
            self.prove(min(dual.bound, best.cutoff))
        dual.restore()

    def until(self, seconds: float) -> Callable[[], float]:
        """Seconds left of some seconds from now, or of the whole search where that is less."""
        end = time.perf_counter() + seconds
        return lambda: min(self.left(), end - time.perf_counter())

    def look_at_obvious(self, start: Sequence[int] | None) -> None:
        """The given choice, the cheapest strategies and the smallest ones; a bound that needs no search."""
        problem = self.problem
        if problem.limit is not None and problem.least_peak()[1] > problem.limit * (1 + 1e-12):
            self.no_choice()
            return
        for choice in (start, tuple(int(np.argmin(c)) for c in problem.costs)):
            if choice is not None and problem.feasible(choice):
                self.keep(tuple(choice), problem.objective(choice))
        least_costs = [float(c.min()) for c in (*problem.costs, *(e for e in problem.edge_costs))]
        self.bound = math.fsum(least_costs) if all(math.isfinite(c) for c in least_costs) else -math.inf

    def take(self, best: Best) -> None:
        """A better choice of the reduced network."""
        if self.network is None or best.choice is None:
            return
        names = sorted(self.network.costs)
        reduced = self.flat.expand(best.choice)
        choice = self.network.expand(dict(zip(names, reduced.tolist(), strict=True)))
        if self.problem.feasible(choice):
            self.keep(choice, self.problem.objective(choice))

    def keep(self, choice: tuple[int, ...], objective: float) -> None:
        if objective < self.objective:
            self.choice, self.objective = choice, objective
            if self.on_incumbent is not None:
                self.on_incumbent(self.solution())

    def prove(self, bound: float) -> None:
        self.bound = max(self.bound, bound)

    def finish(self, best: Best) -> None:
        """There is nothing below the cutoff."""
        if math.isinf(best.objective):
            self.no_choice()
        else:
            self.prove(best.objective)

    def no_choice(self) -> None:
        """There is none: say why."""
        self.infeasible = True
        with self.phase("explain"):
            where, missing, self.message = explain_shortage(self.problem, self.left)
        self.short = None if where is None else (where, missing)

    def solution(self) -> Solution:
        """What is known now."""
        if self.choice is None:
            bound = math.inf if self.infeasible else self.bound
            short = self.short or (None, 0.0)
            return Solution(
                choice=None,
                objective=math.inf,
                bound=bound,
                gap=math.inf,
                status="infeasible" if self.infeasible else "unknown",
                seconds=dict(self.seconds),
                time=short[0],
                missing=short[1],
                message=self.message,
            )
        bound = min(self.bound, self.objective)
        gap = gap_of(self.objective, bound)
        status: Status = "optimal" if gap <= _ROUNDING else "feasible"
        seconds = dict(self.seconds)
        return Solution(self.choice, self.objective, bound, gap, status, seconds, message=self.message)
