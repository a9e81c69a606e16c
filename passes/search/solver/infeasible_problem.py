"""Why a problem has no feasible choice: what is forbidden, or the time at which memory falls short."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from distgraph.passes.search.solver.flat_problem import Flat
from distgraph.passes.search.solver.message_passing import Messages
from distgraph.passes.search.solver.problem import Floats, Problem
from distgraph.passes.search.solver.reduced_problem import Network
from distgraph.passes.search.solver.subproblem import restrict

__all__ = ["explain_shortage"]

_TIMES = 16  # times that are looked at, those with the largest sums of least uses first
_SWEEPS = 20


def explain_shortage(problem: Problem, left: Callable[[], float]) -> tuple[int | None, float, str]:
    """For a problem that is known to be infeasible: a time, the units missing at that time at least, a
    message.

    The least use at a time is bounded by message passing over what is permitted, with the units used then as
    costs; the time is None where no single time explains the infeasibility.
    """
    permitted = Problem(
        problem.name,
        tuple(np.where(np.isinf(c), np.inf, 0.0) for c in problem.costs),
        problem.edges,
        tuple(np.where(np.isinf(c), np.inf, 0.0) for c in problem.edge_costs),
    )
    whole = Flat.of(Network.of(permitted))
    nothing = np.zeros(0)
    state = restrict(whole, np.isfinite(whole.cost), np.zeros(int(whole.side_first[-1])), nothing)
    if state is None:
        return None, 0.0, "every choice takes a forbidden strategy or pair"
    if problem.limit is None:
        return None, 0.0, "forbidden strategies and pairs leave no choice"
    worst_time, missing = None, 0.0
    for t in _tightest(problem):
        short = _least_use(problem, state[0], t) - problem.limit
        if short > missing:
            worst_time, missing = t, short
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
    starts = np.unique([use.start for own in problem.uses for use in own])
    steps = np.zeros(len(starts) + 1)
    for costs, own in zip(problem.costs, problem.uses, strict=True):
        for use in own:
            least = float(use.amounts[np.isfinite(costs)].min())
            steps[np.searchsorted(starts, use.start)] += least
            steps[np.searchsorted(starts, use.stop)] -= least
    order = np.argsort(-np.cumsum(steps)[:-1], kind="stable")
    return [int(t) for t in starts[order[:_TIMES]]]


def _least_use(problem: Problem, flat: Flat, t: int) -> float:
    """A lower bound on the units that any permitted choice uses at a time."""
    amounts: dict[int, Floats] = {
        i: np.sum([use.amounts for use in own if use.start <= t < use.stop], axis=0)
        for i, own in enumerate(problem.uses)
        if any(use.start <= t < use.stop for use in own)
    }
    cost = np.zeros(len(flat.cost))
    decided = float(sum(amounts[i][flat.fixed[i]] for i in amounts))
    for node, i in enumerate(flat.names.tolist()):
        if i in amounts:
            own = slice(int(flat.first[node]), int(flat.first[node + 1]))
            cost[own] = amounts[i][flat.numbers[own]]
            decided -= float(amounts[i][flat.fixed[i]])
    messages, scratch = Messages(flat), np.zeros(flat.nodes, dtype=np.int64)
    bound = 0.0
    for sweep in range(_SWEEPS):
        bound = max(bound, messages.sweep(cost, scratch, backward=bool(sweep % 2)))
    return decided + bound
