"""The search looks for the fastest layouts within a device's memory where the fastest ones do not fit."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.programs.search_cases import MESHES, SLOW, cost_model
from support.programs.searched import PROGRAMS, two_by_two

from distgraph import ops
from distgraph.engine.commands.plan_search import SearchOptions, search
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.layout_variants import Variant
from distgraph.engine.search_driver.search_space import Shape, pools_of, submeshes_of
from distgraph.passes.search.intra_op import memory_limit, solve_layouts
from distgraph.passes.search.intra_op.formulate import formulate
from distgraph.passes.search.intra_op.memory_limit import MemoryLimit, solve_within
from distgraph.passes.search.solver import solve
from distgraph.passes.search.solver.problem import Problem, Solution, Use
from distgraph.plan.constraints import SearchConstraints
from distgraph.tracing.tracer import Trace

pytestmark = pytest.mark.timeout(600)

GRID = Shape((("dp", 2), ("tp", 2)))


def variants_within(memory: str) -> tuple[tuple[Variant, ...], MemoryLimit]:
    """Layouts of a small GPT on all four devices, with this memory each."""
    cluster = two_by_two(memory=memory)
    costs = LayoutCosts(PROGRAMS["gpt"].compile_request(), cluster, pools_of(cluster))
    whole = submeshes_of(costs.pools)[-1]
    of_shape = 1, whole, GRID, "none"
    variants = (*costs.variants(*of_shape), *costs.variants_within_memory(*of_shape))
    return variants, costs.memory_limit(1, whole)


@pytest.mark.parametrize(("memory", "gain"), [("75.6 KiB", math.inf), ("88.6 KiB", 1.02)])
def test_the_fastest_layouts_that_fit(memory: str, gain: float) -> None:
    """Faster than those of every memory multiplier that fit, where any of these does."""
    variants, limit = variants_within(memory)
    within = [v for v in variants if v.memory_limit == limit]
    by_multiplier = [v for v in variants if v.memory_limit is None]
    assert len(within) == 1
    assert limit.needed(within[0].profile) <= limit.nbytes < limit.needed(by_multiplier[0].profile)
    fit = [v.profile.seconds(1) for v in by_multiplier if limit.needed(v.profile) <= limit.nbytes]
    assert min(fit, default=math.inf) >= gain * within[0].profile.seconds(1)
    assert within[0].profile.seconds(1) >= by_multiplier[0].profile.seconds(1)


def test_no_limit_where_the_fastest_layouts_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayoutCosts, "limited_variants", None)  # a call would fail
    variants, _ = variants_within("1 MiB")
    assert [v.memory_limit for v in variants] == [None]


def test_a_search_finds_a_faster_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its forecast, on devices where the fastest plan of multipliers alone is slower."""
    options = SearchOptions(
        seconds=3600.0, processes=1, constraints=SearchConstraints(stages=1, micro_batches=1)
    )
    monkeypatch.setattr(solve_layouts, "GAP", 0.02)  # the plans differ by more: no time for proofs
    cluster = two_by_two(memory="92 KiB")
    within = search(PROGRAMS["gpt"].compile_request(), cluster, options).forecast
    monkeypatch.setattr(LayoutCosts, "limited_variants", lambda *given: ())
    before = search(PROGRAMS["gpt"].compile_request(), cluster, options).forecast
    assert within is not None
    assert before is not None
    assert max(within.memory) <= 92 * 1024
    assert within.seconds < before.seconds


@pytest.mark.parametrize("speed", [SLOW, 1.0])
def test_equal_to_brute_force(speed: float) -> None:
    """At every limit: the least objective of all choices whose profile keeps it."""
    trace = Trace("chain")
    with trace.activate():
        x = trace.source("input", "x", (8, 4), "f32")
        w = trace.source("param", "w", (4, 6), "f32")
        graph = trace.finish({"y": ops.tanh(ops.matmul(x, w))})
    formulation = formulate(graph, MESHES[0], cost_model(speed))
    problem, one = formulation.problem, MemoryLimit(math.inf)
    every = itertools.product(*(range(len(costs)) for costs in problem.costs))
    possible = [choice for choice in every if math.isfinite(problem.objective(choice))]
    costs = np.array([problem.objective(choice) for choice in possible])
    needs = np.array([one.needed(formulation.profile(choice)) for choice in possible])
    for nbytes in np.unique(needs):
        limit = MemoryLimit(float(nbytes))
        solution = solve_within(formulation, problem, limit, lambda each: solve(each, seconds=30), _unchanged)
        assert solution.objective == pytest.approx(costs[needs <= nbytes].min(), rel=1e-9)
    least = MemoryLimit(float(needs.min()) - 1)
    assert solve_within(formulation, problem, least, solve, _unchanged).choice is None


def _unchanged(problem: Problem, solution: Solution) -> Solution:
    return solution


def test_only_choices_that_fit_are_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the better choice, whose profile may exceed the limit: then the first one stays."""
    needs = [9.0, 8.0, 8.5, 7.5]  # bytes of each of four choices
    formulation = SimpleNamespace(profile=lambda choice: [needs[choice[0]]])
    solutions = {8.0: (0, 5.0), 7.0: (1, 6.0)}  # bytes allowed -> (choice, objective)
    uses = ((Use(0, 1, np.full(4, 8.0)),),)
    problem = Problem("one", (np.zeros(4),), uses=uses, limit=8.0)
    monkeypatch.setattr(memory_limit, "limited_nodes", lambda formulation, problem, limit: problem)
    monkeypatch.setattr(memory_limit, "_with_copies", lambda formulation, nodes, limit: nodes)
    monkeypatch.setattr(memory_limit, "_solved", lambda problem, solve: solve(problem))
    monkeypatch.setattr(MemoryLimit, "needed", lambda limit, profile: profile[0])
    improved: list[float | None] = []

    def solve_at(within: Problem) -> Solution:
        assert within.limit is not None
        choice, objective = solutions[within.limit]
        return Solution((choice,), objective, 1.0, 0.8, "feasible")

    def improve(choice: int) -> Any:
        def improve_at(within: Problem, solution: Solution) -> Solution:
            improved.append(within.limit)
            return Solution((choice,), 2.0, 1.0, 0.5, "feasible")

        return improve_at

    limit = MemoryLimit(8.0)
    assert solve_within(formulation, problem, limit, solve_at, improve(2)).objective == 6.0
    assert solve_within(formulation, problem, limit, solve_at, improve(3)).objective == 2.0
    assert improved == [7.0, 7.0]


@pytest.mark.parametrize("live", [1, 3])
def test_no_copies_are_added_where_nodes_alone_exceed_the_limit(
    live: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With copies the least uses are no lower, so that there is no choice in any case."""
    cluster = two_by_two(memory="1 MiB")
    costs = LayoutCosts(PROGRAMS["gpt"].compile_request(), cluster, pools_of(cluster))
    devices = tuple(range(4))
    formulation = costs.formulation(costs.layered_graph(1), devices, GRID)
    problem, one = formulation.problem, MemoryLimit(1.0, live=live)
    least = memory_limit.limited_nodes(formulation, problem, one).least_peak()[1]
    assert memory_limit.limited(formulation, problem, one).least_peak()[1] >= least
    too_little, enough = (MemoryLimit(part * least, live=live) for part in (0.999, 1.001))
    within = memory_limit.limited(formulation, problem, too_little)
    assert solve(within, seconds=30).status == "infeasible"
    solved: list[float | None] = []

    def solve_at(each: Problem) -> Solution:
        solved.append(each.limit)
        return solve(each, seconds=0.5)

    assert solve_within(formulation, problem, enough, solve_at, _unchanged).choice or solved
    monkeypatch.setattr(memory_limit, "_with_copies", None)  # a call would fail
    solved.clear()
    assert solve_within(formulation, problem, too_little, solve_at, _unchanged).choice is None
    assert not solved


def test_rough_solutions_lead_to_choices_that_fit_and_are_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hardly any choice fits: the objective of precise solutions from the start, up to the gap of a
    rough one; elsewhere nothing is solved roughly."""
    cluster = two_by_two(memory="1 MiB")
    costs = LayoutCosts(PROGRAMS["gpt"].compile_request(), cluster, pools_of(cluster))
    formulation = costs.formulation(costs.layered_graph(1), tuple(range(4)), GRID)
    problem, one = formulation.problem, MemoryLimit(1.0)
    least = memory_limit.limited_nodes(formulation, problem, one).least_peak()[1]
    rough = solve_layouts._solve_roughly
    solved: list[Problem] = []

    def solve_roughly(each: Problem) -> Solution:
        solved.append(each)
        return rough(each)

    monkeypatch.setattr(solve_layouts, "_solve_roughly", solve_roughly)
    for part, share in ((2.0, 0.97), (2.0, 0.4), (1.05, 0.97), (1.025, 0.97)):
        limit, tight = MemoryLimit(part * least), part * share < 1
        monkeypatch.setattr(memory_limit, "_TIGHT", share)
        precise = solve_within(
            formulation, problem, limit, solve_layouts.solve_briefly, solve_layouts.improve_solution
        )
        solved.clear()
        solution = solve_layouts.solve_with_limit(formulation, problem, limit)
        assert bool(solved) == tight
        assert (solution.choice is None) == (precise.choice is None) == (part < 1.03)
        if solution.choice is not None:
            assert limit.needed(formulation.profile(solution.choice)) <= limit.nbytes
            assert solution.objective <= precise.objective * (1.021 if tight else 1.0)
