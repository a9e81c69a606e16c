"""What the figures of a report hold: rows of time, parts of a step, bytes between ranks, memory."""

from __future__ import annotations

import itertools

import pytest
from support.files.clusters import cluster_of
from support.programs.forecasts import chain, document, machines
from support.programs.reported import grid, pipe, traced

from distgraph.resources.cluster import Cluster
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.forecast.memory_timeline import occupancy
from distgraph.runtime.forecast.traffic_matrix import by_machine, exchanged_bytes
from distgraph.runtime.program.memory_plan import plan_storage
from distgraph.runtime.report import plots
from distgraph.runtime.report.timeline_segments import inner_segments, row_name, task_segments


def behind(issue: str | None) -> Cluster:
    """Two machines of six devices, whose hosts take so long to issue an op."""
    described = document(6, 6)
    for entry in described["machines"]:
        entry["devices"]["compute"] |= {} if issue is None else {"host": {"op": issue}}
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
