"""Measured timelines: what is taken down of a step, the file, and the report beside a forecast."""

from __future__ import annotations

import itertools
import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support.files.browser import CHROMIUM, opened
from support.files.clusters import cluster_of
from support.programs.forecasts import document
from support.programs.training import data, engine

import distgraph as dg
from distgraph.engine.callbacks import Timeline
from distgraph.errors import RuntimeFault
from distgraph.resources.cluster import Cluster
from distgraph.runtime.execute.measured_timeline import (
    MeasuredMessage,
    MeasuredRank,
    MeasuredRun,
    MeasuredStep,
    MeasuredTimeline,
)
from distgraph.runtime.execute.recorder import Recorder
from distgraph.runtime.report import chrome_trace, plots
from distgraph.runtime.report.comparison import comparison
from distgraph.runtime.schedule.simulate import simulate

PLOTLY = pytest.mark.skipif(find_spec("plotly") is None, reason="plotly is not installed")


def boxes(size: int) -> Cluster:
    """A machine of some devices that know f64 too."""
    described = document(size)
    device = described["machines"][0]["devices"]
    device["peak"]["f64"] = "5 TFLOP/s"
    device["compute"]["matmul"]["f64"] = device["compute"]["matmul"]["f32"]
    return cluster_of(described)


def recorded(layout: str, micro: int = 1, steps: int = 3) -> tuple[dg.Engine, MeasuredTimeline]:
    """An engine that has trained, and some steps of it."""
    trained = engine(layout, micro=micro)
    x, y = data(24)
    trained.run((x, y))
    trained.start_recording()
    for _ in range(steps):
        trained.run((x, y))
    return trained, trained.stop_recording()


@pytest.mark.parametrize(("layout", "micro"), [("pp2", 4), ("dp2pp2", 3), ("dp3", 1), ("serial", 2)])
def test_every_task_of_the_schedule_is_recorded_in_its_order(layout: str, micro: int) -> None:
    trained, timeline = recorded(layout, micro)
    build = trained._session.program("train", dg.data.whole(data(24))).build
    assert timeline.tasks == {task.name: task.kind for task in build.task_graph.tasks}
    assert [step.number for step in timeline.steps] == [2, 3, 4]
    for step in timeline.steps:
        assert sorted(step.ranks) == list(build.ranks)
        for rank, did in step.ranks.items():
            assert tuple((run.task, run.micro) for run in did.runs) == build.schedule.order(rank)
            for run in did.runs:
                assert 0 <= run.start <= run.end <= step.seconds
            for one, following in itertools.pairwise(did.runs):
                assert one.end <= following.start


@pytest.mark.parametrize(("layout", "micro"), [("pp2", 6), ("dp2pp2", 4)])
def test_the_actors_allow_the_order_in_which_tasks_ran(layout: str, micro: int) -> None:
    """With each rank in the order measured the actors, under a simulated clock, run all of it."""
    trained, timeline = recorded(layout, micro, steps=1)
    graph = trained._session.program("train", dg.data.whole(data(24))).build.task_graph
    ran = {rank: did.runs for rank, did in timeline.steps[0].ranks.items()}
    order = {rank: [(run.task, run.micro) for run in runs] for rank, runs in ran.items()}
    seconds = {task.name: 1.0 for task in graph.tasks}
    simulated = simulate(graph, seconds, policy="1f1b", order=order)
    counted = {(run.task, run.micro) for run in simulated.intervals}
    assert counted == {step for steps in order.values() for step in steps}
    assert len(counted) == sum(graph.instances(task) for task in graph.tasks)
    order[0] = order[0][::-1]
    with pytest.raises(RuntimeFault, match="deadlock"):
        simulate(graph, seconds, policy="1f1b", order=order)
    begins = {(run.task, run.micro): run.start for runs in ran.values() for run in runs}
    for edge in graph.edges:  # what a task sends is with its reader before that ends
        for (name, number), start in begins.items():
            readers = [r for runs in ran.values() for r in runs if (r.task, r.micro) == (edge.target, number)]
            if name == edge.source and graph.task(edge.target).per_micro == graph.task(name).per_micro:
                assert all(start <= reader.end for reader in readers)


def test_messages_are_recorded_by_sender_and_receiver() -> None:
    """Stage 0 sends every micro-batch forward and receives its gradient; stage 1 the other way round."""
    _, timeline = recorded("pp2", 4, steps=1)
    kinds = {rank: sorted(m.kind for m in did.messages) for rank, did in timeline.steps[0].ranks.items()}
    assert kinds[0].count("send") >= 4
    assert kinds[0].count("recv") >= 4
    assert kinds[0].count("send") == kinds[1].count("recv")
    assert kinds[1].count("send") == kinds[0].count("recv")
    for did in timeline.steps[0].ranks.values():
        assert all(0 <= m.waited <= m.end - m.start for m in did.messages)
    _, timeline = recorded("dp3", steps=1)
    assert {m.kind for did in timeline.steps[0].ranks.values() for m in did.messages} == {"all_reduce"}


def test_recording_changes_no_number() -> None:
    x, y = data(24)
    watched, plain = engine("pp2", micro=4), engine("pp2", micro=4)
    watched.start_recording()
    for _ in range(3):
        assert watched.run((x, y)) == plain.run((x, y))
    assert len(watched.stop_recording().steps) == 3
    assert watched.run((x, y)) == plain.run((x, y))
    with pytest.raises(RuntimeFault, match="engine records nothing; call start_recording"):
        watched.stop_recording()


def test_after_a_recording_tasks_call_the_transport_itself() -> None:
    trained, _ = recorded("pp2", 2)
    compiled = trained._session.program("train", dg.data.whole(data(24)))
    for rank, worker in compiled.workers.items():
        transport = trained._session.ranks().transport(rank)
        assert all(task.scope["comm"] is transport for task in worker.tasks.values())


def test_the_callback_records_some_steps_of_fit(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    trained = engine("pp2", micro=2)
    callbacks = [Timeline(path, after=3, steps=2)]
    trained.fit(data(24), epochs=4, batch_size=8, callbacks=callbacks, progress=False)
    found = MeasuredTimeline.read(path)
    assert [step.number for step in found.steps] == [4, 5]
    assert found.micro_batches == 2
    early = Timeline(tmp_path / "early.json", after=1, steps=9)
    trained.fit(data(24), batch_size=8, callbacks=[early], progress=False)
    assert [step.number for step in MeasuredTimeline.read(tmp_path / "early.json").steps] == [14, 15]
    with pytest.warns(UserWarning, match="training ended after 3 steps, before the first that"):
        trained.fit(
            data(24), batch_size=8, callbacks=[Timeline(tmp_path / "no.json", after=9)], progress=False
        )
    assert not (tmp_path / "no.json").exists()
    with pytest.raises(RuntimeFault, match="steps of Timeline is 0 but must be an integer"):
        Timeline(path, after=0, steps=0)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    _, timeline = recorded("pp2", 2)
    timeline.write(path)
    assert MeasuredTimeline.read(path) == timeline
    with pytest.raises(RuntimeFault, match=r"cannot be written"):
        timeline.write(tmp_path / "none" / "timeline.json")


RUN = '{"task": "t", "micro": 1, "start": 0.0, "end": 1.0}'
RANKS = f'"ranks": {{"0": {{"messages": [], "runs": [{RUN}]}}}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"timeline.json:1:1: not JSON"),
        ("[]", r"timeline.json: expected a mapping of fields, got \[\]"),
        ('{"tasks": {}, "micro_batches": 1}', r"timeline.json: steps: missing; add the field"),
        ('{"tasks": {}, "micro_batches": 1, "steps": []}', r"has no step"),
        (
            '{"tasks": {}, "micro_batches": 1, "steps": [{"number": "x", "ranks": {}}]}',
            r'timeline.json: steps\[0\].number: expected a whole number, got "x"',
        ),
        (
            '{"tasks": {}, "micro_batches": 1, "steps": [{"number": 1, "ranks": {"00": 1}}]}',
            r'expected ranks such as "0" as keys',
        ),
        (
            f'{{"tasks": {{"t": "f"}}, "micro_batches": 1, "steps": [{{"number": 1, {RANKS}}}]}}',
            r"steps\[0\].ranks\['0'\]: expected times in order, of 1 micro-batches",
        ),
        (
            f'{{"tasks": {{}}, "micro_batches": 2, "steps": [{{"number": 1, {RANKS}}}]}}',
            r"steps\[0\].ranks\['0'\]: expected tasks among none, got \"t\"",
        ),
    ],
)
def test_files_that_are_no_timeline(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(text)
    with pytest.raises(RuntimeFault, match=message):
        MeasuredTimeline.read(path)
    with pytest.raises(RuntimeFault, match=r"none.json: cannot be read: No such file"):
        MeasuredTimeline.read(tmp_path / "none.json")


def step_of(seconds: float, number: int = 1) -> MeasuredStep:
    """One rank; a forward task that waits in its middle, a gap, a backward task; a send that ends last."""
    runs = (
        MeasuredRun("forward.s0", 0, 0.1 * seconds, 0.4 * seconds),
        MeasuredRun("backward.s0", 0, 0.5 * seconds, 0.9 * seconds),
    )
    messages = (
        MeasuredMessage("recv", "forward.s0", 0, 0.0, 0.3 * seconds, 0.1 * seconds),
        MeasuredMessage("send", "backward.s0", 0, 0.9 * seconds, seconds, 0.1 * seconds),
    )
    return MeasuredStep(number, {0: MeasuredRank(runs, messages)})


def test_the_median_step_and_what_a_task_waits() -> None:
    kinds = {"forward.s0": "forward", "backward.s0": "backward"}
    steps = tuple(step_of(seconds, number) for number, seconds in enumerate((3.0, 9.0, 1.0, 2.0), 1))
    timeline = MeasuredTimeline(kinds, 1, steps)
    assert timeline.median.number == 4
    assert timeline.median.seconds == 2.0
    did = steps[2].ranks[0]
    assert [did.waited(run) for run in did.runs] == pytest.approx([0.1, 0.0])


def test_the_clock_is_read_at_the_start_and_end_of_tasks() -> None:
    """A clock that ticks at every reading tells how often it is read."""
    ticks = itertools.count()
    recorder = Recorder(clock=lambda: float(next(ticks)))
    recorder.begin(None, (0,), np)
    recorder.run("forward.s0", 2, lambda m: None)
    recorder.run("optimize.s0", 0, lambda m: None)
    assert recorder.content(recorder.origin).runs == (
        MeasuredRun("forward.s0", 2, 1.0, 2.0),
        MeasuredRun("optimize.s0", 0, 3.0, 4.0),
    )


def test_a_timeline_of_another_program_is_refused() -> None:
    _, timeline = recorded("pp2", 4)
    other, _ = recorded("pp2", 2)
    with pytest.raises(RuntimeFault, match=r"micro-batches 4 were measured but 2 are\s+forecast; record it"):
        other.forecast(boxes(2), measured=timeline)
    other, _ = recorded("dp3", 4)
    with pytest.raises(RuntimeFault, match=r"tasks .*s1.* were measured but"):
        other.forecast(boxes(3), measured=timeline)


def test_compared_rows_add_up() -> None:
    trained, timeline = recorded("dp2pp2", 3)
    found = trained.forecast(boxes(4))
    rows = {row.name: row for row in comparison(found, timeline)}
    assert list(rows)[-2:] == ["waiting", "step"]
    assert rows["forward"].runs == 3 * 4
    assert rows["optimize"].runs == 4
    for side in ("forecast", "measured"):
        parts = [getattr(row, side) for name, row in rows.items() if name != "step"]
        assert sum(parts) == pytest.approx(4 * getattr(rows["step"], side))
    assert rows["step"].forecast == found.step_seconds
    assert rows["step"].measured == timeline.median.seconds
    assert min(row.measured for row in rows.values()) >= 0


def test_measured_and_forecast_times_have_one_axis() -> None:
    trained, timeline = recorded("dp2pp2", 3)
    found = trained.forecast(boxes(4))
    figure, _ = plots.timeline_figure(found, timeline)
    rows = figure["layout"]["yaxis"]["ticktext"]
    assert rows == [
        "forecast, ranks 0-1", "measured, rank 0", "measured, rank 1",
        "forecast, ranks 2-3", "measured, rank 2", "measured, rank 3",
    ]  # fmt: skip
    forward = next(trace for trace in figure["data"] if trace["name"] == "forward")
    assert {int(y) for y in forward["y"]} == set(range(6))
    assert len(forward["y"]) == 6 * 3
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[figure["layout"]["xaxis"]["title"]["text"][6:-1]]
    ends = [a + b for trace in figure["data"] for a, b in zip(trace["base"], trace["x"], strict=True)]
    assert max(ends) * scale == pytest.approx(max(timeline.median.seconds, found.step_seconds))


def test_the_trace_has_measured_ranks_after_the_forecast(tmp_path: Path) -> None:
    trained, timeline = recorded("pp2", 2)
    path = tmp_path / "trace.json"
    found = trained.forecast(boxes(2), trace=path, measured=timeline)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "measured, rank 0", 3: "measured, rank 1"}
    for pid, rank in ((2, 0), (3, 1)):
        tasks = [e for e in events if e["pid"] == pid and e["ph"] == "X" and e["tid"] == 0]
        assert [(e["args"]["task"], e["args"]["micro_batch"]) for e in tasks] == [
            (run.task, run.micro) for run in timeline.median.ranks[rank].runs
        ]
    alone, _ = chrome_trace.trace_events(found)
    assert alone == events[: len(alone)]


@PLOTLY
def test_the_report_shows_measured_and_forecast(tmp_path: Path) -> None:
    trained, timeline = recorded("pp2", 2)
    file, html = tmp_path / "timeline.json", tmp_path / "report.html"
    timeline.write(file)
    trained.forecast(boxes(2), html=html, measured=file)
    text = html.read_text()
    assert "forecast, rank 0" in text
    assert "measured, rank 1" in text
    (table,) = re.findall(r'<table class="numbers measured">(.*?)</table>', text, re.DOTALL)
    assert re.findall(r"<tr><th>(\w+)</th>", table)[-2:] == ["waiting", "step"]
    assert re.search(
        r"<th>step</th><td></td><td>[\d.]+ \w+</td><td>[\d.]+ \w+</td><td>[+-][\d.]+%</td>", table
    )
    trained.forecast(boxes(2), html=html)
    assert "measured, rank" not in html.read_text()


@PLOTLY
@CHROMIUM
def test_measured_and_forecast_are_drawn_in_a_browser(tmp_path: Path) -> None:
    trained, timeline = recorded("pp2", 2)
    html = tmp_path / "report.html"
    trained.forecast(boxes(2), html=html, measured=timeline)
    probe = opened(html.read_text(), tmp_path)
    assert probe["errors"] == []
    assert probe["loaded"] == []
    assert probe["ticks"] == [
        "forecast, rank 0", "measured, rank 0", "forecast, rank 1", "measured, rank 1",
    ]  # fmt: skip
    assert probe["bars"] > 2 * 2 * (2 + 2 + 1)
    assert "backward.s" in probe["hover"]
