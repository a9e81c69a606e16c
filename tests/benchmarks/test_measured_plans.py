"""What is measured on several machines: plans in the order of devices, unequal machines, transfers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.programs.searched import CHAIN, SECONDS, two_by_two

from benchmarks.support.measured_plans import forecast_on, in_device_order, ratios
from benchmarks.support.networks import resharding as transfers
from benchmarks.support.networks.searched_plans import SETTINGS, Setting
from distgraph.engine.commands.plan_search import SearchOptions, search
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.search_space import pools_of
from distgraph.plan.constraints import SearchConstraints
from distgraph.plan.plan import Plan
from distgraph.resources import load_cluster


@pytest.fixture(scope="module")
def pipeline() -> Plan:
    """Two stages, each on a machine of two devices."""
    options = SearchOptions(seconds=SECONDS, processes=1, constraints=SearchConstraints(stages=2))
    return search(CHAIN.compile_request(), two_by_two(), options)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_plan_in_the_order_of_devices_is_the_same_program(pipeline: Plan, reverse: bool) -> None:
    cluster, stages = two_by_two(), pipeline.stages
    if reverse:
        devices = [stage.devices for stage in reversed(stages)]
        stages = tuple(replace(stage, devices=own) for stage, own in zip(stages, devices, strict=True))
    given = replace(pipeline, stages=stages)
    plan = in_device_order(given, cluster)
    assert [stage.mesh.members for stage in plan.stages] == [stage.devices for stage in given.stages]
    assert Plan.parse(plan.text()).stages == plan.stages
    layout_costs = LayoutCosts(CHAIN.compile_request(), cluster, pools_of(cluster))
    assert forecast_on(plan, layout_costs) == pytest.approx(forecast_on(given, layout_costs), rel=1e-12)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_machines_of_unequal_speed_are_of_several_kinds(setting: Setting, tmp_path: Path) -> None:
    file = tmp_path / "network.yaml"
    file.write_text(setting.description())
    cluster = load_cluster(file)
    assert len(cluster.devices) == setting.ranks * len(setting.cores)
    assert len({device.model for device in cluster.devices}) == len(set(setting.cores))
    assert [machine.name for machine in cluster.machines] == [f"m{n}" for n in range(len(setting.cores))]


def test_the_ratio_is_that_of_turns_and_its_interval_holds_it() -> None:
    ratio, (low, high) = ratios([[1.0, 3.0, 1.0], [2.0], [1.5]], [[2.0], [2.0], [2.0]])
    assert ratio == 0.75
    assert low <= ratio <= high


def _transfers(case: str) -> Iterator[tuple[str, int]]:
    """Kind and number of the collectives of a step."""
    with transfers.landing_of(case):
        engine, batch = transfers.make(case)
        for each in engine.prepare(batch).collectives:
            yield each.kind, each.count


def test_without_the_all_gather_twice_as_many_bytes_go_from_machine_to_machine() -> None:
    assert ("all_gather", 1) in _transfers("with")
    assert not any(kind == "all_gather" for kind, _ in _transfers("without"))


def test_a_hierarchy_has_three_steps_in_place_of_one() -> None:
    assert {kind for kind, _ in _transfers("relayed")} == {"all_reduce"}
    assert {kind for kind, _ in _transfers("hierarchical")} == {"reduce_scatter", "all_reduce", "all_gather"}


def test_gains_are_those_above_the_signal() -> None:
    seconds = {"signal": 1.0, "without": 3.0, "with": 2.0}
    assert transfers.gains(seconds) == {"local_all_gather": 2.0}
    sums = {"direct": 3.0, "relayed": 2.0}
    assert transfers.gains({**seconds, **sums}) == {"local_all_gather": 2.0, "relayed_all_reduce": 1.5}
