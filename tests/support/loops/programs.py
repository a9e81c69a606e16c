"""Programs with loops, each also written without: `scanned=False` repeats the body in the program itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distgraph import ops
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.serial.backward import differentiate
from distgraph.passes.serial.dead_code_elimination import prune
from distgraph.tracing.pytrees import leaves, map_leaves
from distgraph.tracing.tracer import Trace

TURNS, SAMPLES, WIDTH, HIDDEN = 5, 6, 4, 12
SIZES = {"xs": (TURNS, SAMPLES, WIDTH), "wx": (WIDTH, HIDDEN), "wh": (HIDDEN, HIDDEN), "b": (HIDDEN,)}
"""Sources of the recurrent programs; 6 samples and 12 columns are cut by 2 and 3."""

LAYERS = {"h": (SAMPLES, 3, HIDDEN), "wq": (3, HIDDEN, HIDDEN), "wu": (3, HIDDEN, 2 * HIDDEN),
          "wd": (3, 2 * HIDDEN, HIDDEN), "g": (3, HIDDEN)}  # fmt: skip
"""Sources of the program of layers: parameters of three layers are stacked."""


def repeat(scanned: bool, f: Callable[..., Any], init: Any, xs: Any, **options: Any) -> tuple[Any, Any]:
    """`ops.scan`, or the same with the body written once for each turn."""
    if scanned:
        return ops.scan(f, init, xs, **options)
    count = next(x for _, x in leaves(xs)).shape[0]
    order = range(count - 1, -1, -1) if options.get("reverse") else range(count)
    rows: dict[int, Any] = {}
    carry = init
    for turn in order:
        carry, rows[turn] = f(carry, map_leaves(lambda _, x, turn=turn: x[turn], xs))
    tables = {turn: dict(leaves(row)) for turn, row in rows.items()}
    stacked = map_leaves(lambda path, _: ops.stack([tables[t][path] for t in range(count)], 0), rows[0])
    return carry, stacked


def rnn(scanned: bool, xs: Any, wx: Any, wh: Any, b: Any, **options: Any) -> list[Any]:
    """A recurrent network: last state and all states."""

    def turn(h: Any, x: Any) -> Any:
        h = ops.tanh(x @ wx + h @ wh + b)
        return h, h

    h, hs = repeat(scanned, turn, ops.zeros((SAMPLES, HIDDEN), "f64"), xs, **options)
    return [h, hs]


def lstm(scanned: bool, xs: Any, wx: Any, wh: Any, b: Any, **options: Any) -> list[Any]:
    """A recurrent network with gates and a pytree as carry; two carries change places."""

    def turn(c: Any, x: Any) -> Any:
        z = ops.tanh(x @ wx + c["h"] @ wh + b)
        gate = ops.sigmoid(x @ wx - c["h"] @ wh)
        cell = gate * c["cell"] + (1.0 - gate) * z + 0.1 * c["old"]
        return {"h": cell * ops.sigmoid(z), "cell": cell, "old": c["cell"]}, (cell, ops.softmax(z, -1))

    zero = ops.zeros((SAMPLES, HIDDEN), "f64")
    last, (cells, gates) = repeat(scanned, turn, {"h": zero, "cell": zero, "old": zero}, xs, **options)
    return [last["h"], last["old"], cells, gates]


def nested(scanned: bool, xs: Any, wx: Any, wh: Any, b: Any, **options: Any) -> list[Any]:
    """A loop over samples in a loop over turns; the inner one reads the outer carry and a weight."""

    def turn(h: Any, x: Any) -> Any:
        def sample(total: Any, row: Any) -> Any:
            total = 0.9 * total + ops.tanh(row @ wx) * ops.reduce("sum", h, (0,))
            return total, total * b

        total, rows = repeat(scanned, sample, ops.zeros((HIDDEN,), "f64"), x)
        h = ops.tanh(h @ wh + total) + 0.1 * rows
        return h, total

    h, totals = repeat(scanned, turn, ops.zeros((SAMPLES, HIDDEN), "f64"), xs, **options)
    return [h, totals]


def cumulative(scanned: bool, xs: Any, wx: Any, wh: Any, b: Any, **options: Any) -> list[Any]:
    """Cumulative sums and products of projected rows, with a scale from outside."""
    scale = ops.mean(wh)

    def turn(c: Any, x: Any) -> Any:
        total, product = c[0] + x * scale, c[1] * (1.0 + 0.1 * x)
        return (total, product), total * product

    start = ops.zeros((SAMPLES, HIDDEN), "f64")
    (total, product), all_turns = repeat(scanned, turn, (start + b, start + 1.0), xs @ wx, **options)
    return [total, product, all_turns]


def layers(scanned: bool, h: Any, wq: Any, wu: Any, wd: Any, g: Any, **options: Any) -> list[Any]:
    """Transformer layers whose parameters are items: attention and a feed-forward part."""

    def layer(h: Any, p: Any) -> Any:
        n = ops.rms_norm(h, p["g"])
        q = n @ p["wq"]
        h = h + ops.softmax(q @ ops.transpose(n, (0, 2, 1)) / 4.0, -1) @ n
        return h + ops.gelu(ops.rms_norm(h, p["g"]) @ p["wu"]) @ p["wd"], None

    return [repeat(scanned, layer, h, {"wq": wq, "wu": wu, "wd": wd, "g": g}, **options)[0]]


PROGRAMS = {"rnn": rnn, "lstm": lstm, "nested": nested, "cumulative": cumulative, "layers": layers}


def arrays(name: str) -> dict[str, np.ndarray]:
    """The numbers of the sources of a program."""
    rng = np.random.default_rng(7)
    sizes = LAYERS if name == "layers" else SIZES
    return {source: 0.5 * rng.standard_normal(shape) for source, shape in sizes.items()}


def graph_of(name: str, scanned: bool, **options: Any) -> Graph:
    """A program with a loss, its results and the gradients of all sources as outputs."""
    trace = Trace(name)
    with trace.activate():
        given = arrays(name)
        sources = {key: trace.source("input", key, array.shape, "f64") for key, array in given.items()}
        results = PROGRAMS[name](scanned, *sources.values(), **options)
        loss = sum((ops.mean(r * r * (n + 1.0)) + ops.mean(r) for n, r in enumerate(results)), 0.0)
    grads = differentiate(trace, loss, list(sources.values()))
    outputs = {f"r{n}": r for n, r in enumerate(results)}
    outputs |= {f"d{key}": grad for key, grad in zip(sources, grads, strict=True)}
    return prune(trace.finish({"loss": loss, **outputs}))


def annotated(graph: Graph, mesh: ProcessMesh, layouts: dict[str, Sequence[Any]]) -> Graph:
    """The graph with layouts for some sources: name -> axes of the dims, as far as the mesh has them."""
    attrs = {}
    for name, dims in layouts.items():
        kept = [axis if axis in mesh.sizes else None for axis in dims]
        attrs[name] = DistAttr(mesh, ShardSpec.of(kept), Origin("user", name))
    return graph.with_ops(graph.ops, attrs=attrs)
