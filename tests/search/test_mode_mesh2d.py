"""Mode mesh2d: a transformer trains as on one rank, the tuner's choice is in the plan, and wrong input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.programs.search_cases import cluster

import distgraph as dg
from distgraph import optim
from distgraph.errors import ShardingError
from distgraph.ir.graph import Graph
from distgraph.models import GPT, GPTConfig
from distgraph.passes.backward import differentiate
from distgraph.passes.search.modes.mesh2d import layouts_by_tuner, linear_layers, shapes
from distgraph.tracing.tracer import Trace


def gpt() -> GPT:
    return GPT(GPTConfig(vocabulary=96, hidden=48, heads=6, layers=1, sequence=8, dtype="f64"))


def engine(model: GPT | None = None, **options: object) -> dg.Engine:
    loss = lambda y, t: dg.ops.mean(dg.ops.cross_entropy(y, t))  # noqa: E731
    return dg.Engine(model or gpt(), loss, optim.AdamW(0.01), **options)


def batch() -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, 96, size=(12, 9)).astype(np.int32)
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def losses(trained: dg.Engine) -> list[float]:
    return [trained.run(batch())["loss"] for _ in range(2)]


@pytest.mark.parametrize(("machines", "ranks"), [((2, 2), 4), ((3, 3), 6), ((4, 4), 8)])
def test_a_transformer_trains_as_on_one_rank(machines: tuple[int, int], ranks: int, tmp_path: Path) -> None:
    sharded = engine(strategy=dg.Strategy(mode="mesh2d"), cluster=cluster(machines))
    assert losses(sharded) == pytest.approx(losses(engine()), rel=0, abs=1e-12)
    path = tmp_path / "plan.json"
    sharded.plan.save(path)
    plan = dg.Plan.load(path)
    rows, cols = plan.stages[0].mesh.shape
    assert rows * cols == ranks
    assert min(rows, cols) > 1
    lines = [line for layer in plan.ops for line in layer.ops if line.algorithm is not None]
    assert {line.kind for line in lines} == {"matmul", "einsum"}  # forward and backward
    assert any(name.startswith("mesh2d") for name in plan.baselines)


def large(samples: int, inputs: int, outputs: int) -> Graph:
    """One linear layer and its gradients, in shapes alone."""

    recorded = Trace("layer")
    with recorded.activate():
        x = recorded.source("input", "x", (samples, inputs), "f32")
        dy = recorded.source("input", "dy", (samples, outputs), "f32")
        w = recorded.source("param", "w", (inputs, outputs), "f32")
        dx, dw = differentiate(recorded, dg.ops.reduce("sum", (dg.ops.gelu(x) @ w) * dy), [x, w])
    return recorded.finish({"dx": dx, "dw": dw})


def test_the_tuner_slices_where_communication_can_be_hidden() -> None:
    boxes = cluster((4, 4))
    graph = large(16384, 4096, 16384)
    (layer,) = linear_layers(graph)
    assert (layer.samples, layer.inputs, layer.outputs) == (16384, 4096, 16384)
    sliced = layouts_by_tuner(graph, shapes(boxes), boxes, "meshslice")
    whole = layouts_by_tuner(graph, shapes(boxes), boxes, "collective")
    assert [tuning.mesh for tuning, _ in sliced] != []
    assert sliced[0][0].seconds < whole[0][0].seconds
    algorithms = sliced[0][1].algorithms.values()
    assert len(algorithms) == 3  # forward and both gradients
    assert any(algorithm.slices > 1 for algorithm in algorithms)


def test_what_does_not_fit_is_refused() -> None:
    def annotated(mesh: dg.ProcessMesh) -> dg.Engine:
        model = gpt()
        dg.shard_tensor(model.head.weight, mesh, [None, mesh.axes[0]])
        return engine(model, strategy=dg.Strategy(mode="mesh2d"), cluster=cluster((2, 2)))

    with pytest.raises(ShardingError, match="mode mesh2d needs a mesh of two axes but the annotations name"):
        annotated(dg.ProcessMesh.grid(tp=4)).prepare(batch())
    prime = engine(strategy=dg.Strategy(mode="mesh2d"), cluster=cluster((3, 2)))
    with pytest.raises(ShardingError, match="no mesh of two axes divides a linear layer"):
        prime.prepare(batch())
