"""Tensor parallelism and FSDP on one mesh axis as programs: rivals of the algorithms on two axes.

All layers of a block, forward and then backward, as one program on a ring of simulated TPU v4 chips:

    tensor parallelism   with sequence parallelism, as in Megatron-LM: a layer that is split by columns
                         gathers its input, which is split along the samples, one that is split by rows
                         scatters its result. The gathered input is not kept: it is gathered again backward.
    FSDP                 samples and weights are split over all chips: a weight is gathered one layer ahead,
                         for the forward and for the backward product, and its gradient is scattered under the
                         products of the next layer (the passes of ZeRO-3).

Each has its best layout: the ring along either axis of the torus and, for tensor parallelism, layers split by
columns and rows in turn, from either on. The seconds are those of a block among many: of two blocks less
those of one, so that the first gathers and the last scatters of a step, which nothing hides, do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.support.mesh2d.mesh2d_programs import torus
from distgraph import ops
from distgraph.ir.graph import Graph
from distgraph.ir.matmul_algorithm import CONTRACTIONS, MatmulAlgorithm
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.complete import complete
from distgraph.passes.matmul_algorithms.layer_products import Layer, Mesh
from distgraph.passes.matmul_algorithms.product_seconds import ONE_AXIS
from distgraph.passes.pass_pipeline import pipeline
from distgraph.passes.serial.backward import differentiate
from distgraph.passes.serial.dead_code_elimination import prune
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.program.build import Build, build
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

_AXIS, _NONE = "ring", None
_SAMPLES, _FEATURES = (_AXIS, _NONE), (_NONE, _AXIS)
_LAYOUTS = {
    "columns": (_SAMPLES, _FEATURES, _FEATURES),
    "rows": (_FEATURES, _SAMPLES, _SAMPLES),
    "samples": (_SAMPLES, _SAMPLES, _SAMPLES),
}
"""How X, W and Y are split; so are their gradients."""


@dataclass(frozen=True)
class OneAxis:
    """The fastest program of an algorithm under the simulated clock.

    Attributes:
        mesh: shape of the torus, which is a ring.
        first: how the first layer is split: by columns, by rows, or along the samples (FSDP).
        seconds: by which a step is longer with a second block.
        compute: of a chip for one block.
        communication: of a chip for one block, all messages one after another, hidden or not.
    """

    mesh: Mesh
    first: str
    seconds: float
    compute: float
    communication: float


def graph_of(layers: Sequence[Layer], mesh: ProcessMesh, splits: Sequence[str], dtype: str = "bf16") -> Graph:
    """Layers forward and backward; each has its own input and gradient of its result."""
    trace, pinned, outputs = Trace("layers"), dict[str, DistAttr](), dict[str, Tensor]()

    def pin(tensor: Tensor, dims: tuple[str | None, ...]) -> None:
        pinned[tensor.value.name] = DistAttr(mesh, ShardSpec.of(dims), Origin("user", "one axis"))

    with trace.activate():
        losses, wanted = [], []
        for layer, split in zip(layers, splits, strict=True):
            x = trace.source("input", f"x.{layer.name}", (layer.samples, layer.inputs), dtype)
            dy = trace.source("input", f"dy.{layer.name}", (layer.samples, layer.outputs), dtype)
            w = trace.source("param", layer.name, (layer.inputs, layer.outputs), dtype)
            y = x @ w
            losses.append(ops.reduce("sum", y * dy))
            wanted += [x, w]
            outputs[f"y.{layer.name}"] = y
            for tensor, dims in zip((x, w, y, dy), (*_LAYOUTS[split], _LAYOUTS[split][2]), strict=True):
                pin(tensor, dims)
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        gradients = differentiate(trace, total, wanted)
        for number, tensor in enumerate(gradients):
            layer, split = layers[number // 2], splits[number // 2]
            outputs[f"{'dx' if number % 2 == 0 else 'dw'}.{layer.name}"] = tensor
            pin(tensor, _LAYOUTS[split][number % 2])
    return prune(replace(trace.finish(outputs), attrs=pinned))


def program(algorithm: str, layers: Sequence[Layer], chips: int, first: str, dtype: str = "bf16") -> Build:
    """The compiled program of "tensor_parallel" or "fsdp"; see `OneAxis` for `first`."""
    mesh = ProcessMesh.grid(**{_AXIS: chips})
    if algorithm == "fsdp":
        graph = graph_of(layers, mesh, [first] * len(layers), dtype)
        return build(complete(graph, mesh), passes=pipeline(("gather_parameters",)))
    turn = ("columns", "rows") if first == "columns" else ("rows", "columns")
    graph = graph_of(layers, mesh, [turn[number % 2] for number in range(len(layers))], dtype)
    products = (op.name for op in graph.ops if op.kind in CONTRACTIONS)
    return build(
        complete(replace(graph, algorithms=dict.fromkeys(products, MatmulAlgorithm("collective"))), mesh)
    )


@cache
def one_axis(algorithm: str, layers: tuple[Layer, ...], chips: int) -> OneAxis:
    """An algorithm of one axis in its best layout, for a block of layers."""
    assert algorithm in ONE_AXIS
    layouts = []
    more = tuple(replace(layer, name=f"{layer.name}.next") for layer in layers)
    for first in ("samples",) if algorithm == "fsdp" else ("columns", "rows"):
        builds = [program(algorithm, each, chips, first) for each in (layers, (*layers, *more))]
        for mesh in ((1, chips), (chips, 1)):
            cluster = torus(*mesh)
            devices = cluster.network.corner_block(mesh)
            one, two = (forecast(built, cluster, devices) for built in builds)
            times = [task.last for task in one.tasks.values()]
            compute, messages = sum(time.compute for time in times), sum(time.communication for time in times)
            layouts.append(OneAxis(mesh, first, two.step_seconds - one.step_seconds, compute, messages))
    return min(layouts, key=lambda each: each.seconds)
