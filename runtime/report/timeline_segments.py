"""Segments of the rows of a timeline: tasks, waiting, messages, idle time.

*In:* a forecast, best one with spans (`forecast(..., trace=True)`).
*Out:* `Segment`s, in seconds of the step.
*Invariant:* the segments of the lane "compute" at the level of tasks cover the whole step on every row
without a gap or an overlap: a task or idle. Waiting is part of tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from distgraph.errors import first_of
from distgraph.runtime.execute.measured_timeline import MeasuredRank, MeasuredRun
from distgraph.runtime.forecast.forecast import Forecast
from distgraph.runtime.forecast.task_time import Span, TaskTime
from distgraph.runtime.schedule.timeline import Interval

TASKS = ("load", "forward", "backward", "weight", "send", "recv", "sync", "optimize")
_ROUNDING = 1e-9  # of the step: shorter gaps are rounding


@dataclass(frozen=True, slots=True)
class Segment:
    """A bar in one row of a timeline.

    Attributes:
        row: number of the column of the timeline (a group of ranks that do the same).
        lane: "compute" or "communicate".
        kind: kind of the task; "op", "wait" (for communication), "host" (for the host to issue ops) inside
            one; "collective", "send" beside it; "idle" between tasks.
        task: name; "" where idle.
        micro: number of the micro-batch; -1 where idle.
        start, seconds: from the start of the step.
        op: kind of the op, and scope: the part of the model it belongs to.
    """

    row: int
    lane: str
    kind: str
    task: str
    micro: int
    start: float
    seconds: float
    op: str = ""
    scope: str = ""


def task_segments(forecast: Forecast, row: int) -> Iterator[Segment]:
    """Tasks of one row and the idle time between them, without a gap."""
    timeline, seconds = forecast.timeline, forecast.step_seconds
    kinds = {task.name: task.kind for task in timeline.graph.tasks}
    return _with_idle(timeline.of_rank(timeline.columns[row][0]), row, kinds, seconds, _ROUNDING * seconds)


def _with_idle(
    runs: Iterable[Interval | MeasuredRun], row: int, kinds: Mapping[str, str], seconds: float, least: float
) -> Iterator[Segment]:
    """Segments of runs, and of the idle time of more than `least` seconds before, between and after them."""
    clock = 0.0
    for run in runs:
        if run.start - clock > least:
            yield Segment(row, "compute", "idle", "", -1, clock, run.start - clock)
        yield Segment(row, "compute", kinds[run.task], run.task, run.micro, run.start, run.end - run.start)
        clock = run.end
    if seconds - clock > least:
        yield Segment(row, "compute", "idle", "", -1, clock, seconds - clock)


def inner_segments(forecast: Forecast, row: int, *, ops: bool = True) -> Iterator[Segment]:
    """Segments inside the tasks of one row: ops (if requested), waiting, messages."""
    for run in forecast.timeline.of_rank(forecast.timeline.columns[row][0]):
        yield from inside(task_time(forecast, run), run, row, ops=ops)


def inside(time: TaskTime, run: Interval, row: int, *, ops: bool = True) -> Iterator[Segment]:
    """Segments of one run of a task: its spans, and the gaps of its compute stream, in which it waits for
    communication or for the host."""
    clock, least = 0.0, _ROUNDING * max(time.seconds, 0.0)
    for span in time.spans:
        if span.stream == "compute":
            if span.start - clock > least:
                yield _gap("wait", run, row, clock, span.start)
            clock = span.start + span.seconds
            if not ops:
                continue
        yield _segment_of_span(span, run, row)
    if not time.spans:
        return
    device_done = max(clock, time.compute + time.exposed)  # the host is behind the device only at the end
    if device_done - clock > least:
        yield _gap("wait", run, row, clock, device_done)
    if time.seconds - device_done > least:
        yield _gap("host", run, row, device_done, time.seconds)


def task_time(forecast: Forecast, run: Interval) -> TaskTime:
    """Times of the task of one interval: those with the last micro-batch, or with any other."""
    graph, times = forecast.timeline.graph, forecast.tasks[run.task]
    return times.last if run.micro == graph.micro_batches - 1 else times.body


def measured_segments(
    rank: MeasuredRank, row: int, kinds: Mapping[str, str], seconds: float
) -> Iterator[Segment]:
    """Segments of one rank in a measured step: tasks with the waiting inside, idle time, messages."""
    yield from _with_idle(rank.runs, row, kinds, seconds, 0.0)
    for message in rank.messages:
        context = message.task, message.micro
        waits = message.end - message.waited
        yield Segment(row, "compute", "wait", *context, waits, message.waited)
        kind = "send" if message.kind in ("send", "recv") else "collective"
        duration = message.end - message.start
        yield Segment(row, "communicate", kind, *context, message.start, duration, message.kind)


def count_spans(forecast: Forecast, rows: Iterable[int]) -> int:
    """Number of spans of all tasks of some rows."""
    columns = forecast.timeline.columns
    runs = (run for row in rows for run in forecast.timeline.of_rank(columns[row][0]))
    return sum(len(task_time(forecast, run).spans) for run in runs)


def row_name(ranks: tuple[int, ...]) -> str:
    """Short name of the ranks of a column.

    Example:
        >>> row_name((4,)), row_name((0, 1, 2, 3)), row_name((0, 2))
        ('rank 4', 'ranks 0-3', 'ranks 0, 2')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {first_of(ranks)}" + (f" ({len(ranks)} ranks)" if len(ranks) > 4 else "")


def _gap(kind: str, run: Interval, row: int, start: float, end: float) -> Segment:
    return Segment(row, "compute", kind, run.task, run.micro, run.start + start, end - start)


def _segment_of_span(span: Span, run: Interval, row: int) -> Segment:
    lane = "compute" if span.stream == "compute" else "communicate"
    kind = {"compute": "op", "send": "send"}.get(span.stream, "collective")
    start = run.start + span.start
    return Segment(row, lane, kind, run.task, run.micro, start, span.seconds, span.kind, span.scope)
