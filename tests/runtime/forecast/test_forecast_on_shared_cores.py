"""Ranks that share cores compute faster while others wait, and the cores do no more than they can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from support.files.clusters import cluster_of
from support.programs.forecasts import chain, document

from distgraph.errors import ResourceError
from distgraph.ir.mesh import ProcessMesh
from distgraph.resources import Cluster
from distgraph.runtime.forecast.core_contention import CoreGroup, core_groups, with_shared_cores
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.forecast.stream_model import TaskTime
from distgraph.runtime.forecast.task_forecast import TaskForecast
from distgraph.runtime.profile.evaluation import cores_of
from distgraph.runtime.schedule.simulate import simulate
from distgraph.runtime.schedule.task import TaskGraph, pipeline
from distgraph.runtime.schedule.timeline import Timeline

grid = ProcessMesh.grid
FREE = {"launch": "0 s", "latency": "0 s", "bandwidth": "1000000 TB/s", "cable": "1000000 TB/s"}


def boxes(*sizes: int, cores: float | None) -> Cluster:
    """Machines with some devices each, and cores that the devices of each share; links are free."""
    described = document(*sizes, **FREE)
    for entry in described["machines"]:
        if cores is not None:
            entry["devices"]["compute"]["cores"] = cores
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


def test_neighbours_share_a_whole_number_of_cores() -> None:
    halves = core_groups(boxes(4, cores=2.0), range(4))
    assert [halves[rank].ranks for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert halves[0] == CoreGroup((0, 1), 2, 1.0)
    uneven = core_groups(boxes(3, 3, cores=1.5), (0, 1, 3))
    assert uneven == {0: CoreGroup((0, 1), 3, 1.5), 1: CoreGroup((0, 1), 3, 1.5), 2: CoreGroup((2,), 3, 1.5)}
    assert core_groups(boxes(2, cores=2.0), range(2)) == core_groups(boxes(2, cores=None), range(2)) == {}


def settled(
    graph: TaskGraph, seconds: float, groups: Mapping[int, CoreGroup], compute: float = 1.0
) -> Timeline:
    """The timeline of tasks of some seconds each, of which a part is computation."""
    time = TaskTime(seconds, compute * seconds, (1 - compute) * seconds, 0.0, 0.0)
    tasks = {t.name: TaskForecast(t.name, t.kind, t.stage, t.ranks[0], time, time) for t in graph.tasks}

    def simulated(tasks: Mapping[str, TaskForecast]) -> Timeline:
        return simulate(graph, {name: task.body.seconds for name, task in tasks.items()})

    return with_shared_cores(tasks, simulated, groups)[1]


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


def test_cores_that_a_profile_finds() -> None:
    cluster = boxes(2, 2, cores=None)
    first, _, third, _ = cluster.devices
    shares = (2.0, 2.0, 4.0, 4.0)  # machines of one core and of half a core
    assert cores_of(cluster, first, shares) == 1.0
    assert cores_of(cluster, third, shares) == 0.5
    assert cores_of(cluster, first, (1.0,) * 4) is cores_of(cluster, first, ()) is None


@pytest.mark.parametrize("cores", [0, -1, "two"])
def test_cores_are_a_positive_number(cores: object) -> None:
    described = document(2)
    described["machines"][0]["devices"]["compute"]["cores"] = cores
    with pytest.raises(ResourceError, match=r"machines\[0\]\.devices\.compute\.cores"):
        cluster_of(described)
