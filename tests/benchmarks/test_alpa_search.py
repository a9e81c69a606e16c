"""Alpa's suite for the search: both sides are one program on the same devices, and what counts as slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import alpa_search as suite
from benchmarks.alpa_search import Evaluation, Point
from benchmarks.support.all_uniform_pipelines import uniform_pipelines
from benchmarks.support.alpa.recorded_plans import Plan, Stage
from distgraph.engine.search_driver.candidate import build_candidate
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.search_space import pools_of
from distgraph.models import GPTConfig
from distgraph.resources import Cluster

POINTS = {point.name: point for point in suite.points()}
TINY = GPTConfig(
    hidden=64, layers=2, heads=4, vocabulary=128, sequence=32, packed=True, fused=False, dtype="f16"
)


def tiny(gpus: int, stages: tuple[Stage, ...], micro: int) -> tuple[Point, Plan]:
    """The point of a small GPT whose only baseline is one plan."""
    plan = Plan(config=TINY, batch=8, micro=micro, stages=stages, recompute=False)
    row = replace(POINTS["gpt 1"].rows[0], system="alpa", gpus=gpus, plans=(plan,))
    return Point("gpt", gpus, (row,)), plan


def test_every_published_model_is_a_point() -> None:
    families, ablations = ("gpt", "moe", "wresnet"), ("intra_gpt", "intra_moe", "intra_wresnet")
    wanted = [f"{table} {gpus}" for table in families for gpus in (1, 2, 4, 8, 16, 32, 64)]
    wanted += [f"{table} {gpus}" for table in ablations for gpus in (1, 2, 4, 8)]
    assert list(POINTS) == wanted
    assert {row.system for row in POINTS["gpt 16"].rows} >= {"megatron", "alpa", "equal_layer"}
    assert {row.system for row in POINTS["moe 16"].rows} >= {"deepspeed", "alpa", "inter_only"}
    assert {row.system for row in POINTS["intra_wresnet 8"].rows} == {
        "ilp", "data", "zero2", "zero3", "heuristic",
    }  # fmt: skip


@pytest.mark.parametrize(("gpus", "machines"), [(1, 1), (4, 1), (8, 1), (16, 2), (64, 8)])
def test_devices_are_those_of_the_cluster(gpus: int, machines: int) -> None:
    whole, some = suite.devices_of(64), suite.devices_of(gpus)
    assert (len(some.devices), len(some.machines)) == (gpus, machines)
    assert some.devices[-1].memory == whole.devices[0].memory == 16 * 2**30
    assert lanes(some) == {lane for lane in lanes(whole) if max(lane[:2]) < gpus}


def lanes(cluster: Cluster) -> set[tuple[int, int, float | None]]:
    """NVLinks of the first machine: devices and bandwidth."""
    number = {device.node: device.local for device in cluster.devices if device.machine == 0}
    return {
        (number[link.source], number[link.target], link.bandwidth)
        for link in cluster.links
        if link.kind == "nvlink" and {link.source, link.target} <= set(number)
    }


def test_rows_with_smaller_batches_keep_their_micro_batches() -> None:
    point = POINTS["gpt 64"]
    (narrow,) = (row for row in point.rows if row.system == "intra_only")
    (plan,) = narrow.plans
    assert (plan.batch, plan.micro) == (64, 32)
    same = suite.same_program(plan, point)
    assert (same.batch, same.micro, same.stages) == (1024, 512, plan.stages)
    assert same.config == point.reference.config
    small = suite.same_program(replace(plan, batch=1024, micro=1024), point)
    assert small.micro == 1024


def test_both_sides_are_one_program() -> None:
    point, plan = tiny(1, (Stage(2, 1),), micro=2)
    cluster = suite.devices_of(1)
    found = suite.evaluation_of(plan, cluster)
    assert not found.missing
    layout_costs = LayoutCosts(suite.compile_request_of(point), cluster, pools_of(cluster))
    alike = [
        build_candidate(row, layout_costs).seconds
        for row in uniform_pipelines(layout_costs, 2, "none")
        if not row.recompute
    ]
    assert alike
    assert alike == pytest.approx([found.seconds] * len(alike), rel=1e-9)


def test_what_a_baseline_counts_with() -> None:
    row = POINTS["gpt 8"].rows[0]
    slow, fast, large = (
        Evaluation("slow", 3.0, 0.0),
        Evaluation("fast", 2.0, 0.0),
        Evaluation("large", 1.0, 5.0),
    )
    assert suite.chosen(row, [slow, fast, large]) == fast
    assert suite.chosen(row, [large]) == large  # it ran, with another compiler
    assert suite.chosen(replace(row, published=None), [large]) is None
    assert suite.chosen(replace(row, projected=True), [large]) is None


@pytest.mark.parametrize(("seconds", "not_slower"), [(2.0, True), (2.5, False), (None, False)])
def test_ours_is_slower_where_it_takes_longer_or_is_none(seconds: float | None, not_slower: bool) -> None:
    row = {
        "table": "gpt", "system": "alpa", "gpus": 4, "published": 58.21, "sample_flop": 3e12, "seconds": 2.0,
        "fits": True, "plan": "", "tried": [],
    }  # fmt: skip
    entry = {"name": "gpt 4", "batch": 8, "ours": {"seconds": seconds, "plan": ""}, "rows": [row]}
    figures = suite.figures_of([entry])
    assert figures["ours_not_slower"] is not_slower
    assert figures["slower_than"] == ([] if not_slower else ["gpt alpa 4"])
    assert figures["rows"][0]["forecast"] == pytest.approx(3.0)
    assert figures["rows"][0]["ours"] == (None if seconds is None else pytest.approx(6.0 / seconds))
