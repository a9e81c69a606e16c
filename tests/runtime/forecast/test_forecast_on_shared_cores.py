"""Ranks that share cores compute faster while others wait, and the cores do no more than they can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from support.files.clusters import cluster_of
from support.programs.forecasts import chain, document

from distgraph.errors import ResourceError
from distgraph.ir.mesh import ProcessMesh
from distgraph.resources import Cluster
from distgraph.runtime.forecast.core_contention import (
    MOST_TURNS,
    CoreGroup,
    Speeds,
    core_groups,
    core_speeds,
)
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.forecast.rank_seconds import rank_seconds
from distgraph.runtime.forecast.task_forecast import TaskForecast
from distgraph.runtime.forecast.task_time import TaskTime
from distgraph.runtime.profile.evaluation import cores_of
from distgraph.runtime.profile.shared_cores import CoreSharing
from distgraph.runtime.schedule.simulate import simulate
from distgraph.runtime.schedule.task import TaskGraph, pipeline
from distgraph.runtime.schedule.timeline import Timeline

grid = ProcessMesh.grid
FREE = {"launch": "0 s", "latency": "0 s", "bandwidth": "1000000 TB/s", "cable": "1000000 TB/s"}


def boxes(*sizes: int, cores: float | None, bound: bool = False) -> Cluster:
    """Machines with some devices each, and cores that the devices of each share; links are free."""
    described = document(*sizes, **FREE)
    for entry in described["machines"]:
        if cores is not None:
            entry["devices"]["compute"] |= {"cores": cores, "bound": bound}
    return cluster_of(described)


@pytest.mark.parametrize(
    ("devices", "cores", "computing", "speed"),
    [
        (2, 1.0, 2, 1.0),
        (2, 1.0, 1, 2.0),
        (2, 1.0, 1.5, 1.5),
        (2, 0.5, 1, 2.0),  # half a core, or a quarter
        (1, 0.5, 1, 1.0),
        (4, 2.0, 1, 2.0),  # no rank computes on two cores
        (4, 2.0, 3, 4 / 3),
        (3, 2.0, 2, 1.5),
    ],
)
def test_speed_of_a_rank(devices: int, cores: float, computing: float, speed: float) -> None:
    assert CoreGroup((0,), devices, cores).speed(computing) == pytest.approx(speed)


def test_groups_of_ranks() -> None:
    shared = core_groups(boxes(4, cores=2.0), by_rank(range(4)))
    assert shared == dict.fromkeys(range(4), CoreGroup((0, 1, 2, 3), 4, 2.0))
    bound = core_groups(boxes(4, cores=2.0, bound=True), by_rank(range(4)))
    assert [bound[rank] for rank in range(4)] == 2 * [CoreGroup((0, 1), 2, 1.0)] + 2 * [
        CoreGroup((2, 3), 2, 1.0)
    ]
    uneven = core_groups(boxes(3, 3, cores=1.5), {0: 0, 1: 1, 5: 3})
    assert uneven == {0: CoreGroup((0, 1), 3, 1.5), 1: CoreGroup((0, 1), 3, 1.5), 5: CoreGroup((5,), 3, 1.5)}
    assert core_groups(boxes(2, cores=2.0), by_rank(range(2))) == {}
    assert core_groups(boxes(2, cores=None), by_rank(range(2))) == {}


def by_rank(devices: Sequence[int]) -> dict[int, int]:
    return dict(enumerate(devices))


def settled(
    graph: TaskGraph, seconds: float, groups: Mapping[int, CoreGroup], compute: float = 1.0
) -> Timeline:
    """The timeline of tasks of some seconds each, of which a part is computation, after some turns."""
    speeds: Speeds = {}
    for _ in range(MOST_TURNS):
        tasks = {}
        for task in graph.tasks:
            computing = compute * seconds / min(speeds.get((task.name, rank), 1.0) for rank in task.ranks)
            waiting = (1 - compute) * seconds
            time = TaskTime(computing + waiting, computing, waiting, 0.0, 0.0)
            tasks[task.name] = TaskForecast(task.name, task.kind, task.stage, task.ranks[0], time, time)
        timeline = simulate(graph, {name: task.body.seconds for name, task in tasks.items()})
        speeds = core_speeds(tasks, timeline, groups)
    return timeline


def one_core(ranks: Sequence[int]) -> dict[int, CoreGroup]:
    return dict.fromkeys(ranks, CoreGroup(tuple(ranks), len(ranks), 1.0))


def test_stages_that_take_turns_are_twice_as_fast() -> None:
    graph = pipeline([(0,), (1,)], 1, optimize=False)
    assert settled(graph, 1.0, {}).makespan == 4
    assert settled(graph, 1.0, one_core((0, 1))).makespan == pytest.approx(2)
    assert settled(graph, 1.0, {}, compute=0.5).makespan == 4
    assert settled(graph, 1.0, one_core((0, 1)), compute=0.5).makespan == pytest.approx(3)


@pytest.mark.parametrize("micro_batches", [2, 4, 8, 16])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_core_does_the_work_of_all_its_ranks(stages: int, micro_batches: int) -> None:
    """The core never waits, so a step takes the sum of all tasks: a task takes 1 / stages of its seconds."""
    graph = pipeline([(rank,) for rank in range(stages)], micro_batches, optimize=False)
    step = settled(graph, 1.0, one_core(range(stages))).makespan
    assert step == pytest.approx(2 * micro_batches, rel=0.1)
    assert settled(graph, 1.0, {}).makespan == 2 * (micro_batches + stages - 1)


def test_ranks_that_compute_together_leave_each_other_nothing() -> None:
    graph = pipeline([(0, 1)], 4)
    assert settled(graph, 1.0, one_core((0, 1))) == settled(graph, 1.0, {})


def test_a_rank_alone_has_the_cores_of_its_machine() -> None:
    graph = pipeline([(0,)], 2, optimize=False)
    assert settled(graph, 1.0, {0: CoreGroup((0,), 4, 2.0)}).makespan == pytest.approx(2)


def test_a_pipeline_on_one_machine_and_on_two() -> None:
    build = chain(64, [64, 64, 64], [grid(0, x=1), grid(1, x=1)], 1)
    stated = forecast(build, boxes(2, cores=None))
    shared = forecast(build, boxes(2, cores=1.0))
    apart = forecast(build, boxes(2, 2, cores=1.0), (0, 2))
    assert forecast(build, boxes(2, cores=2.0)).step_seconds == stated.step_seconds
    assert apart.step_seconds == pytest.approx(stated.step_seconds / 2)
    assert apart.step_seconds <= shared.step_seconds < 0.8 * stated.step_seconds
    assert sum(shared.compute_seconds.values()) < sum(stated.compute_seconds.values())


def test_ranks_that_run_nothing_take_nothing() -> None:
    """Meshes without some ranks, and mappings of more ranks than the program has."""
    build = chain(64, [64, 64], [ProcessMesh([0, 2], "dp")])
    alone = forecast(build, boxes(2, 2, cores=1.0))
    assert alone.step_seconds == pytest.approx(forecast(build, boxes(2, 2, cores=None)).step_seconds / 2)
    whole = chain(64, [64, 64], [grid(dp=2)])
    assert forecast(whole, boxes(4, cores=1.0), (0, 1, 2, 3)).step_seconds > 0


@pytest.mark.parametrize("devices", [(0, 2, 3), (2, 3, 0), (2, 0, 3)])
def test_the_order_of_ranks_makes_no_difference(devices: tuple[int, ...]) -> None:
    """Two of three ranks share a core, so all wait for ranks of the stated speed."""
    build = chain(63, [64, 64], [grid(dp=3)])
    stated = forecast(build, boxes(3, cores=None)).step_seconds
    assert forecast(build, boxes(2, 2, cores=1.0), devices).step_seconds == pytest.approx(stated)


@pytest.mark.parametrize("cable", ["5 GB/s", "2 GB/s", "0.5 GB/s"])
def test_messages_are_hidden_by_no_more_than_the_faster_computation(cable: str) -> None:
    """Ranks alone on cores of two are as fast as devices that are stated twice as fast."""
    build = chain(256, [128] * 5, [grid(dp=2)] * 4, micro_batches=2)
    shared, fast = document(2, 2, cable=cable), document(2, 2, cable=cable)
    for described in (shared, fast):
        for entry in described["machines"]:
            entry["devices"]["compute"]["launch"] = "0 s"
    for entry in shared["machines"]:
        entry["devices"]["compute"]["cores"] = 1.0
    for entry in fast["machines"]:
        entry["devices"] |= {"memory_bandwidth": "2000 GB/s", "peak": {"f32": "20 TFLOP/s"}}
    found, expected = (forecast(build, cluster_of(each), (0, 2)) for each in (shared, fast))
    assert found.step_seconds == pytest.approx(expected.step_seconds)
    assert found.exposed_seconds == pytest.approx(expected.exposed_seconds)


def test_what_runs_inside_a_task_ends_with_it() -> None:
    build = chain(64, [64, 64, 64], [grid(0, x=1), grid(1, x=1)], 1)
    found = forecast(build, boxes(2, cores=1.0), trace=True)
    for task in found.tasks.values():
        ends = [span.start + span.seconds for span in task.last.spans if span.stream == "compute"]
        assert max(ends, default=0.0) <= task.last.seconds * (1 + 1e-9)


def test_seconds_of_ranks_are_those_of_the_forecast() -> None:
    build = chain(64, [64, 64, 64], [grid(0, x=1), grid(1, x=1)], 1)
    cluster = boxes(2, cores=1.0)
    seconds = rank_seconds(build, cluster, (0, 1))
    assert seconds == pytest.approx(forecast(build, cluster).compute_seconds)


def test_cores_that_a_profile_finds() -> None:
    cluster = boxes(2, 2, cores=None)
    first, _, third, _ = cluster.devices
    quotas = CoreSharing((2.0, 2.0, 4.0, 4.0), bound=True, period=0.01)  # of a core and of half a core
    assert cores_of(cluster, first, quotas) == (1.0, None)
    assert cores_of(cluster, third, quotas) == (0.5, None)
    assert cores_of(cluster, first, CoreSharing((2.0,) * 4, bound=True)) == (1.0, True)
    assert cores_of(cluster, first, CoreSharing((1.0,) * 4)) == (None, None)
    assert cores_of(boxes(4, cores=None), first, CoreSharing((2.0, 2.0))) == (2.0, None)


@pytest.mark.parametrize("cores", [0, -1, "two"])
def test_cores_are_a_positive_number(cores: object) -> None:
    described = document(2)
    described["machines"][0]["devices"]["compute"]["cores"] = cores
    with pytest.raises(ResourceError, match=r"machines\[0\]\.devices\.compute\.cores"):
        cluster_of(described)
