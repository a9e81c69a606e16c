"""Mode mesh2d: layouts of two-dimensional tensor parallelism for the linear layers of a program.

*In:* a serial graph, a mesh of two axes (rows, cols), a dataflow and an algorithm for each layer. *Out:* the
graph with the annotations that follow. *Invariant:* annotations of the user stay; a layer with one that says
otherwise, or with sizes that the mesh does not divide, is left to completion.

Activations [batch, ..., features] are split by rows along the batch and by cols along the features, so that
layers follow each other without a change of layout, and all other ops follow along their index rules. A
weight [inputs, outputs] is split [rows, cols] where the result stays in place (OS) and [cols, rows] where the
input does (LS).

    %x : f32[8, 64, 512] [rows, _, cols]   %w : f32[512, 2048] [rows, cols]     matmul(%x, %w)  OS

Source: Nam et al., "MeshSlice" (2025), section 3.2.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec

ORIGIN = Origin("user", 'Strategy(mode="mesh2d")')
KINDS = ("matmul", "einsum")


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
    if (*activation.shape[:-1], weight.shape[1]) != op.result.shape or activation.shape[-1] != weight.shape[
        0
    ]:
        return None
    if op.kind == "einsum" and not _is_product(op.attrs["spec"]):
        return None
    return LinearLayer(op.name, activation, weight, op.result)


def _is_product(spec: str) -> bool:
    """Whether an einsum multiplies the last dim of its first operand with a matrix: "bsk,kn->bsn"."""
    left, _, result = spec.replace(" ", "").partition("->")
    first, second = left.split(",")
    return len(second) == 2 and first[-1] == second[0] and result == first[:-1] + second[1]


def annotate(graph: Graph, mesh: ProcessMesh, dataflows: Mapping[str, str]) -> tuple[Graph, tuple[str, ...]]:
    """The graph with the layouts of two-dimensional tensor parallelism.

    Args:
        graph: serial.
        mesh: of two axes, rows and cols.
        dataflows: name of a layer's op -> "OS" or "LS".

    Returns:
        the graph, and the names of the layers that have these layouts.
    """
    rows, cols = mesh.axes
    attrs, annotated = dict(graph.attrs), []
    for layer in linear_layers(graph):
        if layer.op not in dataflows:
            continue
        weight = [rows, cols] if dataflows[layer.op] == "OS" else [cols, rows]
        between = [None] * (len(layer.activation.shape) - 2)
        layouts = {
            layer.activation: DistAttr(mesh, ShardSpec.of([rows, *between, cols]), ORIGIN),
            layer.weight: DistAttr(mesh, ShardSpec.of(weight), ORIGIN),
            layer.result: DistAttr(mesh, ShardSpec.of([rows, *between, cols]), ORIGIN),
        }
        if all(_fits(attrs, value, attr) for value, attr in layouts.items()):
            attrs |= {value.name: attr for value, attr in layouts.items()}
            annotated.append(layer.op)
    return replace(graph, attrs=attrs), tuple(annotated)


def _fits(attrs: Mapping[str, DistAttr], value: Value, attr: DistAttr) -> bool:
    """Whether no annotation says otherwise, and every dim divides evenly."""
    parts = (attr.mesh.count(axes) for axes in attr.spec.dims)
    divides = all(size % count == 0 for size, count in zip(value.shape, parts, strict=True))
    return divides and attrs.get(value.name, attr) == attr


def shapes(devices: int) -> Iterable[tuple[int, int]]:
    """All meshes (rows, cols) of a number of devices, neither of which is 1."""
    return ((rows, devices // rows) for rows in range(2, devices // 2 + 1) if devices % rows == 0)
