"""Mode mesh2d: layouts of two-dimensional tensor parallelism for the linear layers of a program.

*In:* a serial graph, a mesh of axes (rows, cols) or (data, rows, cols), a dataflow and an algorithm for each
layer. *Out:* the graph with the annotations that follow. *Invariant:* annotations of the user stay; a layer
with one that says otherwise, or with sizes that the mesh does not divide, is left to completion.

Activations [batch, ..., features] are split by rows along the batch and by cols along the features, so that
layers follow each other without a change of layout, and all other ops follow along their index rules. A
weight [inputs, outputs] is split [rows, cols] where the result stays in place (OS) and [cols, rows] where the
input does (LS). Where weights stay (RS), activations are turned by one layer and turned back by the next.
An axis for data splits the batch before the other one, and gradients of weights are summed over it.

    %x : f32[8, 64, 512] [rows, _, cols]   %w : f32[512, 2048] [rows, cols]     matmul(%x, %w)  OS

Source: Nam et al., "MeshSlice" (2025), section 3.2.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from distgraph.errors import InfeasibleError, ShardingError
from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.matmul_algorithm import CONTRACTIONS as KINDS
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.matmul_algorithms.cluster_prices import (
    ClusterPrices,
    devices_of,
    on_torus,
    product_rate,
    slice_block,
)
from distgraph.passes.matmul_algorithms.layer_products import Layer, dataflow, divisors
from distgraph.passes.matmul_algorithms.tuner import LayerTuning, Tuning, tune
from distgraph.passes.search.modes.weight_stationary import weight_stationary_groups
from distgraph.resources.cluster import Cluster

ORIGIN = Origin("user", 'Strategy(mode="mesh2d")')
_LAYOUTS: Final = {
    "OS": ((0, 1), (0, 1), (0, 1)),
    "LS": ((0, 1), (1, 0), (0, 1)),
    "RS": ((1, 0), (0, 1), (0, 1)),
    "RS^T": ((0, 1), (1, 0), (1, 0)),
}
"""Mesh axes, of rows and cols, that split the first and the last dim of input, weight and result."""
_TOLERANCE: Final = 0.02
"""Share of its seconds by which a product may be slower by the tuner's model than with more slices."""


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A product of activations with a parameter matrix.

    Attributes:
        op: name of the forward op.
        activation: its input [batch, ..., inputs].
        weight: the parameter [inputs, outputs].
        result: [batch, ..., outputs].
    """

    op: str
    activation: Value
    weight: Value
    result: Value

    @property
    def samples(self) -> int:
        """Rows of the product: all dims of the activation but the last."""
        return math.prod(self.activation.shape[:-1])

    @property
    def inputs(self) -> int:
        """Features of the input."""
        return self.weight.shape[0]

    @property
    def outputs(self) -> int:
        """Features of the result."""
        return self.weight.shape[1]


@dataclass(frozen=True, slots=True)
class TunedMesh:
    """A program on a mesh as the tuner has it.

    Attributes:
        mesh: with axes (rows, cols) or (data, rows, cols).
        tuning: of the products of one position along the data axis.
        graph: with the layouts and the algorithms.
        reduction: seconds in which the gradients of the weights are summed over the data axis.
    """

    mesh: ProcessMesh
    tuning: Tuning
    graph: Graph
    reduction: float

    @property
    def seconds(self) -> float:
        """Of the products of a step, and the sums of the gradients behind them."""
        return self.tuning.seconds + self.reduction


def linear_layers(graph: Graph) -> tuple[LinearLayer, ...]:
    """The linear layers of a program, in program order."""
    return tuple(filter(None, (_layer(graph, op) for op in graph.ops)))


def _layer(graph: Graph, op: Op) -> LinearLayer | None:
    if op.kind not in KINDS or op.role != "forward" or len(op.operands) != 2:
        return None
    activation, weight = op.operands
    if graph.producers[weight.name].kind != "param" or len(weight.shape) != 2 or len(activation.shape) < 2:
        return None
    if graph.producers[activation.name].kind == "param":
        return None
    made = (*activation.shape[:-1], weight.shape[1])
    if made != op.result.shape or activation.shape[-1] != weight.shape[0]:
        return None
    if op.kind == "einsum" and not _is_product(op.attrs["spec"]):
        return None
    return LinearLayer(op.name, activation, weight, op.result)


def _is_product(spec: str) -> bool:
    """Whether an einsum multiplies the last dim of its first operand with a matrix: "bsk,kn->bsn"."""
    left, _, result = spec.replace(" ", "").partition("->")
    first, second = left.split(",")
    return len(second) == 2 and first[-1] == second[0] and result == first[:-1] + second[1]


def layouts_by_tuner(
    graph: Graph, meshes: Sequence[ProcessMesh], cluster: Cluster, algorithm: str
) -> list[TunedMesh]:
    """The graph on each mesh, its layers with the dataflows and slices that the tuner chooses, best first.

    A layer whose largest matrix is the weight keeps it in place (RS) where the layers around it do too
    (`weight_stationary`) and that is faster; else it takes the better of OS and LS.

    Args:
        graph: serial; its annotations stay.
        meshes: of two axes, or three with one for data first.
        cluster: whose prices count.
        algorithm: "meshslice" or another that the tuner knows.

    Raises:
        ShardingError: the program has no linear layer that a mesh divides.
    """
    layouts = []
    block = slice_block(cluster)
    for mesh in meshes:
        layers = [layer for layer in linear_layers(graph) if _divides(layer, mesh)]
        if not layers:
            continue
        tuning = _tune(graph, layers, mesh, cluster, algorithm)
        dataflows = {layer.op: _form(each) for layer, each in zip(layers, tuning.layers, strict=True)}
        annotated, names = annotate(graph, mesh, dataflows)
        algorithms = dict(annotated.algorithms)
        for layer, each in zip(layers, tuning.layers, strict=True):
            if layer.op in names:
                algorithms |= layer_algorithms(graph, layer, each, mesh, algorithm, block)
        nbytes = (layer.weight.nbytes / math.prod(tuning.mesh) for layer in layers)
        prices = ClusterPrices(cluster, data=_data(mesh))
        reduction = sum(prices.reduction_seconds(tuning.mesh, each) for each in nbytes)
        layouts.append(TunedMesh(mesh, tuning, replace(annotated, algorithms=algorithms), reduction))
    if not layouts:
        raise ShardingError(
            f"graph @{graph.name}: no mesh of two axes divides a linear layer of the program; use sizes and "
            f"a number of devices with common factors, or another mode"
        )
    return sorted(layouts, key=lambda each: each.seconds)


def _data(mesh: ProcessMesh) -> int:
    """Ranks along the axes of data parallelism, which are those before the last two."""
    return math.prod(mesh.shape[:-2])


def _tune(
    graph: Graph, layers: Sequence[LinearLayer], mesh: ProcessMesh, cluster: Cluster, algorithm: str
) -> Tuning:
    """Dataflows and slices of the layers of a program on one mesh."""
    rows, cols = mesh.shape[-2:]
    dtype, data = layers[0].result.dtype, _data(mesh)
    sizes = {
        layer.op: Layer(layer.op, layer.samples // data, layer.inputs, layer.outputs) for layer in layers
    }
    prices, rate = ClusterPrices(cluster, data=data), product_rate(cluster, dtype)

    @cache
    def tuned(samples: int, inputs: int, outputs: int, forward: str, turned: bool) -> LayerTuning:
        size = Layer("", samples, inputs, outputs)
        return tune(
            [size, size] if turned else [size],  # behind another, a layer in RS reads what is turned
            rows * cols,
            prices,
            rate,
            item_bytes=itemsize(dtype),
            block=slice_block(cluster),
            algorithm=algorithm,
            forward=forward,
            meshes=[(rows, cols)],
            tolerance=_TOLERANCE,
        ).layers[-1]

    def option(op: str, forward: str, turned: bool = False) -> LayerTuning:
        size = sizes[op]
        tuning = tuned(size.samples, size.inputs, size.outputs, forward, turned)
        return replace(tuning, layer=size)

    largest = {op: dataflow(size) for op, size in sizes.items()}
    chosen = {}
    for op, flow in largest.items():
        options = [option(op, forward) for forward in ([flow] if flow != "RS" else ["OS", "LS"])]
        chosen[op] = min(options, key=lambda each: each.seconds)
    turning = [layer.op for layer in layers if layer.activation.shape[0] % (data * cols) == 0]
    allowed = [op for op in turning if largest[op] == "RS"]
    for group in weight_stationary_groups(graph, [each.op for each in linear_layers(graph)], allowed):
        try:
            instead = {op: option(op, "RS", op in group.returning) for op in group.leaving | group.returning}
        except InfeasibleError:  # the block of a slice does not divide the samples
            continue
        if _seconds(instead.values()) < _seconds(chosen[op] for op in instead):
            chosen |= instead
    return Tuning(algorithm, (rows, cols), tuple(chosen.values()))


def _seconds(layers: Iterable[LayerTuning]) -> float:
    return sum(layer.seconds for layer in layers)


def _form(layer: LayerTuning) -> str:
    """A dataflow as `annotate` takes it."""
    return "RS^T" if layer.transposed else layer.dataflow


def _divides(layer: LinearLayer, mesh: ProcessMesh) -> bool:
    """Whether both axes divide the features, and rows the batch; then every dataflow has legal slices."""
    ranks, batch = math.lcm(*mesh.shape[-2:]), layer.activation.shape[0]
    samples = math.prod(mesh.shape[:-1])
    return layer.inputs % ranks == 0 and layer.outputs % ranks == 0 and batch % samples == 0


def _slices_of_batch(layer: LinearLayer, mesh: ProcessMesh, count: int, block: int) -> int:
    """The most slices, up to a count, into which the shards of the batch can be cut.

    A layer whose weight stays in place is sliced along the samples. The tuner counts batch * sequence
    samples, a program slices the batch alone.
    """
    batch = layer.activation.shape[0] // _data(mesh)
    shard = math.gcd(*(batch // ranks if batch % ranks == 0 else 1 for ranks in mesh.shape[-2:]))
    return max(each for each in range(1, count + 1) if each == 1 or shard % (each * block) == 0)


def layer_algorithms(
    graph: Graph, layer: LinearLayer, tuning: LayerTuning, mesh: ProcessMesh, name: str, block: int
) -> dict[str, MatmulAlgorithm]:
    """Name of an op -> its algorithm, for a layer's forward product and those of its gradients.

    Args:
        graph: of the layer.
        layer: one of `linear_layers`.
        tuning: its slices, and for Wang's algorithm its rings.
        mesh: of two axes, or three with one for data first.
        name: of the algorithm.
        block: adjacent rows or columns that stay together at least when a shard is sliced.
    """
    three = []
    for product in tuning.products:
        count, ring = product.slices, product.seconds.ring
        if tuning.dataflow == "RS":
            count = _slices_of_batch(layer, mesh, count, block)
        axis = None if ring is None else mesh.axes[-2:][ring]
        three.append(MatmulAlgorithm(name, count, ring=axis))
    forward, backward_data, backward_weight = three
    algorithms = {layer.op: forward}
    for op in _backward(graph, layer):
        algorithms[op.name] = backward_data if _reads_weight(op, layer) else backward_weight
    return algorithms


def _backward(graph: Graph, layer: LinearLayer) -> list[Op]:
    """The contractions of a layer's gradients."""
    return [op for op in graph.ops if op.link == layer.op and op.role == "backward" and op.kind in KINDS]


def _reads_weight(op: Op, layer: LinearLayer) -> bool:
    return any(value.name == layer.weight.name for value in op.operands)


def annotate(graph: Graph, mesh: ProcessMesh, dataflows: Mapping[str, str]) -> tuple[Graph, tuple[str, ...]]:
    """The graph with the layouts of two-dimensional tensor parallelism.

    Args:
        graph: serial.
        mesh: of two axes, rows and cols, or three with one for data first.
        dataflows: name of a layer's op -> "OS", "LS", or where its weight stays "RS^T" if its input is split
            by rows along the samples, "RS" if by cols.

    Returns:
        the graph, and the names of the layers that have these layouts.
    """
    attrs, annotated = dict(graph.attrs), []
    *data, rows, cols = mesh.axes
    for layer in linear_layers(graph):
        if layer.op not in dataflows:
            continue
        read, weight, made = _LAYOUTS[dataflows[layer.op]]
        between = [None] * (len(layer.activation.shape) - 2)
        layouts = {}
        for value, (first, last), before in (
            (layer.activation, read, data), (layer.weight, weight, []), (layer.result, made, data)
        ):  # fmt: skip
            inner = [] if value is layer.weight else between
            spec = ShardSpec.of([(*before, (rows, cols)[first]), *inner, (rows, cols)[last]])
            layouts[value] = DistAttr(mesh, spec, ORIGIN)
        for op in _backward(graph, layer):  # no partial sum is passed on
            layouts[op.result] = layouts[layer.activation if _reads_weight(op, layer) else layer.weight]
            layouts[op.operands[0]] = layouts[layer.result]  # its gradient
        if all(_fits(attrs, value, attr) for value, attr in layouts.items()):
            attrs |= {value.name: attr for value, attr in layouts.items()}
            annotated.append(layer.op)
    return replace(graph, attrs=attrs), tuple(annotated)


def _fits(attrs: Mapping[str, DistAttr], value: Value, attr: DistAttr) -> bool:
    """Whether no annotation says otherwise, and every dim divides evenly."""
    parts = (attr.mesh.count(axes) for axes in attr.spec.dims)
    divides = all(size % count == 0 for size, count in zip(value.shape, parts, strict=True))
    return divides and attrs.get(value.name, attr) == attr


def shapes(cluster: Cluster, count: int | None = None) -> list[ProcessMesh]:
    """All meshes (rows, cols) and (dp, rows, cols) of all devices, or of the first `count`.

    No axis has one rank. On a torus they are blocks of it, with dp and rows along one of its dims.
    """
    devices = len(cluster.devices) if count is None else count
    candidates = []
    for data in divisors(devices):
        ranks = devices // data
        candidates += [(data, rows, ranks // rows) for rows in divisors(ranks)[1:-1]]
    blocks = [each for each in candidates if on_torus(cluster, each) or on_torus(cluster, _block(each))]
    candidates = [each for each in blocks or candidates if max(devices_of(cluster, _block(each))) < devices]
    return [_grid(*each) for each in candidates]


def _block(shape: tuple[int, int, int]) -> tuple[int, int]:
    return shape[0] * shape[1], shape[2]


def _grid(data: int, rows: int, cols: int) -> ProcessMesh:
    if data == 1:
        return ProcessMesh.grid(rows=rows, cols=cols)
    return ProcessMesh.grid(dp=data, rows=rows, cols=cols)
