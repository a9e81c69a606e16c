"""The intra-operator solver against brute force, the contest's example, and what it says when it fails."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.paths import DATA

from benchmarks.support.iopddl_reader import problem_of, read_contest
from distgraph.errors import GraphError
from distgraph.passes.search.solver import solve
from distgraph.passes.search.solver.flat_problem import Flat
from distgraph.passes.search.solver.lagrangian_dual import Dual
from distgraph.passes.search.solver.problem import Problem, Use, gap_of
from distgraph.passes.search.solver.reduced_problem import Network
from distgraph.passes.search.solver.reductions import reduce_network
from distgraph.passes.search.solver.scip_model import solve_exactly
from distgraph.passes.search.solver.search_process import Job, Worker
from distgraph.passes.search.solver.subproblem import restrict

DATA = DATA / "iopddl"


def random_problem(seed: int) -> Problem:
    """2 to 7 nodes of 1 to 4 strategies; some forbidden; chains, stars, cycles; memory more or less tight."""
    random = np.random.default_rng(seed)
    nodes = int(random.integers(2, 8))
    sizes = random.integers(1, 5, size=nodes)
    forbidding = random.choice([0.0, 0.2, 0.5])

    def costs(*shape: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        numbers = random.integers(0, random.choice([3, 40]), size=shape).astype(np.float64)
        numbers[random.random(shape) < forbidding] = math.inf
        return numbers

    pairs = list(itertools.combinations(range(nodes), 2))
    chosen = random.random(len(pairs)) < random.choice([0.3, 0.6])
    edges = [
        (u, v) if random.random() < 0.5 else (v, u)
        for (u, v), take in zip(pairs, chosen, strict=True)
        if take
    ]
    edges += [edges[0]] if edges and random.random() < 0.2 else []  # a parallel edge
    tables = [costs(int(sizes[u]), int(sizes[v])) for u, v in edges]
    if edges and random.random() < 0.4:  # a follower: one permitted pair in each row
        u, v = edges[0]
        tables[0] = np.full((sizes[u], sizes[v]), math.inf)
        tables[0][np.arange(sizes[u]), random.integers(0, sizes[v], size=sizes[u])] = 1.0
    uses = []
    for size in sizes:
        own = []
        for _ in range(int(random.integers(0, 3))):
            begin = int(random.integers(0, 8))
            own.append(
                Use(begin, begin + int(random.integers(1, 6)), random.integers(0, 9, size).astype(float))
            )
        uses.append(tuple(own))
    limit = None if random.random() < 0.25 else float(random.integers(2, 25))
    node_costs = tuple(
        np.where(np.isinf(c := costs(int(k))), random.choice([1.0, math.inf]), c) for k in sizes
    )
    return Problem(f"random{seed}", node_costs, tuple(edges), tuple(tables), tuple(uses), limit)


def brute_force(problem: Problem) -> float:
    """Least cost by looking at every choice; costs and memory are summed here anew."""
    best = math.inf
    times = range(16)
    for choice in itertools.product(*(range(len(c)) for c in problem.costs)):
        cost = sum(c[s] for c, s in zip(problem.costs, choice, strict=True))
        cost += sum(
            t[choice[u], choice[v]] for (u, v), t in zip(problem.edges, problem.edge_costs, strict=True)
        )
        if cost >= best:
            continue
        used = [
            sum(
                use.amounts[s]
                for own, s in zip(problem.uses, choice, strict=True)
                for use in own
                if use.start <= t < use.stop
            )
            for t in times
        ]
        if problem.limit is None or max(used) <= problem.limit:
            best = float(cost)
    return best


@pytest.mark.parametrize("block", range(10))
def test_optimum_equals_brute_force(block: int) -> None:
    statuses = set()
    for seed in range(40 * block, 40 * block + 40):
        problem = random_problem(seed)
        expected = brute_force(problem)
        found = solve(problem, seconds=20)
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


def test_every_bound_of_the_dual_and_of_single_strategies_is_below_the_optimum() -> None:
    tight = 0
    for seed in range(300):
        problem = random_problem(seed)
        expected = brute_force(problem)
        if math.isinf(expected):
            continue
        flat = Flat.of(Network.of(problem))
        vectors, prices = np.zeros(flat.side_first[-1]), np.zeros(len(flat.room))
        state = restrict(flat, np.isfinite(flat.cost), vectors, prices)
        assert state is not None, seed
        if not state[0].nodes:
            continue
        dual = Dual(*state)
        for _ in range(30):
            dual.step(expected)
            assert dual.bound <= expected + 1e-6, seed
            floor = np.minimum.reduceat(dual.least(), dual.flat.first[:-1])
            assert (floor <= expected + 1e-6).all(), seed
        tight += dual.bound > 0.9 * expected
    assert tight > 20


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


def test_incumbents_improve_and_are_feasible() -> None:
    problem = read_contest(DATA / "G.json.gz")
    seen = []
    found = solve(problem, seconds=60, on_incumbent=seen.append)
    objectives = [s.objective for s in seen]
    assert objectives == sorted(objectives, reverse=True)
    assert objectives[-1] == found.objective
    assert all(problem.feasible(s.choice) and s.bound <= found.objective * (1 + 1e-9) for s in seen)


def test_interrupt_returns_the_best_so_far() -> None:
    problem = read_contest(DATA / "G.json.gz")

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    found = solve(problem, seconds=60, on_incumbent=interrupt)
    assert found.status == "feasible"
    assert found.choice is not None
    assert problem.feasible(found.choice)
    assert found.bound <= 217039
    assert "interrupted" in found.message


def hard_problem() -> Problem:
    """A grid with tight memory, which neither reductions nor the first bounds decide."""
    random = np.random.default_rng(3)
    side, strategies = 6, 5
    node = np.arange(side * side).reshape(side, side)
    edges = [*zip(node[:, :-1].ravel().tolist(), node[:, 1:].ravel().tolist(), strict=True)]
    edges += [*zip(node[:-1].ravel().tolist(), node[1:].ravel().tolist(), strict=True)]
    costs = tuple(random.integers(0, 50, strategies).astype(float) for _ in range(side * side))
    tables = tuple(random.integers(0, 50, (strategies, strategies)).astype(float) for _ in edges)
    uses = tuple((Use(0, 1, random.integers(0, 50, strategies).astype(float)),) for _ in costs)
    return Problem("hard", costs, tuple(edges), tables, uses, limit=600.0)


def test_one_and_two_processes_agree_on_a_problem_that_needs_branching() -> None:
    problem = hard_problem()
    one, two = (solve(problem, seconds=100, threads=threads) for threads in (1, 2))
    assert one.status == two.status == "optimal"
    assert one.objective == pytest.approx(two.objective)
    assert "tree" in one.seconds
    assert (one.message, two.message) == ("", "")


def test_scip_agrees_with_the_own_search() -> None:
    problem = hard_problem()
    network = Network.of(problem)
    reduce_network(network)
    flat = Flat.of(network)
    choice, bound, ended = solve_exactly(flat, 100.0)
    found = solve(problem, seconds=100)
    assert ended
    assert choice is not None
    assert flat.objective(choice) == pytest.approx(found.objective)
    assert bound == pytest.approx(found.objective)


@pytest.mark.parametrize("task", ["exact", "neighbourhoods"])
def test_a_second_process_sends_what_it_finds(task: Any) -> None:
    """From a bad choice to start with; what comes back is judged by the network itself."""
    flat = Flat.of(Network.of(hard_problem()))
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

    monkeypatch.setattr("distgraph.passes.search.solver.parallel_search.Worker", Killed)
    module = sys.modules["distgraph.passes.search.solver.solve"]
    monkeypatch.setattr(module, "_SHORTEST", 0.05)  # or the tree ends in its first turn
    monkeypatch.setattr(module, "_TURN_SHARE", 0.0)
    found = solve(hard_problem(), seconds=100)
    assert found.status == "optimal"
    assert "SCIP (pyscipopt) stopped with exit code -9" in found.message


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
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(GraphError, match=message):
        read_contest(file)
