"""Estimates of pipelines know where stages are; local search reshapes, merges and divides stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from support.programs.searched import CHAIN, SECONDS, two_by_two

from distgraph.engine.search_driver.candidate import Candidate, StageChoice, build_candidate
from distgraph.engine.search_driver.evaluations import Evaluation
from distgraph.engine.search_driver.local_search import local_search, stage_moves
from distgraph.engine.search_driver.search_space import Shape, submeshes_of
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.engine.search_driver.stage_search import pipeline_estimate, transfer_seconds
from distgraph.passes.search.inter_op.submesh_placement import SubMesh

ONE, TWO, FOUR = (Shape((("dp", size),)) for size in (1, 2, 4))


@pytest.fixture(scope="module")
def state() -> SearchState:
    return SearchState(CHAIN.compile_request(), two_by_two(), "auto", SECONDS)


def pipeline(*stages: StageChoice) -> Candidate:
    return Candidate("search", stages, "none", 1.0, micro_batches=2)


def test_borders_are_priced_where_stages_are(state: SearchState) -> None:
    """Devices 0 and 1 are in one machine, 2 and 3 in the other."""
    inside, across = (
        pipeline(StageChoice(0, 2, (0,), ONE), StageChoice(2, 5, (other,), ONE)) for other in (1, 2)
    )
    estimates = [pipeline_estimate(state.layout_costs, each).seconds for each in (inside, across)]
    forecasts = [build_candidate(each, state.layout_costs).seconds for each in (inside, across)]
    assert estimates[0] < estimates[1]
    assert estimates == pytest.approx(forecasts, rel=0.1)
    (near, held_near), (far, held_far) = (
        transfer_seconds(state.layout_costs, 2, [SubMesh((1,)), SubMesh((2,))], apart)
        for apart in (False, True)
    )
    assert (near[:-1, 0] < far[:-1, 0]).all()
    assert (2 * held_far[:-1, 0] <= far[:-1, 0]).all()  # each way over its own link
    assert (held_near[:-1, 0] > 0).all()
    assert (near[:, 1] == far[:, 1]).all()  # two stages of two devices are in two machines anyway


def test_moves_change_the_stages(state: SearchState) -> None:
    given = pipeline(StageChoice(0, 2, (0, 1), TWO), StageChoice(2, 5, (2, 3), TWO))
    found = list(stage_moves(given, state.layout_costs, submeshes_of(state.layout_costs.pools)))
    merged = [each for each in found if len(each.stages) == 1]
    assert {str(each.stages[0].shape) for each in merged} >= {"dp=4", "dp=2 x tp=2"}
    assert {(each.stages[0].first, each.stages[0].stop, each.stages[0].devices) for each in merged} == {
        (0, 5, (0, 1, 2, 3))
    }
    divided = {
        tuple((s.first, s.stop, s.devices) for s in each.stages) for each in found if len(each.stages) == 3
    }
    assert divided == {
        ((0, 1, (0,)), (1, 2, (1,)), (2, 5, (2, 3))),
        ((0, 2, (0, 1)), (2, 3, (2,)), (3, 5, (3,))),
    }
    assert {each.restriction for each in found} == {"none", "uniform", "zero1", "zero3"}
    (whole,) = {each.stages[0] for each in merged if each.stages[0].shape == FOUR}
    again = list(stage_moves(pipeline(whole), state.layout_costs, submeshes_of(state.layout_costs.pools)))
    assert {str(each.stages[0].shape) for each in again if len(each.stages) == 1} >= {"dp=4", "dp=2 x tp=2"}


@dataclass
class ByStages:
    """An evaluator that likes few stages, and baselines of one stage least of all their kind."""

    processes: int = 1
    asked: list[Candidate] = field(default_factory=list)

    def evaluate(self, candidate: Candidate) -> Evaluation:
        self.asked.append(candidate)
        seconds = float(len(candidate.stages)) + (candidate.restriction == "none")
        return Evaluation(candidate.origin, candidate, seconds, 1.0, 0.0, 1, {}, None)

    def evaluate_all(self, candidates: Sequence[Candidate], processes: int) -> list[Evaluation | None]:
        return [self.evaluate(candidate) for candidate in candidates]


def test_local_search_starts_from_baselines_too() -> None:
    evaluator = ByStages()
    state = SearchState(CHAIN.compile_request(), two_by_two(), "auto", SECONDS, evaluator=evaluator)
    stages = (StageChoice(0, 2, (0, 1), TWO), StageChoice(2, 5, (2, 3), TWO))
    state.record(evaluator.evaluate(replace(pipeline(*stages), origin="uniform, without ZeRO: dp=2")))
    for _ in local_search(state):
        pass
    assert state.best is not None
    assert state.best.candidate is not None
    assert len(state.best.candidate.stages) == 1
    assert state.best.candidate.restriction != "none"
