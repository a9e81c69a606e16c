"""A forecast as Chrome trace events: a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

*In:* a forecast, best one with spans (`forecast(..., trace=True)`).
*Out:* JSON in the Trace Event Format (Google, 2016): a process a group of ranks that do the same, with a
thread of tasks, one of ops, one or more of messages; after them a process a measured rank.
*Invariant:* times are microseconds; on one thread no two events overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distgraph.errors import RuntimeFault
from distgraph.runtime.execute.measured_timeline import MeasuredTimeline
from distgraph.runtime.forecast.forecast import Forecast
from distgraph.runtime.report.timeline_segments import (
    Segment,
    count_spans,
    inner_segments,
    measured_segments,
    row_name,
    task_segments,
)
from distgraph.serialization.atomic_files import write_atomically

MOST_EVENTS = 400_000
"""With more spans than these (about 100 MB of JSON), only tasks and messages are written."""
_TASKS, _OPS, _MESSAGES = 0, 1, 2
_MICROSECOND = 1e-6


def write_trace(forecast: Forecast, path: str | Path, measured: MeasuredTimeline | None = None) -> None:
    """Write a forecast as a Chrome trace.

    Args:
        forecast: of a step.
        path: of the file.
        measured: whose median step is shown after the forecast, a process for each rank.

    Raises:
        RuntimeFault: the file cannot be written.
    """
    events, complete = trace_events(forecast)
    if measured is not None:
        events += measured_events(measured, len(forecast.timeline.columns))
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "what": "distgraph forecast",
            "step_seconds": forecast.step_seconds,
            "ops": "all" if complete else f"left out, there are more than {MOST_EVENTS}",
        },
    }
    write_atomically(path, json.dumps(content, separators=(",", ":")), RuntimeFault, durable=False)


def trace_events(forecast: Forecast) -> tuple[list[dict[str, Any]], bool]:
    """The events, and whether ops are among them."""
    rows = range(len(forecast.timeline.columns))
    ops = count_spans(forecast, rows) <= MOST_EVENTS
    events: list[dict[str, Any]] = []
    for row in rows:
        ranks = forecast.timeline.columns[row]
        events += _names(row, row_name(ranks))
        events += (_event(s, _TASKS) for s in task_segments(forecast, row) if s.kind != "idle")
        segments = list(inner_segments(forecast, row, ops=ops))
        events += (_event(s, _OPS) for s in segments if s.lane == "compute")
        events += _messages(row, [s for s in segments if s.lane == "communicate"])
    return events, ops


def measured_events(measured: MeasuredTimeline, first: int) -> list[dict[str, Any]]:
    """The median step as processes from number `first` on, a rank each."""
    events: list[dict[str, Any]] = []
    step = measured.median
    for row, (rank, did) in enumerate(step.ranks.items(), first):
        segments = list(measured_segments(did, row, measured.tasks, step.seconds))
        events += _names(row, f"measured, rank {rank}", ops="waiting")
        computed = [s for s in segments if s.lane == "compute" and s.kind != "idle"]
        events += (_event(s, _OPS if s.kind == "wait" else _TASKS) for s in computed)
        events += _messages(row, [s for s in segments if s.lane == "communicate"])
    return events


def _names(row: int, name: str, ops: str = "compute stream") -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": row, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": row, "name": "process_sort_index", "args": {"sort_index": row}}
    for thread, label in ((_TASKS, "tasks"), (_OPS, ops)):
        yield {"ph": "M", "pid": row, "tid": thread, "name": "thread_name", "args": {"name": label}}


def _messages(row: int, segments: list[Segment]) -> Iterator[dict[str, Any]]:
    """Messages may overlap: each is drawn on the first thread that is free."""
    free: list[float] = []
    for segment in sorted(segments, key=lambda s: s.start):
        number = next((i for i, end in enumerate(free) if end <= segment.start), len(free))
        if number == len(free):
            free.append(0.0)
            name = "messages" if not number else f"messages {number + 1}"
            tid = _MESSAGES + number
            yield {"ph": "M", "pid": row, "tid": tid, "name": "thread_name", "args": {"name": name}}
        free[number] = segment.start + segment.seconds
        yield _event(segment, _MESSAGES + number)


def _event(segment: Segment, thread: int) -> dict[str, Any]:
    name = segment.op or (
        segment.kind if segment.kind in ("wait", "host") else f"{segment.task} {segment.micro}"
    )
    args: dict[str, Any] = {"task": segment.task, "micro_batch": segment.micro}
    if segment.scope:
        args["scope"] = segment.scope
    return {
        "ph": "X",
        "pid": segment.row,
        "tid": thread,
        "name": name,
        "cat": segment.kind,
        "ts": segment.start / _MICROSECOND,
        "dur": segment.seconds / _MICROSECOND,
        "args": args,
    }
