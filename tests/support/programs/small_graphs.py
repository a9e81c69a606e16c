"""Small graphs with fixed source lines, for golden texts and for tests that break them."""

from __future__ import annotations

from dataclasses import replace

from distgraph import ops, optim
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.serial.backward import differentiate
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

MESH = ProcessMesh.grid(dp=2, tp=3)


def pin(trace: Trace, tensor: Tensor, spec: str, where: str, mesh: ProcessMesh = MESH) -> None:
    trace.annotate(tensor.value, DistAttr(mesh, ShardSpec.parse(spec), Origin("user", where)))


def mlp(batch: int = 12, width: int = 6, hidden: int = 10, *, rows: str = "[dp, _]") -> Graph:
    """Two layers, gelu, cross-entropy, trained by SGD with momentum; dims that do not divide."""
    trace = Trace("mlp")
    with trace.activate():
        x = trace.source("input", "x", (batch, width), "f32")
        y = trace.source("input", "y", (batch,), "i32")
        pin(trace, x, rows, "train.py:9")
        layers = []
        for name, shape, spec in (("fc1", (width, hidden), "[_, tp]"), ("fc2", (hidden, width), "[tp, _]")):
            with trace.within(scope=name), trace.on_behalf_of("", name, f"model.py:{len(layers) + 3}"):
                weight = trace.source("param", f"{name}.weight", shape, "f32")
                bias = trace.source("param", f"{name}.bias", shape[1:], "f32")
            pin(trace, weight, spec, f"train.py:{len(layers) + 12}")
            layers.append((weight, bias))
        h = x
        for number, (weight, bias) in enumerate(layers):
            with trace.on_behalf_of("", f"fc{number + 1}", f"model.py:{number + 7}"):
                h = h @ weight + bias
                h = ops.gelu(h) if number == 0 else h
        with trace.on_behalf_of("", "", "train.py:20"):
            loss = ops.mean(ops.cross_entropy(h, y))
            total = ops.accumulate(loss)
        params = [p for layer in layers for p in layer]
        pairs = []
        for p, grad in zip(params, differentiate(trace, loss, params), strict=True):
            with trace.within(role="backward"), trace.on_behalf_of(p.value.name, "", "train.py:21"):
                pairs.append((p, ops.accumulate(grad)))
        with trace.on_behalf_of("", "", "train.py:22"):
            optim.SGD(momentum=0.9).update(trace, pairs)
    graph = trace.finish({"loss": total})
    return _with_sources(graph)


def _with_sources(graph: Graph) -> Graph:
    """Source lines of this file would change with it."""
    ops_ = [op if op.source.startswith(("model", "train")) else replace(op, source="") for op in graph.ops]
    return graph.with_ops(ops_)
