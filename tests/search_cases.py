"""Small models for tests of the search, training them as the search laid them out, and a plain search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from clusters import boxes
from partitioned import run_partitioned

from distgraph import nn, ops, optim
from distgraph.dtypes import to_numpy
from distgraph.engine.graphs import train_graph
from distgraph.graph import Graph
from distgraph.init import materialize
from distgraph.interpret import interpret
from distgraph.kernels.random import random_key
from distgraph.mesh import ProcessMesh
from distgraph.passes.search.alternatives import Neighbourhoods
from distgraph.passes.search.problem import Problem
from distgraph.passes.search.prices import Prices
from distgraph.resources import Cluster
from distgraph.resources.build import build_cluster
from distgraph.resources.schema import check

SEED = 5
MESHES = (ProcessMesh.grid(x=2), ProcessMesh.grid(x=4), ProcessMesh.grid(x=2, y=2))

COMPUTE = {
    "launch": "1 us",
    "memory_efficiency": 0.8,
    "lookup_efficiency": 0.3,
    "matmul": {name: {"efficiency": 0.8, "half": [32, 32, 32]} for name in ("f32", "f64")},
}


def cluster(machines: Sequence[int] = (4, 4), **fields: Any) -> Cluster:
    """Machines of G devices, 100 GB/s inside, 10 GB/s between, that say what computing costs."""
    device = {
        "type": "gpu",
        "model": "G",
        "memory": "16 GiB",
        "memory_bandwidth": "500 GB/s",
        "peak": {"f32": "10 TFLOP/s", "f64": "5 TFLOP/s"},
        "compute": COMPUTE,
        **fields,
    }
    from clusters import INSIDE, NICS

    document = {
        "name": "boxes",
        "launch": "10 us",
        "machines": [
            {"name": f"b{i}", "devices": {**device, "count": n}, "inside": INSIDE, "nics": NICS}
            for i, n in enumerate(machines)
        ],
        "network": {"topology": "switch"},
    }
    return build_cluster(check(document, "test.yaml"), "test.yaml")


@cache
def prices() -> Prices:
    """Of that cluster."""
    return Prices(cluster())


class Experts(nn.Module):
    """A layer of experts between two others."""

    def __init__(self, width: int) -> None:
        self.up, self.moe = nn.Linear(6, width, dtype="f64"), nn.MoE(width, 10, 4, dtype="f64")
        self.down = nn.Linear(width, 5, dtype="f64")

    def forward(self, x: Any) -> Any:
        h = ops.tanh(self.up(x))
        return self.down(h + self.moe(h))


@dataclass(frozen=True)
class Task:
    """A model and its batches."""

    model: Any
    batches: tuple[tuple[np.ndarray, np.ndarray], ...]

    def graph(self, micro: int = 1, optimizer: Any = None) -> Graph:
        """The train graph of one micro-batch."""
        part = [(a[: len(a) // micro].shape, str(a.dtype)) for a in self.batches[0]]
        batch = [(shape, {"float64": "f64", "int32": "i32"}[dtype]) for shape, dtype in part]
        graph = train_graph(self.model, batch, loss, optimizer or optim.Adam(lr=0.01, eps=1e-6))
        return replace(graph, micro_batches=micro)


def loss(output: Any, target: Any) -> Any:
    """Mean cross-entropy."""
    return ops.mean(ops.cross_entropy(output, target))


def task(name: str) -> Task:
    """mlp, gpt, conv or moe; three batches."""
    rng = np.random.default_rng(SEED)
    if name == "gpt":
        from equivalence import LENGTH, VOCABULARY, Layout, gpt

        shape = (8, LENGTH)
        batches = [
            tuple(rng.integers(0, VOCABULARY, shape).astype(np.int32) for _ in range(2)) for _ in range(3)
        ]
        return Task(gpt(Layout("serial"), "f64"), tuple(batches))  # type: ignore[arg-type]
    if name == "conv":
        from equivalence import CHANNELS, CLASSES, IMAGE, Layout, conv

        shape4 = (8, CHANNELS[0], IMAGE, IMAGE)
        return Task(
            conv(Layout("serial"), "f64"),
            tuple(
                (rng.normal(size=shape4), rng.integers(0, CLASSES, 8).astype(np.int32)) for _ in range(3)
            ),
        )
    if name == "moe":
        return Task(
            Experts(8),
            tuple(
                (rng.normal(size=(4, 8, 6)), rng.integers(0, 5, (4, 8)).astype(np.int32)) for _ in range(3)
            ),
        )
    parts: list[Any] = [nn.Linear(12, 16, dtype="f64"), ops.gelu, nn.Linear(16, 6, dtype="f64")]
    return Task(
        nn.Sequential(*parts),
        tuple((rng.normal(size=(8, 12)), rng.integers(0, 6, 8).astype(np.int32)) for _ in range(3)),
    )


def train(
    graph: Graph, batches: Sequence[tuple[np.ndarray, np.ndarray]], optimizer: Any, completed: Graph | None = None
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and final parameters and states of some steps, serial or as completed.

    The serial run averages gradients itself: it computes the whole batch as one micro-batch, so `graph` is that
    of the whole batch there.
    """
    state = {
        str(op.attrs["name"]): materialize(
            op.attrs["init"], op.attrs["name"], SEED, op.result.shape, dtype=op.result.dtype
        )
        for op in graph.sources("param", "state")
    }
    names = [str(op.attrs["name"]) for op in graph.sources("input")]
    losses = []
    for number, batch in enumerate(batches):
        whole = dict(zip([n for n in names if graph_input(graph, n).shape], batch, strict=True))
        scalars = {
            "key": np.uint64(random_key(SEED, 0, number)), **optimizer.inputs(number)
        }
        scalars = {n: v for n, v in scalars.items() if n in names}
        if completed is None:
            outputs, updates = interpret(graph, {**whole, **scalars}, state)
            losses.append(float(outputs["loss"]))
        else:
            micro = completed.micro_batches
            feeds = [
                {**{n: a.reshape(micro, -1, *a.shape[1:])[m] for n, a in whole.items()}, **scalars}
                for m in range(micro)
            ]
            found, updates, _ = run_partitioned(completed, feeds, state)
            losses.append(float(np.mean(found["loss"])))
        state = {**state, **{n: np.asarray(a) for n, a in updates.items()}}
    return losses, state


def graph_input(graph: Graph, name: str) -> Any:
    """The value of an input."""
    return next(op.result for op in graph.sources("input") if op.attrs["name"] == name)


def descend(problem: Problem, start: Sequence[int]) -> tuple[int, ...]:
    """Best responses of one node after the other until none helps."""
    around, choice = Neighbourhoods(problem), list(start)
    moved = True
    while moved:
        moved = False
        for node in range(len(choice)):
            change = around.fixed(choice, node)
            best = int(change.argmin())
            if change[best] < -1e-15:
                choice[node], moved = best, True
    return tuple(choice)
