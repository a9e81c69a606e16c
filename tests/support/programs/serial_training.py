"""Training by the serial interpreter: what the tests of modules and optimisers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distgraph import nn, ops
from distgraph.ir.dtypes import short
from distgraph.ir.graph import Graph
from distgraph.ir.reference_interpreter import interpret
from distgraph.kernels.random import random_key
from distgraph.nn.initializers import materialize
from distgraph.optim import Optimizer
from distgraph.passes.serial.backward import differentiate
from distgraph.tracing.tracer import Trace


class GPT(nn.Module):
    """A small decoder over token numbers."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        heads: int,
        layers: int,
        length: int,
        dropout: float = 0.0,
        dtype: str = "f32",
    ) -> None:
        self.tokens = nn.Embedding(vocabulary, width, dtype=dtype)
        self.positions = nn.Parameter((length, width), dtype)
        self.blocks = [nn.TransformerBlock(width, heads, dropout=dropout, dtype=dtype) for _ in range(layers)]
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mean_cross_entropy(logits: Any, labels: Any) -> Any:
    return ops.mean(ops.cross_entropy(logits, labels))


@dataclass(frozen=True)
class Step:
    """One training step as a graph, and what it starts from."""

    graph: Graph
    optimizer: Optimizer
    start: Mapping[str, Any]

    def train(self, batches: Sequence[tuple[Any, Any]]) -> tuple[list[float], dict[str, Any]]:
        """Losses of every step, and params and states at the end."""
        state, losses = dict(self.start), []
        for number, (x, y) in enumerate(batches):
            inputs = {
                "x": x,
                "y": y,
                "key": np.uint64(random_key(0, 0, number)),
                **self.optimizer.inputs(number),
            }
            outputs, updates = interpret(self.graph, inputs, state)
            state |= updates
            losses.append(float(outputs["loss"]))
        return losses, state


def step_of(
    model: Any, loss: Callable[[Any, Any], Any], optimizer: Optimizer, batch: tuple[Any, Any], seed: int = 0
) -> Step:
    """Trace forward, backward and update of a model for batches like this one."""
    trace = Trace("step")
    with trace.activate():
        x, y = (
            trace.source("input", name, a.shape, short(a.dtype)) for name, a in zip("xy", batch, strict=True)
        )
        value = loss(model(x), y)
        params = [trace.tensor(p) for p in model.parameters() if p.trainable]
        optimizer.update(trace, list(zip(params, differentiate(trace, value, params), strict=True)))
        graph = trace.finish({"loss": value})
    start = {
        str(op.attrs["name"]): materialize(op.attrs["init"], op.attrs["name"], seed, v.shape, dtype=v.dtype)
        for op in graph.sources("param", "state")
        for v in op.results
    }
    return Step(graph, optimizer, start)


def forward(model: Any, *arrays: Any, params: Mapping[str, Any], training: bool = False, key: int = 0) -> Any:
    """What a model gives for arrays."""
    trace = Trace("forward")
    trace.training = training
    with trace.activate():
        inputs = [trace.source("input", f"x{i}", a.shape, short(a.dtype)) for i, a in enumerate(arrays)]
        graph = trace.finish({"y": model(*inputs)})
    given = {f"x{i}": a for i, a in enumerate(arrays)} | {"key": np.uint64(key)}
    return interpret(graph, given, params)[0]["y"]


def initial(model: Any, seed: int = 0) -> dict[str, Any]:
    """Parameters and buffers at the start."""
    return {
        name: materialize(p.init, name, seed, p.shape, dtype=p.dtype) for name, p in model.named_tensors()
    }
