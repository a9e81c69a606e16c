"""Why a problem has no feasible choice: what is forbidden, or the time at which memory falls short."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.solver.flat_problem import Flat
from distgraph.passes.search.solver.lagrangian_dual import Dual
from distgraph.passes.search.solver.problem import Problem
from distgraph.passes.search.solver.reduced_problem import Network
from distgraph.passes.search.solver.reductions import reduce_network

__all__ = ["explain_shortage"]

_TIMES = 16  # times that are looked at, those with the largest sums of least uses first
_STEPS = 10  # of the dual, for the least use at one time


def explain_shortage(problem: Problem, left: Callable[[], float]) -> tuple[int | None, float, str]:
    """For a problem that is known to be infeasible: a time, the units missing at that time at least, a
    message.

    The time is None where no single time explains the infeasibility.
    """
    if _least_cost(problem, [np.zeros(len(costs)) for costs in problem.costs]) is None:
        return None, 0.0, "every choice takes a forbidden strategy or pair"
    if problem.limit is None:
        return None, 0.0, "forbidden strategies and pairs leave no choice"
    worst_time, missing = None, 0.0
    for t in _tightest(problem):
        least = _least_cost(problem, [_amounts(problem, node, t) for node in range(len(problem.costs))])
        if least is not None and least - problem.limit > missing:
            worst_time, missing = t, least - problem.limit
        if left() <= 0:
            break
    if worst_time is None:
        return None, 0.0, "memory at several times together leaves no choice"
    label = (
        f"at time {worst_time} every choice uses {missing:g} units more than the limit of {problem.limit:g}"
    )
    return worst_time, missing, label


def _tightest(problem: Problem) -> list[int]:
    """Times at which uses begin, those of the largest sums of least uses first."""
    starts = np.unique([use.start for uses in problem.uses for use in uses])
    steps = np.zeros(len(starts) + 1)
    for costs, uses in zip(problem.costs, problem.uses, strict=True):
        for use in uses:
            least = float(use.amounts[np.isfinite(costs)].min())
            steps[np.searchsorted(starts, use.start)] += least
            steps[np.searchsorted(starts, use.stop)] -= least
    order = np.argsort(-np.cumsum(steps)[:-1], kind="stable")
    return [int(t) for t in starts[order[:_TIMES]]]


def _amounts(problem: Problem, node: int, t: int) -> Floats:
    """Units [strategies] that a node uses at a time."""
    alive = [use.amounts for use in problem.uses[node] if use.start <= t < use.stop]
    return sum(alive, np.zeros(len(problem.costs[node])))


def _least_cost(problem: Problem, costs: list[Floats]) -> float | None:
    """A lower bound on the sum of other costs over all permitted choices; None where there is none."""
    permitted = Problem(
        problem.name,
        tuple(np.where(np.isinf(c), np.inf, cost) for c, cost in zip(problem.costs, costs, strict=True)),
        problem.edges,
        tuple(np.where(np.isinf(table), np.inf, 0.0) for table in problem.edge_costs),
    )
    network = Network.of(permitted)
    reduce_network(network)
    if network.dead:
        return None
    flat = Flat.of(network)
    dual = Dual(flat)
    for _ in range(_STEPS):
        dual.step(np.inf)
    return dual.bound if np.isfinite(dual.bound) else None
