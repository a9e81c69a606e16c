"""`distgraph calibrate`: numbers behind measured steps come back, errors are those of held-out runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from distgraph.cli.application import app
from distgraph.engine.commands.measured_runs import read_runs
from distgraph.errors import ResourceError
from distgraph.plan.forecast_errors import KINDS, WIDTH, ForecastErrors
from distgraph.resources.host_times import HostTimes
from distgraph.resources.load import load_cluster
from distgraph.resources.runtimes.load_runtime import load_runtime
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.profile.calibration.calibrate import calibrate
from distgraph.runtime.profile.calibration.error_model import coverage, fit_errors, memory_error
from distgraph.runtime.profile.calibration.fitted_numbers import applied

HEAD = "model,hidden,layers,heads,vocabulary,sequence,dtype,batch,dp,tp,pp,micro_batches,seconds,memory\n"
LAYOUTS = ((1, 1, 1, 1), (2, 1, 1, 2), (1, 1, 2, 1))
SHAPES = ((256, 64), (512, 128), (1024, 32))
CLUSTER, RUNTIME = "dgx_a100_pod", "megatron"


def rows(seconds=None) -> str:
    """Runs of small GPTs with a time each."""
    lines, layouts = [], [(shape, layout) for shape in SHAPES for layout in LAYOUTS]
    for at, ((hidden, sequence), degrees) in enumerate(layouts):
        cells = ("gpt", hidden, 2, 4, 1000, sequence, "f16", 16, *degrees)
        lines.append(",".join(map(str, (*cells, 0.01 if seconds is None else seconds[at], "2e9"))))
    return HEAD + "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """Steps of a machine that computes at another rate and issues ops more slowly, as its forecast says."""
    file = tmp_path_factory.mktemp("runs") / "runs.csv"
    file.write_text(rows())
    cluster, runtime = load_cluster(CLUSTER), load_runtime(RUNTIME)
    name = f"devices.{cluster.devices[0].model}.compute.memory_efficiency"
    true = applied(cluster, replace(runtime, host=HostTimes(op=25e-6)), {name: 0.5})
    runs = read_runs(file, cluster)
    noise = np.exp(np.random.default_rng(3).normal(0.0, 0.01, len(runs)))
    steps = [forecast(run.program(), true[0], runtime=true[1]).step_seconds for run in runs]
    file.write_text(rows(np.array(steps) * noise))
    return file


def test_numbers_behind_the_steps_come_back_and_are_written(measured, tmp_path):
    output = tmp_path / "mine.yaml"
    words = ["calibrate", str(measured), "--cluster", CLUSTER, "--runtime", RUNTIME, "-o", str(output)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "9 runs in 6 groups" in done.output
    cluster, runtime = load_cluster(output), load_runtime(tmp_path / "mine.runtime.yaml")
    assert runtime.host.op == pytest.approx(25e-6, rel=0.15)
    assert runtime.sources["host.op"].kind == "fitted"
    steps = [(run, forecast(run.program(), cluster, runtime=runtime)) for run in read_runs(measured, cluster)]
    errors = [abs(found.step_seconds / run.seconds - 1.0) for run, found in steps]
    assert np.mean(errors) < 0.03
    assert cluster.errors.runtime == RUNTIME
    assert cluster.errors.runs == 9
    assert 0 < cluster.errors.own < 0.1
    assert cluster.errors.memory > 0.1
    assert steps[0][1].errors == cluster.errors
    assert "9 held-out runs of megatron" in str(steps[0][1])
    other = forecast(steps[0][0].program(), cluster, runtime="torch")
    assert other.errors.computation > cluster.errors.computation
    original = load_cluster(CLUSTER)  # what no run depends on is left alone
    assert cluster.devices[0].compute.matmul["f64"] == original.devices[0].compute.matmul["f64"]
    networks = ([k for k in c.links if k.kind == "infiniband"] for c in (cluster, original))
    assert next(networks) == next(networks)


def sample(runs: int, seed: int):
    """Residuals of runs in groups of four with known deviations, their shares and groups."""
    random = np.random.default_rng(seed)
    shares = random.dirichlet((4.0, 1.0, 1.0, 0.5), runs)
    groups = [str(at // 4) for at in range(runs)]
    shared = random.normal(0.0, (0.1, 0.3, 0.05, 0.05), (runs // 4, len(KINDS)))
    residuals = (shares * np.repeat(shared, 4, axis=0)).sum(axis=1) + random.normal(0.0, 0.03, runs)
    return residuals, shares, groups


BEFORE = ForecastErrors(computation=0.2, inside=0.2, between=0.2, host=0.2, own=0.05)


def test_errors_by_kind_come_back():
    errors = fit_errors(*sample(800, 1), BEFORE)
    assert errors.computation == pytest.approx(0.1, rel=0.35)
    assert errors.inside == pytest.approx(0.3, rel=0.35)
    assert errors.own == pytest.approx(0.03, rel=0.35)


def test_intervals_hold_four_of_five_runs_of_other_groups():
    assert 0.75 <= coverage(*sample(400, 2), BEFORE) <= 0.85


def test_a_kind_that_no_run_has_keeps_its_error():
    residuals, shares, groups = sample(80, 5)
    shares[:, 2] = 0.0
    errors = fit_errors(residuals, shares, groups, replace(BEFORE, between=0.4))
    assert errors.between > 0.2


def test_the_error_of_bytes_is_that_which_holds_four_of_five():
    forecasts = np.full(99, 1e9)
    measured = forecasts * np.exp(np.linspace(0.0, 1.0, 99))
    assert memory_error(forecasts, measured) == pytest.approx(0.8 / WIDTH, rel=0.03)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("model,", "modell,"), "lack model"),
        (("dtype,", "colour,"), "column 'colour' is unknown"),
        ((",micro_batches", ",dp"), "lack micro_batches"),
        (("gpt,256", "bert,256"), "line 2: model 'bert' is none of gpt"),
        (("gpt,256", "gpt:9B,256"), "line 2: preset '9B' of gpt does not exist; there are 350M"),
        (("gpt,256", "gpt,x"), "line 2: column hidden: expected a whole number, got 'x'"),
        (("gpt,256", "gpt,"), "line 2: model gpt has no preset and column hidden is missing"),
        (
            ("f16,16,1,1,1,1,", "f16,16,1,1,1,0,"),
            "line 2: column micro_batches: expected a whole number from 1",
        ),
        (("f16,16,1,1,1,1,", "f16,16,64,64,64,1,"), "needs 262144 devices but cluster dgx_a100_pod has 160"),
        (("f16,16,1,1,1,1,", "f16,16,3,1,1,1,"), "batch 16 over dp 3 in 1 micro-batches: they do not"),
        (("1,1,1,1,0.01", "1,1,1,1,-1"), "line 2: column seconds: expected a positive number, got '-1'"),
        (("1,1,1,1,0.01", "1,1,1,1,"), "line 2: column seconds is empty"),
        (("0.01,2e9\n", "0.01\n"), "line 2: 13 cells in 14 columns"),
    ],
)
def test_a_bad_row_is_named(tmp_path, change, words):
    file = tmp_path / "runs.csv"
    file.write_text(rows().replace(*change, 1))
    with pytest.raises(ResourceError, match=words):
        read_runs(file, load_cluster(CLUSTER))


def test_a_row_without_a_program_is_named(tmp_path):
    file = tmp_path / "runs.csv"
    file.write_text(rows().replace(",f16,", ",f99,", 1))
    first, *_ = read_runs(file, load_cluster(CLUSTER))
    with pytest.raises(ResourceError, match=r"runs\.csv, line 2: dtype 'f99' is not supported"):
        first.program()


def test_a_missing_file_an_empty_one_and_too_few_groups_are_named(tmp_path):
    cluster = load_cluster(CLUSTER)
    with pytest.raises(ResourceError, match=r"no file of measured runs"):
        read_runs(tmp_path / "none.csv", cluster)
    file = tmp_path / "runs.csv"
    file.write_text(HEAD)
    with pytest.raises(ResourceError, match="no measured run"):
        read_runs(file, cluster)
    file.write_text("\n".join(rows().splitlines()[:3]) + "\n")
    with pytest.raises(ResourceError, match=r"2 runs in . groups.* 3 models or numbers of devices"):
        calibrate(read_runs(file, cluster), cluster, load_runtime(RUNTIME))


def test_what_is_no_csv_is_named(tmp_path):
    file = tmp_path / "runs.csv"
    file.write_text(HEAD + 'gpt,"256\n')
    with pytest.raises(ResourceError, match=r"runs.csv, line 2: not CSV: .*; fix the line"):
        read_runs(file, load_cluster(CLUSTER))
