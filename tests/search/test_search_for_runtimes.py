"""A plan is the best for the runtime that is to execute it, among those that it executes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.files.clusters import cluster_of
from support.programs.searched import CHAIN, PROGRAMS, SECONDS, finished_search, slow, two_by_two

import distgraph as dg
from distgraph import nn, ops
from distgraph.engine.commands.plan_search import SearchOptions, options_of, search, with_constraints_of
from distgraph.engine.search_driver.candidate import Candidate, StageChoice, build_candidate, plan_of
from distgraph.engine.search_driver.run_search import plan_of_search
from distgraph.engine.search_driver.search_space import Shape
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.errors import InfeasibleError, ResourceError, ShardingError
from distgraph.plan.apply.stage_layouts import layouts_of
from distgraph.plan.constraints import SearchConstraints
from distgraph.plan.export.torch_source import torch_schedules
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy
from distgraph.resources.host_times import HostTimes
from distgraph.resources.runtimes.load_runtime import load_runtime
from distgraph.resources.runtimes.runtime_model import Memory, RuntimeModel

WAITING = RuntimeModel(name="waiting", about="hides nothing, and both ends of a message wait")


@cache
def searched(name: str = "") -> Plan:
    """The plan for a runtime; for no model without a name."""
    if not name:
        return plan_of_search(finished_search(CHAIN), SearchOptions(seconds=SECONDS).settings())
    runtime = WAITING if name == WAITING.name else load_runtime(name)
    options = SearchOptions(seconds=SECONDS, processes=1, runtime=runtime)
    return search(CHAIN.compile_request(), two_by_two(), options)


def test_the_answer_is_forecast_under_the_runtime() -> None:
    ours, other = searched(), searched(WAITING.name)
    assert ours.forecast is not None
    assert other.forecast is not None
    assert other.forecast.seconds > ours.forecast.seconds
    assert "runtime" not in ours.search.settings
    assert other.search.settings["runtime"] == "waiting"


def test_the_model_of_distgraph_gives_the_plan_of_no_model() -> None:
    ours, named = searched(), searched("distgraph_gpu")
    assert named.forecast == ours.forecast
    assert named.stages == ours.stages


def test_what_a_runtime_keeps_of_the_memory_is_not_planned_with() -> None:
    cluster = two_by_two()
    memory = cluster.devices[0].memory
    runtime = replace(WAITING, memory=Memory(usable=0.5, context=1000.0))
    left, rest = runtime.applied(cluster)
    assert {device.memory for device in left.devices} == {0.5 * memory - 1000.0}
    assert rest.memory.available(left.devices[0].memory) == pytest.approx(0.5 * memory - 1000.0)


def test_a_strategy_names_its_runtime() -> None:
    strategy = Strategy(mode="auto", runtime="megatron", stages=2)
    assert options_of(strategy).runtime is load_runtime("megatron")
    assert with_constraints_of(strategy, SearchOptions()).runtime is load_runtime("megatron")
    command = SearchOptions(runtime=load_runtime("torch"))
    assert with_constraints_of(strategy, command).runtime is load_runtime("torch")
    with pytest.raises(
        ShardingError, match="runtime of Strategy is 'torch' but mode 'semi' searches nothing"
    ):
        Strategy(runtime="torch")
    with pytest.raises(ResourceError, match="neither a file nor a runtime; shipped are"):
        options_of(Strategy(mode="auto", runtime="nothing"))


CLUSTER = cluster_of(slow(4))


def executing(name: str) -> RuntimeModel:
    """A framework whose host costs nothing and that takes no memory, so that small programs are split."""
    return replace(load_runtime(name), host=HostTimes(), memory=Memory())


@cache
def plan_for(program: str, runtime: str | None, **given: Any) -> Plan:
    """The plan of a program for a framework, or for distgraph."""
    options = SearchOptions(
        seconds=SECONDS,
        processes=1,
        runtime=None if runtime is None else executing(runtime),
        constraints=SearchConstraints(**given),
    )
    chosen = CHAIN if program == "chain" else PROGRAMS[program]
    return search(chosen.compile_request(), CLUSTER, options)


def test_the_schedules_of_torch_are_those_that_plans_are_applied_with() -> None:
    assert set(load_runtime("torch").executes.schedules) == set(torch_schedules())


def test_a_pipeline_for_torch_has_a_schedule_of_torch() -> None:
    assert plan_for("chain", None, stages=2).schedule == "zb-h1"
    plan = plan_for("chain", "torch", stages=2)
    assert plan.schedule in torch_schedules()
    assert len(layouts_of(plan).stages) == 2


def on_two_axes(runtime: str | None) -> Plan:
    """A GPT in the fastest layouts on dp=2 x tp=2."""
    request = PROGRAMS["gpt"].compile_request()
    state = SearchState(
        request, CLUSTER, "auto", 3600, runtime=None if runtime is None else executing(runtime)
    )
    layers = len(state.layout_costs.layered_graph(1).layers)
    stage = StageChoice(0, layers, (0, 1, 2, 3), Shape((("dp", 2), ("tp", 2))))
    built = build_candidate(Candidate("search", (stage,), "none", 0.0), state.layout_costs)
    return plan_of(built, state.layout_costs)


def test_axes_have_one_use() -> None:
    assert layouts_of(on_two_axes("torch")).stages[0].ranks.shape == (2, 1, 2)
    with pytest.raises(ShardingError, match="computed split over tp, which splits the batch elsewhere"):
        layouts_of(on_two_axes(None))


def test_an_axis_may_stand_alone_for_matrices() -> None:
    """In so little memory no baseline fits, so the search itself has to offer a mesh without other axes."""
    plan = plan_for("chain", "torch", memory="24.5 KiB", stages=1, micro_batches=1)
    assert plan.stages[0].mesh.axes == ("tp",)
    assert layouts_of(plan).stages[0].ranks.shape == (1, 1, 4)


def test_jax_gets_one_stage() -> None:
    """On machines on which distgraph gets two."""
    options = SearchOptions(seconds=SECONDS, processes=1, runtime=executing("jax"))
    assert len(searched().stages) == 2
    assert len(search(CHAIN.compile_request(), two_by_two(), options).stages) == 1


@pytest.mark.parametrize(
    ("runtime", "given", "message"),
    [
        ("jax", {"stages": 2}, "stages of the search is 2 but runtime jax has no pipeline"),
        ("jax", {"borders": (2,)}, "stages of the search is 2 but runtime jax has no pipeline"),
        ("torch", {"schedule": "zb-h1"}, "schedule of the search is 'zb-h1' but runtime torch executes 1f1b"),
    ],
)
def test_constraints_that_the_framework_does_not_execute(
    runtime: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ShardingError, match=message):
        plan_for("chain", runtime, **given)


def test_products_by_distributed_algorithms_are_refused() -> None:
    options = SearchOptions(mode="mesh2d", runtime=executing("torch"))
    with pytest.raises(ShardingError, match=r"mode mesh2d searches .* which runtime torch does not execute"):
        search(CHAIN.compile_request(), CLUSTER, options)


class Annotated(nn.Module):
    """Two linear layers; the activation between them is annotated by axes alone."""

    def __init__(self, axes: Any) -> None:
        self.first, self.last = nn.Linear(24, 24, dtype="f64"), nn.Linear(24, 6, dtype="f64")
        self.axes = axes

    def forward(self, x: Any) -> Any:
        return self.last(dg.shard_tensor(ops.relu(self.first(x)), axes=self.axes))


def test_an_annotation_that_gives_an_axis_another_use_is_refused() -> None:
    options = SearchOptions(seconds=SECONDS, processes=1, runtime=executing("torch"))
    with pytest.raises(
        ShardingError, match=r"annotated as .*tp.* has one use for an axis: dp splits samples"
    ):
        search(CHAIN.compile_request(Annotated(["tp", None])), CLUSTER, options)


def test_annotated_stages_that_the_framework_does_not_execute() -> None:
    model = CHAIN.make()
    dg.shard_tensor(model.layers[0].weight, dg.ProcessMesh.grid(a=2), [None, "a"])
    dg.shard_tensor(model.last.weight, dg.ProcessMesh.grid(2, a=2), [None, "a"])
    options = SearchOptions(seconds=SECONDS, processes=1, runtime=executing("jax"))
    with pytest.raises(InfeasibleError, match=r"annotations, completed does not keep stages=1"):
        search(CHAIN.compile_request(model), CLUSTER, options)


def test_a_device_without_memory_for_programs() -> None:
    with pytest.raises(ResourceError, match=r"device 0 has 512 MiB but runtime torch lets programs use 100%"):
        search(
            CHAIN.compile_request(),
            cluster_of(slow(4, memory="512 MiB")),
            SearchOptions(runtime=load_runtime("torch")),
        )
