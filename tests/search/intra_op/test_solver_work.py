"""The solver counts its work: its answer does not depend on how fast the clock runs beside it."""

from __future__ import annotations

import itertools
import warnings

import pytest
from support.search.layout_problems import hard_problem

from distgraph.passes.search.intra_op import solve_layouts
from distgraph.passes.search.solver import solve, work
from distgraph.passes.search.solver.problem import Solution


class Clock:
    """Time that passes by some seconds whenever somebody looks."""

    def __init__(self, step: float) -> None:
        self._times = itertools.count(0.0, step)

    def perf_counter(self) -> float:
        return next(self._times)


def solved(monkeypatch: pytest.MonkeyPatch, step: float, seconds: float) -> Solution:
    """A problem that is not solved within a little work."""
    monkeypatch.setattr(work, "time", Clock(step))
    return solve(hard_problem(side=12), seconds=seconds)


@pytest.mark.parametrize("seconds", [0.02, 0.1])
def test_the_answer_is_the_same_beside_any_load(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    idle, busy = (solved(monkeypatch, step, seconds) for step in (1e-9, 1e-3))
    assert idle.status == "feasible"
    assert (idle.choice, idle.objective, idle.bound) == (busy.choice, busy.objective, busy.bound)
    assert not idle.cut
    assert not busy.cut


def test_more_work_gives_a_better_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    little, more = (solved(monkeypatch, 0.0, seconds) for seconds in (0.05, 0.3))
    assert little.objective >= more.objective
    assert little.gap > more.gap


def test_the_wall_clock_is_the_last_resort_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = solved(monkeypatch, 1.0, 0.5)
    assert found.cut
    assert found.status in ("feasible", "unknown")
    assert "the wall clock ended the search before its work was done" in found.message


def test_a_search_warns_of_what_the_wall_clock_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = hard_problem(side=3)
    ended = Solution((0,) * len(problem.costs), 1.0, 1.0, 0.0, "feasible", message="the wall clock", cut=True)
    monkeypatch.setattr(solve_layouts, "solve_cached", lambda *given, **options: ended)
    with pytest.warns(RuntimeWarning, match="the wall clock"):
        solve_layouts.solve_problem(problem)
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not solve_layouts.solve_problem(problem).cut
