"""The exact model of a small network in SCIP: x for every strategy, y for every permitted pair of an edge.

y may be continuous: once x is 0 or 1, the rows that tie y to x leave one pair of each edge.
"""

from __future__ import annotations

import math
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from distgraph.passes.search.solver.flat_problem import Flat, Ints

__all__ = ["missing_scip", "solve_exactly"]


def missing_scip() -> str:
    """Why SCIP cannot be used; empty where it can."""
    try:
        import_module("pyscipopt")
    except ImportError as error:
        return f"pyscipopt cannot be imported ({error}); install it for the exact model"
    return ""


def solve_exactly(flat: Flat, seconds: float, start: Ints | None = None) -> tuple[Ints | None, float, bool]:
    """Solve a network by branch and cut.

    Args:
        flat: the network.
        seconds: wall-clock limit.
        start: a choice to start from, [nodes].

    Returns:
        The best choice found, None where there is none that fits beyond SCIP's tolerance; a lower bound on
        every choice; whether the search came to its end.
    """
    if flat.nodes == 0:
        return np.zeros(0, dtype=np.int64), flat.constant, True
    model, taken = _model(flat)
    model.setParam("limits/time", max(0.01, seconds))
    if start is not None:
        _suggest(model, taken, start)
    model.optimize()
    ended = model.getStatus() in ("optimal", "infeasible")
    bound = math.inf if model.getStatus() == "infeasible" else model.getDualbound() + flat.constant
    choice = None
    if model.getNSols():
        solution = model.getBestSol()
        rounded = [int(np.argmax([model.getSolVal(solution, x) for x in own])) for own in taken]
        choice = np.array(rounded, dtype=np.int64)
        if not (math.isfinite(flat.objective(choice)) and flat.fits(choice)):
            choice = None
    model.freeProb()
    return choice, bound, ended


def _model(flat: Flat) -> tuple[Any, list[list[Any]]]:
    scip = import_module("pyscipopt")
    model = scip.Model()
    model.hideOutput()
    model.setParam("parallel/maxnthreads", 1)
    model.setParam("misc/catchctrlc", False)
    taken = [
        [model.addVar(vtype="B", obj=float(c)) for c in flat.cost[start:stop]]
        for start, stop in pairwise(flat.first.tolist())
    ]
    for own in taken:
        model.addCons(scip.quicksum(own) == 1)
    for e, (u, v) in enumerate(flat.ends.tolist()):
        shape = (len(taken[u]), len(taken[v]))
        table = flat.table[flat.table_first[e] : flat.table_first[e + 1]].reshape(shape)
        _add_edge(model, scip.quicksum, taken[u], taken[v], table)
    _add_limit(model, scip.quicksum, flat, taken)
    return model, taken


def _add_edge(model: Any, quicksum: Any, left: list[Any], right: list[Any], table: Any) -> None:
    finite = np.isfinite(table)
    pairs = {
        (a, b): model.addVar(vtype="C", lb=0.0, obj=float(table[a, b]))
        for a, b in np.argwhere(finite).tolist()
    }
    for a, x in enumerate(left):
        model.addCons(quicksum(pairs[a, b] for b in np.flatnonzero(finite[a]).tolist()) == x)
    for b, x in enumerate(right):
        model.addCons(quicksum(pairs[a, b] for a in np.flatnonzero(finite[:, b]).tolist()) == x)


def _add_limit(model: Any, quicksum: Any, flat: Flat, taken: list[list[Any]]) -> None:
    """One row for each time, in units of its room where there is any."""
    for t, room in enumerate(flat.room.tolist()):
        alive = np.flatnonzero((flat.span[:, 0] <= t) & (t < flat.span[:, 1])).tolist()
        unit = room if room > 0 else 1.0
        terms = [
            float(amount) / unit * x
            for use in alive
            for amount, x in zip(
                flat.amount[flat.amount_first[use] : flat.amount_first[use + 1]],
                taken[flat.user[use]],
                strict=True,
            )
            if amount
        ]
        if terms:
            model.addCons(quicksum(terms) <= room / unit)


def _suggest(model: Any, taken: list[list[Any]], start: Ints) -> None:
    """Give SCIP the x of a choice; it completes y."""
    solution = model.createPartialSol()
    for own, s in zip(taken, start.tolist(), strict=True):
        for other, x in enumerate(own):
            model.setSolVal(solution, x, float(other == s))
    model.addSol(solution)
