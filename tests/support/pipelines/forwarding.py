"""Pipelines whose middle stage passes on what it received, seen in another shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from distgraph import ops
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.complete import complete
from distgraph.passes.serial.backward import differentiate
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

grid = ProcessMesh.grid
ROWS, COLUMNS = 6, 4

STAGES: dict[str, tuple[ProcessMesh, ProcessMesh, ProcessMesh]] = {
    "one rank each": (grid(a=1), grid(1, a=1), grid(2, a=1)),
    "1, 2 and 1 ranks": (grid(a=1), grid(1, a=2), grid(3, a=1)),
    "2, 1 and 1 ranks": (grid(a=2), grid(2, a=1), grid(3, a=1)),
    "overlapping": (grid(a=2), grid(1, a=2), grid(2, a=1)),
}

VIEWS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "identity": lambda h: [ops.identity(h)],
    "reshape": lambda h: [ops.reshape(h, (ROWS // 2, 2 * COLUMNS))],
    "slice": lambda h: [h[1:4]],
    "transpose": lambda h: [ops.transpose(h, (1, 0))],
    "reshape of a slice": lambda h: [ops.reshape(h[:4], (-1,))],
    "twice": lambda h: [ops.reshape(h, (-1, 2)), h[2:]],
}
"""What the middle stage does to what it received."""


@dataclass(frozen=True)
class Case:
    """One pipeline.

    Attributes:
        view: of `VIEWS`.
        stages: of `STAGES`.
        policy: of the schedule.
        micro: micro-batches.
    """

    view: str
    stages: str
    policy: str
    micro: int

    def __str__(self) -> str:
        return f"{self.view}, {self.stages}, {self.policy}, {self.micro} micro"

    @property
    def ranks(self) -> int:
        """How many it needs."""
        return 1 + max(max(mesh.members) for mesh in STAGES[self.stages])

    def graph(self) -> Graph:
        """sin on the first stage, views on the second, the loss on the third; gradients go the same way back.

        On several ranks the rows of what the first stage makes are split.
        """
        first, middle, last = STAGES[self.stages]
        trace = Trace("forwarding")
        with trace.activate():
            x = trace.source("input", "x", (ROWS, COLUMNS), "f64")
            v = trace.source("param", "v", (ROWS, COLUMNS), "f64")
            w = trace.source("param", "w", (1,), "f64")
            with trace.on(first):
                _pin(trace, v, first, "[a, _]")
                h = ops.sin(x * v)
            with trace.on(middle):
                views = VIEWS[self.view](h)
            with trace.on(last):
                _pin(trace, w, last, "[_]")
                total = ops.reduce("sum", ops.concat([ops.reshape(ops.sin(r) * w, (-1,)) for r in views], 0))
            outputs = {"loss": ops.accumulate(total), "h": h}
            for p, gradient in zip((v, w), differentiate(trace, total, [v, w]), strict=True):
                with trace.on_behalf_of(p.value.name, "", ""):
                    with trace.within(role="backward"):
                        mean = ops.accumulate(gradient)
                    with trace.within(role="optimize"):
                        trace.updates.append((p.value.name, (p - mean * 0.125).value))
        return trace.finish(outputs)

    def completed(self) -> Graph:
        """With a layout for everything."""
        return complete(self.graph(), STAGES[self.stages][0])


def _pin(trace: Trace, tensor: Tensor, mesh: ProcessMesh, spec: str) -> None:
    trace.annotate(tensor.value, DistAttr(mesh, ShardSpec.parse(spec), Origin("user", "")))


def feeds(micro: int) -> list[dict[str, Any]]:
    """Inputs of every micro-batch."""
    rng = np.random.default_rng(5)
    return [{"x": rng.normal(size=(ROWS, COLUMNS))} for _ in range(micro)]


def params() -> dict[str, Any]:
    """Parameters of all of these programs."""
    rng = np.random.default_rng(6)
    return {"v": rng.normal(size=(ROWS, COLUMNS)), "w": rng.normal(size=(1,))}


def cases() -> Iterator[Case]:
    """Every view and schedule on one rank each, and every row of stages with a reshape."""
    for view in VIEWS:
        for policy in ("1f1b", "gpipe"):
            for micro in (1, 2, 3, 4):
                yield Case(view, "one rank each", policy, micro)
    for stages in list(STAGES)[1:]:
        for policy in ("1f1b", "gpipe"):
            yield Case("reshape", stages, policy, 4)
            yield Case("twice", stages, policy, 3)


def read_in_backward(stages: int, sender: int | None, receiver: int) -> tuple[Graph, ProcessMesh]:
    """A pipeline of stages of one rank each. What one stage makes, another reads in its backward part only.

    Args:
        stages: how many.
        sender: the stage; None for the input of the program, which lies on the first, and then no parameter
            is trained, so that stages before the receiver have no backward part of their own.
        receiver: the stage that reads it.
    """
    meshes = [grid(rank, a=1) for rank in range(stages)]
    trace = Trace("backward_only")
    with trace.activate():
        x = trace.source("input", "x", (ROWS, COLUMNS), "f64")
        v = trace.source("param", "v", (ROWS, COLUMNS), "f64")
        h, made = x * v, []
        for mesh in meshes:
            with trace.on(mesh):
                h = ops.sin(h)
                made.append(h)
        if sender is None:
            _pin(trace, x, meshes[0], "[_, _]")
            late = x
        else:
            with trace.on(meshes[sender]):
                late = ops.tanh(made[sender])
        with trace.on(meshes[-1]):
            total = ops.reduce("sum", ops.sin(h))
        wanted = [made[receiver]] if sender is None else [made[receiver], v]  # else all have a backward part
        inner, *rest = differentiate(trace, total, wanted)
        with trace.within(role="backward"), trace.on(meshes[receiver]):
            product = inner * late
            _pin(trace, product, meshes[receiver], "[_, _]")
            seen = ops.accumulate(ops.reduce("sum", product))
        for gradient in rest:
            with trace.on_behalf_of(v.value.name, "", ""):
                with trace.within(role="backward"):
                    mean = ops.accumulate(gradient)
                with trace.within(role="optimize"):
                    trace.updates.append((v.value.name, (v - mean * 0.125).value))
        return trace.finish({"loss": ops.accumulate(total), "seen": seen}), meshes[0]


def masked_and_reduced() -> tuple[Graph, ProcessMesh]:
    """A value that is made a partial sum of itself, and reduced again."""
    mesh, trace = grid(a=2), Trace("masked")
    with trace.activate():
        x = trace.source("input", "x", (ROWS, COLUMNS), "f64")
        _pin(trace, x, mesh, "[_, _]")
        y = ops.identity(x)
        _pin(trace, y, mesh, "[_, _] partial(a)")
        z = ops.sin(ops.reshape(y, (COLUMNS, ROWS)))
    return trace.finish({"z": z}), mesh
