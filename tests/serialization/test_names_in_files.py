"""Names in what is written: graph text, plans, exports, reports. They come back as they are, as text only."""

from __future__ import annotations

import ast
from contextlib import closing
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs.forecasts import chain, machines
from support.programs.odd_names import ODD, Odd, losses, texts, weighted_sum

from distgraph import nn, ops, optim
from distgraph.engine import Engine
from distgraph.engine.compile.program_summary import PlanView
from distgraph.engine.compile.training_spec import metric_names
from distgraph.errors import GraphError, ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.parser import parse_graph, print_graph
from distgraph.ir.range_notation import fold, unfold
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.plan.export.result import header, quoted
from distgraph.plan.pipeline_schedules import schedule_names
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.report import html_report, plots
from distgraph.tracing.tracer import Trace

NAMES = tuple(name for name in ODD if name != "lr")
SCRIPT = "</script><script>document.title='taken'</script>"


@given(st.lists(texts, min_size=2, max_size=2, unique=True), st.text(max_size=12))
def test_graph_text_keeps_any_name(names: list[str], source: str) -> None:
    graph = weighted_sum(names[:1], names[1:], source)
    assert parse_graph(print_graph(graph)) == graph


@given(st.text(min_size=1, max_size=4))
def test_a_mesh_axis_reads_back_or_is_refused(name: str) -> None:
    try:
        mesh = ProcessMesh([0, 1], [name])
    except ShardingError:
        return
    graph = weighted_sum(["x"], ["w"])
    attr = DistAttr(mesh, ShardSpec(((name,), ())))
    graph = replace(graph, attrs={"x": attr})
    assert parse_graph(print_graph(graph)) == graph


@pytest.mark.parametrize("name", ["_", "a\u00b7b", "e\u0301", "", "a b", "1"], ids=ascii)
def test_axes_that_no_text_reads_back_are_refused(name: Any) -> None:
    with pytest.raises(ShardingError, match="must be distinct identifiers of letters and digits"):
        ProcessMesh([0, 1], [name])


parts = st.sampled_from(
    ["0", "1", "10", "a", "", "{0..1}", "{{0..1}", "{0", "1}", "\u0661", "\u00b2", "0..1"]
)


@given(st.dictionaries(st.lists(parts, min_size=1, max_size=4).map(".".join), st.integers(0, 1), max_size=12))
def test_folded_tables_unfold_to_the_same(table: dict[str, int]) -> None:
    unfolded = [(name, item) for pattern, item in fold(table).items() for name in unfold(pattern)]
    assert dict(unfolded) == table
    assert len(unfolded) == len(table)


@cache
def odd_plan() -> Plan:
    mesh = ProcessMesh.grid(dp=2, tp=2)
    rows = {name: np.zeros((8, 3)) for name in NAMES}
    strategy = Strategy(mesh=mesh, batch_axis="dp", micro_batches=2)
    with closing(Engine(Odd(NAMES), None, optim.Adam(), strategy=strategy)) as engine:
        plan: Plan = engine.prepare(rows).portable
    return plan


def test_a_plan_keeps_odd_names() -> None:
    plan = odd_plan()
    found = Plan.parse(plan.text())
    assert found == plan
    assert set(found.tensors) >= {*NAMES, *(f"parts.{name}" for name in NAMES)}
    by_plan = losses(NAMES, found, np.random.default_rng(0))
    np.testing.assert_allclose(by_plan, losses(NAMES, Strategy(), np.random.default_rng(0)), rtol=1e-6)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_exports_hold_names_as_literals_only(framework: str) -> None:
    plan = odd_plan()
    named = replace(plan, program=replace(plan.program, name='x"""\nraise SystemExit(3)\n"""\\\0\u2028'))
    source = named.export(framework).source
    tree = ast.parse(source)
    assert source.isascii()
    raised = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    assert not any("SystemExit" in each for each in raised)
    if framework == "jax":
        texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert texts >= {*NAMES, *(f"parts.{name}" for name in NAMES)}


@given(st.text())
def test_any_text_is_a_literal_of_an_export(text: str) -> None:
    assert ast.literal_eval(quoted(text)) == text
    plan = replace(odd_plan(), program=replace(odd_plan().program, name=text))
    (docstring,) = ast.parse(header(plan, "Shardings", [text])).body
    assert isinstance(docstring, ast.Expr)


def test_the_schedule_of_a_plan_is_no_code() -> None:
    text = odd_plan().text().replace('"schedule": "1f1b"', '"schedule": "print(3)"')
    with pytest.raises(GraphError, match=f"schedule: expected one of {', '.join(schedule_names())}, got"):
        Plan.parse(text)
    with pytest.raises(ShardingError, match=r"has the schedule 'print\(3\)' but PyTorch those of"):
        replace(odd_plan(), schedule="print(3)").export("torch")


@pytest.mark.skipif(find_spec("plotly") is None, reason="plotly is not installed")
def test_no_name_is_markup_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = chain(8, [4, 6, 4], [ProcessMesh.grid(dp=2)] * 2, 2)
    found = forecast(build, machines(2), trace=True)
    rows = [replace(row, name=SCRIPT, origin=SCRIPT) for row in PlanView(build).tensors]
    html_report.report(found, tmp_path / "plain.html", html_report.Subject("a", build, machines(2), rows[:0]))
    monkeypatch.setattr(plots, "inner_segments", scripted(plots.inner_segments))
    html_report.report(found, tmp_path / "odd.html", html_report.Subject(SCRIPT, build, machines(2), rows))
    plain, odd = ((tmp_path / name).read_text() for name in ("plain.html", "odd.html"))
    assert odd.count("<script") == plain.count("<script")
    assert odd.count("</script") == plain.count("</script")
    assert "taken" in odd
    drawn, _ = plots.timeline_figure(found)
    texts = [text for bars in drawn["data"] for text in bars["hovertext"]]
    assert any("taken" in text for text in texts)
    assert not any("<script" in text for text in texts)


def scripted(segments: Any) -> Any:
    """Segments whose ops and scopes hold markup."""
    return lambda *args, **options: (replace(s, op=SCRIPT, scope=SCRIPT) for s in segments(*args, **options))


def test_two_things_of_one_name_are_refused() -> None:
    trace = Trace()
    trace.source("param", "w", (2,), "f32")
    for kind, name, shape, dtype, message in (
        ("input", "w", (4, 2), "f32", r"input 'w' has the name of a param"),
        ("state", "w", (2,), "f32", r"state 'w' has the name of a param"),
        ("param", "w", (3,), "f32", r"param 'w' is f32\[3\] but another param of that name f32\[2\]"),
        ("param", 3, (3,), "f32", r"name of param is 3 but must be a text without NUL"),
        ("param", "\ud800", (3,), "f32", r"name of param is '\\ud800' but must be a text without NUL"),
    ):
        with pytest.raises(GraphError, match=message):
            trace.source(kind, name, shape, dtype)
    assert trace.source("input", "lr", (), "f32").shape == ()
    assert trace.source("param", "lr", (3,), "f32").shape == (3,)


def test_a_field_with_the_name_of_the_learning_rate_is_refused() -> None:
    message = r"input 'lr' is f64\[\] but another input of that name f64\[8, 3\]; rename one"
    engine = Engine(Odd(("lr",)), None, optim.SGD())
    with closing(engine), pytest.raises(GraphError, match=message):
        engine.run({"lr": np.zeros((8, 3))})


class Attends(nn.Module):
    """A model with an argument called target."""

    def __init__(self) -> None:
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Any, target: Any) -> Any:
        return self.linear(x) * target


def test_an_argument_called_target_is_not_the_target(rng: np.random.Generator) -> None:
    x, y, z = (rng.normal(size=(8, 3)).astype("f4") for _ in range(3))
    with closing(Engine(Attends(), nn.MeanSquaredError(), optim.SGD(lr=0.0), seed=1)) as engine:
        found = engine.run((x, y, z))["loss"]
        predicted = engine.predict((x, y))
    assert found == pytest.approx(np.mean((predicted - z) ** 2), rel=1e-5)


@pytest.mark.parametrize("name", ["loss", "valid_loss", "valid_accuracy"])
def test_metrics_do_not_take_the_name_of_another_number(name: str) -> None:
    with pytest.raises(GraphError, match=rf"a metric is named '{name}' but"):
        metric_names({"accuracy": ops.mean, name: ops.mean})
