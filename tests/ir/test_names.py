"""Names are any text: they never become code, and what Unicode or Python takes for one name stays two."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs.odd_names import BREAKS, ODD, losses, texts, weighted_sum
from support.programs.partitioned import run_partitioned

from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.reference_interpreter import interpret
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.pass_pipeline import run_passes
from distgraph.plan.strategy import Strategy
from distgraph.runtime.program.identifiers import Identifiers, commented, literal
from distgraph.runtime.program.task_compiler import compile_task

MERGED = (("\u03bc", "\u00b5"), ("\ufb01", "fi"), ("K", "\u212a"), ("\u017f", "s"))  # one after normalisation
GRID = ProcessMesh.grid(dp=2, tp=2)


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
