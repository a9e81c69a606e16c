"""The report: a forecast as one HTML page that needs no network.

*In:* a forecast; what it was made of, where the page is to show it.
*Out:* a file. Its figures are drawn by plotly.js, which stands inside the page.
*Invariant:* the page loads nothing: no script, style, font or image from anywhere else.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from distgraph.errors import RuntimeFault, installing
from distgraph.plan.forecast_errors import EQUAL
from distgraph.resources import Cluster
from distgraph.resources.describe import describe
from distgraph.resources.mesh_communication import MeshCommunication
from distgraph.resources.units import format_bytes, format_si
from distgraph.runtime.execute.measured_timeline import MeasuredTimeline
from distgraph.runtime.forecast.forecast import Forecast, out_of_memory
from distgraph.runtime.forecast.memory_timeline import occupancy
from distgraph.runtime.forecast.traffic_matrix import by_machine, exchanged_bytes
from distgraph.runtime.program.build import Build
from distgraph.runtime.program.memory_plan import plan_storage
from distgraph.runtime.report.comparison import comparison
from distgraph.runtime.report.plots import (
    Figure,
    matrix_figure,
    memory_figure,
    parts_figure,
    peak_figure,
    task_figure,
    timeline_figure,
)
from distgraph.runtime.report.tensor_table import TensorRow
from distgraph.runtime.report.timeline_segments import row_name
from distgraph.serialization.atomic_files import write_atomically

_MANY = 64  # ranks above which the matrix shows machines
_MENU = 32  # ranks whose memory is shown over time


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of a forecast; the page shows the parts that are given.

    Attributes:
        title: of the page.
        build: the program; for communication between ranks and memory over time.
        cluster: for capacities, and the topology next to the communication.
        tensors: rows of the table.
        others: name -> another forecast of the same training to compare with, or the reason why there is
            none.
        measured: recorded steps of the same program.
    """

    title: str = "forecast"
    build: Build | None = None
    cluster: Cluster | None = None
    tensors: Sequence[TensorRow] = ()
    others: Mapping[str, Forecast | str] = field(default_factory=dict)
    measured: MeasuredTimeline | None = None


def report(forecast: Forecast, path: str | Path, subject: Subject | None = None) -> None:
    """Write a forecast as a page.

    Args:
        forecast: best with spans (`forecast(..., trace=True)`); without them the timeline shows tasks only.
        path: of the file to write.
        subject: what the forecast is of.

    Raises:
        RuntimeFault: plotly is not installed, or the file cannot be written.
    """
    page = Page(forecast, subject or Subject()).text()
    write_atomically(path, page, RuntimeFault, durable=False)


def load_plotly() -> ModuleType:
    """The module `plotly.io`. Raises RuntimeFault: plotly is not installed."""
    try:
        return import_module("plotly.io")
    except ImportError:
        raise RuntimeFault(f"report needs plotly, which is not installed; {installing('report')}") from None


class Page:
    """The sections of a page."""

    def __init__(self, forecast: Forecast, subject: Subject) -> None:
        self.plotly: Any = load_plotly()
        self.forecast, self.subject, self.drawn = forecast, subject, 0

    def text(self) -> str:
        """The whole page."""
        title = html.escape(self.subject.title)
        sections = [
            self._summary(),
            self._timeline(),
            self._measured(),
            self._tasks(),
            self._parts(),
            self._memory(),
            self._communication(),
            self._tensors(),
            self._cluster(),
        ]
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
            f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n'
            + "\n".join(section for section in sections if section)
            + f"\n<script>{_SCRIPT}</script></body></html>\n"
        )

    def _draw(self, figure: Figure) -> str:
        """A figure as a div; the first one contains plotly.js."""
        self.drawn += 1
        drawn: str = self.plotly.to_html(
            figure,
            config={"displaylogo": False, "scrollZoom": True, "responsive": True},
            include_plotlyjs=self.drawn == 1,
            include_mathjax=False,
            full_html=False,
            div_id=f"figure{self.drawn}",
        )
        return drawn

    def _summary(self) -> str:
        forecasts: dict[str, Forecast | str] = {"this plan": self.forecast, **self.subject.others}
        columns = [self._numbers(forecast) for forecast in forecasts.values()]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in ("", *forecasts))
        body = ""
        for name in columns[0]:
            body += f"<tr><th>{name}</th>" + "".join(f"<td>{c.get(name, '')}</td>" for c in columns) + "</tr>"
        exact = (
            "" if self.forecast.exact else "<p>Ranks differ: the slowest corner of every mesh decides.</p>"
        )
        return f'<section id="summary"><table class="numbers"><tr>{head}</tr>{body}</table>{exact}</section>'

    def _numbers(self, forecast: Forecast | str) -> dict[str, str]:
        """Rows of the summary for one forecast."""
        if isinstance(forecast, str):
            return {"step": html.escape(forecast)}
        exposed = max(forecast.exposed_seconds.values(), default=0.0)
        sent = [f"{format_bytes(size)} over {link}" for link, size in forecast.traffic.items()]
        short = () if self.subject.cluster is None else out_of_memory(forecast, self.subject.cluster)
        fits = html.escape(str(short[0])) if short else "yes"
        share = exposed / forecast.step_seconds if forecast.step_seconds else 0.0
        rate = forecast.total_flops / forecast.step_seconds if forecast.step_seconds else 0.0
        return {
            "step": f"<b>{format_si(forecast.step_seconds, 's')}</b>{self._interval(forecast)}",
            "FLOP/s over all ranks": format_si(rate, "FLOP/s"),
            "bubble": f"{max(0.0, forecast.bubble):.1%} of the step, mean rank",
            "exposed communication": f"{format_si(exposed, 's')} ({share:.1%}) on the rank that waits most",
            "peak memory of a rank": format_bytes(forecast.peak_memory),
            "does it fit": fits if self.subject.cluster is not None else "not asked",
            "sent in a step": html.escape(", ".join(sent) or "nothing"),
        }

    def _interval(self, forecast: Forecast) -> str:
        """The interval of a step, and of another forecast whether it differs from that of the page."""
        subject, other = self.forecast.uncertain, forecast.uncertain
        equal = f", {EQUAL}" if forecast is not self.forecast and subject.equals(other) else ""
        return f" (80 % of steps: {other.interval}{equal})"

    def _timeline(self) -> str:
        figure, note = timeline_figure(self.forecast, self.subject.measured)
        text = (
            "A row for each group of ranks that do the same: above what it computes, below what it sends. "
            "Drag to zoom, double click to zoom out, hover to see the task. " + note
        )
        return _section("timeline", "Timeline of the step", text, self._draw(figure))

    def _measured(self) -> str:
        measured = self.subject.measured
        if measured is None:
            return ""
        rows = "".join(
            f"<tr><th>{html.escape(row.name)}</th><td>{row.runs or ''}</td>"
            f"<td>{format_si(row.forecast, 's')}</td><td>{format_si(row.measured, 's')}</td>"
            f"<td>{row.error}</td></tr>"
            for row in comparison(self.forecast, measured)
        )
        heads = ("", "runs", "forecast", "measured", "error of the forecast")
        head = "".join(f"<th>{text}</th>" for text in heads)
        steps, number = len(measured.steps), measured.median.number
        text = (
            f"Step {number}, the median of {steps} recorded step{'s' * (steps > 1)}. Seconds of tasks are "
            "without waiting for communication, summed over all ranks; for the rest of the step ranks wait."
        )
        body = f'<table class="numbers measured"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        return _section("measured", "Forecast and measured", text, body)

    def _tasks(self) -> str:
        figure = task_figure(self.forecast)
        if figure is None:
            return ""
        text = "One run of every task on its slowest rank: ops, waiting, messages. " + figure[1]
        return _section("tasks", "Inside the tasks", text, self._draw(figure[0]))

    def _parts(self) -> str:
        text = "What the time of every group of ranks goes to."
        return _section("parts", "Parts of the step", text, self._draw(parts_figure(self.forecast)))

    def _memory(self) -> str:
        forecast, cluster, build = self.forecast, self.subject.cluster, self.subject.build
        capacity = {}
        if cluster is not None:
            capacity = {rank: cluster.devices[forecast.devices[rank]].memory for rank in forecast.memory}
        text = "What every rank allocates, by category."
        drawn = self._draw(peak_figure(forecast, capacity))
        if build is not None:
            ranks = list(forecast.memory)[:_MENU]
            names = {rank: row_name(forecast.ranks[rank]) for rank in ranks}
            occupancies = []
            for rank in ranks:
                program = build.program(rank)
                storage = plan_storage(program, build.schedule)
                occupancies.append(
                    occupancy(program, storage, forecast.timeline, forecast.workspaces.get(rank))
                )
            text += " Below: what of that is in use when; it is allocated all the time."
            drawn += self._draw(memory_figure(occupancies, names, forecast.step_seconds))
        return _section("memory", "Memory", text, drawn)

    def _communication(self) -> str:
        build, cluster, forecast = self.subject.build, self.subject.cluster, self.forecast
        if build is None or cluster is None:
            return ""
        many = len(build.ranks) > _MANY
        columns = {ranks[0]: ranks for ranks in forecast.timeline.columns}
        matrix = exchanged_bytes(build.lowered, columns if many or forecast.exact else None)
        if not matrix:
            return _section("communication", "Communication", "Ranks send each other nothing.", "")
        place = {rank: cluster.devices[forecast.devices[rank]] for rank in build.ranks}
        if many:
            matrix = by_machine(matrix, cluster, forecast.devices)
            machines = sorted({device.machine for device in place.values()})
            names = {number: cluster.machines[number].name for number in machines}
            figure = matrix_figure(matrix, names)
            text = "Bytes of a step between machines; inside of them on the diagonal."
            if not forecast.exact:
                text += " Blocks differ in size: those of the first rank of a stage stand for all."
        else:
            order = sorted(build.ranks, key=lambda rank: place[rank].index)
            borders = [
                i for i in range(1, len(order)) if place[order[i]].machine != place[order[i - 1]].machine
            ]
            link = MeshCommunication(cluster).narrowest
            links = {(a, b): link(place[a].index, place[b].index) or "nothing" for a, b in matrix}
            names = {rank: f"rank {rank} ({place[rank].node})" for rank in order}
            figure = matrix_figure(matrix, names, borders, links)
            text = "Bytes of a step from rank to rank; dotted lines are borders of machines."
        return _section("communication", "Communication", text, self._draw(figure))

    def _tensors(self) -> str:
        if not self.subject.tensors:
            return ""
        rows = "".join(
            "<tr>"
            + "".join(f"<td>{html.escape(text)}</td>" for text in (t.name, t.kind, t.type, t.layout, t.mesh))
            + f"<td>{format_bytes(t.nbytes)}</td><td>{html.escape(t.origin)}</td></tr>"
            for t in self.subject.tensors
        )
        heads = ("name", "kind", "type", "layout", "mesh", "bytes of a block", "decided by")
        head = "".join(f"<th>{text}</th>" for text in heads)
        table = (
            '<input id="filter" placeholder="part of a name, a layout, an origin" size="40">'
            f'<div class="scroll"><table id="rows"><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )
        return _section("tensors", "Tensors", "The layout of every tensor, and what decided it.", table)

    def _cluster(self) -> str:
        if self.subject.cluster is None:
            return ""
        text = html.escape(describe(self.subject.cluster))
        return _section("cluster", "Cluster", "", f"<pre>{text}</pre>")


def _section(name: str, title: str, text: str, body: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2><p>{html.escape(text)}</p>{body}</section>'


_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5em auto; max-width: 1400px;
  padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 1.6em 0 0.2em }
p { color: #555; margin: 0.2em 0 0.6em }
table { border-collapse: collapse } th, td { text-align: left; padding: 0.25em 0.8em; vertical-align: top }
tr { border-bottom: 1px solid #e4e4e4 } thead th { position: sticky; top: 0; background: #fff }
.scroll { max-height: 480px; overflow: auto; border: 1px solid #e4e4e4; margin-top: 0.5em }
#rows { font: 13px/1.4 ui-monospace, monospace; width: 100% }
pre { overflow: auto; background: #f6f6f6; padding: 1em }
"""
_SCRIPT = """
const box = document.getElementById("filter");
if (box) box.addEventListener("input", () => {
  const wanted = box.value.toLowerCase();
  for (const row of document.querySelectorAll("#rows tbody tr"))
    row.hidden = !row.textContent.toLowerCase().includes(wanted);
});
"""
