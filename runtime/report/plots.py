"""The figures of a report, as plain plotly documents: {"data": [...], "layout": {...}}.

*In:* a forecast and what belongs to it.
*Out:* one dict a figure; nothing here needs plotly.
*Invariant:* every number that is drawn can be read by hovering over it.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distgraph.resources.units import format_bytes, format_si
from distgraph.runtime.execute.measured_timeline import MeasuredTimeline
from distgraph.runtime.forecast.forecast import Forecast
from distgraph.runtime.forecast.memory_timeline import Occupancy
from distgraph.runtime.report.timeline_segments import (
    Segment,
    count_spans,
    inner_segments,
    inside,
    measured_segments,
    row_name,
    task_segments,
)
from distgraph.runtime.schedule.timeline import Interval

Figure = dict[str, Any]

MOST_BARS = 12_000
"""Limit on the bars of one figure; browsers stay responsive up to about this number."""
COLORS = {
    "load": "#7f8c8d", "forward": "#3b7dd8", "backward": "#2a9d6f", "send": "#b07aa1", "recv": "#9c755f",
    "weight": "#7cc4a1", "sync": "#e0a030", "optimize": "#8e5bb5", "op": "#5b9bd5", "wait": "#d64545",
    "host": "#f0b89a", "collective": "#e0a030", "idle": "#e4e4e4",
}  # fmt: skip
_MEMORY_COLORS = {
    "parameters": "#3b7dd8", "gradients": "#2a9d6f", "states": "#8e5bb5", "activations": "#e0a030",
    "temporary": "#7f8c8d", "communication": "#d64545", "inputs": "#9c755f",
}  # fmt: skip
_MOST_MEASURED = 16
"""Ranks up to which all of them are shown as measured."""
_HEIGHT = {"compute": 0.46, "communicate": 0.26}
_PLACE = {"compute": 0.0, "communicate": 0.38}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def timeline_figure(forecast: Forecast, measured: MeasuredTimeline | None = None) -> tuple[Figure, str]:
    """Ranks over time, and in words what had to be left out.

    One row for each group of ranks that do the same: above what they compute, below what they send. Ops are
    drawn where there is room for all of them, tasks always. The ranks of a measured timeline stand below the
    group that they belong to, on the same axis.
    """
    columns = forecast.timeline.columns
    rows: list[Any] = []
    bars = 0
    for row, ranks in enumerate(columns):
        bars += 2 * len(forecast.timeline.of_rank(ranks[0]))
        if bars > MOST_BARS and rows:
            break
        rows.append(row)
    note = "" if len(rows) == len(columns) else f"The first {len(rows)} of {len(columns)} groups of ranks. "
    segments = [s for row in rows for s in task_segments(forecast, row)]
    spans = count_spans(forecast, rows)
    if len(segments) + spans <= MOST_BARS:
        segments += [s for row in rows for s in inner_segments(forecast, row)]
    elif spans:
        note += "The whole step shows tasks only; ops, waiting and messages stand in the next figure."
    names = {row: row_name(columns[row]) for row in rows}
    if measured is None:
        return _gantt(segments, names, forecast.step_seconds), note
    shown, step = _measured_ranks(forecast, rows), measured.median
    places: dict[int, int] = {}
    below: list[Segment] = []
    names = {}
    for row in rows:
        places[row] = len(names)
        names[len(names)] = f"forecast, {row_name(columns[row])}"
        for rank in shown[row]:
            below += measured_segments(step.ranks[rank], len(names), measured.tasks, step.seconds)
            names[len(names)] = f"measured, rank {rank}"
    both = [*(replace(s, row=places[s.row]) for s in segments), *below]
    if any(len(shown[row]) < len(columns[row]) for row in rows):
        note += "Of groups of many ranks the first is shown as measured. "
    return _gantt(both, names, max(forecast.step_seconds, step.seconds)), note


def _measured_ranks(forecast: Forecast, rows: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Ranks of every group that are shown as measured: all, or the first of each where there are many."""
    columns = forecast.timeline.columns
    many = sum(len(columns[row]) for row in rows) > _MOST_MEASURED
    return {row: columns[row][:1] if many else columns[row] for row in rows}


def task_figure(forecast: Forecast) -> tuple[Figure, str] | None:
    """One run of every task with its ops, and in words what had to be left out; None without spans."""
    segments: list[Segment] = []
    names: dict[int, str] = {}
    left_out, longest = [], 0.0
    for name, task in forecast.tasks.items():
        for time, which in ((task.body, ""), (task.last, ", last micro-batch")):
            if which and (task.last is task.body or task.last.seconds == task.body.seconds):
                continue
            if not time.spans:
                continue
            if len(segments) + len(time.spans) > MOST_BARS:
                left_out.append(name + which)
                continue
            row, run = len(names), Interval(name, 0, 0.0, time.seconds)
            names[row] = f"{name}{which}"
            segments.append(Segment(row, "compute", task.kind, name, 0, 0.0, time.seconds))
            segments += inside(time, run, row)
            longest = max(longest, time.seconds)
    if not names:
        return None
    note = f"No room for {', '.join(left_out)}." if left_out else ""
    return _gantt(segments, names, longest), note


def _gantt(segments: Iterable[Segment], names: Mapping[int, str], seconds: float) -> Figure:
    """Segments as bars over time, a legend entry a kind."""
    scale, unit = _scale(seconds)
    kinds: dict[str, list[Segment]] = defaultdict(list)
    for segment in segments:
        kinds[segment.kind].append(segment)
    data = []
    for kind in sorted(kinds, key=list(COLORS).index):
        bars = kinds[kind]
        thin = kind in ("op", "wait", "host")
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": kind,
                "base": [s.start / scale for s in bars],
                "x": [s.seconds / scale for s in bars],
                "y": [s.row + _PLACE[s.lane] for s in bars],
                "width": [_HEIGHT[s.lane] * (0.55 if thin else 1.0) for s in bars],
                "marker": {"color": COLORS[kind], "line": {"width": 0.5, "color": "#ffffff"}},
                "hovertext": [_hover_text(s) for s in bars],
                "hoverinfo": "text",
            }
        )
    ticks = {
        "tickvals": list(names),
        "ticktext": list(map(_escape_markup, names.values())),
        "autorange": "reversed",
    }
    return {
        "data": data,
        "layout": {
            "barmode": "overlay",
            "height": 180 + 46 * max(2, len(names)),
            "xaxis": {"title": {"text": f"time ({unit})"}, "zeroline": False},
            "yaxis": {**ticks, "showgrid": False, "zeroline": False},
            "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom"},
            "margin": {"l": 150, "r": 20, "t": 40, "b": 50},
            "hovermode": "closest",
            "plot_bgcolor": "#ffffff",
        },
    }


def _hover_text(segment: Segment) -> str:
    """Text that is shown when hovering over a segment."""
    when = f"{format_si(segment.seconds, 's')} from {format_si(segment.start, 's')}"
    if segment.kind == "idle":
        return f"idle<br>{when}"
    head = {
        "op": segment.op, "collective": segment.op.removeprefix("comm."), "send": "send",
        "wait": "waits for communication", "host": "waits for the host to issue ops",
    }.get(segment.kind, segment.kind)  # fmt: skip
    scope = f"<br>{_escape_markup(segment.scope)}" if segment.scope else ""
    task = _escape_markup(segment.task)
    return f"<b>{_escape_markup(head)}</b><br>{task}, micro-batch {segment.micro}{scope}<br>{when}"


def _escape_markup(text: str) -> str:
    """Text with HTML tags escaped, which plotly would interpret as formatting."""
    return html.escape(text, quote=False)


def parts_figure(forecast: Forecast) -> Figure:
    """Breakdown of the step time of every group of ranks: computing, waiting inside tasks, idle."""
    scale, unit = _scale(forecast.step_seconds)
    compute, exposed, busy = forecast.compute_seconds, forecast.exposed_seconds, forecast.timeline.busy()
    columns = forecast.timeline.columns
    firsts = [ranks[0] for ranks in columns]
    parts = {
        "computing": ("op", [compute[r] for r in firsts]),
        "exposed communication": ("wait", [exposed[r] for r in firsts]),
        "waiting for the host": ("host", [max(0.0, busy[r] - compute[r] - exposed[r]) for r in firsts]),
        "idle (bubble)": ("idle", [max(0.0, forecast.step_seconds - busy[r]) for r in firsts]),
    }
    names = [row_name(ranks) for ranks in columns]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": names,
            "x": [value / scale for value in values],
            "marker": {"color": COLORS[color]},
            "hovertext": [
                f"{name}: {format_si(v, 's')} ({v / max(forecast.step_seconds, 1e-300):.1%})" for v in values
            ],
            "hoverinfo": "text+y",
        }
        for name, (color, values) in parts.items()
    ]
    layout = _layout(110 + 26 * len(columns), f"time ({unit})", "")
    layout["yaxis"]["autorange"] = "reversed"
    return {"data": data, "layout": {**layout, "barmode": "stack"}}


def peak_figure(forecast: Forecast, capacity: Mapping[int, float]) -> Figure:
    """Allocated bytes by category on every representative rank, with the memory of its device."""
    ranks, (scale, unit) = list(forecast.memory), _size(forecast.peak_memory)
    names = [row_name(forecast.ranks[rank]) for rank in ranks]
    categories = list(next(iter(forecast.memory.values())).categories)
    data: list[dict[str, Any]] = []
    for category in categories:
        sizes = [forecast.memory[rank].categories[category] for rank in ranks]
        if any(sizes):
            data.append(
                {
                    "type": "bar",
                    "name": category,
                    "x": names,
                    "y": [size / scale for size in sizes],
                    "marker": {"color": _MEMORY_COLORS[category]},
                    "hovertext": [f"{category}: {format_bytes(size)}" for size in sizes],
                    "hoverinfo": "text+x",
                }
            )
    if capacity:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "memory of the device",
                "x": names,
                "y": [capacity[rank] / scale for rank in ranks],
                "marker": {"symbol": "line-ew-open", "size": 26, "color": "#000000", "line": {"width": 2}},
                "hovertext": [f"device has {format_bytes(capacity[rank])}" for rank in ranks],
                "hoverinfo": "text+x",
                "visible": True if _comparable(forecast, capacity) else "legendonly",
            }
        )
    return {"data": data, "layout": {**_layout(360, "", unit), "barmode": "stack"}}


def _comparable(forecast: Forecast, capacity: Mapping[int, float]) -> bool:
    """Whether the capacity is small enough to share an axis with the memory in use."""
    return max(capacity.values()) < 20 * max(forecast.peak_memory, 1.0)


def memory_figure(occupancies: Sequence[Occupancy], names: Mapping[int, str], seconds: float) -> Figure:
    """Bytes in use over time by category, one rank at a time, chosen from a menu."""
    scale, unit = _scale(seconds)
    bytes_scale, bytes_unit = _size(max((used.peak for used in occupancies), default=0))
    data: list[dict[str, Any]] = []
    owner: list[int] = []
    for number, used in enumerate(occupancies):
        times = [time / scale for time in used.times]
        for category, sizes in used.bytes.items():
            owner.append(number)
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": category,
                    "stackgroup": f"rank{used.rank}",
                    "x": times,
                    "y": [size / bytes_scale for size in sizes],
                    "line": {"shape": "hv", "width": 0.5, "color": _MEMORY_COLORS[category]},
                    "hovertext": [f"{category}: {format_bytes(size)}" for size in sizes],
                    "hoverinfo": "text",
                    "visible": number == 0,
                }
            )
    buttons = [
        {
            "label": names[used.rank],
            "method": "update",
            "args": [{"visible": [number == other for other in owner]}],
        }
        for number, used in enumerate(occupancies)
    ]
    layout = _layout(380, f"time ({unit})", f"{bytes_unit} in use")
    layout["hovermode"] = "x unified"
    menu = {"buttons": buttons, "x": 0.0, "xanchor": "left", "y": 1.14, "yanchor": "bottom"}
    layout["margin"]["t"] = 80
    return {"data": data, "layout": {**layout, "updatemenus": [menu] if len(buttons) > 1 else []}}


def matrix_figure(
    matrix: Mapping[tuple[int, int], float],
    names: Mapping[int, str],
    borders: Sequence[int] = (),
    links: Mapping[tuple[int, int], str] | None = None,
) -> Figure:
    """Heat map of the bytes between senders (rows) and receivers (columns).

    Args:
        matrix: (sender, receiver) -> bytes in a step.
        names: of senders and receivers, in the order in which they are drawn.
        borders: positions in this order at which the next machine starts.
        links: (sender, receiver) -> kind of the narrowest link of the route.
    """
    order, links = list(names), links or {}
    names = {which: _escape_markup(name) for which, name in names.items()}
    labels = list(names.values())
    scale, unit = _size(max(matrix.values(), default=0.0))
    sizes = [[matrix.get((a, b), 0.0) for b in order] for a in order]
    hover = [
        [
            f"{names[a]} to {names[b]}: {format_bytes(matrix.get((a, b), 0.0))} a step"
            + (f"<br>over {_escape_markup(links[a, b])}" if (a, b) in links else "")
            for b in order
        ]
        for a in order
    ]
    heatmap = {
        "type": "heatmap",
        "x": labels,
        "y": labels,
        "z": [[size / scale or None for size in row] for row in sizes],
        "hovertext": hover,
        "hoverinfo": "text",
        "colorscale": "Blues",
        "colorbar": {"title": {"text": unit}},
        "zmin": 0,
    }
    line = {"color": "#555555", "width": 1, "dash": "dot"}
    shapes = []
    for border in borders:
        start, end = border - 0.5, len(order) - 0.5
        shapes.append({"type": "line", "x0": start, "x1": start, "y0": -0.5, "y1": end, "line": line})
        shapes.append({"type": "line", "y0": start, "y1": start, "x0": -0.5, "x1": end, "line": line})
    layout = _layout(min(900, 260 + 22 * len(order)), "receives", "sends")
    layout["yaxis"] |= {"autorange": "reversed", "type": "category"}
    layout["xaxis"]["type"] = "category"
    return {"data": [heatmap], "layout": {**layout, "shapes": shapes, "width": layout["height"] + 160}}


def _layout(height: int, x: str, y: str) -> dict[str, Any]:
    return {
        "height": height,
        "xaxis": {"title": {"text": x}, "zeroline": False, "automargin": True},
        "yaxis": {"title": {"text": y}, "zeroline": False, "automargin": True},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "margin": {"l": 80, "r": 20, "t": 40, "b": 50},
        "plot_bgcolor": "#ffffff",
    }


def _scale(seconds: float) -> tuple[float, str]:
    """Scale and unit of an axis for a span of time."""
    return next(((size, unit) for size, unit in _UNITS if seconds >= size), _UNITS[-1])


def _size(nbytes: float) -> tuple[float, str]:
    """Scale and unit of an axis for a number of bytes."""
    units = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
    return next(((size, unit) for size, unit in units if nbytes >= size), (1.0, "B"))
