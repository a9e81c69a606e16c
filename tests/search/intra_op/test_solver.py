"""The intra-operator solver against brute force, the contest's example, and what it says when it fails."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support.paths import DATA
from support.search.layout_problems import brute_force, cost_of, fits, hard_problem, random_problem

from benchmarks.support.iopddl_reader import problem_of, read_contest
from distgraph.errors import GraphError
from distgraph.passes.search.solver import scip_model, solve
from distgraph.passes.search.solver.flat_problem import Flat
from distgraph.passes.search.solver.incumbent import Incumbent
from distgraph.passes.search.solver.lagrangian_dual import Dual
from distgraph.passes.search.solver.problem import Problem, Use, gap_of
from distgraph.passes.search.solver.reduced_problem import Network
from distgraph.passes.search.solver.reductions import reduce_network
from distgraph.passes.search.solver.scip_model import ExactModel
from distgraph.passes.search.solver.work import Work

DATA = DATA / "iopddl"


@pytest.mark.parametrize("block", range(10))
def test_optimum_equals_brute_force(block: int) -> None:
    statuses = set()
    for seed in range(40 * block, 40 * block + 40):
        problem = random_problem(seed)
        expected = brute_force(problem)
        found = solve(problem, seconds=60)
        statuses.add(found.status)
        assert found.objective == pytest.approx(expected), seed
        if math.isinf(expected):
            assert (found.status, found.choice) == ("infeasible", None), seed
            continue
        assert found.status == "optimal", seed
        assert found.choice is not None
        assert problem.feasible(found.choice)
        assert problem.objective(found.choice) == pytest.approx(expected)
        assert found.bound <= expected * (1 + 1e-9)
    assert statuses == {"optimal", "infeasible"}


def least_of_network(network: Network, problem: Problem) -> float:
    """Least cost among the choices that a reduced network still has, judged on the problem itself."""
    if network.dead:
        return math.inf
    names = sorted(network.costs)
    best = math.inf
    for strategies in itertools.product(*(range(len(network.costs[name])) for name in names)):
        choice = network.expand(dict(zip(names, strategies, strict=True)))
        if problem.feasible(choice):
            best = min(best, problem.objective(choice))
    return best


def test_reductions_keep_the_optimum_and_shrink() -> None:
    nodes = left = 0
    for seed in range(400):
        problem = random_problem(seed)
        network = Network.of(problem)
        reduce_network(network)
        assert least_of_network(network, problem) == brute_force(problem), seed
        nodes += len(problem.costs)
        left += 0 if network.dead else len(network.costs)
    assert left < nodes / 4


def test_the_cost_of_a_reduced_choice_is_that_of_the_whole_choice() -> None:
    compared = 0
    for seed in range(400):
        problem = random_problem(seed)
        network = Network.of(problem)
        reduce_network(network)
        if network.dead:
            continue
        flat = Flat.of(network)
        names = sorted(network.costs)
        for strategies in itertools.product(*(range(len(network.costs[name])) for name in names)):
            choice = network.expand(dict(zip(names, strategies, strict=True)))
            reduced = np.array(strategies, dtype=np.int64)
            possible = math.isfinite(flat.objective(reduced)) and flat.fits(reduced)
            assert possible == problem.feasible(choice), seed
            if possible:
                assert flat.objective(reduced) == pytest.approx(problem.objective(choice))
                compared += 1
    assert compared > 200


def no_seconds() -> float:
    """For reductions that stop at arc consistency."""
    return 0.0


def test_every_bound_of_the_dual_and_of_single_strategies_is_below_the_optimum() -> None:
    tight = 0
    for seed in range(300):
        problem = random_problem(seed)
        expected = brute_force(problem)
        if math.isinf(expected):
            continue
        network = Network.of(problem)
        reduce_network(network, no_seconds)
        assert not network.dead, seed
        dual = Dual(Flat.of(network))
        for _ in range(30):
            dual.step(expected)
            assert dual.bound <= expected + 1e-6, seed
            floor = np.minimum.reduceat(dual.least(), dual.flat.first[:-1])
            assert (floor <= expected + 1e-6).all(), seed
            if len(dual.flat.ends):
                floor = np.minimum.reduceat(dual.least_of_pairs(), dual.flat.table_first[:-1])
                assert (floor <= expected + 1e-6).all(), seed
        tight += dual.bound > 0.9 * expected
    assert tight > 20


def test_bounds_of_strategies_and_pairs_are_below_every_choice_that_takes_them() -> None:
    compared = 0
    for seed in range(80):
        problem = random_problem(seed)
        network = Network.of(problem)
        reduce_network(network, no_seconds)
        if network.dead:
            continue
        flat, names = Flat.of(network), sorted(network.costs)
        dual = Dual(flat)
        for _ in range(20):
            dual.step(math.inf)
        least, pairs = dual.least(), dual.least_of_pairs()
        lower, upper = flat.ends.T
        width = flat.first[upper + 1] - flat.first[upper]
        for strategies in itertools.product(*(range(len(network.costs[name])) for name in names)):
            choice = network.expand(dict(zip(names, strategies, strict=True)))
            cost = cost_of(problem, choice)
            if math.isinf(cost) or not fits(problem, choice):
                continue
            taken = np.array(strategies, dtype=np.int64)
            assert (least[flat.first[:-1] + taken] <= cost + 1e-6).all(), seed
            entries = flat.table_first[:-1] + taken[lower] * width + taken[upper]
            assert (pairs[entries] <= cost + 1e-6).all(), seed
            compared += 1
    assert compared > 1000


def test_dives_and_forbidding_find_the_optimum_without_the_exact_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of most small problems; what is claimed about the others is true."""
    monkeypatch.setitem(sys.modules, "pyscipopt", None)
    proved = 0
    for seed in range(200):
        problem = random_problem(seed)
        expected, found = brute_force(problem), solve(problem, seconds=20)
        assert found.objective >= expected, seed
        assert found.bound <= expected * (1 + 1e-9), seed
        assert found.status != "infeasible" or math.isinf(expected), seed
        assert found.status != "optimal" or found.objective == pytest.approx(expected), seed
        proved += found.status in ("optimal", "infeasible")
    assert proved > 150


@pytest.mark.parametrize("name", ["B", "G"])
def test_contest_instances_are_solved_to_proved_optimality(name: str) -> None:
    best_known = {"B": 532843.0, "G": 217039.0}  # with a lower bound of as much, and of 217017
    problem = read_contest(DATA / f"{name}.json.gz")
    assert len(problem.costs) == 816
    found = solve(problem, seconds=60)
    assert found.choice is not None
    assert problem.feasible(found.choice)
    assert problem.objective(found.choice) == found.objective == best_known[name]
    assert found.status == "optimal"


def test_contest_example() -> None:
    problem = read_contest(DATA / "example.json")
    assert problem.objective((0, 1, 2, 0, 0)) == 495
    assert problem.objective((0, 0, 1, 1, 0)) == 415
    assert problem.peak((0, 0, 1, 1, 0)) == (50, 55.0)
    assert not problem.feasible((0, 0, 1, 1, 0))
    found = solve(problem, seconds=10)
    assert (found.choice, found.status) == ((0, 0, 2, 1, 0), "optimal")
    unlimited = json.loads((DATA / "example.json").read_text())
    unlimited["problem"]["usage_limit"] = None
    found = solve(problem_of(unlimited), seconds=10)
    assert (found.choice, found.objective) == ((0, 0, 1, 1, 0), 415)


def test_gzip_and_plain_files_are_the_same_problem(tmp_path: Path) -> None:
    packed = tmp_path / "example.json.gz"
    packed.write_bytes(gzip.compress((DATA / "example.json").read_bytes()))
    a, b = read_contest(DATA / "example.json"), read_contest(packed)
    assert (a.name, a.edges, a.limit) == (b.name, b.edges, b.limit)
    assert all((x == y).all() for x, y in zip(a.edge_costs, b.edge_costs, strict=True))


def held(*amounts: float) -> tuple[Use, ...]:
    return (Use(3, 5, np.array(amounts)),)


def test_infeasible_by_memory_names_the_time_and_the_units_missing() -> None:
    costs = (np.zeros(2), np.zeros(2))
    problem = Problem("p", costs, uses=(held(4, 6), held(7, 5)), limit=8.0)
    found = solve(problem, seconds=5)
    assert (found.status, found.time, found.missing) == ("infeasible", 3, 1.0)
    assert found.choice is None


def test_infeasible_by_memory_and_pairs_names_what_is_missing_at_least() -> None:
    """Each node alone could be small, but a pair forbids that both are: 4 + 5 fits, 4 + 7 and 6 + 5 do
    not."""
    table = np.array([[math.inf, 0.0], [0.0, 0.0]])
    problem = Problem("p", (np.zeros(2), np.zeros(2)), ((0, 1),), (table,), (held(4, 6), held(5, 7)), 9.0)
    found = solve(problem, seconds=5)
    assert (found.status, found.time, found.missing) == ("infeasible", 3, 2.0)


def test_why_nothing_fits_is_not_computed_where_nobody_asks() -> None:
    table = np.array([[math.inf, 0.0], [0.0, 0.0]])
    problem = Problem("p", (np.zeros(2), np.zeros(2)), ((0, 1),), (table,), (held(4, 6), held(5, 7)), 9.0)
    solution = solve(problem, seconds=5, explained=False)
    assert (solution.status, solution.time, solution.missing) == ("infeasible", None, 0.0)
    assert not solution.message
    assert "explain" not in solution.seconds


def test_infeasible_by_pairs_alone_names_no_time() -> None:
    problem = Problem("p", (np.zeros(1), np.zeros(1)), ((0, 1),), (np.array([[math.inf]]),))
    found = solve(problem, seconds=5)
    assert (found.status, found.time, found.missing) == ("infeasible", None, 0.0)
    assert "forbidden" in found.message


def test_no_seconds_gives_an_honest_answer() -> None:
    problem = read_contest(DATA / "example.json")
    found = solve(problem, seconds=0)
    assert found.status in ("feasible", "unknown")
    given = solve(problem, seconds=0, start=(0, 0, 2, 1, 0))
    assert (given.status, given.choice, given.objective) == ("feasible", (0, 0, 2, 1, 0), 445)
    assert given.bound < 445
    assert given.gap == pytest.approx(gap_of(445, given.bound))


def test_an_infeasible_start_is_not_returned() -> None:
    problem = read_contest(DATA / "example.json")
    found = solve(problem, seconds=0, start=(0, 0, 1, 1, 0))
    assert found.choice is None or problem.feasible(found.choice)


def test_incumbents_improve_and_are_feasible(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = read_contest(DATA / "G.json.gz")
    see, seen = Incumbent.see, []

    def watch(self: Incumbent, choice: tuple[int, ...]) -> bool:
        taken = see(self, choice)
        if taken:
            seen.append(self.solution())
        return taken

    monkeypatch.setattr(Incumbent, "see", watch)
    found = solve(problem, seconds=60)
    objectives = [s.objective for s in seen]
    assert objectives == sorted(objectives, reverse=True)
    assert objectives[-1] == found.objective
    assert all(problem.feasible(s.choice) and s.bound <= found.objective * (1 + 1e-9) for s in seen)


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


def test_an_interrupt_while_scip_runs_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal arrives in the middle of the first slice; one slice later the search has ended."""
    run = ExactModel.solve

    def interrupted(self: ExactModel, *given: Any) -> float:
        timer = signal.setitimer(signal.ITIMER_VIRTUAL, 0.05, 0.05)  # again, where the garbage collector runs
        assert timer == (0.0, 0.0)
        return run(self, *given)

    def interrupt(_: object, frame: FrameType | None) -> None:
        code = None if frame is None else frame.f_code  # Python ignores what callbacks raise
        if code is not None and code.co_name != "gc_callback" and not code.co_filename.endswith("weakref.py"):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.raise_signal(signal.SIGINT)

    problem = hard_problem(side=12)
    monkeypatch.setattr(ExactModel, "solve", interrupted)
    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        found = solve(problem, seconds=100)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert found.status == "feasible"
    assert found.choice is not None
    assert problem.feasible(found.choice)
    assert "interrupted" in found.message
    assert found.seconds["exact"] < 50


def test_an_interrupt_between_the_events_of_scip_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """SCIP calls Python before its first event: an exception there would be an error of SCIP."""
    make = scip_model._counter

    def interrupting(work: Work, left: Callable[[], float]) -> Any:
        counter = make(work, left)
        begin = counter.eventinit

        def eventinit() -> None:
            signal.raise_signal(signal.SIGINT)
            begin()

        counter.eventinit = eventinit
        return counter

    problem = hard_problem(side=12)
    monkeypatch.setattr(scip_model, "_counter", interrupting)
    found = solve(problem, seconds=100)
    assert found.status == "feasible"
    assert found.choice is not None
    assert problem.feasible(found.choice)
    assert "interrupted" in found.message


def test_a_problem_that_needs_branching_is_solved_by_scip() -> None:
    problem = hard_problem()
    found = solve(problem, seconds=100)
    assert (found.status, found.message) == ("optimal", "")
    assert "exact" in found.seconds


def whole_model(problem: Problem, cutoff: float) -> tuple[Flat, ExactModel]:
    """The exact model of a problem that is not reduced, its dual not improved."""
    flat = Flat.of(Network.of(problem))
    return flat, ExactModel(Dual(flat), cutoff, 0.0)


@pytest.mark.parametrize("cutoff", [math.inf, 1320.5, 1319.5])
def test_scip_finds_the_optimum_below_any_cutoff(cutoff: float) -> None:
    """The costs are integers and the optimum is 1320: what `solve` and the contest's search tree prove."""
    problem = hard_problem()
    assert solve(problem, seconds=100).objective == 1320.0
    flat, model = whole_model(problem, cutoff)
    seen: list[np.ndarray] = []
    assert model.solve(lambda: 100.0, seen.append) == math.inf
    below = [flat.objective(choice) for choice in seen if flat.objective(choice) < cutoff]
    assert below == ([] if cutoff < 1320.0 else [1320.0])
    assert all(flat.fits(choice) for choice in seen)


def test_scip_that_runs_out_of_time_gives_a_bound() -> None:
    _, model = whole_model(hard_problem(), math.inf)
    assert model.solve(lambda: 0.0, lambda _: None) <= 1320.0


def test_scip_that_is_missing_is_said_and_the_rest_of_the_search_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pyscipopt", None)
    problem = hard_problem()
    found = solve(problem, seconds=100)
    assert found.choice is not None
    assert problem.feasible(found.choice)
    assert found.bound <= 1320.0 <= found.objective <= 1.1 * 1320.0
    assert "pyscipopt cannot be imported" in found.message


def test_without_numba_the_loops_are_interpreted() -> None:
    program = f"""
import sys
sys.modules["numba"] = None
from benchmarks.support.iopddl_reader import read_contest
from distgraph.passes.search.solver import solve
found = solve(read_contest({str(DATA / "example.json")!r}), seconds=60)
print(found.choice, found.status)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(0, 0, 2, 1, 0) optimal"


def test_a_gap_ends_the_search() -> None:
    problem = read_contest(DATA / "G.json.gz")
    found = solve(problem, seconds=60, gap=0.2)
    assert found.gap <= 0.2
    assert found.bound <= 217039


def test_large_float_costs_do_not_lose_the_optimum() -> None:
    table = np.array([[3e9 + 0.25, 1.0], [1.0, 3e9]])
    problem = Problem("p", (np.array([5e9, 5e9 + 0.5]), np.array([0.0, 7e9])), ((0, 1),), (table,))
    assert solve(problem, seconds=5).choice == (1, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"costs": (np.zeros(0),)}, "p: costs of node 0 have shape"),
        ({"costs": (np.array([math.nan]),)}, "p: costs of node 0 hold nan"),
        (
            {"edges": ((0, 0),), "edge_costs": (np.zeros((2, 2)),)},
            r"p: edge \(0, 0\) must join two different",
        ),
        ({"edges": ((0, 1),), "edge_costs": (np.zeros((2, 2)),)}, r"shape \(2, 2\) but .* \(2, 3\)"),
        ({"edges": ((0, 1),)}, "1 edges but 0 arrays"),
        ({"uses": (held(1, 1),)}, "uses of 1 nodes but 2 nodes"),
        ({"uses": (held(1, -1), ())}, "use of node 0 is negative"),
        ({"uses": (held(1), ())}, "amounts of shape"),
        ({"uses": ((Use(4, 4, np.zeros(2)),), ())}, "lasts from 4 to 4"),
        ({"limit": math.inf}, "use None for no limit"),
        ({"labels": ("a",)}, "1 labels but 2 nodes"),
    ],
)
def test_malformed_problems_are_refused(fields: dict[str, Any], message: str) -> None:
    whole = {"name": "p", "costs": (np.zeros(2), np.zeros(3)), **fields}
    with pytest.raises(GraphError, match=message):
        Problem(**whole)


def test_bad_arguments_are_refused() -> None:
    problem = Problem("p", (np.zeros(2),), labels=("w1",))
    with pytest.raises(GraphError, match="seconds=-1"):
        solve(problem, seconds=-1)
    with pytest.raises(GraphError, match="w1 has 2 strategies"):
        problem.objective((2,))
    with pytest.raises(GraphError, match="a choice of 2 strategies for 1 nodes"):
        problem.feasible((0, 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("{}", "no entry 'problem'"),
        ('{"problem": {"nodes": {"costs": [[1, 2]], "intervals": [], "usages": []}}}', "no entry 'edges'"),
        (
            """{"problem": {"nodes": {"costs": [[1], [1]], "intervals": [], "usages": []},
                            "edges": {"nodes": [[0, 1]], "costs": [[1, 2]]}}}""",
            "2 costs, expected 1 x 1",
        ),
        (
            """{"problem": {"name": true, "edges": {"nodes": [], "costs": []},
                            "nodes": {"costs": [[1], [1]], "intervals": [[0, 1]], "usages": [[1]]}}}""",
            "bad.json: True: uses of 1 nodes but 2 nodes",
        ),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(GraphError, match=message):
        read_contest(file)
