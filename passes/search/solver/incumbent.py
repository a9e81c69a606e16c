"""The state of one search: the best choice so far, the bound on all choices, the clock and the phases."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from distgraph.passes.search.solver.infeasible_problem import explain_shortage
from distgraph.passes.search.solver.problem import Problem, Solution, Status, gap_of
from distgraph.passes.search.solver.work import Work

__all__ = ["Incumbent"]

_ROUNDING = 1e-9  # gap below which a choice counts as optimal: sums of floats are no more exact
_WITHIN = 1.0 - 1e-6  # of the gap, so that a bound at the cutoff reaches the gap in spite of rounding
_CUT = "the wall clock ended the search before its work was done: another time the choice may be another"


class Incumbent:
    """The best known choice of a problem and the bound on the costs of all choices.

    Args:
        problem: what is solved.
        work: counts the work of the search, and limits it.
        gap: (objective - bound) / |objective| at which the search may end.
        explained: whether to find out why a problem has no choice.
        exact: whether SCIP may be used.

    Attributes:
        choice: the best choice so far; None where none is known.
        objective: its cost; inf where none is known.
        bound: no choice costs less.
        infeasible: whether it is proved that there is no choice.
        interrupted: whether the user ended the search.
        seconds: wall-clock seconds of every phase so far.
        message: what else there is to say.
    """

    def __init__(
        self, problem: Problem, work: Work, gap: float, explained: bool = True, exact: bool = True
    ) -> None:
        self.problem, self.work, self.gap = problem, work, max(gap, _ROUNDING)
        self.explained, self.exact = explained, exact
        self.choice: tuple[int, ...] | None = None
        self.objective, self.bound = math.inf, -math.inf
        self.infeasible = self.interrupted = False
        self.seconds: dict[str, float] = {}
        self.message = ""
        self._shortage: tuple[int | None, float] = (None, 0.0)

    @property
    def cutoff(self) -> float:
        """What a choice must cost less than to change the solution by more than the gap; inf without one."""
        if math.isinf(self.objective):
            return math.inf
        return self.objective - _WITHIN * self.gap * abs(self.objective)

    def left(self) -> float:
        """Seconds of work until the limit; 0 when the gap is reached or the problem is infeasible."""
        if self.infeasible or gap_of(self.objective, self.bound) <= self.gap:
            return 0.0
        return self.work.left()

    def until(self, seconds: float) -> Callable[[], float]:
        """Seconds of work left of some from now, or of the whole search where that is less."""
        end = self.work.seconds + seconds
        return lambda: min(self.left(), end - self.work.seconds)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def see_obvious(self, start: Sequence[int] | None) -> None:
        """Look at the given choice and the cheapest strategies, and at the bounds that need no search."""
        problem = self.problem
        if problem.limit is not None and problem.least_peak()[1] > problem.limit * (1 + 1e-12):
            self.prove_infeasible()
            return
        for choice in (start, tuple(int(np.argmin(c)) for c in problem.costs)):
            if choice is not None:
                self.see(tuple(choice))
        least_costs = [float(c.min()) for c in (*problem.costs, *problem.edge_costs)]
        self.bound = math.fsum(least_costs) if all(math.isfinite(c) for c in least_costs) else -math.inf

    def see(self, choice: tuple[int, ...]) -> bool:
        """Take a choice of the whole problem if it is feasible and better; whether it was taken."""
        objective = self.problem.objective(choice)
        if not objective < self.objective or not self.problem.feasible(choice):
            return False
        self.choice, self.objective = choice, objective
        return True

    def prove(self, bound: float) -> None:
        """Take a lower bound on the costs of all choices."""
        self.bound = max(self.bound, bound)

    def prove_none_below(self, cutoff: float) -> None:
        """Note that no choice costs less than a cutoff, which is inf where there is no choice at all."""
        if math.isinf(cutoff):
            self.prove_infeasible()
        else:
            self.prove(cutoff)

    def prove_infeasible(self) -> None:
        """Note that there is no choice, and find out why where that is asked for."""
        if self.explained:
            with self.phase("explain"):
                when, missing, self.message = explain_shortage(self.problem, self.left)
            self._shortage = when, missing
        self.infeasible = True

    def solution(self) -> Solution:
        """What is known now."""
        if self.work.cut:
            self.message = "; ".join(filter(None, [_CUT, self.message]))
        seconds, ended = dict(self.seconds), (self.work.cut, self.interrupted)
        if self.choice is None:
            status: Status = "infeasible" if self.infeasible else "unknown"
            bound = math.inf if self.infeasible else self.bound
            when, missing = self._shortage
            return Solution(
                None, math.inf, bound, math.inf, status, seconds, when, missing, self.message, *ended
            )
        bound = min(self.bound, self.objective)
        gap = gap_of(self.objective, bound)
        status = "optimal" if gap <= _ROUNDING else "feasible"
        figures = self.choice, self.objective, bound, gap, status, seconds
        return Solution(*figures, message=self.message, cut=self.work.cut, interrupted=self.interrupted)
