"""Intervals of forecasts, and plans that a forecast cannot tell apart."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from distgraph.errors import ResourceError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.plan.forecast_errors import WIDTH, ForecastErrors, Interval, Uncertain
from distgraph.plan.plan import Plan
from distgraph.plan.plan_components import Estimate, Layer, LayerOps, Program, Stage, Stored
from distgraph.resources.load import parse_cluster, read_document
from distgraph.resources.runtimes.load_runtime import load_runtime
from distgraph.runtime.forecast.forecast_error_shares import errors_of
from distgraph.runtime.profile.resource_writer import as_yaml

ERRORS = ForecastErrors(computation=0.1, inside=0.2, between=0.3, own=0.01)
COMPUTES = {"computation": 1.0}
SENDS = {"computation": 0.5, "between": 0.5}


def test_an_interval_is_that_of_a_normal_distribution_of_logarithms():
    interval = Interval.around(2.0, 0.1)
    assert interval.low == pytest.approx(2.0 * math.exp(-0.1 * WIDTH))
    assert 2.0 in interval
    assert interval.high * 1.01 not in interval


@pytest.mark.parametrize(
    ("shares", "deviation"),
    [(COMPUTES, math.hypot(0.1, 0.01)), (SENDS, math.hypot(0.05, 0.15, 0.01)), ({}, 0.01)],
)
def test_kinds_count_as_much_as_they_take(shares, deviation):
    assert ERRORS.step(shares) == pytest.approx(deviation)


def test_shared_errors_cancel_where_plans_go_to_the_same():
    first = Uncertain(1.0, COMPUTES, ERRORS)
    assert not first.equals(Uncertain(1.05, COMPUTES, ERRORS))
    assert first.equals(Uncertain(1.015, COMPUTES, ERRORS))
    assert first.equals(Uncertain(1.05, SENDS, ERRORS))
    other_cluster = replace(ERRORS, runtime="torch")  # nothing is shared with another cluster or runtime
    assert first.equals(Uncertain(1.15, COMPUTES, other_cluster))
    assert not first.equals(Uncertain(1.5, COMPUTES, other_cluster))


def plan(seconds: float, shares=COMPUTES, **baselines: float) -> Plan:
    mesh = ProcessMesh.grid(dp=2)
    return Plan(
        program=Program(name="Linear", fingerprint="0", parameters=3, inputs={"x": "f32[2, 3]"}),
        batch=4,
        micro_batches=1,
        schedule="1f1b",
        layers=(Layer(first="1"),),
        stages=(Stage(mesh=mesh, first=0, last=1),),
        tensors={"x": Stored("input", 0, ShardSpec.of(["dp", None]))},
        ops=(LayerOps((), ()),),
        forecast=Estimate(
            seconds=seconds, shares=shares, errors=ERRORS, beside=dict.fromkeys(baselines, COMPUTES)
        ),
        baselines=baselines,
    )


def test_a_plan_prints_intervals_and_says_what_is_equal():
    text = str(plan(1.0, data_parallel=1.01, zero=1.5))
    assert "this plan      1 s (879.2 ms to 1.137 s)" in text
    assert "data_parallel  1.01 s (887.9 ms to 1.149 s), equal within the forecast" in text
    assert "zero           1.5 s (1.319 s to 1.706 s)\n" in f"{text}\n"


def test_a_comparison_says_which_plan_is_faster_or_that_nobody_knows():
    assert str(plan(1.0).compare(plan(1.01))).endswith("the steps of both are equal within the forecast")
    assert str(plan(1.0).compare(plan(1.3))).endswith("this is faster by forecast")
    assert str(plan(1.3).compare(plan(1.0))).endswith("other is faster by forecast")


def test_errors_are_kept_in_plan_files_and_absent_where_unknown():
    original = plan(1.0, zero=1.5)
    assert Plan.parse(original.text()) == original
    bare = replace(original, forecast=Estimate(seconds=1.0))
    assert '"errors"' not in bare.text()
    assert "to" not in str(bare).split("forecast of a step")[1].splitlines()[1].split()


def test_guesses_make_intervals_wider_than_measurements():
    document, _ = read_document("dgx_a100_pod")
    known = parse_cluster(as_yaml(document), "known.yaml")
    document["machines"][0]["nics"]["origin"]["bandwidth"] = "guess within 80%"
    guessed = parse_cluster(as_yaml(document), "guessed.yaml")
    runtime = load_runtime("megatron")
    first, second = (errors_of(cluster, range(8), runtime) for cluster in (known, guessed))
    assert second.between > first.between
    assert (second.computation, second.inside) == (first.computation, first.inside)


def test_errors_of_a_calibration_are_those_of_its_runtime_only():
    document, _ = read_document("dgx_a100_pod")
    document["errors"] = {"computation": 0.03, "own": 0.02, "runtime": "megatron", "runs": 40}
    cluster = parse_cluster(as_yaml(document), "calibrated.yaml")
    calibrated = errors_of(cluster, range(8), load_runtime("megatron"))
    assert (calibrated.computation, calibrated.own, calibrated.runs) == (0.03, 0.02, 40)
    others = errors_of(cluster, range(8), load_runtime("torch"))
    assert others.computation > 0.03
    assert others.runs == 0


def test_an_error_that_is_no_deviation_is_named():
    document, _ = read_document("dgx_a100_pod")
    document["errors"] = {"computation": "3 %"}
    with pytest.raises(ResourceError, match=r'bad.yaml: errors.computation: expected a number, got "3 %"'):
        parse_cluster(as_yaml(document), "bad.yaml")
