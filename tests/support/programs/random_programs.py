"""Random small programs with random annotations, drawn by hypothesis."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from distgraph import ops
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.serial.backward import differentiate
from distgraph.tracing.tensor import Tensor, emit
from distgraph.tracing.tracer import Trace

MESHES = (
    ProcessMesh.grid(x=2),
    ProcessMesh.grid(x=4),
    ProcessMesh.grid(x=2, y=2),
    ProcessMesh.grid(x=3),
    ProcessMesh.grid(x=2, y=3),
)
PIPELINES = (
    (ProcessMesh.grid(x=2), ProcessMesh.grid(2, x=2)),
    (ProcessMesh.grid(x=1), ProcessMesh.grid(1, x=3)),
    (ProcessMesh.grid(x=2, y=2), ProcessMesh.grid(4, x=2)),
    (ProcessMesh.grid(x=2), ProcessMesh.grid(2, y=1), ProcessMesh.grid(3, x=2)),
)
OVERLAPPING = (
    (ProcessMesh.grid(x=2, y=2), ProcessMesh.grid(x=2)),
    (ProcessMesh.grid(x=3), ProcessMesh.grid(2, x=2)),
    (ProcessMesh.grid(x=4), ProcessMesh.grid(x=2, y=2)),
)
LOOPED = (
    (ProcessMesh.grid(x=2), ProcessMesh.grid(2, x=1), ProcessMesh.grid(x=2)),
    (ProcessMesh.grid(x=1), ProcessMesh.grid(1, x=3), ProcessMesh.grid(x=1), ProcessMesh.grid(1, x=3)),
)
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
_LARGEST = 400  # elements of one tensor


@dataclass(repr=False)
class Program:
    """A traced graph and everything to run it.

    Attributes:
        graph: annotated serial graph.
        params: param -> array.
        feeds: inputs by name, one mapping a micro-batch.
        text: what was built, for the report of a failure.
    """

    graph: Graph
    params: dict[str, Any]
    feeds: list[dict[str, Any]]
    text: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        lines = [f"{len(self.feeds)} micro-batches", *self.text]
        lines += [f"%{name} : {attr}" for name, attr in self.graph.attrs.items()]
        return "\n  ".join(lines) + "\n"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # what hypothesis shows of a failure


class _Builder:
    """Grows one program; every choice is a draw."""

    def __init__(self, draw: Callable[[Any], Any], meshes: tuple[ProcessMesh, ...], smooth: bool) -> None:
        self.draw, self.meshes, self.smooth = draw, meshes, smooth
        self.mesh = meshes[0]
        self.trace = Trace("random")
        self.params: dict[str, Any] = {}
        self.inputs: dict[str, tuple[int, ...]] = {}
        self.made: list[Tensor] = []
        self.rng = np.random.default_rng(7)

    def pick(self, options: Any) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def shape(self, ndim: int) -> tuple[int, ...]:
        while True:
            shape = tuple(self.pick(_LENGTHS) for _ in range(ndim))
            if math.prod(shape) <= _LARGEST:
                return shape

    def annotate(self, x: Tensor, often: float = 0.4) -> Tensor:
        """Perhaps pin a tensor to a random layout on the present mesh."""
        if x.value.name in self.trace.attrs or not self.draw(st.integers(0, 9)) < 10 * often:
            return x
        dims: list[list[str]] = [[] for _ in x.shape]
        for axis in self.draw(st.permutations(self.mesh.axes)):
            place = self.draw(st.integers(0, x.ndim)) if x.ndim else 0
            if place < x.ndim:
                dims[place].append(axis)
        spec = ShardSpec(tuple(tuple(d) for d in dims))
        self.trace.annotate(x.value, DistAttr(self.mesh, spec, Origin("user", f"%{x.value.name}")))
        return x

    def input(self, shape: tuple[int, ...]) -> Tensor:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = shape
        return self.annotate(self.trace.source("input", name, shape, "f64"))

    def param(self, shape: tuple[int, ...]) -> Tensor:
        name = f"w{len(self.params)}"
        self.params[name] = self.rng.normal(size=shape) / max(1.0, math.sqrt(shape[0] if shape else 1))
        return self.annotate(self.trace.source("param", name, shape, "f64"))

    # each step takes a tensor and returns one, or None where it does not apply

    def contraction(self, x: Tensor) -> Tensor | None:
        return None if not x.ndim else ops.matmul(x, self.param((x.shape[-1], self.pick(_LENGTHS))))

    def outer(self, x: Tensor) -> Tensor | None:
        other = self.pick(self.made)
        if not x.ndim or not other.ndim or x.shape[0] != other.shape[0]:
            return None
        left, right = "abcd"[: x.ndim], "aefg"[: other.ndim]
        keep = self.pick([left[1:] + right[1:], left + right[1:], left[1:], left])
        return ops.einsum(f"{left},{right}->{keep}", x, other)

    def bias(self, x: Tensor) -> Tensor | None:
        shape = tuple(self.pick((n, 1)) for n in x.shape)
        skip = self.draw(st.integers(0, x.ndim)) if x.ndim else 0
        return self.pick((ops.add, ops.multiply))(x, self.param(shape[skip:]))

    def join(self, x: Tensor) -> Tensor | None:
        same = [t for t in self.made if t.shape == x.shape]
        function = self.pick((ops.add, ops.subtract, ops.multiply))
        return function(x, self.pick(same))

    def unary(self, x: Tensor) -> Tensor | None:
        return self.pick((ops.tanh, ops.sin, ops.negative, lambda t: t * 0.5, ops.identity))(x)

    def transpose(self, x: Tensor) -> Tensor | None:
        return ops.transpose(x, self.draw(st.permutations(range(x.ndim))))

    def reshape(self, x: Tensor) -> Tensor | None:
        if not x.ndim:
            return None
        place = self.draw(st.integers(0, x.ndim - 1))
        n = x.shape[place]
        if x.ndim > 1 and place + 1 < x.ndim and self.draw(st.booleans()):
            return ops.reshape(x, (*x.shape[:place], n * x.shape[place + 1], *x.shape[place + 2 :]))
        factor = self.pick([d for d in range(1, n + 1) if n % d == 0])
        return ops.reshape(x, (*x.shape[:place], factor, n // factor, *x.shape[place + 1 :]))

    def reduction(self, x: Tensor) -> Tensor | None:
        if not x.ndim:
            return None
        dims = self.draw(st.sets(st.integers(0, x.ndim - 1), min_size=1, max_size=x.ndim))
        kinds = ("sum",) if self.smooth else ("sum", "max", "min", "prod")
        return ops.reduce(self.pick(kinds), x, tuple(sorted(dims)), self.draw(st.booleans()))

    def rows(self, x: Tensor) -> Tensor | None:
        if not x.ndim or x.shape[-1] < 2:
            return None
        if self.draw(st.booleans()):
            return ops.softmax(x, self.draw(st.integers(0, x.ndim - 1)))
        # a large eps: rows of nearly equal numbers would multiply rounding by 1/sqrt(eps)
        y: Tensor = emit("layer_norm", x, self.param(x.shape[-1:]), self.param(x.shape[-1:]), eps=0.5)[0]
        return y

    def cut(self, x: Tensor) -> Tensor | None:
        if not x.ndim:
            return None
        place = self.draw(st.integers(0, x.ndim - 1))
        n = x.shape[place]
        if n > 1 and self.draw(st.booleans()):
            start = self.draw(st.integers(0, n - 1))
            stop = self.draw(st.integers(start + 1, n))
            return ops.getitem(x, (slice(None),) * place + (slice(start, stop),))
        return ops.concat([x, self.pick([t for t in self.made if t.shape == x.shape])], axis=place)

    def slide(self, x: Tensor) -> Tensor | None:
        """An op that reads neighbours' positions."""
        if not x.ndim:
            return None
        place = self.draw(st.integers(0, x.ndim - 1))
        kind = self.pick(("roll", "flip", "pad", "stride", "conv"))
        if kind == "roll":
            return ops.roll(x, self.draw(st.integers(-9, 9)), place)
        if kind == "flip":
            return ops.flip(x, place)
        if kind == "pad":
            sides = [[self.draw(st.integers(0, 3)) * (d == place) for d in range(x.ndim)] for _ in range(2)]
            return ops.pad(x, *sides, value=self.pick((0, 0.5)))
        if kind == "stride":
            step = self.pick((-2, -1, 2, 3))
            return ops.getitem(x, (slice(None),) * place + (slice(None, None, step),))
        if x.ndim < 3:
            return None
        low, high, stride = (self.draw(st.integers(0, 2)) for _ in range(3))
        w = self.param((self.draw(st.integers(1, 3)), x.shape[1], *(min(3, n) for n in x.shape[2:])))
        padding = [(low, high)] * (x.ndim - 2)
        return ops.conv(x, w, stride=1 + stride, padding=padding) * 0.2

    def running(self, x: Tensor) -> Tensor | None:
        return None if not x.ndim else ops.cumsum(x, self.draw(st.integers(0, x.ndim - 1)))

    def grow(self) -> None:
        steps = (
            self.contraction, self.outer, self.bias, self.join, self.unary, self.transpose, self.reshape,
            self.reduction, self.rows, self.cut, self.slide, self.slide, self.running,
        )  # fmt: skip
        x = self.pick(self.made[-2:])
        count = len(self.trace.ops)
        made = self.pick(steps)(x)
        if made is None or made.size > _LARGEST or made.ndim > 4:
            del self.trace.ops[count:]  # a step too far is taken back, with its params
            self._forget()
            return
        self.made.append(self.annotate(made, 0.25))

    def _forget(self) -> None:
        alive = {v.name for op in self.trace.ops for v in op.results}
        self.trace.attrs = {n: a for n, a in self.trace.attrs.items() if n in alive}
        self.trace._sources = {k: t for k, t in self.trace._sources.items() if t.value.name in alive}
        self.trace._constants = {k: t for k, t in self.trace._constants.items() if t.value.name in alive}
        self.trace.placements = {n: m for n, m in self.trace.placements.items() if n in alive}
        self.params = {n: a for n, a in self.params.items() if n in alive}


@st.composite
def programs(
    draw: Callable[[Any], Any],
    meshes: tuple[tuple[ProcessMesh, ...], ...],
    train: bool,
    micro: bool = True,
    steps: int = 7,
) -> Program:
    """A random program on one of the given sequences of meshes.

    Args:
        meshes: candidate pipelines; each part of the program runs on the next mesh.
        train: also take gradients of a scalar and update the params.
        micro: several micro-batches.
        steps: most ops drawn.
    """
    pipeline = draw(st.sampled_from(meshes))
    builder = _Builder(draw, pipeline, smooth=train)
    outputs: dict[str, Tensor] = {}
    with builder.trace.activate():
        builder.made.append(builder.annotate(builder.input(builder.shape(draw(st.integers(1, 3)))), 1.0))
        for mesh in pipeline:
            builder.mesh = mesh
            with builder.trace.on(mesh) if len(pipeline) > 1 else builder.trace.within():
                before = len(builder.made)
                for _ in range(draw(st.integers(1, steps))):
                    builder.grow()
                if len(builder.made) == before:
                    builder.made.append(ops.tanh(builder.made[-1]))
        last = builder.made[-1]
        outputs["y"] = builder.made[draw(st.integers(0, len(builder.made) - 1))]
        outputs["z"] = last
        if train:
            with builder.trace.on(pipeline[-1]) if len(pipeline) > 1 else builder.trace.within():
                loss = ops.reduce("sum", ops.tanh(last))
                outputs["loss"] = ops.accumulate(loss)
            params = [t for (kind, _), t in builder.trace._sources.items() if kind == "param"]
            for p, grad in zip(params, differentiate(builder.trace, loss, params), strict=True):
                with builder.trace.on_behalf_of(p.value.name, "", ""):
                    with builder.trace.within(role="backward"):
                        mean = ops.accumulate(grad)
                    with builder.trace.within(role="optimize"):
                        builder.trace.updates.append((p.value.name, (p - mean * 0.125).value))
        graph = builder.trace.finish(outputs)
    count = draw(st.integers(1, 3)) if micro else 1
    rng = np.random.default_rng(11)
    feeds = [{n: rng.normal(size=s) for n, s in builder.inputs.items()} for _ in range(count)]
    text = [
        f"{', '.join(f'%{v.name} {v.type}' for v in op.results)} = {op.kind}"
        f"({', '.join(f'%{v.name}' for v in op.operands)}) {op.attrs if op.kind != 'constant' else ''}"
        for op in graph.ops
    ]
    return Program(graph, builder.params, feeds, text)
