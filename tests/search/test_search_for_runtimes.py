"""A plan is the best for the runtime that is to execute it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from support.programs.searched import CHAIN, SECONDS, finished_search, two_by_two

from distgraph.engine.commands.plan_search import SearchOptions, options_of, search, with_constraints_of
from distgraph.engine.search_driver.run_search import plan_of_search
from distgraph.errors import ResourceError, ShardingError
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy
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
    assert other.forecast.seconds >= ours.forecast.seconds
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


def test_a_runtime_has_the_name_of_its_framework_too() -> None:
    assert load_runtime("jax") is load_runtime("xla")


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
