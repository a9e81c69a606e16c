"""What a plan says of the runner-up of a layer is what happens with it: it is compiled and forecast."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.files.clusters import cluster_of
from support.programs.searched import PROGRAMS, Net, Program, finished_search, slow, two_by_two
from support.search.distant_machines import WIDE, far

import distgraph as dg
from distgraph import nn
from distgraph.engine.search_driver.candidate import BuiltCandidate, Candidate, build_candidate
from distgraph.engine.search_driver.evaluations import evaluate, evaluation_of
from distgraph.engine.search_driver.explain.runners_up import Explainer
from distgraph.engine.search_driver.run_search import plan_of_search, run_search
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.ir.range_notation import parse_spans, unfold
from distgraph.models import GPT, GPTConfig
from distgraph.plan.constraints import FREE, SearchConstraints
from distgraph.plan.plan import Decision, Plan
from distgraph.resources import Cluster

pytestmark = pytest.mark.timeout(600)  # a search and a dozen programs in one test
MESH = dg.ProcessMesh.grid(dp=2, tp=2)


def five_blocks() -> GPT:
    return GPT(GPTConfig(hidden=16, layers=5, heads=2, vocabulary=12, sequence=6, dtype="f64"))


def far_pairs() -> Cluster:
    """Two machines of two devices, far from each other."""
    document = slow(2, 2)
    for machine in document["machines"]:
        machine["nics"]["latency"] = "200 us"
    return cluster_of(document)


class Row(nn.Module):
    """Three linear layers, each on a device of its own."""

    def __init__(self, meshes: Sequence[dg.ProcessMesh]) -> None:
        self.layers = [
            nn.Linear(16, 16, dtype="f64"),
            nn.Linear(16, 40, dtype="f64"),
            nn.Linear(40, 6, dtype="f64"),
        ]
        self.meshes = meshes

    def forward(self, x: Any) -> Any:
        for mesh, layer in zip(self.meshes, self.layers, strict=True):
            with dg.on(mesh):
                x = layer(x)
        return x


def in_a_row() -> Row:
    return Row([dg.ProcessMesh([rank], ["dp"]) for rank in range(3)])


ROW = Program(in_a_row, (16,), (), batch=6)
Case = tuple[Program, Callable[[], Any], Callable[[], Cluster], str]
GIVEN = {"unequal stages": SearchConstraints(stages=2, micro_batches=4)}
"""Four layers and three: else one stage is faster."""
CASES: dict[str, Case] = {
    "one mesh": (PROGRAMS["mlp"], PROGRAMS["mlp"].make, two_by_two, "auto"),
    "two stages": (WIDE, WIDE.make, lambda: far("20 us"), "auto"),
    "unequal stages": (
        Program(five_blocks, (6,), (6,), tokens=True, batch=16),
        five_blocks,
        far_pairs,
        "auto",
    ),
    "annotated": (PROGRAMS["mlp"], lambda: Net(MESH), two_by_two, "auto"),
    "recursive": (PROGRAMS["mlp"], PROGRAMS["mlp"].make, two_by_two, "recursive"),
}


def state_of(name: str) -> SearchState:
    program, make, cluster, mode = CASES[name]
    constraints = GIVEN.get(name, FREE)
    return SearchState(program.compile_request(make()), cluster(), mode, 3600.0, constraints=constraints)


@cache
def searched(name: str) -> tuple[SearchState, Plan]:
    """A search with its plan, as it comes back from its text."""
    if name == "one mesh":
        state = finished_search(PROGRAMS["mlp"])
    else:
        state = state_of(name)
        for _ in run_search(state):
            pass
    return state, Plan.parse(plan_of_search(state, {}).text())


def seconds(name: str, plan: Plan) -> float:
    """Of a step, by the forecast of an engine that is given the plan."""
    program, make, cluster, _ = CASES[name]
    engine = program.engine(make(), plan=plan, cluster=cluster())
    engine.prepare(program.data(1))
    return float(engine.forecast().step_seconds)


def of_layers(plan: Plan) -> dict[str, Decision]:
    return {name: decision for name, decision in plan.decisions.items() if name.startswith("layer ")}


@pytest.mark.parametrize("name", CASES)
def test_with_the_runner_up_a_step_takes_what_is_said(name: str) -> None:
    _, plan = searched(name)
    assert plan.forecast is not None
    told = {key: decision for key, decision in of_layers(plan).items() if decision.runner_up}
    assert told
    for key, decision in told.items():
        other = plan.instead(key)
        assert decision.runner_up_seconds is not None
        assert seconds(name, other) == pytest.approx(decision.runner_up_seconds, rel=1e-9)
        for layer in (int(each.removeprefix("layer ")) for each in unfold(key)):
            assert decision.chosen.startswith(f"stage {plan.stage_of(layer)}")
            assert ("recomputed" in decision.chosen) == (layer in plan.recompute)
            if decision.runner_up.startswith("stage"):
                assert decision.runner_up == f"stage {other.stage_of(layer)}"
                assert other.stage_of(layer) != plan.stage_of(layer)
                assert other.recompute == plan.recompute
            else:
                (changed,) = re.findall(r"layers? ([\d, -]+) (?:re)?computed", decision.runner_up)
                assert {*other.recompute} ^ {*plan.recompute} == {*parse_spans(changed)}
                assert layer in parse_spans(changed)
                assert other.stages == plan.stages
                assert decision.runner_up_seconds != plan.forecast.seconds  # something is recomputed
        more = decision.runner_up_seconds / plan.forecast.seconds - 1
        assert f"({more:+.2%})" in plan.explain(unfold(key)[-1])


@pytest.mark.parametrize("name", CASES)
def test_every_layer_is_explained(name: str) -> None:
    _, plan = searched(name)
    assert [each for key in of_layers(plan) for each in unfold(key)] == [
        f"layer {number}" for number in range(len(plan.layers))
    ]
    for number in range(len(plan.layers)):
        text = plan.explain(f"layer {number}")
        assert f"on stage {plan.stage_of(number)}" in text
        assert "chosen: stage" in text
        assert "forward" in text
        assert "in place of" in text or "no other choice was forecast" in text


def beside(best: Candidate, layers: int) -> dict[int, float]:
    """Layer -> seconds with the best other choice for it, where all layers but the last are equal."""
    found = dict.fromkeys(range(layers), float("inf"))

    def forecast(other: Candidate, changed: list[int]) -> None:
        for layer in changed:
            found[layer] = min(
                found[layer], build_candidate(other, searched("two stages")[0].layout_costs).seconds
            )

    front, back = best.stages
    for border, layer in ((front.stop - 1, front.stop - 1), (front.stop + 1, front.stop)):
        forecast(replace(best, stages=(replace(front, stop=border), replace(back, first=border))), [layer])
    for stage in best.stages:
        equal = [layer for layer in range(stage.first, stage.stop) if 0 < layer < layers - 1]
        for alike in ([0], equal, [layers - 1]):
            if stage.first <= alike[0] < stage.stop:
                forecast(replace(best, recompute=tuple(alike)), alike)
    return found


def test_the_runner_up_is_the_best_of_all_changes() -> None:
    state, plan = searched("two stages")
    assert state.best is not None
    best = state.best.built(state.layout_costs).candidate
    assert best is not None
    assert best.recompute == ()
    told = of_layers(plan)
    assert {
        int(each.removeprefix("layer ")): decision.runner_up_seconds
        for key, decision in told.items()
        for each in unfold(key)
    } == pytest.approx(beside(best, len(plan.layers)), rel=1e-12)


def test_layers_on_several_given_meshes() -> None:
    """Their stage is that of the plan, their costs those of their own device: layers are not equal."""
    state = SearchState(ROW.compile_request(in_a_row()), cluster_of(slow(3)), "auto", 3600.0)
    for _ in run_search(state):
        pass
    plan = plan_of_search(state, {})
    assert [(stage.first, stage.last) for stage in plan.stages] == [(0, 1), (1, 2), (2, 3)]
    decided = {each: decision for key, decision in of_layers(plan).items() for each in unfold(key)}
    assert [decided[f"layer {n}"].chosen for n in range(3)] == ["stage 0", "stage 1", "stage 2"]
    for number in range(3):
        decision = decided[f"layer {number}"]
        assert decision.terms["forward"] > 0
        assert decision.note.endswith("its mesh is given")
    assert len({decision.terms["forward"] for decision in decided.values()}) == 3


def test_equal_layers_cost_the_same() -> None:
    _, plan = searched("two stages")
    decided = {each: decision for key, decision in of_layers(plan).items() for each in unfold(key)}
    assert decided["layer 1"].terms == decided["layer 3"].terms != decided["layer 4"].terms
    assert min(decided["layer 1"].terms.values()) > 0


def test_a_runner_up_that_is_faster_is_taken() -> None:
    """From a border that is at the wrong place it goes to where nothing beside it is faster."""
    state, plan = searched("two stages")
    assert state.best is not None
    best = state.best.built(state.layout_costs).candidate
    assert best is not None
    front, back = best.stages
    wrong = replace(best, stages=(replace(front, stop=4), replace(back, first=4)))
    other = state_of("two stages")
    other.evaluations.add(evaluate(wrong, other.layout_costs))
    for found in Explainer(other.layout_costs, other.evaluations, lambda: False).run():
        if not isinstance(found, str):
            other.evaluations.add(found)
    assert other.best is not None
    assert plan.forecast is not None
    assert other.best.seconds == pytest.approx(plan.forecast.seconds, rel=1e-12)
    assert other.best.built(other.layout_costs).candidate == best


def test_a_search_that_stops_at_a_faster_runner_up_tells_nothing_of_the_slower_plan() -> None:
    state, _ = searched("two stages")
    assert state.best is not None
    best = state.best.built(state.layout_costs).candidate
    assert best is not None
    front, back = best.stages
    other = state_of("two stages")
    wrong = replace(best, stages=(replace(front, stop=4), replace(back, first=4)))
    other.evaluations.add(evaluate(wrong, other.layout_costs))
    for found in other.explainer.run():
        if not isinstance(found, str):
            other.record(found)
            break
    else:
        pytest.fail("nothing was faster")
    plan = plan_of_search(other, {})
    for key, decision in of_layers(plan).items():
        for layer in (int(each.removeprefix("layer ")) for each in unfold(key)):
            assert decision.chosen.startswith(f"stage {plan.stage_of(layer)}")


def test_programs_of_many_ops_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the number of ops allows, whether they are forecast one by one or at the same time."""
    state, _ = searched("two stages")
    assert state.best is not None
    best: BuiltCandidate = state.best.built(state.layout_costs)
    monkeypatch.setattr(
        "distgraph.engine.search_driver.explain.runners_up._MOST_CHANGE_OPS",
        int(1.5 * len(best.build.lowered.ops)),
    )
    told = []
    for together in (1, 3):
        monkeypatch.setattr("distgraph.engine.search_driver.evaluations.Evaluations.processes", together)
        state.evaluations.best = evaluation_of(best, other_layouts=True)
        explainer = Explainer(state.layout_costs, state.evaluations, lambda: False)
        assert all(isinstance(found, str) for found in explainer.run())
        layers = {k: d for k, d in explainer.decisions.items() if k.startswith("layer ")}
        told.append({key: decision.runner_up_seconds for key, decision in layers.items()})
    assert told[0] == told[1]
    changes = {s for s in told[0].values() if s is not None}
    assert len(changes) == 2
