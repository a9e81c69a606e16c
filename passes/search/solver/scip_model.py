"""The exact model of a small network in SCIP: x for every strategy, y for every permitted pair of an edge.

Costs are those that message passing has moved between edges and nodes: every choice costs as much as before,
and the linear relaxation of the model starts at the bound of the dual. They count from that bound, in units
of what lies between it and the cost that choices must be below; strategies and pairs that the dual shows to
cost as much are left out, and SCIP leaves every branch that reaches it.

y may be continuous: once x is 0 or 1, the rows that tie y to x leave one pair of each edge.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

import numpy as np

from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.solver.flat_problem import Flat, Ints
from distgraph.passes.search.solver.lagrangian_dual import Dual
from distgraph.passes.search.solver.work import Work

__all__ = ["ExactModel", "missing_scip"]

_SLICE = 0.5  # seconds after which SCIP gives way to an interrupt, where work is not counted
_LEAST_UNIT = 1e-9  # of the largest number in costs: a smaller unit is rounding


def missing_scip() -> str:
    """Why SCIP cannot be used; empty where it can."""
    try:
        import_module("pyscipopt")
    except ImportError as error:
        return f"pyscipopt cannot be imported ({error}); install it for the exact model"
    return ""


class ExactModel:
    """The strategies and pairs of a network that may be part of a choice below a cutoff, as a model of SCIP.

    Args:
        dual: of the network, improved before.
        cutoff: what choices must cost less than; inf for any choice.
        gap: cost by which the best choice may exceed the bound when SCIP ends.

    Attributes:
        size: number of pairs; `solve` takes long where there are many.
    """

    def __init__(self, dual: Dual, cutoff: float, gap: float) -> None:
        self.flat, self.cutoff, self.gap = dual.flat, cutoff, gap
        self._strategies = dual.least() < cutoff
        self._pairs = np.isfinite(dual.flat.table) & (dual.least_of_pairs() < cutoff)
        self._own, self._table = dual.messages.reparametrised(dual.flat.cost)
        self.size = int(self._pairs.sum())

    def solve(
        self, left: Callable[[], float], see: Callable[[Ints], object], work: Work | None = None
    ) -> float:
        """Solve the model by branch and cut, interrupted when nothing is left.

        Args:
            left: seconds left; of work where it is counted.
            see: receives the best choice [nodes] of SCIP; it may exceed the limit by SCIP's
                tolerance, and cost more than the cutoff.
            work: where iterations are counted; None for slices of time.

        Returns:
            A lower bound on the cost of every choice below the cutoff; inf where none is better than the
            choice that `see` received, by more than the gap.
        """
        flat = self.flat
        if not np.logical_or.reduceat(self._strategies, flat.first[:-1]).all():
            return math.inf
        model, x, base, unit = self._build()
        choice: Ints | None = None
        try:
            self._run(model, left, work)
        finally:
            if model.getNSols():
                best = model.getBestSol()
                values = np.array([0.0 if v is None else model.getSolVal(best, v) for v in x])
                choice = np.array([np.argmax(chosen) for chosen in np.split(values, flat.first[1:-1])])
                see(choice)
        fits = choice is None or (flat.fits(choice) and math.isfinite(flat.objective(choice)))
        ended = model.getStatus() in ("infeasible", "optimal", "gaplimit")
        bound = math.inf if ended and fits else base + unit * float(model.getDualbound())
        model.freeProb()
        return bound

    def _run(self, model: Any, left: Callable[[], float], work: Work | None) -> None:
        """Run SCIP until it is done or nothing is left.

        Where work is counted, SCIP is interrupted between linear programs: where time ends slices is chance,
        and SCIP goes on in another way.
        """
        if work is not None:
            work.add_model(self.size)
            model.setParam("limits/time", max(0.01, work.wall_seconds()))
            counter = _counter(work, left)
            model.includeEventhdlr(counter, "work", "counts iterations of linear programs")
            with _interrupts_after(counter):
                model.optimize()
            return
        while True:
            model.setParam("limits/time", model.getSolvingTime() + max(0.01, min(_SLICE, left())))
            model.optimize()
            if model.getStatus() != "timelimit" or left() <= 0:
                return

    def _build(self) -> tuple[Any, list[Any], float, float]:
        """The model, its x [strategies] (None for those left out), the cost at 0, the cost of one unit."""
        flat, scip = self.flat, import_module("pyscipopt")
        minima = np.minimum.reduceat(self._own, flat.first[:-1])
        of_edges = np.minimum.reduceat(self._table, flat.table_first[:-1]) if len(flat.ends) else np.zeros(0)
        base = flat.constant + float(minima.sum() + of_edges.sum())
        scale = max(abs(base), float(np.abs(self._own).max()))
        unit = max(self.cutoff - base, _LEAST_UNIT * scale) if self.cutoff < math.inf else scale or 1.0
        model = scip.Model()
        model.hideOutput()
        model.setParam("parallel/maxnthreads", 1)
        model.setParam("misc/catchctrlc", False)
        model.setParam("limits/absgap", self.gap / unit)
        if self.cutoff < math.inf:
            model.setObjlimit((self.cutoff - base) / unit)
        costs = (self._own - minima[flat.owner]) / unit
        x = [
            model.addVar(vtype="B", obj=cost) if permitted else None
            for cost, permitted in zip(costs.tolist(), self._strategies.tolist(), strict=True)
        ]
        for node in range(flat.nodes):
            variables = x[flat.first[node] : flat.first[node + 1]]
            model.addCons(scip.quicksum(v for v in variables if v is not None) == 1)
        self._add_pairs(model, scip.quicksum, x, (self._table - of_edges[flat.pairs[0]]) / unit)
        _add_limit(model, scip.quicksum, flat, x)
        return model, x, base, unit

    def _add_pairs(self, model: Any, quicksum: Any, x: list[Any], costs: Floats) -> None:
        """A y for every pair, and one row for every strategy at every end of an edge."""
        flat = self.flat
        edge, row, column = flat.pairs
        lower, upper = flat.first[flat.ends[edge, 0]] + row, flat.first[flat.ends[edge, 1]] + column
        partners: dict[tuple[int, int], list[Any]] = {}
        for e, (u, v) in enumerate(flat.ends.tolist()):
            for strategy in (*range(*flat.first[u : u + 2]), *range(*flat.first[v : v + 2])):
                partners[e, strategy] = []
        permitted = self._pairs & self._strategies[lower] & self._strategies[upper]
        for pair in np.flatnonzero(permitted).tolist():
            y = model.addVar(vtype="C", lb=0.0, obj=float(costs[pair]))
            partners[int(edge[pair]), int(lower[pair])].append(y)
            partners[int(edge[pair]), int(upper[pair])].append(y)
        for (_, strategy), pairs in partners.items():
            if x[strategy] is not None:
                model.addCons(quicksum(pairs) == x[strategy])


def _counter(work: Work, left: Callable[[], float]) -> Any:
    """A handler of events of SCIP that counts iterations, and interrupts SCIP when no work is left.

    It is called after linear programs, and for every cut that is added to one.

    Attributes:
        interrupted: whether SCIP is to be interrupted for another reason; any code may set it.
    """
    scip = import_module("pyscipopt")
    kinds = scip.SCIP_EVENTTYPE
    events = kinds.FIRSTLPSOLVED | kinds.LPSOLVED | kinds.NODESOLVED | kinds.ROWADDEDLP

    class Counter(scip.Eventhdlr):  # type: ignore[name-defined, misc]  # pyscipopt is imported where it is used
        interrupted = False
        seen = 0

        def eventinit(self) -> None:
            self.model.catchEvent(events, self)

        def eventexit(self) -> None:
            self.model.dropEvent(events, self)

        def eventexec(self, event: Any) -> None:
            done = self.model.getNLPIterations() + self.model.getNStrongbranchLPIterations()
            work.add_iterations(done - self.seen)
            self.seen = done
            if self.interrupted or left() <= 0:
                self.model.interruptSolve()

    return Counter()


@contextmanager
def _interrupts_after(counter: Any) -> Iterator[None]:
    """Inside, Ctrl-C interrupts SCIP by its counter; what Ctrl-C does otherwise follows at the end.

    An exception in the middle of a callback would be swallowed, or become an error of SCIP: pyscipopt calls
    Python between events, too. Nothing changes outside of the main thread, or where Ctrl-C calls no function.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    frames: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        frames.append(frame)
        counter.interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if frames:
            before(signal.SIGINT, frames[0])


def _add_limit(model: Any, quicksum: Any, flat: Flat, x: list[Any]) -> None:
    """One row for each time, in units of its room where there is any."""
    for t, room in enumerate(flat.room.tolist()):
        alive = np.flatnonzero((flat.span[:, 0] <= t) & (t < flat.span[:, 1])).tolist()
        unit = room if room > 0 else 1.0
        terms = []
        for use in alive:
            amounts = flat.amount[flat.amount_first[use] : flat.amount_first[use + 1]].tolist()
            variables = x[flat.first[flat.user[use]] : flat.first[flat.user[use] + 1]]
            terms += [a / unit * v for a, v in zip(amounts, variables, strict=True) if a and v is not None]
        if terms:
            model.addCons(quicksum(terms) <= room / unit)
