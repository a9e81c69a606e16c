"""The trace of a forecast, in the Trace Event Format."""

from __future__ import annotations

import itertools
import json

import pytest
from support.programs.reported import pipe, traced

from distgraph.errors import RuntimeFault
from distgraph.runtime.report import chrome_trace


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
