"""Applies layouts from a search to a train graph: every op and value gets its layout on its stage's mesh.

*In:* a serial graph, a mesh for every op, layouts from one formulation for each stage. *Out:* the completed
graph. *Invariant:* annotations stay. A value that only other meshes read stays in the layout in which it is
produced. Sources that several stages read are loaded on each of them where that costs nothing, and sums of
gradients from several stages are taken once a step (`defer_cross_mesh_sums`), as in completion, and what is
all_reduced before an `accumulate` is all_reduced after it (`defer_accumulated`).

Layouts may come from a mesh of other ranks: only its axes and their sizes count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from distgraph.errors import ShardingError
from distgraph.ir.graph import SOURCES, Graph, Op
from distgraph.ir.index_rule import OpLayout, result_spec
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import lookup, rule_of
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.communication.defer_accumulated import defer_accumulated
from distgraph.passes.communication.defer_cross_mesh_sums import spread_over_meshes
from distgraph.passes.search.intra_op.chosen_layouts import Layouts


def assign(
    graph: Graph,
    placements: Mapping[str, ProcessMesh],
    layouts: Layouts | Mapping[ProcessMesh, Layouts],
) -> Graph:
    """Complete a graph with the layouts that a search has chosen.

    Args:
        graph: the serial graph that was formulated.
        placements: name of every op -> the mesh that computes it.
        layouts: layouts of every op and value, on a mesh with the axes of the op's mesh; one `Layouts` for
            each mesh if stages have meshes of different axes.

    Returns:
        The completed graph.

    Raises:
        ShardingError: an op has no mesh or no layout, or a layout for other axes than its mesh has.
    """
    unplaced = next((op for op in graph.ops if op.name not in placements), None)
    if unplaced is not None:
        raise ShardingError(f"{unplaced} of graph @{graph.name} has no mesh; give one for every op")
    used = dict.fromkeys(placements.values())
    by_mesh = dict.fromkeys(used, layouts) if isinstance(layouts, Layouts) else layouts
    missing = next((op for op in graph.ops if op.name not in by_mesh[placements[op.name]].ops), None)
    if missing is not None:
        raise ShardingError(f"{missing} of graph @{graph.name} has no layout; give one for every op")
    meshes = {op.name: placements[op.name] for op in graph.ops}
    original_names = {value.name for op in graph.ops for value in op.results}
    serial = replace(graph, attrs={}, axis_attrs={}, op_axes={})
    if len(set(meshes.values())) > 1:
        serial, meshes = spread_over_meshes(serial, meshes)
    attrs: dict[str, DistAttr] = {}
    ops: list[Op] = []
    for op in serial.ops:
        mesh, original = meshes[op.name], _original_name(op, original_names)
        chosen = by_mesh[mesh]
        ops.append(op.with_layout(_on_mesh(op, chosen.ops[original], mesh)))
        for position, value in enumerate(op.results):
            attr = chosen.values[value.name if value.name in original_names else original]
            _check_mesh(op, attr.mesh, mesh)
            users = [meshes[user.name] for user in serial.users[value.name]]
            if users and mesh not in users:
                attr = _as_produced(ops[-1], position, attr)
            attrs[value.name] = DistAttr(mesh, attr.spec, attr.origin)
    return defer_accumulated(serial.with_ops(ops, attrs=attrs, placements={}))


def _as_produced(op: Op, position: int, attr: DistAttr) -> DistAttr:
    """The layout of a result that only other meshes read.

    It stays in the layout in which the op produces it, so that each rank sends its part. A partial result is
    reduced as planned.
    """
    if op.kind in SOURCES or op.layout is None:
        return attr
    produced = result_spec(rule_of(op), position, op.layout, lookup(op.kind).reduction)
    return attr if produced.partial else replace(attr, spec=produced)


def _original_name(op: Op, original_names: Collection[str]) -> str:
    """Name of the op of the serial graph from which an op was derived for a stage.

    A copy of a source and a part of a sum are named after the original op, with a suffix.
    """
    name = op.name
    while name not in original_names:
        name, dot, _ = name.rpartition(".")
        assert dot, f"op %{op.name} is derived from no op of the serial graph"
    return name


def _on_mesh(op: Op, layout: OpLayout, mesh: ProcessMesh) -> OpLayout:
    """The layout on another mesh with the same axes."""
    _check_mesh(op, layout.mesh, mesh)
    return layout if layout.mesh == mesh else replace(layout, mesh=mesh)


def _check_mesh(op: Op, planned: ProcessMesh, mesh: ProcessMesh) -> None:
    if (planned.sizes, planned.weights) != (mesh.sizes, mesh.weights):
        raise ShardingError(f"{op} is laid out for {planned} but runs on {mesh}; formulate it for that mesh")
