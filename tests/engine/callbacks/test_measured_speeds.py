"""Speeds of devices from given seconds: what counts as a change, and the cluster that has these speeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from support.files.clusters import boxes, cluster_of
from support.programs.forecasts import document

from distgraph.engine.adaptive.measured_speeds import (
    RecordedSteps,
    changed_devices,
    computing_seconds,
    measured_slowdowns,
    speeds_in_words,
)
from distgraph.engine.adaptive.slowed_cluster import slowed_cluster
from distgraph.errors import RuntimeFault
from distgraph.resources import ComputeCost
from distgraph.runtime.execute.measured_timeline import MeasuredMessage, MeasuredRank, MeasuredRun
from distgraph.runtime.schedule.task import TaskGraph

TWO, FOUR = boxes([1, 1]), boxes([2, 2])


def step(**seconds: float) -> dict[int, MeasuredRank]:
    """A step in which rank `rN` computes for some seconds, and waits for another second inside its task."""
    return {
        int(name[1:]): MeasuredRank(
            (MeasuredRun("forward", 0, 0.0, length + 1.0),),
            (MeasuredMessage("all_reduce", "forward", 0, 0.0, length + 1.0, 1.0),),
        )
        for name, length in seconds.items()
    }


def slowdowns(
    measured: Mapping[int, float], planned: Mapping[int, float] | None = None, cluster: Any = TWO
) -> dict[int, float]:
    """Slowdowns where every rank was to compute for a second; planned ones take longer by their slowdown."""
    before = planned or {}
    forecast = {rank: before.get(rank, 1.0) for rank in measured}
    return measured_slowdowns(measured, forecast, tuple(range(8)), before, cluster, 0.25)


def test_the_median_counts_without_waits() -> None:
    steps = [step(r0=1.0, r1=2.0), step(r0=1.5, r1=9.0), step(r0=7.0, r1=2.5)]
    assert computing_seconds(steps) == {0: 1.5, 1: 2.5}


def test_steps_of_different_ranks_are_not_compared() -> None:
    with pytest.raises(RuntimeFault, match="one recorded step ran on ranks 0-1 and another on ranks 0"):
        computing_seconds([step(r0=1.0, r1=2.0), step(r0=1.0)])
    with pytest.raises(RuntimeFault, match="ranks 0-1 were measured but ranks 0 are forecast"):
        measured_slowdowns({0: 1.0, 1: 1.0}, {0: 1.0}, (0, 1), {}, TWO, 0.25)


def test_a_forecast_that_is_wrong_by_a_factor_changes_nothing() -> None:
    for factor in (1e-3, 1.0, 70.0):
        assert slowdowns({0: factor, 1: 1.2 * factor}) == {0: 1.0, 1: 1.0}


def test_a_slower_machine_is_slower_than_the_rest() -> None:
    assert slowdowns({0: 7.0, 1: 14.2}) == {0: 1.0, 1: 2.0}
    assert slowdowns({0: 14.2, 1: 7.0}) == {0: 2.0, 1: 1.0}


def test_three_of_four_may_be_slower() -> None:
    cluster = boxes([1, 1, 1, 1])
    assert slowdowns({0: 1.0, 1: 3.0, 2: 3.1, 3: 2.9}, cluster=cluster) == {0: 1.0, 1: 3.0, 2: 3.0, 3: 3.0}


def test_devices_of_one_machine_get_one_number_unless_they_differ() -> None:
    assert slowdowns({0: 1.0, 1: 1.1, 2: 2.0, 3: 2.2}, cluster=FOUR) == {0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0}
    assert slowdowns({0: 1.0, 1: 1.1, 2: 1.0, 3: 2.2}, cluster=FOUR) == {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.2}


def test_a_machine_recovers() -> None:
    planned = {1: 2.0}
    assert slowdowns({0: 1.0, 1: 2.1}, planned) == {0: 1.0, 1: 2.0}
    now = slowdowns({0: 1.0, 1: 1.0}, planned)
    assert now == {0: 1.0, 1: 1.0}
    changed = changed_devices(now, planned, 0.25)
    words = speeds_in_words(now, planned, changed, (0, 1), TWO)
    assert words == "rank 1 (machine b1) runs at 1.00 of the described speed, planned at 0.50"


def test_what_has_changed_is_said_by_machine() -> None:
    words = speeds_in_words({2: 2.0, 3: 2.0}, {}, (2, 3), (0, 1, 2, 3), FOUR)
    assert words == "ranks 2-3 (machine b1) run at 0.50 of the described speed, planned at 1.00"


def test_ranks_without_work_say_nothing_about_their_devices() -> None:
    forecast = {0: 1.0, 1: 1.0, 2: 0.0}
    cluster = boxes([1, 1, 1])
    assert measured_slowdowns({0: 1.0, 1: 2.0, 2: 5.0}, forecast, (0, 1, 2), {2: 3.0}, cluster, 0.25) == {
        0: 1.0,
        1: 2.0,
        2: 3.0,
    }


def test_a_shorter_batch_is_left_out_and_clears_nothing() -> None:
    whole, short = TaskGraph((), (), 1), TaskGraph((), (), 1)
    records = RecordedSteps(whole, 2)
    for number, graph in enumerate((whole, short, whole)):
        assert not records.complete
        records.add(graph, number, {})
    assert records.complete
    assert (len(records.steps), records.left_out) == (2, 1)


def test_a_slowed_device_takes_longer_for_everything() -> None:
    described = document(1, 1)
    compute = described["machines"][0]["devices"]["compute"]
    compute["host"] = {"op": "3 us", "network_busy": 0.5}
    compute["ops"] = {"softmax": {"f32": {"bytes": ["1 KiB", "1 MiB"], "times": ["1 us", "90 us"]}}}
    compute["ops"]["conv"] = {
        "f32": {"rates": ["1 ps", "2 ns", "3 ns"], "tile_rates": ["4 ps", "5 ns", "6 ns"]}
    }
    compute["matmul"]["f32"] |= {"moved": "0.2 ns", "copied": "0.3 ns"}
    cluster = cluster_of(described)
    slowed = slowed_cluster(cluster, {1: 4.0})
    cost = ComputeCost(slowed)
    for arguments in (
        ("matmul", 1e9, 1e3, "f32", (1, 256, 256, 256)),
        ("memory", 0.0, 1e6, "f32"),
        ("launch", 0.0, 0.0, "f32"),
        ("matmul", 1e6, 1e9, "f32", (1, 256, 256, 256), "einsum", (0.0, 0.0), 1e6),
        ("matmul", 1e9, 1e3, "f32", (1, 256, 256, 256), "conv", (1e6, 1e3)),
        ("matmul", 1e9, 1e3, "f32", (1, 256, 256, 256), "conv", (1e6, 1e3), 0.0, (2e9, 1e6, 1e3)),
    ):
        assert cost.time(1, *arguments) == pytest.approx(4 * cost.time(0, *arguments))
    softmax = ("memory", 0.0, 5e5, "f32", (1, 1, 1, 1), "softmax")
    assert cost.time(1, *softmax) == pytest.approx(4 * cost.time(0, *softmax))
    hosts = [device.compute.host for device in slowed.devices]
    assert hosts[1].op == pytest.approx(4 * 3e-6)
    assert hosts[1].network_busy == hosts[0].network_busy == 0.5
    assert slowed.devices[0] == cluster.devices[0]
    assert slowed.devices[1].memory == cluster.devices[1].memory
    assert slowed.machines[0] == cluster.machines[0]
    assert slowed.machines[1].template not in {machine.template for machine in cluster.machines}
    assert slowed_cluster(cluster, {0: 1.0}) is cluster
