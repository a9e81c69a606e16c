"""What a plan says of a runner-up is what happens with it: the changed plan is compiled and forecast."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from support.programs.searched import PROGRAMS, Net, Program, finished_search, two_by_two

import distgraph as dg
from distgraph.engine.search_driver.candidate import plan_of
from distgraph.engine.search_driver.explain.whole_program import other_choices, with_choice
from distgraph.engine.search_driver.run_search import plan_of_search, run_search
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.errors import GraphError
from distgraph.ir.range_notation import unfold
from distgraph.plan.plan import Plan

pytestmark = pytest.mark.timeout(600)  # a search and a dozen programs in one test
MESH = dg.ProcessMesh.grid(dp=2, tp=2)
SEARCHES: dict[str, tuple[str, str, Any]] = {
    **{name: (name, "auto", None) for name in PROGRAMS},
    "annotated": ("mlp", "auto", lambda: Net(MESH)),
    "recursive": ("mlp", "recursive", None),
    "sharding_propagation": ("mlp", "sharding_propagation", lambda: Net(MESH)),
}


def program_of(name: str) -> tuple[Program, Any]:
    program, _, make = SEARCHES[name]
    return PROGRAMS[program], make or PROGRAMS[program].make


@cache
def searched(name: str) -> tuple[SearchState, Plan]:
    """A search with its plan, as it comes back from its text."""
    if name in PROGRAMS:
        state = finished_search(PROGRAMS[name])
    else:
        program, make = program_of(name)
        state = SearchState(program.compile_request(make()), two_by_two(), SEARCHES[name][1], 3600.0)
        for _ in run_search(state):
            pass
    return state, Plan.parse(plan_of_search(state, {}).text())


def seconds(name: str, plan: Plan) -> float:
    """Of a step, by the forecast of an engine that is given the plan."""
    program, make = program_of(name)
    engine = program.engine(make(), plan=plan, cluster=two_by_two())
    engine.prepare(program.data(1))
    return float(engine.forecast().step_seconds)


@pytest.mark.parametrize("name", SEARCHES)
def test_with_the_runner_up_a_step_takes_what_is_said(name: str) -> None:
    """The same graph is built and forecast in both, so that only rounding may differ."""
    _, plan = searched(name)
    assert plan.forecast is not None
    assert seconds(name, plan) == plan.forecast.seconds
    told = {key: d for key, d in plan.decisions.items() if d.runner_up_seconds is not None and d.instead}
    told = {key: decision for key, decision in told.items() if not key.startswith("layer ")}
    assert len(told) >= 3
    for key, decision in told.items():
        other = plan.instead(key)
        assert seconds(name, other) == pytest.approx(decision.runner_up_seconds, rel=1e-9)
        for tensor in unfold(key):
            assert str(plan.tensors[tensor].spec) == decision.chosen.partition(" and ")[0]
            assert str(other.tensors[tensor].spec) == decision.runner_up.partition(" and ")[0]
        more = decision.runner_up_seconds / plan.forecast.seconds - 1
        assert f"({more:+.2%})" in plan.explain(key)


@pytest.mark.parametrize("name", SEARCHES)
def test_every_parameter_is_explained(name: str) -> None:
    _, plan = searched(name)
    explained = {each for key in plan.decisions for each in unfold(key)}
    parameters = {tensor for tensor, stored in plan.tensors.items() if stored.kind == "param"}
    assert parameters <= explained
    for tensor in parameters:
        text = plan.explain(tensor)
        assert "chosen: " in text
        assert "compute" in text
        assert "communication" in text
        runner_up = next((line for line in text.split("\n") if line.startswith("  runner-up")), "in place of")
        assert "in place of" in runner_up or "the runner-up was not forecast" in text
    assert {"micro_batches", "stages", "recompute", "schedule"} <= set(plan.decisions)


@pytest.mark.parametrize("name", SEARCHES)
def test_runners_up_of_the_whole_program_differ_in_one_choice(name: str) -> None:
    """Of micro-batches, stages, recomputation and schedule: a program that was forecast, and that
    is as the best in all other choices."""
    state, plan = searched(name)
    assert state.best is not None
    best = state.best.choices
    for key in ("micro_batches", "stages", "recompute", "schedule"):
        decision = plan.decisions[key]
        if decision.runner_up_seconds is None:
            assert "nothing that differs in this alone and fits was forecast" in decision.note
            continue
        assert decision.chosen == best[key] != decision.runner_up
        assert "differs in this alone" in decision.note
        if decision.note.startswith("the runner-up is the best program of the search"):
            same = [e for e in state.evaluations.all if e.seconds == decision.runner_up_seconds]
            assert any(
                all(
                    e.choices[k] == best[k]
                    for k in best
                    if k != key and not (k == "schedule" and single_stage(best, e.choices))
                )
                for e in same
            )
        with pytest.raises(GraphError, match=rf"does not say what '{key}' would be instead; it does of"):
            plan.instead(key)


def single_stage(*programs: Mapping[str, str]) -> bool:
    """Whether one of these has a single stage, which has no schedule."""
    return any("; " not in choices["stages"] for choices in programs)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_another_choice_is_the_plan_with_one_field_changed(name: str) -> None:
    """Its program is built and forecast; nothing but the decision differs in its plan."""
    state, _ = searched(name)
    assert state.best is not None
    best, costs = state.best.built(state.layout_costs), state.layout_costs
    plan, told = plan_of(best, costs), state.explainer.decisions
    names = set()
    for choice in other_choices(best, costs):
        other = with_choice(best, choice, costs)
        if other is None:
            continue
        names.add(choice.name)
        texts = plan_of(other, costs).texts()
        assert [key for key, text in plan.texts().items() if texts[key] != text] == [choice.name]
        assert plan_of(other, costs).stages == plan.stages
        assert told[choice.name].runner_up_seconds is not None
        assert other.seconds >= best.seconds
        assert told[choice.name].runner_up_seconds <= other.seconds or not other.fits
    assert "micro_batches" in names
    assert "recompute" in names


def test_annotated_parameters_say_where() -> None:
    _, plan = searched("annotated")
    assert str(plan.tensors["first.weight"].spec) == "[_, tp]"
    assert "annotated (" in plan.explain("first.weight")
    assert "searched.py" in plan.explain("first.weight")
    assert "annotated (" not in plan.explain("second.weight")
