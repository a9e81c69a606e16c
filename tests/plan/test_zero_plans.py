"""ZeRO as a decision of plans and of the search: forecast, chosen, stored, trained as on one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.programs.searched import CHAIN, SECONDS, two_by_two
from support.search.plan_training import trains_as_one_rank

from distgraph.engine.commands.plan_search import SearchOptions, search
from distgraph.engine.search_driver.candidate import BuiltCandidate, plan_of
from distgraph.engine.search_driver.fixed_mesh_search import data_parallel
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.errors import GraphError
from distgraph.plan.constraints import SearchConstraints
from distgraph.plan.decisions import Decisions
from distgraph.plan.plan import Plan

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def programs() -> list[BuiltCandidate]:
    """Data parallelism on four devices with every level of ZeRO."""
    layout_costs = SearchState(CHAIN.compile_request(), two_by_two(), "auto", SECONDS).layout_costs
    found = [
        data_parallel(layout_costs, (0, 1, 2, 3), "data parallel", decisions=Decisions(zero=level))
        for level in range(4)
    ]
    plans = [replace(p, plan=plan_of(p, layout_costs)) for p in found if isinstance(p, BuiltCandidate)]
    assert len(plans) == 4
    return plans


def test_levels_need_less_memory_and_are_in_the_plan(programs: list[BuiltCandidate]) -> None:
    peaks = [program.forecast.peak_memory for program in programs]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[3] < peaks[1] < peaks[0]
    plans = [program.plan for program in programs if program.plan is not None]
    assert [plan.zero for plan in plans] == [0, 1, 2, 3]
    assert '"zero"' not in plans[0].text()
    assert "ZeRO: level 3" in str(plans[3])
    assert "zero" in str(plans[1].compare(plans[3]))
    with pytest.raises(GraphError, match="zero"):
        Plan.parse(plans[3].text().replace('"zero": 3', '"zero": 4'))


@pytest.mark.parametrize("level", [2, 3])
def test_a_plan_trains_with_the_passes_of_its_level(programs: list[BuiltCandidate], level: int) -> None:
    plan = programs[level].plan
    assert plan is not None
    again = Plan.parse(plan.text())
    assert again == plan
    trains_as_one_rank(CHAIN, again)
    engine = CHAIN.engine(plan=again, cluster=two_by_two())
    engine.prepare(CHAIN.data(1))
    assert engine.forecast().step_seconds == pytest.approx(programs[level].seconds, rel=1e-9)


def test_the_search_forecasts_levels_and_keeps_what_is_given() -> None:
    options = SearchOptions(seconds=SECONDS, processes=1, constraints=SearchConstraints(zero=2, stages=1))
    plan = search(CHAIN.compile_request(), two_by_two(), options)
    assert isinstance(plan.baselines["data parallel, ZeRO-1"], float)
    assert plan.zero <= 2
    assert not any("dp" in dim for t in plan.tensors.values() if t.kind == "param" for dim in t.spec.dims)
    assert "given: zero=2" in plan.explain("zero")


def test_where_plain_data_parallelism_fits_the_lowest_and_the_highest_level_are_forecast() -> None:
    options = SearchOptions(seconds=SECONDS, processes=1, constraints=SearchConstraints(stages=1))
    baselines = search(CHAIN.compile_request(), two_by_two(), options).baselines
    assert isinstance(baselines["data parallel"], float)
    assert isinstance(baselines["data parallel, ZeRO-1"], float)
    assert isinstance(baselines["data parallel, ZeRO-3"], float)
    assert "data parallel, ZeRO-2" not in baselines
