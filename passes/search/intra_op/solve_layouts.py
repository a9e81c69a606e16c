"""How much work goes into a problem of layouts: briefly first, more where the bound stays far away, less as
long as choices do not fit where hardly any do.

*In:* a problem. *Out:* its solution, from the cache where it was solved before. *Invariant:* the answer does
not depend on how busy the machine is; a warning says where the wall clock ended a search.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

from distgraph.passes.search.intra_op.formulate import Formulation
from distgraph.passes.search.intra_op.memory_limit import MemoryLimit, is_tight, solve_within
from distgraph.passes.search.intra_op.solution_cache import solve_cached
from distgraph.passes.search.solver.problem import Problem, Solution

__all__ = ["GAP", "SOLVE_SECONDS", "improve_solution", "solve_briefly", "solve_problem", "solve_with_limit"]

SOLVE_SECONDS = 2.0
"""Seconds of work, see `solver.solve`."""
GAP = 1e-3
_LARGE_GAP, _MORE_TIME = 0.1, 5.0
"""A solution with this gap to its bound is solved again, with this many times the work."""
_ROUGH_SECONDS, _ROUGH_GAP = SOLVE_SECONDS / 2, 0.02
"""Of a choice that is only looked at to see whether it fits."""


def solve_problem(problem: Problem) -> Solution:
    """Solve a problem of layouts; once more with more work where the gap to the bound is large.

    The answer does not depend on how busy the machine is; a warning says where the wall clock ended a search.
    """
    return improve_solution(problem, solve_briefly(problem))


def solve_briefly(problem: Problem, explained: bool = True, start: Sequence[int] | None = None) -> Solution:
    """Solve a problem of layouts once, whatever the gap to the bound is.

    Args:
        problem: of layouts.
        explained: whether to find out why a problem has no choice.
        start: a choice that may be improved.
    """
    return _complete(
        problem, solve_cached(problem, seconds=SOLVE_SECONDS, gap=GAP, start=start, explained=explained)
    )


def improve_solution(problem: Problem, solution: Solution) -> Solution:
    """Solve a problem of layouts once more with more work, where the gap to the bound is large."""
    if solution.status == "infeasible" or solution.gap <= _LARGE_GAP:
        return solution
    seconds = _MORE_TIME * SOLVE_SECONDS
    return _complete(problem, solve_cached(problem, seconds=seconds, gap=GAP, start=solution.choice))


def solve_with_limit(formulation: Formulation, problem: Problem, limit: MemoryLimit | None) -> Solution:
    """Solve a problem of a formulation, within a limit on memory if there is one.

    Where hardly any memory is left for copies, most choices do not fit: only those that do are worth as much
    work as others. Why a limit leaves no choice is not computed.
    """
    if limit is None:
        return solve_problem(problem)
    if is_tight(formulation, problem, limit):
        return solve_within(formulation, problem, limit, _solve_roughly, _improve_rough)
    return solve_within(
        formulation, problem, limit, partial(solve_briefly, explained=False), improve_solution
    )


def _solve_roughly(problem: Problem) -> Solution:
    """A choice that is good enough to see how much more memory such choices need."""
    return _complete(
        problem,
        solve_cached(problem, seconds=_ROUGH_SECONDS, gap=_ROUGH_GAP, explained=False, exact=False),
    )


def _improve_rough(problem: Problem, solution: Solution) -> Solution:
    """Solve a problem that has a rough solution as any other problem with a limit on memory."""
    if solution.status == "infeasible":
        return solution
    return improve_solution(problem, solve_briefly(problem, explained=False, start=solution.choice))


def _complete(problem: Problem, solution: Solution) -> Solution:
    if solution.cut:
        warnings.warn(f"{problem.name}: {solution.message}", RuntimeWarning, stacklevel=3)
    return solution
