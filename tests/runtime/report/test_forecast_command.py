"""Forecasts of a script and of an engine."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
import yaml
from support.programs.forecasts import document, machines
from support.programs.reported import PLOTLY, grid
from typer.testing import CliRunner

import distgraph as dg
from distgraph.cli import application
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.program_forecast import forecast_training
from distgraph.engine.data import whole
from distgraph.errors import ResourceError, RuntimeFault
from distgraph.ir.mesh import ProcessMesh
from distgraph.runtime.forecast.forecast import Forecast


def test_a_timeline_is_read_before_anything_is_forecast(files, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "distgraph.engine.compile.program_forecast.forecast", lambda *args, **how: pytest.fail("forecast")
    )
    asked = ("forecast", files[0], "--cluster", files[1], "--measured", str(tmp_path / "none.json"))
    code, output = invoke(*asked)
    assert code == 1
    assert "none.json: cannot be read" in output


def test_a_measured_step_is_printed_beside_the_forecast(files, tmp_path, rng):
    x, path = rng.normal(size=(24, 6)).astype("f4"), tmp_path / "t.json"
    script = tmp_path / "short.py"
    script.write_text(SHORT)
    trained = engine(grid(dp=3))
    callback = dg.callbacks.Timeline(path, after=1, steps=2)
    trained.fit((x, x[:, :1]), 4, 24, callbacks=[callback], progress=False)
    asked = ("forecast", str(script), "--cluster", files[1])
    code, output = invoke(*asked, "--measured", str(path))
    assert code == 0, output
    assert invoke(*asked)[1] in output
    assert re.search(r"^measured: step \d, the median of 2 recorded steps; seconds of", output, re.MULTILINE)
    assert re.search(r"^step +\S+ \S+ +\S+ \S+ +[+-][\d.]+%$", output, re.MULTILINE)
    code, output = invoke("forecast", files[0], "--cluster", files[1], "--measured", str(path))
    assert code == 1
    assert "were measured but" in output


def test_what_a_page_needs_is_missed_before_anything_is_forecast(files, tmp_path, monkeypatch, rng):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    monkeypatch.setattr(
        "distgraph.engine.compile.program_forecast.forecast", lambda *args, **how: pytest.fail("forecast")
    )
    script, cluster = files
    code, output = invoke("forecast", script, "--cluster", cluster, "--html", str(tmp_path / "r.html"))
    assert code == 1
    assert "report needs plotly, which is not installed; pip install" in output
    x = rng.normal(size=(12, 6)).astype("f4")
    trained = engine(grid(dp=3))
    trained.prepare((x, x[:, :1]))
    with pytest.raises(RuntimeFault, match="report needs plotly"):
        trained.forecast(machines(3), html=tmp_path / "r.html")


SCRIPT = """
import sys
import numpy as np
import distgraph as dg

mesh = dg.ProcessMesh.grid(dp=3, tp=2)


class Net(dg.nn.Module):
    def __init__(self):
        self.first = dg.nn.Linear(6, 10)
        self.second = dg.nn.Linear(10, 1)
        dg.shard_tensor(self.first.weight, mesh, [None, "tp"])

    def forward(self, x):
        return self.second(dg.ops.tanh(self.first(x)))


strategy = dg.Strategy(mesh=mesh, batch_axis="dp", micro_batches=2)
engine = dg.Engine(Net(), dg.nn.MeanSquaredError(), dg.optim.Adam(), strategy=strategy)
x = np.zeros((24, 6), "f4")
if "--idle" in sys.argv:
    sys.exit(3)
if "--prepare" in sys.argv:
    engine.prepare((x, x[:, :1]))
engine.fit((x, x[:, :1]), batch_size=24, progress=False)
print("trained")
"""


SHORT = """
import numpy as np

import distgraph as dg

model = dg.nn.Sequential(dg.nn.Linear(6, 10), dg.nn.Linear(10, 1))
strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=3), batch_axis="dp")
engine = dg.Engine(model, dg.nn.MeanSquaredError(), dg.optim.SGD(lr=0.1), strategy=strategy)
x = np.zeros((24, 6), "f4")
engine.fit((x, x[:, :1]), batch_size=24, progress=False)
"""
"""The same program as that of `engine`."""


@pytest.fixture
def files(tmp_path) -> tuple[str, str]:
    """A script and a resource file of two machines of three devices."""
    script, cluster = tmp_path / "train.py", tmp_path / "boxes.yaml"
    script.write_text(SCRIPT)
    cluster.write_text(yaml.safe_dump(document(3, 3)))
    return str(script), str(cluster)


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(application.app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 1, f"error: {result.exception}"
    return result.exit_code, result.output


@PLOTLY
@pytest.mark.parametrize("how", [[], ["--prepare"]])
def test_forecast_of_a_script(files, tmp_path, how):
    script, cluster = files
    html, trace = tmp_path / "r.html", tmp_path / "t.json"
    args = ["forecast", script, "--cluster", cluster, "--html", str(html), "--trace", str(trace), *how]
    code, output = invoke(*args)
    assert code == 0, output
    assert "cluster boxes" in output
    assert "forward.s0" in output
    assert "fits every device" in output
    assert "trained" not in output
    text = html.read_text()
    assert "forecast of train on boxes, 6 ranks" in text
    assert "plain data parallel (dp=6)" in text
    assert "there is none" not in text
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_forecast_makes_no_parameter(monkeypatch, files):
    """The initial values of a model that fits no laptop are never drawn."""
    monkeypatch.setattr(
        "distgraph.engine.parameter_store.Memory.block", lambda *args: pytest.fail("made a block")
    )
    code, output = invoke("forecast", files[0], "--cluster", files[1])
    assert code == 0, output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), r"the engine has no cluster"),
        (("--cluster", "local"), r"mesh dp=3 x tp=2 needs 6 devices but cluster local has 2"),
        (("--idle", "--cluster", "local"), r"exits \(3\) before its first training step"),
        (("--cluster", "nowhere"), r"neither a file nor a shipped cluster"),
    ],
)
def test_mistakes_on_the_command_line(files, args, message):
    code, output = invoke("forecast", files[0], *args)
    assert code == 1
    assert re.search(message, output)


def test_a_cluster_without_numbers_for_computation(files, tmp_path):
    described = document(3, 3)
    for entry in described["machines"]:
        del entry["devices"]["compute"]
    path = tmp_path / "bare.yaml"
    path.write_text(yaml.safe_dump(described))
    code, output = invoke("forecast", files[0], "--cluster", str(path))
    assert code == 1
    assert "compute.launch: missing" in output
    assert "distgraph profile" in output


def engine(mesh: ProcessMesh, micro_batches: int = 1) -> dg.Engine:
    model = dg.nn.Sequential(dg.nn.Linear(6, 10), dg.nn.Linear(10, 1))
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp", micro_batches=micro_batches)
    return dg.Engine(model, dg.nn.MeanSquaredError(), dg.optim.SGD(lr=0.1), strategy=strategy)


def test_engine_forecast(rng):
    x = rng.normal(size=(12, 6)).astype("f4")
    trained = engine(grid(dp=3))
    with pytest.raises(RuntimeFault, match=r"engine has no forecast yet; call prepare\(batch\) or fit first"):
        trained.forecast(machines(3))
    trained.prepare((x, x[:, :1]))
    with pytest.raises(ResourceError, match=r"forecast: the engine has no cluster"):
        trained.forecast()
    with pytest.raises(ResourceError, match=r"needs 3 devices but cluster boxes has 2"):
        trained.forecast(machines(2))
    near, far = trained.forecast(machines(3)), trained.forecast(machines(1, 1, 1))
    assert near.step_seconds < far.step_seconds
    trained.fit((x, x[:, :1]), batch_size=12, progress=False)  # the engine is as it was
    assert trained.step == 1


def training_of(trained, batch):
    return CompileRequest(trained.training_spec, "train", len(batch), batch.fields(), {})


def test_plain_data_parallelism_is_the_engine_s_own():
    """What stands beside a plan that is plain data parallelism takes as long as the plan."""
    x = np.zeros((12, 6), "f4")
    trained = engine(grid(dp=3))
    batch = whole((x, x[:, :1]))
    found = forecast_training(training_of(trained, batch), machines(3))
    ((name, other),) = found.data_parallel_baseline().items()
    assert name == "plain data parallel (dp=3)"
    assert isinstance(other, Forecast)
    assert other.step_seconds == pytest.approx(found.forecast.step_seconds)
    few = whole((x[:2], x[:2, :1]))
    short = forecast_training(training_of(trained, few), machines(3))
    ((_, said),) = short.data_parallel_baseline().items()
    assert said == "there is none: the batch has 2 samples, fewer than ranks"
