"""Local search with an injected evaluator: it ends at a local optimum and evaluates nothing twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from support.programs.searched import CHAIN, SECONDS, two_by_two
from support.search.plan_training import trains_as_one_rank

from distgraph.engine.search_driver import local_search as local_search_module
from distgraph.engine.search_driver.candidate import Candidate, StageChoice, build_candidate, plan_of
from distgraph.engine.search_driver.evaluations import Evaluation, Evaluations
from distgraph.engine.search_driver.local_search import evaluate_substituted_schedules, local_search
from distgraph.engine.search_driver.search_space import Shape
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.engine.search_driver.stage_search import pipeline_estimate
from distgraph.plan.plan import Plan

TWO = Shape((("dp", 2),))


@dataclass
class ByBorder:
    """An evaluator by which a step takes longer the farther the border of two stages is from a layer."""

    best_border: int
    processes: int = 1
    asked: list[Candidate] = field(default_factory=list)

    def evaluate(self, candidate: Candidate) -> Evaluation:
        self.asked.append(candidate)
        seconds = 1.0 + abs(candidate.stages[0].stop - self.best_border)
        return Evaluation("search", candidate, seconds, 1.0, 0.0, 1, {}, None)

    def evaluate_all(self, candidates: Sequence[Candidate], processes: int) -> list[Evaluation | None]:
        return [self.evaluate(candidate) for candidate in candidates]


def test_local_search_ends_where_the_evaluator_likes_no_neighbour_better() -> None:
    evaluator = ByBorder(best_border=4)
    state = SearchState(CHAIN.compile_request(), two_by_two(), "auto", SECONDS, evaluator=evaluator)
    stages = (StageChoice(0, 1, (0, 1), TWO), StageChoice(1, 5, (2, 3), TWO))
    start = Candidate("search", stages, "none", 1.0, micro_batches=2)
    state.record(evaluator.evaluate(start))
    events = list(local_search(state))
    assert state.best is not None
    best = state.best.candidate
    assert best is not None
    assert [(stage.first, stage.stop) for stage in best.stages] == [(0, 4), (4, 5)]
    assert state.best.seconds == 1.0
    assert best.micro_batches == start.micro_batches  # as fast with others, but not faster
    assert len(events) == len(evaluator.asked) - 1
    assert len({candidate.decisions for candidate in evaluator.asked}) == len(evaluator.asked)


@dataclass
class ByShape(ByBorder):
    """An evaluator by which a step is faster the more ranks hold the same samples."""

    def evaluate(self, candidate: Candidate) -> Evaluation:
        axes = dict(candidate.stages[0].shape.axes)
        return replace(super().evaluate(candidate), seconds=2.0 / axes.get("tp", 1))


def test_data_parallelism_is_a_start_with_other_shapes_of_its_mesh() -> None:
    evaluator = ByShape(best_border=0)
    state = SearchState(CHAIN.compile_request(), two_by_two(), "auto", SECONDS, evaluator=evaluator)
    state.record(Evaluation("data parallel", None, 2.0, 1.0, 0.0, 1, {}, None, rebuild=lambda costs: ""))
    list(local_search(state))
    assert state.best is not None
    assert state.best.candidate is not None
    assert dict(state.best.candidate.stages[0].shape.axes)["tp"] > 1
    evaluated = evaluator.asked[0]
    assert (evaluated.micro_batches, len(evaluated.stages)) == (1, 1)
    assert evaluated.stages[0].devices == state.layout_costs.devices


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_backward_part_hides_gradients_of_any_number_of_micro_batches(micro_batches: int) -> None:
    costs = SearchState(CHAIN.compile_request(), two_by_two(), "auto", SECONDS).layout_costs
    costs.variants(micro_batches, costs.submesh((0, 1)), TWO, "uniform")
    stage = StageChoice(0, len(costs.layered_graph(micro_batches).layers), (0, 1), TWO)
    candidate = Candidate("search", (stage,), "uniform", 1.0, micro_batches=micro_batches)
    estimate = pipeline_estimate(costs, candidate).seconds
    assert estimate == pytest.approx(build_candidate(candidate, costs).seconds, rel=0.08)


@dataclass
class ByVisits(ByBorder):
    """An evaluator by which a step is faster where stages are reached several times."""

    def evaluate(self, candidate: Candidate) -> Evaluation:
        return replace(super().evaluate(candidate), seconds=1.0 if candidate.interleaved else 2.0)


def test_stages_are_reached_twice_where_this_is_faster() -> None:
    evaluator = ByVisits(best_border=3)
    state = SearchState(CHAIN.compile_request(), two_by_two(), "auto", SECONDS, evaluator=evaluator)
    costs = state.layout_costs
    costs.variants(2, costs.submesh((0, 1)), TWO, "none")
    stages = (StageChoice(0, 3, (0, 1), TWO), StageChoice(3, 5, (2, 3), TWO))
    start = Candidate("search", stages, "none", 2.0, micro_batches=2)
    state.record(evaluator.evaluate(start))
    list(evaluate_substituted_schedules(state))
    assert state.best is not None
    best = state.best.candidate
    assert best is not None
    assert best.schedule == "interleaved-1f1b"
    assert [stage.devices for stage in best.stages] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    plan = Plan.parse(plan_of(build_candidate(best, costs), costs).text())
    assert [stage.mesh.members for stage in plan.stages] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    trains_as_one_rank(CHAIN, plan)


@dataclass
class Constant(ByBorder):
    """An evaluator that likes nothing better than anything else."""

    def evaluate(self, candidate: Candidate) -> Evaluation:
        return replace(super().evaluate(candidate), seconds=10.0)


def test_pipelines_under_other_schedules_are_tried_in_the_order_of_their_estimates() -> None:
    """Whatever their schedules are, so that the best of them rules out those of another schedule."""
    evaluator = Constant(best_border=3)
    state = SearchState(CHAIN.compile_request(), two_by_two(), "auto", SECONDS, evaluator=evaluator)
    costs = state.layout_costs
    costs.variants(2, costs.submesh((0, 1)), TWO, "none")
    for border in (2, 3):
        stages = (StageChoice(0, border, (0, 1), TWO), StageChoice(border, 5, (2, 3), TWO))
        state.record(evaluator.evaluate(Candidate("search", stages, "none", 2.0, micro_batches=2)))
    list(evaluate_substituted_schedules(state))
    tried = evaluator.asked[2:]
    assert {each.schedule for each in tried} == {"interleaved-1f1b", "zb-h1"}
    assert [each.estimate for each in tried] == sorted(each.estimate for each in tried)


def test_no_more_is_evaluated_ahead_than_local_search_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = Constant(best_border=3, processes=2)
    monkeypatch.setattr(local_search_module, "_MOST_OPS", 1)
    state = SearchState(CHAIN.compile_request(), two_by_two(), "auto", SECONDS, evaluator=evaluator)
    state.evaluations._most_seconds = math.inf
    stages = (StageChoice(0, 2, (0, 1), TWO), StageChoice(2, 5, (2, 3), TWO))
    start = evaluator.evaluate(Candidate("search", stages, "none", 1.0, micro_batches=2))
    state.record(replace(start, ops=1))
    assert len(list(local_search(state))) == 1
    assert len(evaluator.asked) == 2


def test_a_prefetched_evaluation_belongs_to_the_candidate_that_is_evaluated_later() -> None:
    """Its decisions are the same; the estimate may have changed meanwhile."""
    evaluator = ByBorder(best_border=2, processes=2)
    evaluations = Evaluations(evaluator, _most_seconds=math.inf)
    borders = [Candidate("search", (StageChoice(0, stop, (0, 1), TWO),), "none", 1.0) for stop in (1, 2)]
    evaluations.prefetch(borders)
    later = replace(borders[1], estimate=5.0)
    assert evaluations.evaluate(later).candidate == later
    assert evaluator.asked == borders
