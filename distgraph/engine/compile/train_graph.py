"""Training graphs from shapes alone, without an engine, for planning, forecasts and counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.engine.data import POSITION
from distgraph.errors import GraphError
from distgraph.ir.dtypes import short
from distgraph.ir.graph import Graph
from distgraph.optim import AdamW, Optimizer
from distgraph.plan.strategy import Strategy

Shaped = Any
"""Something with `shape` and `dtype`, or a (shape, dtype) pair."""


def train_graph(
    model: Callable[..., Any],
    batch: Sequence[Shaped] | Mapping[str, Shaped],
    loss: Callable[..., Any] | None = None,
    optimizer: Optimizer | None = None,
    strategy: Strategy | None = None,
    *,
    pruned: bool = True,
) -> Graph:
    """Forward, backward and update of one micro-batch as a graph; allocates no tensor.

    Args:
        model: a module, or a function of tensors.
        batch: one micro-batch: (input, ..., target), or a dict by the names of the model's arguments.
        loss: (output, target) -> scalar; by default the model's `loss`, or else the value that it returns.
        optimizer: AdamW by default.
        strategy: gives the layouts of inputs.
        pruned: remove ops whose results nothing reads. With False a recomputed block includes its last ops
            even if nothing reads them, as in frameworks that run the whole block again.

    Raises:
        GraphError: shapes or dtypes do not fit.

    Example:
        >>> from distgraph.models import GPT, GPTConfig
        >>> model = GPT(GPTConfig(hidden=16, layers=1, heads=2, vocabulary=40, sequence=8))
        >>> graph = train_graph(model, (((4, 8), "i32"), ((4, 8), "i32")))
        >>> [label for label, _ in graph.outputs], len(graph.updates) == 3 * len(model.parameters())
        (['loss'], True)
    """
    loss = getattr(model, "loss", None) if loss is None else loss
    training_spec = TrainingSpec(model, loss, optimizer or AdamW(), {}, strategy or Strategy())
    named = batch if isinstance(batch, Mapping) else {f"{POSITION}{i}": x for i, x in enumerate(batch)}
    fields = {name: _field(name, x) for name, x in named.items()}
    return training_spec.trace("train", fields, {}, pruned)


def _field(name: str, x: Shaped) -> tuple[tuple[int, ...], str]:
    pair = isinstance(x, tuple) and len(x) == 2
    shape, dtype = x if pair else (getattr(x, "shape", None), getattr(x, "dtype", None))
    if shape is None or dtype is None:
        raise GraphError(f"{name} is a {type(x).__name__}; give its (shape, dtype), or an array")
    return tuple(int(n) for n in shape), short(dtype)
