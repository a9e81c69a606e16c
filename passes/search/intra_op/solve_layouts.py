"""How much work goes into a problem of layouts: briefly first, more where the bound stays far away.

*In:* a problem. *Out:* its solution, from the cache where it was solved before. *Invariant:* the answer does
not depend on how busy the machine is; a warning says where the wall clock ended a search.
"""

from __future__ import annotations

import warnings

from distgraph.passes.search.intra_op.solution_cache import solve_cached
from distgraph.passes.search.solver.problem import Problem, Solution

__all__ = ["GAP", "SOLVE_SECONDS", "improve_solution", "solve_briefly", "solve_problem"]

SOLVE_SECONDS = 2.0
"""Seconds of work, see `solver.solve`."""
GAP = 1e-3
_LARGE_GAP, _MORE_TIME = 0.1, 5.0
"""A solution with this gap to its bound is solved again, with this many times the work."""


def solve_problem(problem: Problem) -> Solution:
    """Solve a problem of layouts; once more with more work where the gap to the bound is large.

    The answer does not depend on how busy the machine is; a warning says where the wall clock ended a search.
    """
    return improve_solution(problem, solve_briefly(problem))


def solve_briefly(problem: Problem, explained: bool = True) -> Solution:
    """Solve a problem of layouts once, whatever the gap to the bound is.

    Args:
        problem: of layouts.
        explained: whether to find out why a problem has no choice.
    """
    return _complete(problem, solve_cached(problem, seconds=SOLVE_SECONDS, gap=GAP, explained=explained))


def improve_solution(problem: Problem, solution: Solution) -> Solution:
    """Solve a problem of layouts once more with more work, where the gap to the bound is large."""
    if solution.status == "infeasible" or solution.gap <= _LARGE_GAP:
        return solution
    seconds = _MORE_TIME * SOLVE_SECONDS
    return _complete(problem, solve_cached(problem, seconds=seconds, gap=GAP, start=solution.choice))


def _complete(problem: Problem, solution: Solution) -> Solution:
    if solution.cut:
        warnings.warn(f"{problem.name}: {solution.message}", RuntimeWarning, stacklevel=3)
    return solution
