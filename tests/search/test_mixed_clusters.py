"""The search on devices of different models: stages on both where that pays, as exhaustive search finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.devices import fake_cupy
from support.files.clusters import cluster_of
from support.programs.searched import CHAIN, SECONDS, Program, mixed, slow
from support.search.candidates import candidates
from support.search.plan_training import trains_as_one_rank

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine.search_driver.baselines.baselines import evaluate_uniform_and_recursive
from distgraph.engine.search_driver.candidate import build_candidate, plan_of
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.load_balancing import rebalanced
from distgraph.engine.search_driver.micro_batch_search import search_micro_batch_counts
from distgraph.engine.search_driver.pipeline_search import best_count
from distgraph.engine.search_driver.run_search import run_search
from distgraph.engine.search_driver.search_space import (
    Shape,
    micro_batch_counts,
    pools_of,
)
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.engine.search_driver.uniform_pipelines import best_uniform, costs_of_equal_devices
from distgraph.errors import InfeasibleError
from distgraph.passes.search.intra_op.solution_cache import VARIABLE
from distgraph.plan.pipeline_schedules import searched_schedules
from distgraph.plan.plan import Plan


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of solved problems of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("solved")))
        yield


@pytest.mark.parametrize(("speed", "models"), [(0.8, {"G", "H"}), (0.1, {"G"})])
def test_as_exhaustive_search_by_forecasts(speed: float, models: set[str]) -> None:
    """Both models have a stage where the slower one is not much slower; else only the faster one."""
    cluster = cluster_of(mixed(speed, 1, 1))
    layout_costs = LayoutCosts(CHAIN.compile_request(), cluster, pools_of(cluster))
    every = [
        build_candidate(replace(candidate, schedule=schedule), layout_costs)
        for count in micro_batch_counts(CHAIN.batch)
        for candidate in candidates(layout_costs, count)
        for schedule in (searched_schedules() if len(candidate.stages) > 1 else ("1f1b",))
    ]
    # micro-batch counts x (one stage + two, in both orders, four cuts, under three schedules), and one across
    # both: b - 1 ways each
    assert len(every) == 4 * (2 + 2 * 4 * 3) + (7 + 3 + 1)
    best = min(every, key=lambda found: found.seconds)
    plan = CHAIN.search(cluster)
    assert plan.forecast is not None
    assert plan.forecast.seconds == pytest.approx(best.seconds)
    assert {cluster.devices[d].model for stage in plan.stages for d in stage.devices} == models
    trains_as_one_rank(CHAIN, plan)


def test_three_devices_of_two_models() -> None:
    """No pipeline on two devices of one model and one of another is forecast to be faster."""
    cluster = cluster_of(mixed(0.5, 2, 1))
    layout_costs = LayoutCosts(CHAIN.compile_request(), cluster, pools_of(cluster))
    every = [build_candidate(candidate, layout_costs) for candidate in candidates(layout_costs, 1)]
    plan = CHAIN.search(cluster)
    assert plan.forecast is not None
    assert plan.forecast.seconds <= min(found.seconds for found in every)


@pytest.mark.parametrize("speed", [0.8, 0.1])
def test_one_kind_of_device_alone_is_a_baseline(speed: float) -> None:
    """The plan is not behind what a search without the others finds, and is that where they are slow."""
    both, alone = cluster_of(mixed(speed, 2, 2)), cluster_of(slow(2))
    plan, best = CHAIN.search(both), CHAIN.search(alone)
    assert plan.forecast is not None
    assert best.forecast is not None
    baseline = plan.baselines["2 x G alone"]
    assert isinstance(baseline, float)
    assert plan.forecast.seconds <= best.forecast.seconds * (1 + 1e-9) <= baseline * (1 + 2e-9)
    if speed == 0.1:
        assert plan.forecast.seconds == pytest.approx(best.forecast.seconds)


def test_uniform_pipelines_with_equal_shares_are_baselines() -> None:
    """Layouts are those for devices that are all of the slower kind; the program is forecast as it runs."""
    cluster = cluster_of(mixed(0.5, 2, 2))
    state = SearchState(CHAIN.compile_request(), cluster, "auto", SECONDS)
    for _ in run_search(state):
        pass
    assert state.best is not None
    names = [name for name in state.evaluations.baselines if name.startswith("uniform")]
    assert len(names) == 4
    for name in names:
        seconds = state.evaluations.baselines[name]
        assert isinstance(seconds, float)
        assert seconds >= state.best.seconds * (1 - 1e-9)
    uniform = next(each for each in state.evaluations.all if each.origin in names and each.rebuild)
    assert uniform.choices["stages"].count("; ") == len(uniform.choices["stages"].split("layers")) - 2
    program = uniform.built(state.layout_costs)
    assert program.seconds == pytest.approx(uniform.seconds)
    assert set(program.devices) == {0, 1, 2, 3}
    plan = plan_of(program, state.layout_costs)
    assert not any(stage.mesh.weights for stage in plan.stages)
    trains_as_one_rank(CHAIN, plan)


def test_uniform_pipelines_have_the_best_of_adjacent_numbers_of_micro_batches() -> None:
    state = SearchState(CHAIN.compile_request(), cluster_of(mixed(0.5, 2, 2)), "auto", SECONDS)
    for _ in run_search(state):
        pass
    uniform = next(each for each in state.evaluations.all if "ZeRO-1: dp=2, 2 stages" in each.origin)
    assert isinstance(uniform.rebuild, partial)
    count = best_count(state.pipelines.best)
    costs = costs_of_equal_devices(state.layout_costs, count)
    assert isinstance(costs, LayoutCosts)
    each = {n: best_uniform(costs, [n], "zero1") for n in (count, *state.pipelines.adjacent_counts(count))}
    estimates = {n: candidate.estimate for n, candidate in each.items() if candidate is not None}
    best = min(estimates, key=lambda n: estimates[n])
    assert uniform.rebuild.args[0].micro_batches == best != count


@pytest.mark.parametrize("searched", [False, True])
def test_local_search_begins_with_the_stages_of_a_uniform_pipeline_that_is_best(searched: bool) -> None:
    """They get layouts for the devices as they are: those for equal devices are not of this search."""
    state = SearchState(CHAIN.compile_request(), cluster_of(mixed(0.5, 2, 2)), "auto", SECONDS)
    if searched:
        for _ in search_micro_batch_counts(state):
            pass
    before = len(state.evaluations.all)
    for _ in evaluate_uniform_and_recursive(state):
        pass
    assert state.best is not None
    evaluated = state.evaluations.all[before:]
    stages = {each.rebuild.args[0].stages for each in evaluated if isinstance(each.rebuild, partial)}
    starts = [each for each in evaluated if each.candidate is not None]
    if searched:
        assert starts == []
    else:
        assert [start.candidate.stages in stages for start in starts if start.candidate] == [True]
        assert starts[0].choices["micro_batches"] == state.best.choices["micro_batches"]


def of_two_types() -> dict[str, Any]:
    description = mixed(0.5, 2, 2)
    description["machines"][1]["devices"]["type"] = "xpu"
    return description


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        (mixed(0.5, 2, 1), "machines have unequal numbers of devices"),
        (of_two_types(), "devices are of several types"),
    ],
)
def test_where_there_are_no_uniform_pipelines(description: dict[str, Any], reason: str) -> None:
    cluster = cluster_of(description)
    layout_costs = LayoutCosts(CHAIN.compile_request(), cluster, pools_of(cluster))
    assert costs_of_equal_devices(layout_costs, 1) == reason


def test_zero_is_forecast_on_all_devices_and_on_those_of_each_kind() -> None:
    baselines = CHAIN.search(cluster_of(mixed(0.5, 2, 2))).baselines
    for devices in ("data parallel", "data parallel, 2 x G", "data parallel, 2 x H"):
        for level in ("", ", ZeRO-1", ", ZeRO-3"):
            assert isinstance(baselines[devices + level], float)


@pytest.mark.parametrize("speed", [0.8, 0.5])
@pytest.mark.parametrize(("batch", "width"), [(12, 24), (24, 24), (24, 48)])
def test_shares_as_exhaustive_search_by_forecasts(speed: float, batch: int, width: int) -> None:
    """One layer: on either device, or on both, with the batch shared in any way."""
    program = Program(lambda: nn.Linear(width, 6, dtype="f64"), (width,), batch=batch)
    cluster = cluster_of(mixed(speed, 1, 1))
    layout_costs = LayoutCosts(program.compile_request(), cluster, pools_of(cluster))
    every = [
        build_candidate(candidate, layout_costs)
        for count in micro_batch_counts(batch)
        for candidate in candidates(layout_costs, count)
    ]
    plan = program.search(cluster)
    assert plan.forecast is not None
    assert plan.forecast.seconds == pytest.approx(min(found.seconds for found in every))


def test_a_plan_with_uneven_shares_runs(tmp_path: Path) -> None:
    """The device that is half as fast gets half as many samples; the plan file says so, and it trains."""
    program = Program(lambda: nn.Linear(48, 6, dtype="f64"), (48,), batch=24)
    plan = program.search(cluster_of(mixed(0.5, 1, 1)))
    assert [stage.mesh.weights for stage in plan.stages] == [{"dp": (2, 1)}]
    plan.save(tmp_path / "plan.json")
    trains_as_one_rank(program, Plan.load(tmp_path / "plan.json"))


def test_a_plan_with_uneven_shares_runs_on_a_processor_and_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks compute on the types of devices that the plan places them on, the GPU being a stand-in."""
    program = Program(lambda: nn.Linear(48, 6, dtype="f64"), (48,), batch=24)
    described = mixed(0.5, 1, 1)
    described["machines"][1]["devices"]["type"] = "cpu"
    program.search(cluster_of(described)).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert [(part.type, part.ranks) for part in plan.placement] == [("gpu", (0,)), ("cpu", (1,))]
    assert [stage.mesh.weights for stage in plan.stages] == [{"dp": (2, 1)}]
    hardware = fake_cupy.install(monkeypatch, devices=1)
    trains_as_one_rank(program, plan)
    assert hardware.names


def test_samples_pass_between_kinds() -> None:
    shape = Shape((("dp", 4), ("tp", 2)), (5, 5, 3, 3))
    assert [found.samples for found in rebalanced(shape, (0, 0, 1, 1))] == [(4, 4, 4, 4), (6, 6, 2, 2)]
    assert not list(rebalanced(Shape((("dp", 2),), (1, 1)), (0, 1)))


class OnMeshes(nn.Module):
    """A layer on each of two meshes."""

    def __init__(self, first: dg.ProcessMesh, second: dg.ProcessMesh) -> None:
        self.meshes, self.up, self.down = (first, second), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        with dg.on(self.meshes[0]):
            h = ops.relu(self.up(dg.shard_tensor(x, self.meshes[0], ["dp", None])))
        with dg.on(self.meshes[1]):
            return ops.mean(self.down(h) ** 2)


def devices_found(first: dg.ProcessMesh, second: dg.ProcessMesh, **strategy: Any) -> tuple[int, ...]:
    """Devices of the ranks that a search chooses on two processors, numbers 0 and 1, and two GPUs."""
    described = mixed(2.0, 2, 2)
    described["machines"][0]["devices"]["type"] = "cpu"
    made = dg.Engine(
        OnMeshes(first, second), None, optim.SGD(lr=0.1),
        strategy=dg.Strategy(**strategy), cluster=cluster_of(described),
    )  # fmt: skip
    made.prepare((np.ones((8, 8), np.float32),))
    assert made.plan.mapping is not None
    return made.plan.mapping.devices


@pytest.mark.parametrize("mode", ["auto", "sharding_propagation", "recursive"])
def test_ranks_are_on_the_devices_that_their_mesh_needs(mode: str) -> None:
    """In mode auto the mesh would be repeated on all four devices, were they of one kind."""
    mesh = dg.ProcessMesh.grid(dp=2)
    assert devices_found(mesh.requiring("gpu"), mesh.requiring("gpu"), mode=mode) == (2, 3)
    assert devices_found(mesh.requiring("cpu"), mesh.requiring("cpu"), mode=mode) == (0, 1)


def test_each_mesh_gets_its_kind_of_device() -> None:
    first, second = dg.ProcessMesh.grid(dp=2), dg.ProcessMesh.grid(2, dp=2)
    assert devices_found(first.requiring("gpu"), second.requiring("cpu"), mode="auto") == (2, 3, 0, 1)


def test_a_mesh_needs_devices_that_the_search_may_not_use() -> None:
    mesh = dg.ProcessMesh.grid(dp=2).requiring("gpu")
    problem = r"rank 0 needs a gpu device, which is device 2 .* may use the first 2 devices"
    with pytest.raises(InfeasibleError, match=problem):
        devices_found(mesh, mesh, mode="auto", devices=2)
