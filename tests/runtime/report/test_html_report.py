"""The page of a report: it loads nothing, and draws in a browser."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.files.browser import CHROMIUM, opened
from support.programs.forecasts import machines
from support.programs.reported import PLOTLY, pipe

from distgraph.engine.compile.program_summary import PlanView
from distgraph.errors import RuntimeFault
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.report import html_report


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
    text = page(tmp_path, others={"none": "there is none: <no> batch", "other": other, "small": small})
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
