"""Random annotated training programs of a given length, drawn by a seeded NumPy generator.

Unlike `random_programs`, which hypothesis draws and shrinks, a seed names one program for good: for
measurements over hundreds of programs, and for tests that count work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from distgraph import ops
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.serial.backward import differentiate
from distgraph.passes.serial.dead_code_elimination import prune
from distgraph.tracing.tensor import Tensor, emit
from distgraph.tracing.tracer import Trace

CUBE = ProcessMesh.grid(x=2, y=2, z=2)
_LENGTHS = (2, 4, 6, 8, 12, 16)
_LARGEST = 4096  # elements of one tensor


class _Builder:
    """Grows one program; every choice is a draw of one generator."""

    def __init__(self, rng: np.random.Generator, mesh: ProcessMesh) -> None:
        self.rng = rng
        self.mesh = mesh
        self.trace = Trace("seeded")
        self.made: list[Tensor] = []
        self.count = 0

    def pick(self, options: Any) -> Any:
        options = list(options)
        return options[int(self.rng.integers(len(options)))]

    def annotate(self, x: Tensor, often: float) -> Tensor:
        """Perhaps pin a tensor to a random layout."""
        if x.value.name in self.trace.attrs or self.rng.random() >= often:
            return x
        dims: list[list[str]] = [[] for _ in x.shape]
        for axis in self.rng.permutation(self.mesh.axes):
            place = int(self.rng.integers(x.ndim + 1))
            if place < x.ndim:
                dims[place].append(str(axis))
        spec = ShardSpec(tuple(tuple(d) for d in dims))
        self.trace.annotate(x.value, DistAttr(self.mesh, spec, Origin("user", f"%{x.value.name}")))
        return x

    def source(self, kind: str, shape: tuple[int, ...], often: float = 0.4) -> Tensor:
        self.count += 1
        return self.annotate(self.trace.source(kind, f"{kind}{self.count}", shape, "f64"), often)

    # each step takes a tensor and returns one, or None where it does not apply

    def contraction(self, x: Tensor) -> Tensor | None:
        return ops.matmul(x, self.source("param", (x.shape[-1], self.pick(_LENGTHS)))) if x.ndim else None

    def outer(self, x: Tensor) -> Tensor | None:
        other = self.pick(self.made)
        if not x.ndim or not other.ndim or x.shape[0] != other.shape[0]:
            return None
        left, right = "abcd"[: x.ndim], "aefg"[: other.ndim]
        keep = self.pick([left[1:] + right[1:], left + right[1:], left[1:], left])
        return ops.einsum(f"{left},{right}->{keep}", x, other)

    def bias(self, x: Tensor) -> Tensor | None:
        skip = int(self.rng.integers(x.ndim + 1))
        return self.pick((ops.add, ops.multiply))(x, self.source("param", x.shape[skip:]))

    def join(self, x: Tensor) -> Tensor | None:
        same = [t for t in self.made if t.shape == x.shape]
        return self.pick((ops.add, ops.subtract, ops.multiply))(x, self.pick(same))

    def unary(self, x: Tensor) -> Tensor | None:
        return self.pick((ops.tanh, ops.sin, ops.negative, lambda t: t * 0.5))(x)

    def transpose(self, x: Tensor) -> Tensor | None:
        return ops.transpose(x, tuple(int(d) for d in self.rng.permutation(x.ndim))) if x.ndim > 1 else None

    def reshape(self, x: Tensor) -> Tensor | None:
        if not x.ndim:
            return None
        place = int(self.rng.integers(x.ndim))
        n = x.shape[place]
        if place + 1 < x.ndim and self.rng.random() < 0.5:
            return ops.reshape(x, (*x.shape[:place], n * x.shape[place + 1], *x.shape[place + 2 :]))
        factor = self.pick([d for d in range(1, n + 1) if n % d == 0])
        return ops.reshape(x, (*x.shape[:place], factor, n // factor, *x.shape[place + 1 :]))

    def reduction(self, x: Tensor) -> Tensor | None:
        if x.ndim < 2:
            return None
        return ops.reduce("sum", x, (int(self.rng.integers(x.ndim)),), bool(self.rng.random() < 0.5))

    def rows(self, x: Tensor) -> Tensor | None:
        if not x.ndim or x.shape[-1] < 2:
            return None
        if self.rng.random() < 0.5:
            return ops.softmax(x, int(self.rng.integers(x.ndim)))
        shape = x.shape[-1:]
        y: Tensor = emit("layer_norm", x, self.source("param", shape), self.source("param", shape), eps=0.5)[
            0
        ]
        return y

    def cut(self, x: Tensor) -> Tensor | None:
        if not x.ndim:
            return None
        place = int(self.rng.integers(x.ndim))
        n = x.shape[place]
        if n > 1 and self.rng.random() < 0.5:
            start = int(self.rng.integers(n - 1))
            return ops.getitem(
                x, (slice(None),) * place + (slice(start, int(self.rng.integers(start + 1, n + 1))),)
            )
        return ops.concat([x, self.pick([t for t in self.made if t.shape == x.shape])], axis=place)

    def slide(self, x: Tensor) -> Tensor | None:
        """An op that reads neighbours' positions."""
        if not x.ndim:
            return None
        place = int(self.rng.integers(x.ndim))
        if self.rng.random() < 0.5:
            return ops.roll(x, int(self.rng.integers(-5, 6)), place)
        return ops.flip(x, place)

    def grow(self) -> None:
        steps = (
            self.contraction, self.contraction, self.outer, self.bias, self.join, self.unary, self.transpose,
            self.reshape, self.reduction, self.rows, self.cut, self.slide,
        )  # fmt: skip
        made = self.pick(steps)(self.pick(self.made[-3:]))
        if made is not None and made.size <= _LARGEST and made.ndim <= 4:
            self.made.append(self.annotate(made, 0.25))


def seeded_program(
    seed: int, mesh: ProcessMesh = CUBE, least: int = 30, most: int = 80, micro_batches: int = 2
) -> Graph:
    """The annotated serial training graph that a seed names: forward, backward and updates.

    Args:
        seed: of the generator.
        mesh: where it runs, all of it.
        least, most: number of ops of the whole graph, without those that nothing needs.
        micro_batches: parts of a step.
    """
    rng = np.random.default_rng(seed)
    while True:
        graph = _training_graph(rng, mesh, int(rng.integers(least // 3, most // 2)))
        if least <= len(graph.ops) <= most:
            return replace(graph, name=f"seed{seed}", micro_batches=micro_batches)


def _training_graph(rng: np.random.Generator, mesh: ProcessMesh, length: int) -> Graph:
    """A program of about so many forward ops, its gradients and updates."""
    builder = _Builder(rng, mesh)
    trace = builder.trace
    with trace.activate():
        shape = tuple(builder.pick(_LENGTHS) for _ in range(int(rng.integers(2, 4))))
        builder.made.append(builder.source("input", shape, 1.0))
        while len(trace.ops) < length:
            builder.grow()
        loss = ops.reduce("sum", ops.tanh(builder.made[-1]))
        outputs = {"y": builder.pick(builder.made), "loss": ops.accumulate(loss)}
        params = [t for (kind, _), t in trace._sources.items() if kind == "param"]
        for param, grad in zip(params, differentiate(trace, loss, params), strict=True):
            with trace.on_behalf_of(param.value.name, "", ""):
                with trace.within(role="backward"):
                    mean = ops.accumulate(grad)
                with trace.within(role="optimize"):
                    trace.updates.append((param.value.name, (param - mean * 0.125).value))
        return prune(trace.finish(outputs))
