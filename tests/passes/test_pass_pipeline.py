"""The registry of passes, the pipeline and what changes it, and the runner."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.programs.small_graphs import mlp

from distgraph.errors import GraphError, ShardingError
from distgraph.ir.graph import Graph
from distgraph.passes.pass_pipeline import PIPELINE, pipeline, run_passes
from distgraph.passes.pass_registry import PASSES, STAGES, PassContext, register_pass


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """What a test registers is gone after it."""
    before = dict(PASSES)
    yield
    PASSES.clear()
    PASSES.update(before)


def names(*changes: str) -> list[str]:
    return [each.name for each in pipeline(changes).passes]


def add(name: str, **options: Any) -> None:
    @register_pass(name, **options)
    def unchanged(program: Any) -> Any:
        """Return the program as it is."""
        return program


def test_the_pipeline_goes_through_all_stages() -> None:
    stages = [each.stage for each in pipeline().passes]
    assert list(dict.fromkeys(stages)) == list(STAGES)
    assert tuple(names()) == PIPELINE


def test_every_pass_is_named_after_its_file_and_says_what_it_does() -> None:
    for each in PASSES.values():
        module = each.function.__module__
        assert module.startswith("distgraph.passes.")
        assert module.endswith(f".{each.name}")
        assert each.summary.endswith(".")


def test_passes_are_added_behind_their_stage_removed_and_replaced() -> None:
    add("first", stage="serial")
    add("mine", stage="lowered")
    add("shares", requires="resharded", stage="lowered")
    add("shift", stage="rank")
    assert names("first", "mine", "shift") == [
        "dead_code_elimination", "first", "choose_completion", "distribute_matmuls",
        "distribute_attention", "reshard", "lower",
        "bucket_gradients", "bucket_parameters", "fuse_reductions", "mine", "split_tasks",
        "split_user_tasks", "partition",
        "shift",
    ]  # fmt: skip
    assert names("-dead_code_elimination", "lower=shares", "choose_completion=complete") == [
        "complete", "distribute_matmuls", "distribute_attention", "reshard", "shares", "bucket_gradients",
        "bucket_parameters",
        "fuse_reductions", "split_tasks", "split_user_tasks", "partition",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("fuse", r"'fuse' names pass 'fuse', which does not exist; the passes are .*decompose"),
        ("lower=fuse", r"'lower=fuse' names pass 'fuse', which does not exist"),
        ("-decompose", r"'-decompose' names a pass that is not in the pipeline, which is dead_code_elim"),
        ("reshard", r"'reshard' adds a pass that the pipeline has already; leave it out"),
        ("-reshard", r"pass lower takes a resharded program but gets a completed one"),
        ("complete", "pass choose_completion excludes complete; remove or replace one of them"),
        ("again", r"pass again takes a lowered program but gets a tasks one: .*\"name=other\" replaces"),
        ("-partition", r"no pass turns a tasks program into the next stage; the pipeline is dead_code_elim"),
        ("dead_code_elimination=decompose -x", r"'-x' names pass 'x', which does not exist"),
        ("late", r"pass late must stand after later; the pipeline is"),
        ("lonely", r"pass lonely excludes dead_code_elimination; remove or replace one"),
    ],
)
def test_a_change_that_does_not_fit_is_refused(change: str, message: str) -> None:
    add("later", stage="lowered")
    add("late", stage="serial", after=("later",))
    add("again", requires="lowered", stage="tasks")
    add("lonely", stage="serial", excludes=("dead_code_elimination",))
    with pytest.raises(ShardingError, match=message):
        pipeline([*change.split(), *(["later"] if change == "late" else [])])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("two words", {"stage": "serial"}, "name of a pass is 'two words' but must be an identifier"),
        ("odd", {"stage": "done"}, "pass odd: stage 'done' does not exist; the stages are serial, "),
        (
            "odd",
            {"stage": "rank", "requires": "serial"},
            "pass odd takes the stage serial and gives rank but",
        ),
        (
            "lower",
            {"stage": "lowered"},
            r"pass lower of .*test_pass_pipeline has the name of one of distgraph",
        ),
    ],
)
def test_a_registration_that_makes_no_sense_is_refused(name: str, options: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        add(name, **options)


def test_a_pass_may_be_defined_again_where_it_was() -> None:
    add("mine", stage="serial")
    add("mine", stage="lowered")
    assert PASSES["mine"].stage == "lowered"


def test_a_pass_gets_the_context_where_it_asks_for_it() -> None:
    @register_pass("mark", stage="serial")
    def mark(graph: Graph, context: PassContext) -> Graph:
        """Name the graph after the rank."""
        return replace(graph, name=f"rank{context.rank}")

    assert run_passes(mlp(), ["mark"], PassContext(rank=3)).name == "rank3"


def test_what_an_outside_pass_returns_is_always_verified() -> None:
    @register_pass("forget", stage="serial")
    def forget(graph: Graph) -> Graph:
        """Lose the first op."""
        return replace(graph, ops=graph.ops[1:])

    @register_pass("nothing", stage="serial")
    def nothing(graph: Graph) -> None:
        """Forget to return."""

    with pytest.raises(
        GraphError, match=r"pass forget returned a graph that is not serial: .* is made nowhere"
    ):
        run_passes(mlp(), ["forget"], verified=False)
    with pytest.raises(GraphError, match="pass nothing returned a NoneType but must return a Graph"):
        run_passes(mlp(), ["nothing"], verified=False)


def test_passes_of_this_package_are_verified_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    serial = mlp()
    broken = replace(serial, ops=serial.ops[1:])
    prune = ["dead_code_elimination"]
    run_passes(broken, prune, verified=False)
    with pytest.raises(GraphError, match="is made nowhere"):
        run_passes(broken, prune)
    monkeypatch.setenv("DISTGRAPH_VERIFY", "1")
    with pytest.raises(GraphError, match="is made nowhere"):
        run_passes(broken, prune, verified=False)


def test_the_log_says_what_a_pass_changed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "distgraph.passes"):
        run_passes(mlp(), ["dead_code_elimination", "complete", "reshard"])
    pruned, completed, resharded = (record.getMessage() for record in caplog.records)
    assert pruned.startswith("dead_code_elimination: ")
    assert pruned.endswith("; no change")
    assert "changed, " in completed
    assert completed.endswith(" layouts set")
    assert " ops added, " in resharded
