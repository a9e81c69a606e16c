"""Plans that the search finds: they train as one rank does and are not behind what they are compared to."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.files.clusters import cluster_of
from support.paths import ROOT
from support.programs.forecasts import machines
from support.programs.searched import CHAIN, PROGRAMS, SECONDS, Net, finished_search, slow, two_by_two
from support.search.plan_training import trains_as_one_rank

import distgraph as dg
from distgraph.engine.commands.plan_search import SearchOptions, search
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.run_search import plan_of_search
from distgraph.errors import InfeasibleError, ResourceError, ShardingError
from distgraph.ir.gc_pause import collector_paused
from distgraph.passes.search.intra_op import solution_cache as solved
from distgraph.plan.constraints import SearchConstraints
from distgraph.plan.plan import Plan
from distgraph.resources import load_cluster

GRID = dg.ProcessMesh.grid
MLP = PROGRAMS["mlp"]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of solved problems of its own."""
    path = tmp_path_factory.mktemp("solved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(solved.VARIABLE, str(path))
        yield path


@cache
def found(name: str) -> Plan:
    """The plan of a program on two machines of two devices, as it comes back from its text.

    That of the MLP is searched here, so that its problems are in the cache; other files have the others, too.
    """
    if name == "mlp":
        return Plan.parse(MLP.search(two_by_two()).text())
    return Plan.parse(plan_of_search(finished_search(PROGRAMS[name]), {}).text())


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_searched_plan_trains_as_one_rank_does(name: str) -> None:
    trains_as_one_rank(PROGRAMS[name], found(name))


@pytest.mark.parametrize("name", PROGRAMS)
def test_auto_is_not_behind_its_baselines(name: str) -> None:
    plan = found(name)
    assert plan.forecast is not None
    seconds = {name: other for name, other in plan.baselines.items() if not isinstance(other, str)}
    assert min(seconds.values()) >= plan.forecast.seconds
    assert {"data parallel", "double recursion"} < set(plan.baselines)
    assert [name.partition(":")[0] for name in plan.baselines if name.startswith("uniform")] == [
        "uniform, without ZeRO", "uniform, ZeRO-1", "uniform, ZeRO-3", "uniform stages, layouts free",
    ]  # fmt: skip
    printed, explained = str(plan), (ROOT / "docs" / "planning" / "plan.md").read_text()
    for other in plan.baselines:
        assert re.search(rf"\n  {re.escape(other)}  +\S", printed)
        assert f"| `{other.partition(':')[0]}` |" in explained
    if PROGRAMS[name].batch < 4:
        assert plan.baselines["data parallel"] == "the batch has 2 samples, fewer than 4 devices"
    else:
        assert seconds["data parallel"] > plan.forecast.seconds  # there is something to gain on this cluster


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_forecast_of_the_file_is_that_of_the_program(name: str) -> None:
    plan, program, cluster = found(name), PROGRAMS[name], two_by_two()
    assert plan.forecast is not None
    engine = program.engine(plan=plan, cluster=cluster)
    x, y = program.data(1)
    engine.prepare((x, y))
    assert engine.forecast().step_seconds == plan.forecast.seconds


@pytest.mark.parametrize("mode", ["recursive", "sharding_propagation"])
def test_other_modes_give_plans(mode: str) -> None:
    mesh = GRID(dp=2, tp=2)
    plan = MLP.search(two_by_two(), mode, Net(mesh))
    assert plan.search.mode == mode
    assert str(plan.tensors["first.weight"]) == "[_, tp] @0"
    trains_as_one_rank(MLP, plan, lambda: Net(mesh))


def test_auto_keeps_to_annotations() -> None:
    mesh = GRID(dp=2, tp=2)
    plan = MLP.search(two_by_two(), model=Net(mesh))
    assert [str(stage.mesh) for stage in plan.stages] == [str(mesh)]
    trains_as_one_rank(MLP, plan, lambda: Net(mesh))


def test_modes_that_need_annotations_say_so() -> None:
    with pytest.raises(ShardingError, match=r"no annotation to propagate from .* with dg\.shard_tensor"):
        MLP.search(two_by_two(), "sharding_propagation")


@pytest.mark.parametrize("mode", ["auto", "recursive", "sharding_propagation"])
def test_annotations_need_more_devices_than_there_are(mode: str) -> None:
    with pytest.raises(ResourceError, match=r"mesh\(dp=4, tp=2\) .* needs 8 devices but cluster boxes has 4"):
        MLP.search(two_by_two(), mode, Net(GRID(dp=4, tp=2)))


@pytest.mark.parametrize("mode", ["auto", "recursive", "sharding_propagation"])
def test_annotations_that_contradict_each_other(mode: str) -> None:
    class Twice(Net):
        def forward(self, x: object) -> object:
            y = super().forward(dg.shard_tensor(x, GRID(dp=2), ["dp", None]))
            dg.shard_tensor(x, GRID(dp=2), [None, "dp"])
            return y

    with pytest.raises(ShardingError, match=r"\[_, dp\].*test_searched_plans.*\[dp, _\]"):
        MLP.search(two_by_two(), mode, Twice())


def test_less_memory_than_the_fastest_plan_takes() -> None:
    """Another plan that fits by its forecast; at last the error says which device lacks how many bytes."""
    fastest = found("mlp").forecast
    assert fastest is not None
    memory = 0.95 * max(fastest.memory)
    plan = MLP.search(two_by_two(memory=f"{memory / 1024} KiB"))
    assert plan.forecast is not None
    assert max(plan.forecast.memory) <= memory
    assert plan.forecast.seconds > fastest.seconds
    trains_as_one_rank(MLP, plan)
    with pytest.raises(InfeasibleError, match=r"no plan fits cluster boxes; .* needs .*B more on device \d"):
        MLP.search(two_by_two(memory="4 KiB"))


def test_uniform_rows_that_do_not_fit_say_so() -> None:
    baselines = MLP.search(two_by_two(memory="24 KiB")).baselines
    for name in ("uniform, without ZeRO", "uniform, ZeRO-1"):
        assert baselines[name] == "out of memory by the estimate"
    assert any(name.startswith("uniform, ZeRO-3: ") for name in baselines)


def test_no_time_at_all() -> None:
    """The first program that is looked at is the answer."""
    plan = MLP.search(two_by_two(), seconds=0.0)
    assert plan.search.status == "out of time"
    assert list(plan.baselines) == ["data parallel"]
    trains_as_one_rank(MLP, plan)


def test_no_time_and_no_data_parallelism() -> None:
    """Two samples for four devices: the first pipeline that fits, else an error that says so. Costs of
    what was chosen are told, runners-up that nobody forecast are named."""
    program = PROGRAMS["conv"]
    few = replace(program, batch=2)
    plan = few.search(two_by_two(), seconds=0.0)
    assert plan.search.status == "out of time"
    told = [plan.decisions[name] for name in ("conv.weight", "layer 0", "layer 1")]
    assert all(decision.terms and decision.runner_up_seconds is None for decision in told)
    assert "the runner-up was not forecast" in plan.explain("conv.weight")
    too_few = "the batch has 2 samples, fewer than 4 devices"
    assert plan.baselines == {"data parallel": too_few, "data parallel, ZeRO-1": too_few}
    trains_as_one_rank(few, plan)
    with pytest.raises(InfeasibleError, match="no plan that fits cluster boxes was found in 0 s"):
        few.search(two_by_two(memory="1 KiB"), seconds=0.0)


def test_the_same_plan_again_from_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = found("mlp")
    assert list(folder.rglob("*.json"))

    def solve(*args: object, **given: object) -> None:
        pytest.fail("a problem is solved again")

    monkeypatch.setattr(solved, "solve", solve)
    again = MLP.search(two_by_two())
    assert _timeless(again) == _timeless(plan)


def test_the_same_plan_again_without_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(solved.VARIABLE, "off")
    assert _timeless(MLP.search(two_by_two())) == _timeless(found("mlp"))


def _timeless(plan: Plan) -> Plan:
    return replace(plan, search=replace(plan.search, seconds=None))


def test_what_a_search_made_is_freed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes for large programs: they do not wait until a collector looks for cycles."""
    alive: list[weakref.ref[LayoutCosts]] = []
    begin = LayoutCosts.__init__

    def noted(self: LayoutCosts, *given: Any) -> None:
        begin(self, *given)
        alive.append(weakref.ref(self))

    monkeypatch.setattr(LayoutCosts, "__init__", noted)
    with collector_paused():
        search(MLP.compile_request(), two_by_two(), SearchOptions(seconds=SECONDS))
        assert [layout_costs() for layout_costs in alive] == [None]


def test_resource_files(tmp_path: Path) -> None:
    """A cluster from its file gives the plan of the cluster from its description."""
    file = tmp_path / "boxes.yaml"
    file.write_text(yaml.safe_dump(slow(2, 2)))
    assert _timeless(MLP.search(load_cluster(str(file)))) == _timeless(found("mlp"))


def test_an_unfit_cluster() -> None:
    """A device without numbers for matmuls of the dtype of the program."""
    with pytest.raises(ResourceError, match=r"machines\[0\]\.devices\..*f64"):
        MLP.search(machines(2, 2))


def test_two_stages_share_five_machines() -> None:
    """No number of machines from 2 to 4 divides them."""
    options = SearchOptions(seconds=SECONDS, processes=1, constraints=SearchConstraints(stages=2))
    request = replace(CHAIN, batch=60).compile_request()
    plan = search(request, cluster_of(slow(1, 1, 1, 1, 1)), options)
    assert sorted(stage.mesh.size for stage in plan.stages) == [2, 3]
