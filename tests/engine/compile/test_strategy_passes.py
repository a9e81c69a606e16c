"""Passes from outside the package: registered here, named by a strategy, trained with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.ops.graph_equality import same_graph

import distgraph as dg
from distgraph import nn, optim
from distgraph.errors import GraphError, ShardingError
from distgraph.ir.graph import Graph
from distgraph.passes import register_pass
from distgraph.passes.lower import lower
from distgraph.passes.partition import RankProgram
from distgraph.passes.pass_pipeline import run_passes
from distgraph.passes.pass_registry import PASSES

X = np.random.default_rng(0).normal(size=(16, 6)).astype("f4")
Y = np.random.default_rng(1).integers(0, 4, 16)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """What a test registers is gone after it."""
    before = dict(PASSES)
    yield
    PASSES.clear()
    PASSES.update(before)


def engine(*passes: str, lr: float = 0.1, plan: Any = None) -> dg.Engine:
    """A small model on two ranks that split the batch."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp", passes=passes)
    return dg.Engine(model, nn.CrossEntropy(), optim.SGD(lr=lr), strategy=strategy, seed=3, plan=plan)


def losses(trained: dg.Engine) -> list[float]:
    return trained.fit((X, Y), batch_size=8, epochs=2, shuffle=False, progress=False)["loss"]


def test_a_registered_pass_changes_what_is_trained() -> None:
    @register_pass("double_the_rate", stage="serial")
    def double_the_rate(graph: Graph) -> Graph:
        """Add the learning rate to itself before it is used."""
        (rate,) = (op for op in graph.sources("input") if op.attrs["name"] == "lr")
        double = replace(rate.result, name="double")
        added = replace(rate, kind="add", operands=(rate.result,) * 2, results=(double,), attrs={})
        ops = []
        for op in graph.ops:
            operands = tuple(double if value == rate.result else value for value in op.operands)
            ops += [op, added] if op is rate else [replace(op, operands=operands)]
        return graph.with_ops(ops)

    assert losses(engine("double_the_rate")) == losses(engine(lr=0.2)) != losses(engine())


def test_passes_of_every_stage_run_in_training() -> None:
    seen = []

    def watched(stage: str) -> str:
        @register_pass(f"see_{stage}", stage=stage)
        def see(program: Any) -> Any:
            """Note the stage."""
            seen.append(program.rank if isinstance(program, RankProgram) else stage)
            return program

        return f"see_{stage}"

    stages = ("serial", "completed", "resharded", "lowered", "tasks", "rank")
    assert losses(engine(*map(watched, stages))) == losses(engine())
    assert [each for each in seen if not isinstance(each, int)] == list(stages[:-1])
    assert {each for each in seen if isinstance(each, int)} == {0, 1}


def test_a_pass_takes_the_place_of_another() -> None:
    lowered = []

    @register_pass("lower_by_bytes", requires="resharded", stage="lowered")
    def lower_by_bytes(graph: Graph) -> Graph:
        """Lower by the bytes on the wire, whatever the cluster."""
        lowered.append(lower(graph))
        return lowered[-1]

    trained = engine("lower=lower_by_bytes")
    assert losses(trained) == losses(engine())
    fused = run_passes(lowered[0], ["bucket_gradients", "fuse_reductions"])
    assert same_graph(trained.plan.build.lowered, fused)


def test_a_pass_on_completed_graphs_is_no_part_of_the_plan() -> None:
    @register_pass("gather_inputs", stage="completed")
    def gather_inputs(graph: Graph) -> Graph:
        """Add an op that no plan can name."""
        first = next(op for op in graph.ops if op.kind == "relu")
        copy = replace(first.result, name="copy")
        same = replace(first, kind="identity", operands=first.results, results=(copy,))
        ops = [each for op in graph.ops for each in ((op, same) if op is first else (op,))]
        return graph.with_ops(ops, attrs={**graph.attrs, "copy": graph.attrs[first.name]})

    trained = engine("gather_inputs")
    expected = losses(trained)
    assert "copy" in trained.plan.build.lowered.producers
    plan = trained.plan.portable
    assert losses(engine("gather_inputs", plan=plan)) == losses(engine(plan=plan)) == expected


def test_a_malformed_result_names_the_pass() -> None:
    @register_pass("lose_layouts", stage="completed")
    def lose_layouts(graph: Graph) -> Graph:
        """Forget where values are stored."""
        return replace(graph, attrs={})

    with pytest.raises(GraphError, match="pass lose_layouts returned a graph that is not completed"):
        engine("lose_layouts").prepare((X, Y))


def test_passes_that_do_not_exist_are_refused_by_the_engine() -> None:
    message = "passes of Strategy: 'fuse' names pass 'fuse', which does not exist; the passes are .*reshard"
    with pytest.raises(ShardingError, match=message):
        engine("fuse")
    with pytest.raises(ShardingError, match="pass lower takes a resharded program but gets a completed one"):
        engine("-reshard")


@pytest.mark.parametrize("passes", ["reshard", ["a b"], [3], None, ["-a=b"]])
def test_passes_are_a_list_of_changes(passes: Any) -> None:
    message = 'each must be "name", "-name" or "name=other"|but must be a list .each item: text.'
    with pytest.raises(ShardingError, match=message):
        dg.Strategy(passes=passes)
