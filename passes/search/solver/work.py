"""The work of the solver, counted instead of timed: the same problem ends at the same point beside any load.

Work is counted in seconds that it takes on a core at some speed, from what it consists of: entries of tables
that are read, steps, iterations of linear programs. The constants are measured, and rounded: only that all
parts are in proportion matters. The wall clock is a last resort that says when it ends a search.
"""

from __future__ import annotations

import time

__all__ = ["Work"]

_ENTRY, _STEP = 6e-9, 1e-4
"""Seconds of an entry of a table in a pass of the dual, and of the pass itself."""
_DOMINANCE, _NODE = 14e-9, 6e-5
"""Seconds of comparing two strategies in an entry of a table in the reductions, and of looking at a node."""
_PAIR, _ITERATION = 5e-5, 5e-4
"""Seconds of building and presolving a model of SCIP, for each pair of it, and of all that it does between
two iterations of linear programs."""
_RESERVE = 0.02  # of the seconds, for what is under way when they are over
_LOAD = 20.0
"""How many times the seconds may pass on the wall clock before it ends a search: a machine may be busy."""
_LEAST_WALL = 20.0
"""Seconds on the wall clock that a search may take in any case, such as for compiling loops."""


class Work:
    """Counts the work of one search, within a budget.

    Args:
        budget: seconds of work; a small part is kept for what is under way when they are over.

    Attributes:
        cut: whether the wall clock has ended the search.
    """

    def __init__(self, budget: float) -> None:
        self.budget, self.cut = (1 - _RESERVE) * budget, False
        self._seconds = 0.0
        self._end = time.perf_counter() + max(_LOAD * budget, _LEAST_WALL)

    @property
    def seconds(self) -> float:
        """Seconds of work until now."""
        return self._seconds

    def left(self) -> float:
        """Seconds of work that are left; none where the wall clock has ended the search."""
        self.cut = self.cut or time.perf_counter() > self._end
        return 0.0 if self.cut else self.budget - self.seconds

    def wall_seconds(self) -> float:
        """Seconds on the wall clock until it ends the search."""
        return max(0.0, self._end - time.perf_counter())

    def add_pass(self, entries: int) -> None:
        """Count passes of the dual over some entries of tables."""
        self._seconds += _STEP + _ENTRY * entries

    def add_node(self, comparisons: int) -> None:
        """Count a node that the reductions look at."""
        self._seconds += _NODE + _DOMINANCE * comparisons

    def add_model(self, pairs: int) -> None:
        """Count that SCIP begins with a model of some pairs."""
        self._seconds += _PAIR * pairs

    def add_iterations(self, iterations: int) -> None:
        """Count iterations of linear programs of SCIP."""
        self._seconds += _ITERATION * iterations
