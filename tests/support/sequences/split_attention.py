"""Attention and its gradients over a sequence that is split, by a ring or with keys and values gathered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from distgraph import ops
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.reference_interpreter import interpret
from distgraph.passes.complete import complete
from distgraph.passes.serial.backward import differentiate
from distgraph.passes.serial.dead_code_elimination import prune
from distgraph.tracing.annotations import shard_op, shard_tensor
from distgraph.tracing.tracer import Trace

Array = np.ndarray
LABELS = ("o", "dq", "dk", "dv")


@dataclass(frozen=True)
class SplitAttention:
    """o of queries, keys and values [b, h or g, s, d], and their gradients for a given do, in float64.

    `pruned` leaves out the sum whose gradient is taken, which is reduced over all ranks.
    """

    mesh: ProcessMesh
    length: int
    algorithm: str | None = "ring"
    causal: bool = True
    heads: int = 4
    groups: int = 2
    keys: int | None = None
    batch: int = 4
    width: int = 3
    sequence: tuple[str, ...] = ("sp",)
    pruned: bool = True

    @cached_property
    def serial(self) -> Graph:
        """The annotated graph."""
        trace, mesh = Trace("attention"), self.mesh
        keys = self.length if self.keys is None else self.keys
        with trace.activate():
            q = trace.source("input", "q", (self.batch, self.heads, self.length, self.width), "f64")
            k, v = (
                trace.source("input", name, (self.batch, self.groups, keys, self.width), "f64")
                for name in "kv"
            )
            do = trace.source("input", "do", q.shape, "f64")
            batch, heads = (axis if axis in mesh.axes else None for axis in ("dp", "tp"))
            for x in (q, k, v, do):
                shard_tensor(x, mesh, [batch, heads, self.sequence, None])
            function = shard_op(ops.attention, mesh, algorithm=self.algorithm)
            o = function(q, k, v, causal=self.causal)
            grads = differentiate(trace, ops.reduce("sum", o * do), [q, k, v])
            for x in grads:
                shard_tensor(x, mesh, [batch, heads, self.sequence, None])
        graph = trace.finish(dict(zip(LABELS, (o, *grads), strict=True)))
        return prune(graph) if self.pruned else graph

    def completed(self) -> Graph:
        """The graph with layouts."""
        return complete(self.serial, self.mesh)

    def arrays(self) -> dict[str, Array]:
        """Inputs."""
        shapes = {op.attrs["name"]: op.result.shape for op in self.serial.sources("input")}
        return _normal(tuple(shapes.items()))

    def expected(self) -> dict[str, Array]:
        """The outputs by the serial interpreter."""
        return interpret(self.serial, self.arrays())[0]

    @property
    def block_bytes(self) -> float:
        """Bytes of the keys of one rank, on average."""
        return 8.0 * self.batch * self.groups * self.length * self.width / self.mesh.size


@cache
def _normal(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> dict[str, Array]:
    rng = np.random.default_rng(11)
    return {name: rng.normal(size=shape) for name, shape in shapes}
