"""Constraints of a search: every program keeps them, the plan says so, contradictions are named."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.files.clusters import cluster_of
from support.programs.forecasts import machines
from support.programs.searched import CHAIN, PROGRAMS, SECONDS, Net, finished_search, slow, two_by_two
from support.search.plan_training import trains_as_one_rank

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine.commands.plan_search import (
    SearchOptions,
    options_of,
    search,
    with_constraints_of,
    with_searched_plan,
)
from distgraph.engine.search_driver.candidate import (
    candidate_of_plan,
    plan_of,
    program_of_plan,
    split_by_data_axes,
)
from distgraph.engine.search_driver.run_search import plan_of_search, run_search
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.errors import GraphError, InfeasibleError, ResourceError, ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.plan.constraints import FREE, SearchConstraints
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy

MIXED = ProcessMesh.grid(tp=2, dp=2)
pytestmark = pytest.mark.timeout(600)
SHORT = replace(CHAIN, batch=4)
"""As many samples as are needed for four micro-batches: fewer numbers of them are searched."""
KEPT: dict[str, dict[str, Any]] = {
    "micro_batches": {"micro_batches": 4},
    "schedule": {"schedule": "gpipe", "stages": 2},
    "stages": {"stages": 3},
    "devices": {"devices": 3},
    "borders": {"borders": (1, 4)},
    "recompute": {"recompute": (0, 2)},
    "zero": {"zero": 0},
    "uniform": {"uniform": True, "stages": 2, "micro_batches": 2},
}
BATCH_OF_12 = np.ones((12, 6), "f4"), np.zeros(12, "i4")
LOOKS = 40
"""At the clock: as many as a search takes that is ended before it has looked at everything."""


def run(**given: Any) -> SearchState:
    """A finished search of the short chain on two machines of two devices."""
    state = SearchState(
        SHORT.compile_request(), two_by_two(), "auto", SECONDS, constraints=SearchConstraints(**given)
    )
    list(run_search(state))
    return state


def layouts_over_dp(plan: Plan, kind: str) -> bool:
    stored = (tensor for tensor in plan.tensors.values() if tensor.kind == kind)
    return any("dp" in dim for tensor in stored for dim in tensor.spec.dims)


@pytest.mark.parametrize("name", KEPT)
def test_every_program_keeps_what_is_given(name: str) -> None:
    given = KEPT[name]
    state = run(**given)
    options = SearchOptions(constraints=state.constraints)
    plan = plan_of_search(state, options.settings())
    assert all(not state.broken_by(evaluation) for evaluation in state.evaluations.all)
    programs = [e.candidate for e in state.evaluations.all if e.candidate is not None]
    assert programs
    for candidate in programs:
        stages = candidate.stages
        assert candidate.micro_batches == given.get("micro_batches", candidate.micro_batches)
        assert candidate.schedule == given.get("schedule", candidate.schedule)
        assert len(stages) == given.get("stages", len(stages))
        assert tuple(s.first for s in stages[1:]) == given.get("borders", tuple(s.first for s in stages[1:]))
        assert candidate.recompute == given.get("recompute", candidate.recompute)
        assert max(max(s.devices) for s in stages) < given.get("devices", 4)
        assert not given.get("uniform") or len({s.shape for s in stages}) == 1
    if name == "zero":
        assert not layouts_over_dp(plan, "param")
        assert not layouts_over_dp(plan, "state")
    shown = ", ".join(f"{key}={value}" for key, value in state.constraints.given().items())
    assert f"; given: {shown}" in str(plan)
    assert state.constraints.given().items() <= plan.search.settings.items()
    if name in plan.decisions:
        assert f"given: {name}=" in plan.explain(name)
    trains_as_one_rank(SHORT, plan)


def test_without_constraints_nothing_changes() -> None:
    free = plan_of_search(finished_search(CHAIN), SearchOptions(seconds=SECONDS).settings())
    assert "given" not in str(free)
    stages = len(free.stages)
    constraints = SearchConstraints(
        micro_batches=free.micro_batches, schedule=free.schedule, stages=stages, recompute=free.recompute
    )
    options = SearchOptions(seconds=SECONDS, processes=1, constraints=constraints)
    pinned = search(CHAIN.compile_request(), two_by_two(), options)
    assert free.forecast is not None
    assert pinned.forecast is not None
    assert pinned.forecast.seconds <= free.forecast.seconds * (1 + 1e-9)


def test_memory_is_a_limit_of_every_device() -> None:
    """The plan fits into the memory, and is that of a cluster of such devices."""
    free = SearchConstraints(stages=2, micro_batches=2)
    options = SearchOptions(seconds=SECONDS, processes=1, constraints=replace(free, memory="24 KiB"))
    plan = search(SHORT.compile_request(), two_by_two(), options)
    assert plan.forecast is not None
    assert max(plan.forecast.memory) <= 24 * 1024
    small = search(
        SHORT.compile_request(),
        two_by_two(memory="24 KiB"),
        replace(options, constraints=free),
    )
    assert small.forecast is not None
    assert small.forecast.seconds == plan.forecast.seconds
    tiny = SearchConstraints(memory="1 KiB")
    with pytest.raises(InfeasibleError, match=r"no plan fits cluster boxes and keeps memory=1 KiB; the near"):
        search(SHORT.compile_request(), two_by_two(), replace(options, constraints=tiny))


def test_annotated_programs_keep_constraints() -> None:
    """Micro-batches, schedule and recomputation; other stages than the annotated ones are refused."""
    mesh = ProcessMesh.grid(dp=2, tp=2)
    program = PROGRAMS["mlp"]
    constraints = SearchConstraints(micro_batches=2, schedule="gpipe", recompute=False)
    options = SearchOptions(seconds=SECONDS, processes=1, constraints=constraints)
    plan = search(program.compile_request(Net(mesh)), two_by_two(), options)
    assert (plan.micro_batches, plan.schedule, plan.recompute) == (2, "gpipe", ())
    two = replace(options, constraints=SearchConstraints(stages=2))
    with pytest.raises(InfeasibleError, match=r"keeps stages=2: .* does not keep stages=2; leave a constr"):
        search(program.compile_request(Net(mesh)), two_by_two(), two)
    few = replace(options, constraints=SearchConstraints(devices=2))
    with pytest.raises(ResourceError, match=r"needs 4 devices but devices of the search is 2; annotate"):
        search(program.compile_request(Net(mesh)), two_by_two(), few)


def test_what_an_annotation_splits_counts_for_zero() -> None:
    """In programs that another process has forecast, too, which are not at hand."""
    net = Net()
    dg.shard_tensor(net.first.weight, axes=["dp", None])
    request, constraints = PROGRAMS["mlp"].compile_request(net), SearchConstraints(zero=0)
    state = SearchState(request, two_by_two(), "auto", SECONDS, processes=2, constraints=constraints)
    list(run_search(state))
    programs = [evaluation.built(state.layout_costs) for evaluation in state.evaluations.all]
    assert programs
    assert not any(split_by_data_axes(each.completed) for each in programs)
    assert "zero=0" in state.evaluations.left_out.values()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stages": 0}, "stages of the search is 0 but must be a number from 1 up"),
        ({"micro_batches": True}, "micro_batches of the search is True but must be a number"),
        ({"devices": 1.5}, "devices of the search is 1.5 but must be a number"),
        (
            {"schedule": "zigzag"},
            "schedule 'zigzag' of the search does not exist; the schedules are 1f1b, gp",
        ),
        (
            {"zero": 4},
            "zero of the search is 4 but must be 0, 1 .states may be split., 2 .gradients too. or 3",
        ),
        ({"uniform": 1}, "uniform of the search is 1 but must be True or False"),
        ({"memory": 0}, 'memory of the search is 0 but must be a size such as "8 GiB", or bytes'),
        ({"memory": math.inf}, "memory of the search is inf but must be finite"),
        ({"borders": (4, 2)}, r"borders is \(4, 2\) but must ascend"),
        (
            {"borders": (0,)},
            r"borders is \(0,\) but must be numbers of layers from 1 up, the fi",
        ),
        (
            {"recompute": "all"},
            "recompute is 'all' but must be numbers of layers .* or True or",
        ),
        (
            {"recompute": (1, 1)},
            r"recompute is \(1, 1\) but must ascend, without a number twice",
        ),
        ({"borders": ()}, "borders of the search are empty but must be .* for one stage give stages=1"),
        ({"borders": (1, 2), "stages": 2}, "borders of the search are 1,2, which make 3 stages"),
        ({"borders": (2,), "stages": 3}, "borders of the search are 2, which make 2 stages, but stages is 3"),
    ],
)
def test_values_that_no_plan_has(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        SearchConstraints(**given)
    with pytest.raises(ShardingError):
        Strategy(mode="auto", **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"micro_batches": 3},
            r"micro_batches of the search is 3 but a batch of 8 samples .* one of 8, 4, 2, 1",
        ),
        ({"devices": 5}, "devices of the search is 5 but cluster boxes has 4; take fewer"),
        ({"stages": 6}, "stages of the search is 6 but there are 5 layers; every stage has one or more"),
        ({"stages": 3, "devices": 2}, "stages of the search is 3 but there are 2 devices"),
        ({"borders": (5,)}, "borders of the search names layer 5 but the program has layers 0 to 4"),
        ({"recompute": (7,)}, "recompute of the search names layer 7 but the program has layers 0 to 4"),
        ({"memory": "8"}, "memory of the search is '8' but must be a size such as \"80 GiB\""),
        ({"memory": "8 GHz"}, "memory of the search is '8 GHz' but must be a size such as \"80 GiB\""),
    ],
)
def test_what_the_program_or_the_cluster_does_not_have(given: dict[str, Any], message: str) -> None:
    options = SearchOptions(seconds=SECONDS, constraints=SearchConstraints(**given))
    with pytest.raises(ShardingError, match=message):
        search(CHAIN.compile_request(), two_by_two(), options)


@pytest.mark.parametrize("given", [{"seconds": "5"}, {"seconds": -1}, {"seconds": math.nan}, {"runtime": 3}])
def test_settings_of_a_search_have_their_types(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ShardingError, match=f"{name} of Strategy is .* but must be"):
        Strategy(mode="auto", **given)


def test_a_search_without_time_says_that_it_had_none() -> None:
    """And blames no constraint that a plan could keep."""
    options = SearchOptions(seconds=0, processes=1, constraints=SearchConstraints(stages=3))
    with pytest.raises(
        InfeasibleError, match=r"was found in 0 s; give the search more seconds, or leave a c"
    ):
        search(CHAIN.compile_request(), two_by_two(), options)


@pytest.mark.parametrize(
    ("mode", "given"),
    [
        ("semi", {"stages": 2}),
        ("manual", {"memory": "8 GiB"}),
        ("semi", {"devices": 4}),
        ("recursive", {"recompute": False}),
        ("mesh2d", {"zero": 0}),
        ("sharding_propagation", {"borders": (1,)}),
        ("recursive", {"uniform": True}),
    ],
)
def test_a_mode_that_does_not_search_it(mode: str, given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(
        ShardingError, match=f"{name} of Strategy is .* but mode '{mode}' does not search it; "
    ):
        Strategy(mode=mode, **given)
    with pytest.raises(ShardingError, match=f"{name} of the search is .* but mode '{mode}' does not search"):
        SearchOptions(mode=mode, constraints=SearchConstraints(**given))


def test_a_strategy_is_searched_as_it_says() -> None:
    strategy = Strategy(mode="auto", stages=2, devices=3, seconds=SECONDS)
    options = options_of(strategy)
    assert (options.seconds, options.constraints) == (SECONDS, SearchConstraints(stages=2, devices=3))
    request = with_searched_plan(CHAIN.compile_request(strategy=strategy), two_by_two())
    assert request.plan is not None
    assert len(request.plan.stages) == 2
    assert max(request.plan.ranks) < 3
    assert request.training_spec.strategy.constraints.stages is None  # decided: nothing is searched again
    command = SearchOptions(constraints=SearchConstraints(stages=4, schedule="gpipe"))
    both = with_constraints_of(strategy, command).constraints
    assert both == SearchConstraints(stages=4, schedule="gpipe", devices=3)
    assert with_constraints_of(Strategy(micro_batches=4), command) is command
    with pytest.raises(ShardingError, match="seconds of Strategy is 5 but mode 'semi' searches nothing"):
        Strategy(seconds=5)
    with pytest.raises(ShardingError, match="seconds of Strategy is -1 but must be"):
        Strategy(mode="auto", seconds=-1)


def test_modes_on_fewer_devices() -> None:
    """Micro-batches and schedule too, which modes that search layouts alone take as they are given."""
    constraints = SearchConstraints(devices=4, micro_batches=2, schedule="gpipe")
    options = SearchOptions(mode="recursive", seconds=SECONDS, constraints=constraints)
    plan = search(CHAIN.compile_request(), cluster_of(slow(2, 2, 2)), options)
    assert (plan.ranks, plan.micro_batches, plan.schedule) == ((0, 1, 2, 3), 2, "gpipe")
    mesh2d = search(CHAIN.compile_request(), cluster_of(slow(2, 2, 2)), replace(options, mode="mesh2d"))
    assert (len(mesh2d.ranks), mesh2d.micro_batches, mesh2d.schedule) == (4, 2, "gpipe")
    assert dg.Strategy(mode="recursive", micro_batches=4).micro_batches == 4


@pytest.mark.parametrize("given", [{"stages": 3}, {"recompute": True, "schedule": "gpipe"}, {"zero": 3}])
def test_a_search_that_starts_from_a_plan_is_never_behind_it(given: dict[str, Any]) -> None:
    """With no time it is the plan itself, else it or a better one, also under the plan's constraints and in
    a search that ends early."""
    request, cluster = SHORT.compile_request(), two_by_two()
    constraints = SearchConstraints(micro_batches=2, **given)
    limits = SearchOptions(seconds=SECONDS, processes=1, constraints=constraints)
    first = search(request, cluster, limits)
    assert first.forecast is not None
    same = search(request, cluster, SearchOptions(seconds=0.0, processes=1, start=first))
    assert same.digest == first.digest
    assert same.forecast is not None
    assert replace(same.forecast, beside={}) == replace(first.forecast, beside={})  # other plans beside it
    assert same.baselines["start"] == first.forecast.seconds
    assert same.search.settings["start"] == first.digest
    trains_as_one_rank(SHORT, same)
    again = search(request, cluster, replace(limits, start=first))
    assert again.forecast is not None
    assert again.forecast.seconds <= first.forecast.seconds
    assert again.baselines["start"] == first.forecast.seconds
    assert len(again.stages) == given.get("stages", len(again.stages))
    looks = itertools.count()
    free = SearchState(request, cluster, "auto", LOOKS, clock=lambda: float(next(looks)), start=first)
    list(run_search(free))
    assert free.expired()
    assert len(free.evaluations.all) > 1
    assert free.best is not None
    assert free.best.seconds <= first.forecast.seconds


def test_a_plan_with_weights_or_of_another_program_as_a_start() -> None:
    """The plan stays as it is where the search cannot make its stages; other programs are refused."""
    request, cluster = CHAIN.compile_request(), two_by_two()
    engine = CHAIN.engine(
        strategy=Strategy(mesh=ProcessMesh.grid(a=4).weighted(a=(3, 1, 1, 3)), batch_axis="a")
    )
    engine.prepare(CHAIN.first())
    weighted = engine.plan.portable
    layout_costs = SearchState(request, cluster, "auto", SECONDS).layout_costs
    plan = plan_of(program_of_plan(weighted, layout_costs), layout_costs)
    assert plan == replace(weighted, cluster="boxes", stages=plan.stages, forecast=plan.forecast)
    assert plan.stages[0].devices == (0, 1, 2, 3)
    assert candidate_of_plan(weighted, layout_costs) is None
    found = search(request, cluster, SearchOptions(seconds=0.0, processes=1, start=weighted))
    assert plan.forecast is not None
    assert found.baselines["start"] == plan.forecast.seconds
    limited = SearchOptions(
        seconds=0.0, processes=1, start=weighted, constraints=SearchConstraints(devices=2)
    )
    assert search(request, cluster, limited).baselines["start"] == "left out: devices=2 is given"
    other = PROGRAMS["mlp"].compile_request()
    with pytest.raises(GraphError, match=r"plan of Chain is for (batches of|another program)"):
        search(other, cluster, SearchOptions(start=weighted))
    with pytest.raises(ResourceError, match=r"needs 4 devices but cluster boxes has 2"):
        search(request, cluster_of(slow(2)), SearchOptions(start=weighted))
    with pytest.raises(GraphError, match="start of the search is a plan but mode 'semi' searches nothing"):
        SearchOptions(mode="semi", start=weighted)


def test_the_front_of_what_was_forecast() -> None:
    """No plan of it beats another; nothing that was forecast beats one of it."""
    state = finished_search(PROGRAMS["gpt"])
    plan = plan_of_search(state, {})
    front = plan.search.front
    assert plan.forecast is not None
    assert (front[0].seconds, front[0].memory) == (plan.forecast.seconds, max(plan.forecast.memory))
    assert len(front) > 1
    for one, other in itertools.permutations(front, 2):
        assert one.seconds > other.seconds or one.memory > other.memory or one.devices > other.devices
    for each in state.evaluations.all:
        assert not each.fits or any(
            other.seconds <= 1.001 * each.seconds
            and other.memory <= 1.01 * each.memory
            and other.devices <= each.devices
            for other in front
        )
    assert Plan.parse(plan.text()) == plan
    assert f"\n  {front[0].seconds * 1e3:.4g} ms" in str(plan)


class Marked(nn.Module):
    """Five linear layers with a mark behind the second."""

    def __init__(self) -> None:
        self.layers = [nn.Linear(24, 24, bias=False, dtype="f64") for _ in range(4)]
        self.last = nn.Linear(24, 6, dtype="f64")

    def forward(self, x: Any) -> Any:
        for number, layer in enumerate(self.layers):
            x = ops.relu(layer(x))
            if number == 1:
                dg.pipeline_boundary(x)
        return self.last(x)


def test_stages_are_made_of_the_layers_that_are_given_or_marked() -> None:
    options = SearchOptions(seconds=SECONDS, processes=1, constraints=SearchConstraints(layers=2, stages=2))
    two = search(CHAIN.compile_request(), two_by_two(), options)
    assert [(stage.first, stage.last) for stage in two.stages] == [(0, 1), (1, 2)]
    trains_as_one_rank(CHAIN, two)
    program = replace(CHAIN, make=Marked)
    marked = search(program.compile_request(), two_by_two(), replace(options, constraints=FREE))
    assert [layer.scope for layer in marked.layers] == ["layers.0", "layers.2"]
    trains_as_one_rank(program, marked)
    three = replace(options, constraints=SearchConstraints(layers=3))
    with pytest.raises(GraphError, match="is marked to have 2 layers but 3 are given"):
        search(program.compile_request(), two_by_two(), three)
    with pytest.raises(
        ShardingError, match="layers of the search is 3 but the plan to start from has 2; leave"
    ):
        search(CHAIN.compile_request(), two_by_two(), replace(three, start=two))
    assert program.compile_request(strategy=Strategy(micro_batches=2)).trace().layer_starts  # no effect there


@pytest.mark.parametrize(
    ("mesh", "repeated"), [(ProcessMesh.grid(tp=2), "dp=4, tp=2"), (MIXED, "repeat=2, tp=2, dp=2")]
)
def test_one_annotation_leaves_the_other_devices_to_the_search(mesh: ProcessMesh, repeated: str) -> None:
    """Its mesh is repeated on them where that is faster; the annotation holds in each repetition, for
    training and for evaluation; it is the answer on the annotated mesh alone where devices are given."""
    program, cluster = replace(PROGRAMS["mlp"], batch=16), cluster_of(slow(2, 2, 2, 2, flops="1 GFLOP/s"))
    request = program.compile_request(Net(mesh))
    plan = search(request, cluster, SearchOptions(seconds=SECONDS, processes=1))
    assert plan.forecast is not None
    assert [stage.mesh.described for stage in plan.stages] == [repeated]
    assert plan.ranks == tuple(range(8))
    assert plan.tensors["first.weight"].spec.dims == ((), ("tp",))
    trains_as_one_rank(program, plan, lambda: Net(mesh))
    engine = program.engine(Net(mesh), plan=plan)
    samples, classes = program.data(1)
    engine.fit((samples, classes), batch_size=16, valid_data=(samples[:5], classes[:5]), progress=False)
    limits = SearchConstraints(devices=mesh.size)
    few = search(request, cluster, SearchOptions(seconds=SECONDS, processes=1, constraints=limits))
    assert few.forecast is not None
    assert few.ranks == mesh.members
    assert plan.forecast.seconds < few.forecast.seconds


def test_a_mesh_that_cannot_be_repeated() -> None:
    for mesh in (ProcessMesh.grid(2, tp=2), ProcessMesh.grid(tp=2).weighted(tp=(1, 2))):
        with pytest.raises(ShardingError, match="cannot be repeated: it needs ranks 0 to 1, no weights"):
            mesh.repeated(2)
    plan = search(
        PROGRAMS["mlp"].compile_request(Net(ProcessMesh.grid(2, tp=2))),
        two_by_two(),
        SearchOptions(seconds=SECONDS, processes=1),
    )
    assert plan.ranks == (2, 3)


class Bound(nn.Module):
    """Ops that are legal, or the same, for few numbers of samples only."""

    def __init__(self, kind: str, mesh: ProcessMesh | None = None) -> None:
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        self.kind, self.mesh = kind, mesh

    def forward(self, x: Any) -> Any:
        x = x if self.mesh is None else dg.shard_tensor(x, self.mesh, ("dp", None))
        for _ in range(12 * (self.kind == "depends" and x.shape[0] > 3)):
            x = ops.tanh(x)
        x = ops.relu(self.up(x))
        return self.down(x.reshape(2, 8) if self.kind == "reshape" else x)


@pytest.mark.filterwarnings("ignore:loss is not recognised as a mean")
@pytest.mark.parametrize("mode", ["auto", "recursive"])
@pytest.mark.parametrize("annotated", [False, True])
@pytest.mark.parametrize("kind", ["reshape", "depends"])
def test_a_given_number_of_micro_batches_is_the_only_one_for_which_the_model_is_traced(
    kind: str, annotated: bool, mode: str
) -> None:
    mesh, data = ProcessMesh.grid(dp=2) if annotated else None, BATCH_OF_12
    losses = [
        dg.Engine(
            Bound(kind, mesh), nn.CrossEntropy(), optim.SGD(lr=0.1), strategy=strategy, cluster=machines(2)
        ).run(data)["loss"]
        for strategy in (Strategy(micro_batches=6), Strategy(mode=mode, micro_batches=6, seconds=SECONDS))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("annotated", [False, True])
def test_only_numbers_of_micro_batches_with_the_same_ops_are_compared(annotated: bool) -> None:
    mesh = ProcessMesh.grid(dp=2) if annotated else None
    strategy = Strategy(mode="auto", seconds=SECONDS)
    engine = dg.Engine(
        Bound("depends", mesh), nn.CrossEntropy(), optim.SGD(lr=0.1), strategy=strategy, cluster=machines(2)
    )
    assert engine.run(BATCH_OF_12)["loss"] > 0


def test_the_bound_counts_what_runs_for_each_micro_batch() -> None:
    """Launches come again for each: with a given number the bound is above that of the batch at once."""
    whole, parts = run(), run(micro_batches=4)
    assert whole.bound is not None
    assert parts.bound is not None
    assert parts.best is not None
    assert whole.bound < parts.bound <= parts.best.seconds
