"""Gradients are reduced in buckets: the same bits, fewer messages, each at its last gradient."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from support.programs.equivalence import gathered
from support.programs.forecasts import machines

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine.compile.train_graph import train_graph
from distgraph.ir.graph import Graph, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.parser import parse_graph
from distgraph.ir.verifier import verify
from distgraph.passes.communication.bucket_gradients import bucket_gradients
from distgraph.passes.communication.message_buckets import bucket_bytes
from distgraph.passes.complete import complete
from distgraph.passes.pass_pipeline import pipeline, run_passes
from distgraph.passes.redistribution.planner import latency_price
from distgraph.passes.split_tasks import phases
from distgraph.passes.task_splitting.split_user_tasks import split_user_tasks
from distgraph.resources.mesh_communication import MeshCommunication
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.program.build import build

PLAIN = ("-bucket_gradients",)
grid = ProcessMesh.grid


class Stages(nn.Module):
    """Layers on one or several meshes, the weights split over tp where a mesh has it."""

    def __init__(self, meshes: list[ProcessMesh], layers: int = 6, width: int = 12) -> None:
        self.layers = [nn.Linear(width, width, dtype="f64") for _ in range(layers)]
        self.meshes = [meshes[n * len(meshes) // layers] for n in range(layers)]
        for layer, mesh in zip(self.layers, self.meshes, strict=True):
            dg.shard_tensor(layer.weight, mesh, [None, "tp" if "tp" in mesh.sizes else None])

    def forward(self, x: Any) -> Any:
        x = dg.shard_tensor(x, self.meshes[0], ["dp", None])
        for layer, mesh in zip(self.layers, self.meshes, strict=True):
            with dg.on(mesh):
                x = ops.tanh(layer(x))
        return x


def trained(
    meshes: list[ProcessMesh], micro: int, passes: tuple[str, ...], clip: float | None = None
) -> tuple[Graph, list[float], dict[str, Any]]:
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(8, 12)), rng.normal(size=(8, 12))
    engine = dg.Engine(
        Stages(meshes),
        nn.MeanSquaredError(),
        optim.Adam(lr=0.05, clip_norm=clip),
        strategy=dg.Strategy(micro_batches=micro, passes=passes),
        seed=2,
    )
    with closing(engine):
        losses = [engine.run(batch)["loss"] for _ in range(3)]
        (compiled,) = engine._session.programs.values()
        return compiled.build.lowered, losses, gathered(engine)


def reductions(graph: Graph) -> list[Op]:
    """All_reduces of gradients."""
    return [
        op for op in graph.ops if op.kind == "comm.all_reduce" and op.role == "backward" and is_sum(graph, op)
    ]


def is_sum(graph: Graph, op: Op) -> bool:
    return graph.producers[op.operands[0].name].kind == "accumulate"


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(
    "meshes",
    [
        [grid(dp=4)],
        [grid(dp=2, tp=2)],
        [grid(0, dp=2), grid(2, dp=2)],
        [grid(0, dp=2), grid(2, dp=2), grid(0, dp=2)],
    ],
    ids=["dp4", "dp2tp2", "two stages", "there and back"],
)
def test_the_bits_are_those_of_single_messages(meshes: list[ProcessMesh], micro: int) -> None:
    fused, losses, tensors = trained(meshes, micro, (), clip=0.1)
    plain, expected, values = trained(meshes, micro, PLAIN, clip=0.1)
    assert len(reductions(fused)) < len(reductions(plain)) == 12
    assert sum(len(op.results) for op in reductions(fused)) == 12
    assert losses == expected
    for name, value in values.items():
        np.testing.assert_array_equal(tensors[name], value, name)


def lowered(mesh: ProcessMesh, layers: int = 12, width: int = 64) -> Graph:
    model = Stages([mesh], layers, width)
    shapes = ((8, width), "f64"), ((8, width), "f64")
    graph = train_graph(model, shapes, nn.MeanSquaredError(), optim.SGD(lr=0.1))
    result: Graph = run_passes(complete(graph), ["reshard", "lower"])
    return result


def nbytes(op: Op) -> int:
    return sum(value.nbytes for value in op.operands)


def test_buckets_have_the_size_that_costs_least() -> None:
    graph = lowered(grid(dp=4))
    plain = reductions(graph)
    total, start = sum(map(nbytes, plain)), latency_price("all_reduce", 1, 4, grid(dp=4), ("dp",)) - 1
    limit = math.sqrt(total * start / 1.5)  # a rank of four sends 1.5 bytes for each byte that it reduces
    assert bucket_bytes(graph, plain, latency_price) == pytest.approx(limit)
    after = bucket_gradients(graph)
    verify(after, "lowered")
    sizes = [nbytes(op) for op in reductions(after)]
    largest = max(map(nbytes, plain))
    assert sum(sizes) == total
    assert all(limit <= size < limit + largest for size in sizes[:-1])
    assert sizes[-1] < limit + largest


def test_a_price_of_seconds_decides() -> None:
    """Dear starts give one bucket, and free starts a message for each gradient."""
    graph = lowered(grid(dp=4))

    def price(start: float) -> Any:
        return lambda kind, sent, *group: start + 1e-9 * sent

    assert len(reductions(bucket_gradients(graph, price(1.0)))) == 1
    assert len(reductions(bucket_gradients(graph, price(0.0)))) == 24


def test_a_bucket_starts_at_its_last_gradient_in_the_backward_task() -> None:
    graph = bucket_gradients(lowered(grid(dp=4)))
    (task,) = (part for part in phases(graph).tasks if part.kind == "backward")
    place = {op.name: number for number, op in enumerate(task.body)}
    found = [op for op in task.body if op.kind == "comm.all_reduce" and len(op.results) > 1]
    assert len(found) == len(reductions(graph)) > 2
    assert all(op.name in task.tail for op in found)
    for op in found:
        last = max(place[value.name] for value in op.operands)
        assert last == place[op.name] - 1
    assert place[found[0].name] < len(task.body) / 2


def test_a_forecast_with_buckets_is_no_slower() -> None:
    cluster = machines(4)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    strategy = dg.Strategy(mesh=grid(dp=4), batch_axis="dp")
    shapes = ((8, 64), "f32"), ((8, 64), "f32")
    graph = train_graph(model, shapes, nn.MeanSquaredError(), optim.SGD(lr=0.1), strategy)
    price = MeshCommunication(cluster, tuple(range(4))).price
    seconds = [
        forecast(build(complete(graph), price=price, passes=pipeline(passes)), cluster).step_seconds
        for passes in (PLAIN, ())
    ]
    assert seconds[1] <= seconds[0]


TASKS = """graph @tasks
  mesh m0 = (dp=2) ranks 0..1
  %x : f64[4, 3] [dp, _] = input {name="x"} <z0:dp> data
  %s : f64[3] [_] partial(dp) = reduce_sum(%x) {dims=(0,), keepdims=false} <i0:dp> backward task "up"
  %t : f64[3] [_] partial(dp) = accumulate(%s) <partial dp:0> backward task "up"
  %a : f64[3] [_] = comm.all_reduce(%t) {axes=("dp",), reduction="sum"} <> backward
  %b : f64[3] [_] = negative(%a) <> ROLE task "up"
  %n : f64[3] [_] partial(dp) = negative(%s) <partial dp:0> backward task "down"
  %u : f64[3] [_] partial(dp) = accumulate(%n) <partial dp:0> backward task "down"
  %c : f64[3] [_] = comm.all_reduce(%u) {axes=("dp",), reduction="sum"} <> backward
  %d : f64[3] [_] = negative(%c) <> ROLE task "down"
  output "b" = %b
  output "d" = %d
"""


@pytest.mark.parametrize(("role", "messages"), [("optimize", [["a", "c"]]), ("backward", [["a"], ["c"]])])
def test_gradients_of_tasks_share_a_message_unless_these_tasks_wait_for_it(
    role: str, messages: list[list[str]]
) -> None:
    """An op of a backward task that reads its reduced gradient would wait for another backward task."""
    graph = bucket_gradients(parse_graph(TASKS.replace("ROLE", role)))
    verify(graph, "lowered")
    reductions = (op for op in graph.ops if op.kind == "comm.all_reduce")
    assert [[value.name for value in op.results] for op in reductions] == messages
    assert {part.label for part in split_user_tasks(phases(graph)).tasks} >= {"up", "down"}
