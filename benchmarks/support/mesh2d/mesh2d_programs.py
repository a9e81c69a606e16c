"""Programs of the fully connected layers of transformers on simulated TPU v4 tori, and their forecasts."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.support.mesh2d.mesh2d_assumptions import BLOCK, SEQUENCE
from distgraph import nn, ops
from distgraph.engine.compile.train_graph import train_graph
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.models import GPT, GPTConfig
from distgraph.passes.complete import complete
from distgraph.passes.matmul_algorithms import MATMUL_ALGORITHMS
from distgraph.passes.matmul_algorithms.layer_products import Layer
from distgraph.passes.matmul_algorithms.tuner import LayerTuning, Tuning
from distgraph.passes.search.modes.mesh2d import annotate, layer_algorithms, linear_layers
from distgraph.passes.serial.backward import differentiate
from distgraph.passes.serial.dead_code_elimination import prune
from distgraph.resources import Cluster, load_cluster
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.program.build import build
from distgraph.tracing.tracer import Trace

HEAD = 128  # features of a head of attention
FILE = Path(__file__).parents[3] / "resources/files/tpu_v4_16x16.yaml"


@cache
def torus(rows: int, cols: int) -> Cluster:
    """The shipped cluster with a torus of another shape; a ring has the four chips of a machine in line."""
    text = FILE.read_text().replace("shape: [16, 16]", f"shape: [{rows}, {cols}]")
    if 1 in (rows, cols):
        text = text.replace("block: [2, 2]", f"block: [{min(rows, 4)}, {min(cols, 4)}]")
    text = text.replace("count: 64", f"count: {rows * cols // 4}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "torus.yaml"
        path.write_text(text)
        return load_cluster(path)


def graph_of(layer: Layer) -> Graph:
    """A layer forward and backward, in shapes alone."""
    trace = Trace(layer.name)
    with trace.activate():
        x = trace.source("input", "x", (layer.samples, layer.inputs), "bf16")
        dy = trace.source("input", "dy", (layer.samples, layer.outputs), "bf16")
        w = trace.source("param", "w", (layer.inputs, layer.outputs), "bf16")
        y = x @ w
        dx, dw = differentiate(trace, ops.reduce("sum", y * dy), [x, w])
    return trace.finish({"y": y, "dx": dx, "dw": dw})


def form(tuned: LayerTuning) -> str | None:
    """The dataflow of a layer as a program has it; None for OS and LS in their transposed form."""
    if tuned.transposed:
        return "RS^T" if tuned.dataflow == "RS" else None
    return tuned.dataflow


@cache
def simulated(tuned: LayerTuning, mesh_shape: tuple[int, int], algorithm: str) -> float | None:
    """Seconds of a layer under the simulated clock; None for an algorithm or dataflow without a program."""
    if algorithm not in MATMUL_ALGORITHMS or form(tuned) is None:
        return None
    mesh = ProcessMesh.grid(rows=mesh_shape[0], cols=mesh_shape[1])
    graph = graph_of(tuned.layer)
    (linear,) = linear_layers(graph)
    annotated, names = annotate(graph, mesh, {linear.op: form(tuned) or ""})
    assert names == (linear.op,)
    algorithms = layer_algorithms(graph, linear, tuned, mesh, algorithm, BLOCK)
    completed = complete(replace(prune(annotated), algorithms=algorithms), mesh)
    cluster = torus(*mesh_shape)
    found = forecast(build(completed), cluster, cluster.network.corner_block(mesh_shape))
    return found.step_seconds


class TransformerBlock(nn.Module):
    """A block without the layers around it: its mean is the loss."""

    def __init__(self, width: int) -> None:
        model = GPT(GPTConfig(hidden=width, layers=1, heads=width // HEAD, packed=True, dtype="bf16"))
        self.block = model.blocks[0]

    def forward(self, x: Any) -> Any:
        """[sequences, tokens, width] to a number."""
        return ops.mean(self.block(x))


def block_seconds(width: int, sequences: int, tuning: Tuning) -> float | None:
    """Seconds of a training step of a whole block under the simulated clock, with attention, norms and AdamW;
    None where a layer has no program."""
    forms = [form(each) for each in tuning.layers]
    if None in forms:
        return None
    mesh = ProcessMesh.grid(rows=tuning.mesh[0], cols=tuning.mesh[1])
    graph = train_graph(TransformerBlock(width), (((sequences, SEQUENCE, width), "bf16"),))
    layers = linear_layers(graph)
    tuned = dict(zip((layer.op for layer in layers), tuning.layers, strict=True))
    annotated, names = annotate(graph, mesh, dict(zip(tuned, map(str, forms), strict=True)))
    assert len(names) == len(layers)
    algorithms = {}
    for layer in layers:
        algorithms |= layer_algorithms(graph, layer, tuned[layer.op], mesh, tuning.algorithm, BLOCK)
    completed = complete(replace(annotated, algorithms=algorithms), mesh)
    cluster = torus(*tuning.mesh)
    return forecast(build(completed), cluster, cluster.network.corner_block(tuning.mesh)).step_seconds
