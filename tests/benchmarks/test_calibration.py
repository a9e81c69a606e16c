"""Costs of measured steps in closed form are those of the forecast, and find known numbers."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from support.paths import BENCHMARKS, ROOT
from support.programs.forecasts import WAITING

from benchmarks import vtrain
from benchmarks.support.megatron.measured_runs import forecasts_of
from benchmarks.support.megatron.training_cost import Costs
from benchmarks.support.megatron.training_program import Run, Shape, gpt_build, read_runs
from distgraph.errors import ResourceError
from distgraph.resources.cluster import Cluster
from distgraph.resources.host_times import HostTimes
from distgraph.resources.load import load_cluster
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.profile.calibration.robust_fit import Parameter, fit

CLUSTER = "vtrain_a100_pod"


def numbers(cluster: Cluster) -> dict[str, float]:
    """What the closed form takes from a resource file."""
    device = cluster.devices[0]
    rate = device.compute.matmul["f16"]
    links = {link.kind: link for link in cluster.links}
    return {
        "peak": device.peak["f16"],
        "memory_bandwidth": device.memory_bandwidth,
        "efficiency": rate.efficiency,
        **dict(zip(("half_m", "half_n", "half_k"), rate.half, strict=True)),
        "memory_efficiency": device.compute.memory_efficiency,
        "lookup_efficiency": device.compute.lookup_efficiency,
        "launch": device.compute.launch,
        "issue": device.compute.host.op,
        "collective_launch": cluster.launch,
        "send_launch": cluster.launch,
        "inside_bandwidth": links["nvlink"].bandwidth,
        "inside_latency": links["nvlink"].latency,
        "network_bandwidth": links["infiniband"].bandwidth,
        "network_latency": links["infiniband"].latency,
        "update_bytes": 14.0,
    }


def run_of(hidden, heads, sequence, micro, tp, dp, pp, layers, micro_batches) -> Run:
    """A run that nobody measured."""
    gpus, batch = tp * dp * pp, micro * dp * micro_batches
    return Run(gpus, batch, micro, hidden, heads, layers, sequence, tp, dp, pp, 1.0)


@pytest.mark.parametrize("issue", [0.0, 40e-6])
@pytest.mark.parametrize(
    "sizes",
    [
        (256, 4, 128, 2, 1, 2, 1, 3, 2),
        (256, 4, 128, 2, 2, 3, 1, 3, 4),  # dp of 3
        (256, 4, 128, 2, 2, 1, 2, 4, 6),
        (256, 4, 128, 2, 4, 1, 3, 6, 5),
        (256, 4, 128, 2, 1, 12, 1, 2, 3),  # across machines, the last one half full
        (512, 8, 256, 1, 2, 2, 3, 6, 7),
    ],
)
def test_the_closed_form_is_the_forecast(sizes, issue):
    cluster = load_cluster(CLUSTER)
    cluster = dataclasses.replace(
        cluster,
        devices=tuple(
            dataclasses.replace(d, compute=dataclasses.replace(d.compute, host=HostTimes(op=issue)))
            for d in cluster.devices
        ),
    )
    run = run_of(*sizes)
    shape = Shape(run.hidden, run.heads, run.sequence, run.micro, run.tp)
    built = gpt_build(shape, [run.layers // run.pp] * run.pp, run.dp, run.micro_batches)
    whole = forecast(built, cluster, runtime=WAITING)
    closed = Costs([run], cluster, plain=True).seconds(numbers(cluster))
    # Slow hosts: the forecast knows how many ops follow a message, and at which op the host falls behind.
    assert closed[0] == pytest.approx(whole.step_seconds, rel=5e-3 if issue else 1e-6)


@pytest.mark.parametrize(
    "sizes",
    [
        (256, 4, 128, 2, 1, 2, 1, 3, 2),
        (256, 4, 128, 1, 2, 1, 2, 4, 6),  # softmax of matrices that do not come by fours
        (256, 4, 128, 2, 4, 1, 3, 6, 5),
        (
            512,
            8,
            256,
            2,
            1,
            8,
            4,
            8,
            3,
        ),  # gradients are reduced between machines in a pipeline of four stages
    ],
)
def test_the_closed_form_that_is_fitted_is_the_forecast_of_measured_runs(sizes):
    """With recomputation, updates in one kernel and the softmax of Megatron-LM (its runtime model)."""
    run = run_of(*sizes)
    values = {**vtrain.FIXED, **{p.name: p.start for p in vtrain.PARAMETERS}}
    closed = Costs([run], load_cluster(CLUSTER)).seconds(values)
    ((found,),) = forecasts_of([run], [[values]])
    assert found.seconds == pytest.approx(closed[0], rel=5e-3)


def test_a_run_is_forecast_the_same_beside_one_with_more_micro_batches():
    few, many = (run_of(256, 4, 128, 2, 1, 2, 2, 4, count) for count in (2, 5))
    values = {**vtrain.FIXED, **{p.name: p.start for p in vtrain.PARAMETERS}}
    apart = [forecasts_of([run], [[values]])[0] for run in (few, many)]
    assert forecasts_of([few, many], [[values]] * 2) == apart
    assert apart[0][0].seconds < apart[1][0].seconds


def test_a_sample_has_every_layout_of_every_hidden_size():
    runs = read_runs(BENCHMARKS / "support" / "data" / "vtrain" / "measured_multi.csv")
    chosen = [runs[row] for row in vtrain.sample(runs, 3)]
    assert 19 <= len(chosen) < len(runs)
    layouts = [{(run.hidden, run.tp, run.pp) for run in some} for some in (runs, chosen)]
    assert layouts[0] == layouts[1]


@pytest.fixture(scope="module")
def grid() -> Costs:
    """Some layouts of two models on 8 and 16 devices."""
    layouts = [(1, 2, 1), (2, 2, 2), (4, 1, 2), (4, 4, 1), (1, 4, 2), (2, 8, 1)]
    runs = [
        run_of(hidden, 8, 256, micro, tp, dp, pp, 4, micro_batches)
        for hidden in (512, 1024)
        for micro, micro_batches in ((1, 8), (8, 2))
        for tp, dp, pp in layouts
    ]
    return Costs(runs, load_cluster(CLUSTER))


def test_known_numbers_of_a_cluster_come_back_from_steps(grid):
    known = numbers(load_cluster(CLUSTER)) | {"efficiency": 0.6, "issue": 20e-6, "network_bandwidth": 9e9}
    parameters = (
        Parameter("efficiency", 0.8, 0.1, 1.0, 2.0),
        Parameter("issue", 50e-6, 1e-6, 1e-3, 3.0),
        Parameter("network_bandwidth", 25e9, 1e9, 1e11, 3.0),
    )
    found = fit(
        parameters, lambda values: grid.seconds(known | dict(values)), grid.seconds(known), scale=0.01
    )
    assert found.values == pytest.approx({p.name: known[p.name] for p in parameters}, rel=0.02)


@pytest.mark.parametrize(
    ("name", "slower"),
    [
        ("efficiency", 0.5),
        ("half_k", 4.0),
        ("memory_efficiency", 0.5),
        ("launch", 3.0),
        ("issue", 3.0),
        ("collective_launch", 3.0),
        ("network_bandwidth", 0.1),
        ("network_latency", 10.0),
        ("inside_latency", 10.0),
        ("update_bytes", 3.0),
        ("send_launch", 100.0),
    ],
)
def test_slower_hardware_is_never_forecast_faster(grid, name, slower):
    values = numbers(load_cluster(CLUSTER))
    before = grid.seconds(values)
    after = grid.seconds(values | {name: values[name] * slower})
    assert np.all(after >= before * (1 - 1e-12))
    assert np.any(after > before)


def test_both_kinds_of_files_are_read():
    data = BENCHMARKS / "support" / "data" / "vtrain"
    single, multi = read_runs(data / "measured_single.csv"), read_runs(data / "measured_multi.csv")
    assert (len(single), len(multi)) == (377, 57)
    assert single[0] == Run(8, 32, 4, 1024, 16, 24, 1024, 2, 2, 2, 0.219732754)
    assert multi[0] == Run(64, 512, 8, 3072, 32, 30, 2048, 1, 64, 1, 3.5665)
    assert all(run.tp * run.dp * run.pp == run.gpus for run in (*single, *multi))
    assert multi[0].micro_batches == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("8,32,4,1024,16,24,1024,2,2,2", "line 2: expected 10 numbers and milliseconds"),
        ("8,32,4,1024,16,24,1024,2,2,x,200", "line 2: expected 10 numbers"),
        ("8,32,4,1024,16,24,1024,2,3,2,200", "tp 2 x dp 3 x pp 2 on 8 GPUs"),
    ],
)
def test_a_broken_row_is_named(tmp_path, row, words):
    file = tmp_path / "rows.csv"
    file.write_text(f"# GPUs,...\n{row}\n")
    with pytest.raises(ResourceError, match=words):
        read_runs(file)


@pytest.mark.parametrize("how", [["benchmarks/vtrain.py"], ["-m", "benchmarks.vtrain"]])
def test_the_benchmark_starts_as_a_script_and_as_a_module(how):
    root = ROOT
    done = subprocess.run(
        [sys.executable, *how, "--help"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--calibrate" in done.stdout
