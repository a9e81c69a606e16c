"""Names are any text: they never become code, and what Unicode or Python takes for one name stays two."""

from __future__ import annotations

import ast
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from partitioned import run_partitioned

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine import Engine
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.ops.reference_interpreter import interpret
from distgraph.passes.pass_pipeline import run_passes
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy
from distgraph.runtime.program.codegen import compile_task
from distgraph.runtime.program.identifiers import Identifiers, commented, literal
from distgraph.tracing.tracer import Trace

BREAKS = ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
MERGED = (("\u03bc", "\u00b5"), ("\ufb01", "fi"), ("K", "\u212a"), ("\u017f", "s"))  # one after normalisation
ODD = (
    *("m", "work", "sent", "xp", "comm", "feeds", "pending", "copyto", "class", "None", "print", "sum", "lr"),
    *("x\u00b2", "0", "_", "__", "", " ", "a b", "a.b", "a_b", "1.5", "'", '"', "\\", "'''", '"""', "#", "%"),
    *("{0..1}", "work_1", "m_1", "forward_s0_last", "exchange_start", "x" * 300, "\x7f", "\U0001f600"),
    *(f"a{each}raise SystemExit(3)" for each in BREAKS),
    *(f"a{each}    raise SystemExit(3)" for each in BREAKS),
)
GRID = ProcessMesh.grid(dp=2, tp=2)


def weighted_sum(names: list[str], params: list[str], source: str = "") -> Graph:
    """Sum of every input times its parameter, and the new value of every parameter."""
    trace = Trace("odd")
    with trace.activate():
        total: Any = None
        for i, (x, w) in enumerate(zip(names, params, strict=True)):
            product = trace.source("input", x, (4, 6), "f64") @ trace.source("param", w, (6, 5), "f64")
            part = ops.tanh(product) * float(i + 1)
            total = part if total is None else total + part
        loss = dg.tensor.emit_one("accumulate", ops.mean(total))
        for w in params:
            tensor = trace.source("param", w, (6, 5), "f64")
            trace.updates.append((tensor.value.name, (tensor - loss).value))
    graph = trace.finish({"out": total, "loss": loss})
    return graph.with_ops([replace(op, source=source or op.source) for op in graph.ops])


def placed(graph: Graph) -> Graph:
    """Inputs split over one axis, parameters over the other, then completed."""
    attrs = {}
    for op in graph.sources("input", "param"):
        dims = (("dp",), ()) if op.kind == "input" else ((), ("tp",))
        attrs[op.name] = DistAttr(GRID, ShardSpec(dims), Origin("user", "test"))
    return run_passes(replace(graph, attrs=attrs), ["complete"])


def check(names: list[str], params: list[str], rng: np.random.Generator, source: str = "") -> None:
    graph = weighted_sum(names, params, source)
    feeds = [{name: rng.normal(size=(4, 6)) for name in names} for _ in range(3)]
    weights = {name: rng.normal(size=(6, 5)) for name in params}
    outputs, updates, _ = run_partitioned(placed(graph), feeds, weights)
    runs = [interpret(graph, feed, weights) for feed in feeds]
    for m, (serial, _) in enumerate(runs):
        np.testing.assert_allclose(outputs["out"][m], serial["out"], rtol=1e-12, atol=1e-12)
    for name in params:
        expected = np.mean([new[name] for _, new in runs], axis=0)
        np.testing.assert_allclose(updates[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pair", MERGED, ids=ascii)
def test_names_that_unicode_normalisation_merges_are_two(
    pair: tuple[str, str], rng: np.random.Generator
) -> None:
    check(list(pair), [f"{name}.w" for name in pair], rng)
    check(["first", "second"], list(pair), rng)


def test_odd_names_are_names(rng: np.random.Generator) -> None:
    half = len(ODD) // 2
    for names, params in ((ODD[:half], ODD[half : 2 * half]), (ODD[half : 2 * half], ODD[:half])):
        check(list(names), list(params), rng)


texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12)


@given(st.lists(texts, min_size=2, max_size=6, unique=True), st.text(max_size=20))
def test_any_text_is_a_name(names: list[str], source: str) -> None:
    half = len(names) // 2
    check(names[:half], names[half : 2 * half], np.random.default_rng(0), source)


@pytest.mark.parametrize("end", BREAKS, ids=ascii)
def test_no_comment_ends_at_a_line_break_of_a_user(
    end: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sources hold the text inside literals and comments only: every line of it is one of the writer."""
    sources: list[str] = []

    def watched(*args: Any) -> Any:
        task = compile_task(*args)
        sources.append(task.source)
        return task

    monkeypatch.setattr("distgraph.runtime.execute.worker.compile_task", watched)
    check(["x"], ["w"], rng, f"train.py{end}raise SystemExit(3){end}:4")
    assert sources
    for source in sources:
        assert source.isascii()
        assert source.split("\n") == [*source.splitlines(), ""]
        assert not any(isinstance(node, ast.Raise) for node in ast.walk(ast.parse(source)))


class Odd(nn.Module):
    """Inputs and parameters of any names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.parts = {name: nn.Parameter((3, 2), "f64") for name in names}

    def forward(self, **inputs: Any) -> Any:
        total: Any = 0.0
        for i, (name, x) in enumerate(inputs.items()):
            total = total + ops.tanh(x @ self.parts[name]) * (i + 1.0)
        return ops.mean(total)


def losses(names: tuple[str, ...], how: Strategy | Plan, rng: np.random.Generator) -> list[float]:
    rows = {name: rng.normal(size=(8, 3)) for name in names}
    options: Any = {"plan" if isinstance(how, Plan) else "strategy": how}
    with closing(Engine(Odd(names), None, optim.Adam(lr=0.1), seed=1, **options)) as engine:
        return [engine.run(rows)["loss"] for _ in range(3)]


def test_an_engine_trains_with_odd_names() -> None:
    names = tuple(name for name in ODD if name != "lr")
    found = losses(names, Strategy(mesh=GRID, batch_axis="dp", micro_batches=2), np.random.default_rng(0))
    serial = losses(names, Strategy(), np.random.default_rng(0))
    np.testing.assert_allclose(found, serial, rtol=1e-6)


@given(st.lists(st.tuples(st.booleans(), st.text(max_size=60)), max_size=20))
def test_identifiers_are_identifiers_and_all_different(wanted: list[tuple[bool, str]]) -> None:
    names = Identifiers(["m", "work"])
    keys = {text for once, text in wanted if not once}
    made = [names.of(text, text) for text in keys] + [names.once(text) for once, text in wanted if once]
    assert len(set(made)) == len(made)
    assert all(name.isidentifier() and name.isascii() for name in made)
    assert not {"m", "work", "class", "print", "None"} & set(made)
    assert [names.of(text, text) for text in keys] == made[: len(keys)]


@given(st.text())
def test_literals_and_comments_are_one_line_of_ascii(text: str) -> None:
    assert ast.literal_eval(literal(text)) == text
    for line in (literal(text), commented(text)):
        assert line.isascii()
        assert len(line.splitlines()) <= 1
