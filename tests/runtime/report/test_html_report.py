"""The report of a forecast: what its figures hold, what the page loads, and the trace beside it."""

from __future__ import annotations

import itertools
import json
import re
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.files.browser import CHROMIUM, opened
from support.files.clusters import cluster_of
from support.programs.forecasts import chain, document, machines
from typer.testing import CliRunner

import distgraph as dg
from distgraph.cli import application
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.program_forecast import forecast_training
from distgraph.engine.compile.program_summary import PlanView
from distgraph.engine.data import whole
from distgraph.errors import ResourceError, RuntimeFault
from distgraph.ir.mesh import ProcessMesh
from distgraph.resources.cluster import Cluster
from distgraph.runtime.forecast.forecast import Forecast, forecast
from distgraph.runtime.forecast.memory_timeline import occupancy
from distgraph.runtime.forecast.traffic_matrix import by_machine, exchanged_bytes
from distgraph.runtime.program.build import Build
from distgraph.runtime.program.memory_plan import plan_storage
from distgraph.runtime.report import chrome_trace, html_report, plots
from distgraph.runtime.report.timeline_segments import inner_segments, row_name, task_segments

grid = ProcessMesh.grid
PLOTLY = pytest.mark.skipif(find_spec("plotly") is None, reason="plotly is not installed")
TENSOR = [[None, "tp"], ["tp", None]] * 2


def pipe(micro: int = 5, rows: int = 12, inner: int = 60) -> Build:
    """Two stages of two by three ranks, two layers each, split by tensor."""
    meshes = [grid(0, dp=2, tp=3)] * 2 + [grid(6, dp=2, tp=3)] * 2
    return chain(rows, [40, inner, 20, inner, 10], meshes, micro, weights=TENSOR)


def traced(build: Build, *sizes: int) -> Forecast:
    return forecast(build, machines(*sizes), trace=True)


def behind(issue: str | None) -> Cluster:
    """Two machines of six devices, whose hosts take so long to issue an op."""
    described = document(6, 6)
    for entry in described["machines"]:
        entry["devices"]["compute"] |= {} if issue is None else {"issue": issue}
    return cluster_of(described)


def test_every_row_is_covered_by_tasks_and_idle_time():
    found = traced(pipe(), 6, 6)
    for row, ranks in enumerate(found.timeline.columns):
        segments = list(task_segments(found, row))
        assert segments[0].start == 0
        for one, following in itertools.pairwise(segments):
            assert one.start + one.seconds == pytest.approx(following.start, rel=1e-9)
        assert sum(s.seconds for s in segments) == pytest.approx(found.step_seconds)
        idle = sum(s.seconds for s in segments if s.kind == "idle")
        assert idle == pytest.approx(found.step_seconds - found.timeline.busy()[ranks[0]])
        assert idle > 0


@pytest.mark.parametrize("issue", [None, "30 us"])
def test_waiting_and_computing_are_those_of_the_forecast(issue: str | None):
    found = forecast(pipe(), behind(issue), trace=True)
    for row, ranks in enumerate(found.timeline.columns):
        segments = list(inner_segments(found, row))
        waits = sum(s.seconds for s in segments if s.kind == "wait")
        works = sum(s.seconds for s in segments if s.kind == "op")
        assert waits == pytest.approx(found.exposed_seconds[ranks[0]])
        assert works == pytest.approx(found.compute_seconds[ranks[0]])
        assert waits > 0
        host = sum(s.seconds for s in segments if s.kind == "host")
        assert works + waits + host == pytest.approx(found.timeline.busy()[ranks[0]])
        assert (host > 0) == (issue is not None)


def test_the_timeline_has_every_task_and_says_so_on_hovering():
    found = traced(pipe(), 6, 6)
    figure, note = plots.timeline_figure(found)
    assert not note
    bars = {trace["name"]: trace for trace in figure["data"]}
    runs = found.timeline.intervals
    for kind, task in (("forward", "forward.s0"), ("forward", "forward.s1"), ("backward", "backward.s1")):
        for micro in range(5):
            (at,) = (
                i
                for i, text in enumerate(bars[kind]["hovertext"])
                if f"<br>{task}, micro-batch {micro}<br>" in text
            )
            (run,) = (r for r in runs if (r.task, r.micro) == (task, micro))
            unit = 1e-3 if "(ms)" in figure["layout"]["xaxis"]["title"]["text"] else 1e-6
            assert bars[kind]["base"][at] * unit == pytest.approx(run.start)
            assert bars[kind]["x"][at] * unit == pytest.approx(run.end - run.start)
    assert {"op", "wait", "collective", "send", "idle", "optimize"} <= set(bars)
    assert any("<b>matmul</b>" in text for text in bars["op"]["hovertext"])
    assert any("<b>all_reduce</b>" in text for text in bars["collective"]["hovertext"])
    assert figure["layout"]["yaxis"]["ticktext"] == ["ranks 0-5", "ranks 6-11"]


def test_without_room_the_timeline_keeps_tasks_and_says_what_is_left_out(monkeypatch):
    found = traced(pipe(), 6, 6)
    monkeypatch.setattr(plots, "MOST_BARS", 60)
    figure, note = plots.timeline_figure(found)
    assert "tasks only" in note
    assert {trace["name"] for trace in figure["data"]} == {
        "load",
        "forward",
        "backward",
        "optimize",
        "idle",
    }
    monkeypatch.setattr(plots, "MOST_BARS", 20)
    figure, note = plots.timeline_figure(found)
    assert "The first 1 of 2 groups of ranks" in note
    assert figure["layout"]["yaxis"]["ticktext"] == ["ranks 0-5"]
    drawn = plots.task_figure(found)
    assert drawn is not None
    assert "No room for " in drawn[1]


def test_without_spans_there_are_tasks():
    found = forecast(pipe(), machines(6, 6))
    assert plots.task_figure(found) is None
    figure, _ = plots.timeline_figure(found)
    assert "op" not in {trace["name"] for trace in figure["data"]}


@pytest.mark.parametrize("issue", [None, "30 us"])
def test_parts_add_up_to_the_step(issue: str | None):
    found = forecast(pipe(), behind(issue))
    figure = plots.parts_figure(found)
    scale = 1e-3 if "(ms)" in figure["layout"]["xaxis"]["title"]["text"] else 1e-6
    for values in zip(*(trace["x"] for trace in figure["data"]), strict=True):
        assert sum(values) * scale == pytest.approx(found.step_seconds)


@pytest.mark.parametrize(("rows", "inner", "exact"), [(12, 60, True), (12, 61, False), (11, 60, False)])
def test_the_matrix_has_what_every_rank_sends(rows: int, inner: int, exact: bool):
    build, cluster = pipe(3, rows, inner), machines(6, 6)
    found = forecast(build, cluster)
    assert found.exact is exact
    columns = {ranks[0]: ranks for ranks in found.timeline.columns}
    covers = columns if exact else {rank: (rank,) for rank in build.ranks}
    matrix = exchanged_bytes(build.lowered, covers)
    for rank in build.ranks:
        sent = sum(size for (a, _), size in matrix.items() if a == rank)
        assert sent == pytest.approx(build.program(rank).bytes_sent())
    assert not any(a == b for a, b in matrix)
    machine = by_machine(matrix, cluster, found.devices)
    assert sum(machine.values()) == pytest.approx(sum(matrix.values()))
    assert machine[0, 1] > 0  # activations
    figure = plots.matrix_figure(matrix, {rank: str(rank) for rank in build.ranks}, [6])
    (heatmap,) = figure["data"]
    assert heatmap["z"][0][0] is None
    assert heatmap["hovertext"][0][3].startswith("0 to 3: ")


@pytest.mark.parametrize("policy", ["1f1b", "gpipe"])
@pytest.mark.parametrize("micro", [1, 2, 5])
def test_memory_in_use_stays_inside_what_is_allocated(policy: str, micro: int):
    meshes = [grid(0, dp=2), grid(2, dp=1), grid(3, dp=3)]
    build = chain(12, [30, 50, 20, 10], meshes, micro, policy)
    found = forecast(build, machines(6))
    for rank, memory in found.memory.items():
        program = build.program(rank)
        used = occupancy(program, plan_storage(program, build.schedule), found.timeline)
        assert used.allocated == memory.total
        assert used.times[0] == 0
        assert list(used.times) == sorted(set(used.times))
        for category, sizes in used.bytes.items():
            assert min(sizes) >= 0
            assert max(sizes) <= memory.categories[category]
        assert max(used.bytes["activations"]) > min(used.bytes["activations"])
        assert used.bytes["activations"][-1] == 0
        assert used.bytes["parameters"] == (memory.parameters,) * len(used.times)
        forwards = [r for r in found.timeline.of_rank(rank) if r.task.startswith("forward")]
        levels = []
        for run in forwards:
            middle = (run.start + run.end) / 2
            at = max(i for i, time in enumerate(used.times) if time <= middle)
            levels.append(used.bytes["activations"][at])
        if policy == "gpipe":  # nothing is freed before the last forward: a micro-batch more each time
            assert levels == [levels[0] * (i + 1) for i in range(micro)]


def test_row_names():
    assert row_name((2, 3, 4)) == "ranks 2-4"
    assert row_name((0, 2, 4, 6, 8)) == "ranks 0, 2, 4, 6, ... (5 ranks)"


# The trace


def test_the_trace_is_in_the_trace_event_format(tmp_path):
    found = traced(pipe(), 6, 6)
    path = tmp_path / "trace.json"
    chrome_trace.write_trace(found, path)
    content = json.loads(path.read_text())
    assert set(content) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert content["displayTimeUnit"] in ("ms", "ns")
    events, threads = content["traceEvents"], {}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            assert event["args"]
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(threads) <= named
    for found_events in threads.values():  # Perfetto drops what overlaps on one thread
        ordered = sorted(found_events, key=lambda e: e["ts"])
        for one, following in itertools.pairwise(ordered):
            assert one["ts"] + one["dur"] <= following["ts"] * (1 + 1e-9) + 1e-6
    tasks = {(e["args"]["task"], e["args"]["micro_batch"]) for e in threads[0, 0] + threads[1, 0]}
    assert tasks == {(run.task, run.micro) for run in found.timeline.intervals}
    last = max(e["ts"] + e["dur"] for e in threads[0, 0] + threads[1, 0])
    assert last == pytest.approx(found.step_seconds * 1e6)


def test_a_long_trace_leaves_ops_out_and_says_so(monkeypatch):
    found = traced(pipe(), 6, 6)
    monkeypatch.setattr(chrome_trace, "MOST_EVENTS", 10)
    events, complete = chrome_trace.trace_events(found)
    assert not complete
    assert not any(event.get("cat") == "op" for event in events)
    assert any(event.get("cat") == "wait" for event in events)


def test_a_trace_that_cannot_be_written(tmp_path):
    with pytest.raises(RuntimeFault, match=r": cannot be written"):
        chrome_trace.write_trace(traced(pipe(1), 6, 6), tmp_path / "none" / "trace.json")


# The page


class Loads(HTMLParser):
    """Everything that a page would load, and its text outside of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text: list[str] = []
        self.within = ""

    def handle_starttag(self, tag, attrs):
        self.within = tag
        self.loads += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "action") and v]

    def handle_endtag(self, tag):
        self.within = ""

    def handle_data(self, data):
        if self.within not in ("script", "style"):
            self.text.append(data)


def page(tmp_path: Path, **fields) -> str:
    build = pipe()
    cluster = machines(6, 6)
    found = forecast(build, cluster, trace=True)
    subject = html_report.Subject("a < b", build, cluster, PlanView(build).tensors, **fields)
    path = tmp_path / "report.html"
    html_report.report(found, path, subject)
    return path.read_text()


@PLOTLY
def test_the_page_loads_nothing(tmp_path):
    text = page(tmp_path)
    parser = Loads()
    parser.feed(text)
    assert parser.loads == ["data:,"]
    style = re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    assert not any("url(" in each or "@import" in each for each in style)
    assert text.count("plotly.js v") == 1
    shown = "".join(parser.text)
    assert "a < b" in shown
    for title in ("Timeline of the step", "Inside the tasks", "Memory", "Communication", "Tensors"):
        assert title in shown
    assert "layers.0.weight" in shown
    assert "user forecasts.py" in shown
    assert "forward.s1, micro-batch 4" in text


@PLOTLY
@pytest.mark.parametrize("exact", [True, False])
def test_many_ranks_are_shown_by_machine(tmp_path, monkeypatch, exact):
    """All ranks count, though two of them are looked at."""
    monkeypatch.setattr(html_report, "_MANY", 11)
    shown = {}
    monkeypatch.setattr(
        html_report, "matrix_figure", lambda matrix, names: shown.update(matrix) or {"data": []}
    )
    build, cluster = pipe(3, 12, 60 if exact else 61), machines(6, 6)
    found = forecast(build, cluster)
    assert found.exact is exact
    html_report.report(found, tmp_path / "r.html", html_report.Subject("many", build, cluster))
    sent = sum(build.program(rank).bytes_sent() for rank in build.ranks)
    assert sum(shown.values()) == pytest.approx(sent, rel=1e-9 if exact else 0.2)
    assert ("Blocks differ in size" in (tmp_path / "r.html").read_text()) is not exact


@PLOTLY
def test_forecasts_stand_side_by_side(tmp_path):
    other = forecast(pipe(2), machines(6, 6))
    small = forecast(pipe(2), machines(6, 6))
    text = page(tmp_path, beside={"none": "there is none: <no> batch", "other": other, "small": small})
    parser = Loads()
    parser.feed(text)
    assert "there is none: <no> batch" in parser.text
    (table,) = re.findall(r'<table class="numbers">(.*?)</table>', text)
    rows = table.split("</tr>")[:-1]
    assert len(rows) == 8
    assert all(len(re.findall(r"<t[hd]>", row)) == 5 for row in rows)


@PLOTLY
def test_a_page_of_a_forecast_alone(tmp_path):
    path = tmp_path / "r.html"
    html_report.report(forecast(pipe(2), machines(6, 6)), path)
    text = path.read_text()
    assert 'id="timeline"' in text
    assert 'id="communication"' not in text
    with pytest.raises(RuntimeFault, match=r": cannot be written"):
        html_report.report(forecast(pipe(2), machines(6, 6)), tmp_path / "none" / "r.html")


def test_without_plotly_the_way_out_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    line = r"pip install \"distgraph\[report\]\", or in a clone pip install -e \"\.\[report\]\"$"
    with pytest.raises(RuntimeFault, match=f"report needs plotly, which is not installed; {line}"):
        html_report.report(forecast(pipe(1), machines(6, 6)), tmp_path / "r.html")


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
    code, output = invoke("forecast", script, "--cluster", cluster, "--measured", str(tmp_path / "none.json"))
    assert code == 1
    assert "none.json: cannot be read" in output
    x = rng.normal(size=(12, 6)).astype("f4")
    trained = engine(grid(dp=3))
    trained.prepare((x, x[:, :1]))
    with pytest.raises(RuntimeFault, match="report needs plotly"):
        trained.forecast(machines(3), html=tmp_path / "r.html")


@PLOTLY
@CHROMIUM
def test_the_page_draws_in_a_browser(tmp_path):
    """Offline and without an error: the bars are there and hovering over one names its task."""
    probe = opened(page(tmp_path), tmp_path)
    assert probe["errors"] == []
    assert probe["loaded"] == []
    assert probe["plots"] > 5
    assert probe["bars"] > 50
    assert "backward.s" in probe["hover"]


# The engine and the command line

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
        (("--cluster", "dgx_h100_pod"), r"distgraph profile"),
        (("--idle", "--cluster", "local"), r"exits \(3\) before its first training step"),
        (("--cluster", "nowhere"), r"neither a file nor a shipped cluster"),
    ],
)
def test_mistakes_on_the_command_line(files, args, message):
    code, output = invoke("forecast", files[0], *args)
    assert code == 1
    assert re.search(message, output)


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
