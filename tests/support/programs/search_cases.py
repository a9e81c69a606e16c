"""Small models for tests of the search, training them as the search laid them out, and a plain search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from support.files.clusters import INSIDE, NICS
from support.programs.equivalence import CHANNELS, CLASSES, IMAGE, LENGTH, VOCABULARY, Layout, conv, gpt
from support.programs.partitioned import run_partitioned

from distgraph import nn, ops, optim
from distgraph.engine.compile.train_graph import train_graph
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.kernels.random import random_key
from distgraph.nn.initializers import materialize
from distgraph.passes.search.intra_op.cost_model import CostModel
from distgraph.resources import Cluster
from distgraph.resources.cluster_builder import build_cluster
from distgraph.resources.schema import check

SEED = 5
MESHES = (ProcessMesh.grid(x=2), ProcessMesh.grid(x=4), ProcessMesh.grid(x=2, y=2))


def cluster(machines: Sequence[int] = (4, 4), speed: float = 1.0) -> Cluster:
    """Machines of G devices, 100 GB/s inside, 10 GB/s between; `speed` is of computing."""
    rate = {name: {"efficiency": 0.8, "half": [4, 4, 4]} for name in ("f32", "f64")}
    device = {
        "type": "gpu",
        "model": "G",
        "memory": "16 GiB",
        "memory_bandwidth": f"{500 * speed:g} GB/s",
        "peak": {"f32": f"{10 * speed:g} TFLOP/s", "f64": f"{5 * speed:g} TFLOP/s"},
        "compute": {"launch": "1 us", "memory_efficiency": 0.8, "lookup_efficiency": 0.3, "matmul": rate},
    }
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
def cost_model(speed: float = 1.0) -> CostModel:
    """Of that cluster."""
    return CostModel(cluster(speed=speed))


SLOW = 1e-5
"""Speed of computing at which small models are worth splitting."""


class Experts(nn.Module):
    """A layer of experts between two others."""

    def __init__(self, width: int) -> None:
        self.up, self.moe = nn.Linear(6, width, dtype="f64"), nn.MoE(width, 10, 4, dtype="f64")
        self.down = nn.Linear(width, 5, dtype="f64")

    def forward(self, x: Any) -> Any:
        h = ops.tanh(self.up(x))
        return self.down(h + self.moe(h))


Batches = tuple[tuple[np.ndarray, np.ndarray], ...]


@dataclass(frozen=True, eq=False)
class Task:
    """A model and its batches."""

    model: Any
    batches: Batches

    def graph(self, micro: int = 1, optimizer: Any = None) -> Graph:
        """The train graph of one micro-batch."""
        part = [(a[: len(a) // micro].shape, str(a.dtype)) for a in self.batches[0]]
        batch = [(shape, {"float64": "f64", "int32": "i32"}[dtype]) for shape, dtype in part]
        graph = train_graph(self.model, batch, loss, optimizer or optim.Adam(lr=0.01, eps=1e-6))
        return replace(graph, micro_batches=micro)


def loss(output: Any, target: Any) -> Any:
    """Mean cross-entropy."""
    return ops.mean(ops.cross_entropy(output, target))


@cache
def task(name: str) -> Task:
    """mlp, gpt, conv or moe; two batches."""
    rng = np.random.default_rng(SEED)

    def classes(count: int, shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, count, shape).astype(np.int32)

    def batches(make: Callable[[], tuple[np.ndarray, np.ndarray]]) -> Batches:
        return tuple(make() for _ in range(2))

    if name == "gpt":
        shape = (8, LENGTH)
        model: Any = gpt(Layout("serial", tied=True), "f64")
        return Task(model, batches(lambda: (classes(VOCABULARY, shape), classes(VOCABULARY, shape))))
    if name == "conv":
        image = (8, CHANNELS[0], IMAGE, IMAGE)
        model = conv(Layout("serial"), "f64")
        return Task(model, batches(lambda: (rng.normal(size=image), classes(CLASSES, (8,)))))
    if name == "moe":
        return Task(Experts(8), batches(lambda: (rng.normal(size=(4, 8, 6)), classes(5, (4, 8)))))
    model = nn.Sequential(nn.Linear(12, 16, dtype="f64"), ops.gelu, nn.Linear(16, 6, dtype="f64"))
    return Task(model, batches(lambda: (rng.normal(size=(8, 12)), classes(6, (8,)))))


def train(
    completed: Graph, batches: Sequence[tuple[np.ndarray, np.ndarray]], optimizer: Any
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses, and parameters and states at the end, of some steps of a completed graph."""
    state = {
        str(op.attrs["name"]): materialize(
            op.attrs["init"], op.attrs["name"], SEED, op.result.shape, dtype=op.result.dtype
        )
        for op in completed.sources("param", "state")
    }
    inputs = {str(op.attrs["name"]): op.result.shape for op in completed.sources("input")}
    losses = []
    for number, batch in enumerate(batches):
        whole = dict(zip([name for name, shape in inputs.items() if shape], batch, strict=True))
        scalars = {"key": np.uint64(random_key(SEED, 0, number)), **optimizer.inputs(number)}
        scalars = {name: value for name, value in scalars.items() if name in inputs}
        micro = completed.micro_batches
        feeds = [
            {**{n: a.reshape(micro, -1, *a.shape[1:])[m] for n, a in whole.items()}, **scalars}
            for m in range(micro)
        ]
        found, updates, _ = run_partitioned(completed, feeds, state)
        losses.append(float(np.mean(found["loss"])))
        state = {**state, **{name: np.asarray(array) for name, array in updates.items()}}
    return losses, state
