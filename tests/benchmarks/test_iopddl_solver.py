"""The contest's solver: search tree, second process and SCIP agree, and what goes wrong is said."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.paths import DATA
from support.search.layout_problems import brute_force, hard_problem, random_problem

from benchmarks.support.iopddl_reader import read_contest
from benchmarks.support.iopddl_solver.branch_and_bound import Tree
from benchmarks.support.iopddl_solver.large_neighbourhood import Neighbourhoods
from benchmarks.support.iopddl_solver.search import solve
from benchmarks.support.iopddl_solver.search_process import Job, Worker
from benchmarks.support.iopddl_solver.subproblem import PartDual, Subproblem, restrict
from distgraph.errors import GraphError
from distgraph.passes.search.solver import solve as solve_layouts
from distgraph.passes.search.solver.incumbent import Incumbent
from distgraph.passes.search.solver.reduced_problem import Network

DATA = DATA / "iopddl"


@pytest.mark.parametrize("block", range(10))
def test_optimum_equals_brute_force(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        problem = random_problem(seed)
        expected = brute_force(problem)
        found = solve(problem, seconds=60)
        assert found.objective == pytest.approx(expected), seed
        assert found.status == ("infeasible" if math.isinf(expected) else "optimal"), seed
        assert found.choice is None or problem.feasible(found.choice)


def test_every_bound_on_a_part_of_a_problem_is_below_the_optimum() -> None:
    tight = 0
    for seed in range(300):
        problem = random_problem(seed)
        expected = brute_force(problem)
        if math.isinf(expected):
            continue
        flat = Subproblem.of(Network.of(problem))
        vectors, prices = np.zeros(flat.side_first[-1]), np.zeros(len(flat.room))
        state = restrict(flat, np.isfinite(flat.cost), vectors, prices)
        assert state is not None, seed
        if not state[0].nodes:
            continue
        dual = PartDual(*state)
        for _ in range(30):
            dual.step(expected)
            assert dual.bound <= expected + 1e-6, seed
            floor = np.minimum.reduceat(dual.least(), dual.flat.first[:-1])
            assert (floor <= expected + 1e-6).all(), seed
        tight += dual.bound > 0.9 * expected
    assert tight > 20


@pytest.mark.parametrize("name", ["B", "G"])
def test_contest_instances_are_solved_to_proved_optimality(name: str) -> None:
    best_known = {"B": 532843.0, "G": 217039.0}
    found = solve(read_contest(DATA / f"{name}.json.gz"), seconds=60)
    assert (found.objective, found.status) == (best_known[name], "optimal")


def test_interrupt_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = read_contest(DATA / "G.json.gz")
    see = Incumbent.see

    def interrupt(self: Incumbent, choice: tuple[int, ...]) -> bool:
        if see(self, choice):
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(Incumbent, "see", interrupt)
    found = solve(problem, seconds=60)
    assert found.status == "feasible"
    assert found.choice is not None
    assert problem.feasible(found.choice)
    assert found.bound <= 217039
    assert "interrupted" in found.message


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(GraphError, match="threads=0"):
        solve(hard_problem(), threads=0)


def test_one_and_two_processes_agree_on_a_problem_that_needs_branching() -> None:
    problem = hard_problem()
    one, two = (solve(problem, seconds=100, threads=threads) for threads in (1, 2))
    assert one.status == two.status == "optimal"
    assert one.objective == pytest.approx(two.objective)
    assert "tree" in one.seconds
    assert (one.message, two.message) == ("", "")


def test_scip_agrees_with_the_own_search() -> None:
    problem = hard_problem()
    exact, found = solve_layouts(problem, seconds=100), solve(problem, seconds=100)
    assert exact.status == found.status == "optimal"
    assert exact.objective == pytest.approx(found.objective)


@pytest.mark.parametrize("task", ["exact", "neighbourhoods"])
def test_a_second_process_sends_what_it_finds(task: Any) -> None:
    """From a bad choice to start with; what comes back is judged by the network itself."""
    flat = Subproblem.of(Network.of(hard_problem()))
    prices, vectors = np.zeros(len(flat.room)), np.zeros(flat.side_first[-1])
    bad = np.array([int(np.argmin(use[0].amounts)) for use in hard_problem().uses], dtype=np.int64)
    everything = np.ones(len(flat.cost), dtype=bool)
    assert flat.fits(bad)
    worker = Worker(Job(task, flat, vectors, prices, everything, bad, flat.objective(bad), 60.0, 0))
    try:
        found = worker.hear(60.0)
        assert worker.failure == ""
    finally:
        worker.close()
    choice = found[0].choice
    assert choice is not None
    assert flat.fits(choice)
    assert flat.objective(choice) < flat.objective(bad)
    assert found[0].ended == (task == "exact")


def test_the_seconds_of_a_search_are_those_of_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tree, "search", lambda *_: None)
    monkeypatch.setattr(Neighbourhoods, "improve", lambda *_: False)
    monkeypatch.setitem(sys.modules, "pyscipopt", None)
    found = solve(hard_problem(), seconds=1)
    assert found.status == "feasible"
    assert not found.cut


def test_scip_that_is_missing_is_said_and_does_not_stop_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyscipopt", None)
    found = solve(hard_problem(), seconds=100)
    assert found.status == "optimal"
    assert "pyscipopt cannot be imported" in found.message


def test_scip_that_is_killed_is_said_and_does_not_stop_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Worker):
        def __init__(self, job: Job) -> None:
            super().__init__(job)
            self._process.kill()
            self._process.wait()

    class OneNodeFirst(Tree):  # or it ends in its first turn
        def search(self, left: Callable[[], float], steps: int, visits: int = sys.maxsize) -> None:
            super().search(left, steps, visits if self.visited else 1)

    monkeypatch.setattr("benchmarks.support.iopddl_solver.parallel_search.Worker", Killed)
    monkeypatch.setattr("benchmarks.support.iopddl_solver.search.Tree", OneNodeFirst)
    found = solve(hard_problem(), seconds=30)  # of which the first turn is a part
    assert found.status == "optimal"
    assert "SCIP (pyscipopt) stopped with exit code -9" in found.message
