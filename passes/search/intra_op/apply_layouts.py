"""A train graph on the meshes of its stages, every op and value laid out: what `build` takes.

*In:* a serial graph, a mesh for every op, layouts from one formulation a stage. *Out:* the completed graph.
*Invariant:* annotations stay; what only other meshes read leaves as it is made; what stages share is loaded
on each of them where that costs nothing, and sums of gradients from several stages leave the micro-batch part
(`postpone`), as in completion.

Layouts may come from a mesh of other ranks: only its axes and their sizes count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distgraph.errors import ShardingError
from distgraph.ir.graph import SOURCES, Graph, Op
from distgraph.ir.index_rule import OpLayout, result_spec
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import lookup, rule_of
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.deferral.defer_cross_mesh_sums import spread_over_meshes
from distgraph.passes.search.intra_op.chosen_layouts import Layouts


def assign(
    graph: Graph,
    placements: Mapping[str, ProcessMesh],
    layouts: Layouts | Mapping[ProcessMesh, Layouts],
) -> Graph:
    """Complete a graph as a search found it.

    Args:
        graph: serial; the one that was formulated.
        placements: op name -> mesh that computes it; of every op.
        layouts: of every op and value, on a mesh with the axes of the op's; one for each mesh, where stages
            have meshes of different axes.

    Returns:
        a completed graph.

    Raises:
        ShardingError: an op has no mesh or no layout, or one for other axes than its mesh has.
    """
    homeless = next((op for op in graph.ops if op.name not in placements), None)
    if homeless is not None:
        raise ShardingError(f"{homeless} of graph @{graph.name} has no mesh; give one for every op")
    used = dict.fromkeys(placements.values())
    by_mesh = dict.fromkeys(used, layouts) if isinstance(layouts, Layouts) else layouts
    bare = next((op for op in graph.ops if op.name not in by_mesh[placements[op.name]].ops), None)
    if bare is not None:
        raise ShardingError(f"{bare} of graph @{graph.name} has no layout; give one for every op")
    meshes = {op.name: placements[op.name] for op in graph.ops}
    known = {value.name: value.name for op in graph.ops for value in op.results}
    serial = replace(graph, attrs={})
    if len(set(meshes.values())) > 1:
        serial, meshes = spread_over_meshes(serial, meshes)
    attrs: dict[str, DistAttr] = {}
    ops: list[Op] = []
    for op in serial.ops:
        mesh, like = meshes[op.name], _original(op, known)
        here = by_mesh[mesh]
        ops.append(replace(op, layout=_moved(op, here.ops[like], mesh)))
        for position, value in enumerate(op.results):
            attr = here.values[known.get(value.name, like)]
            _check(op, attr.mesh, mesh)
            users = [meshes[user.name] for user in serial.users[value.name]]
            if users and mesh not in users:
                attr = _as_made(ops[-1], position, attr)
            attrs[value.name] = replace(attr, mesh=mesh)
    return serial.with_ops(ops, attrs=attrs, placements={})


def _as_made(op: Op, position: int, attr: DistAttr) -> DistAttr:
    """Layout of a result that only other meshes read: no reader here wants it brought together.

    It stays as it is made, so that each rank sends its part; sums are taken as planned.
    """
    if op.kind in SOURCES or op.layout is None:
        return attr
    made = result_spec(rule_of(op), position, op.layout, lookup(op.kind).reduction)
    return attr if made.partial else replace(attr, spec=made)


def _original(op: Op, known: Mapping[str, str]) -> str:
    """Name of the op whose layout one takes that was made for the stages.

    Copies of sources and parts of sums are named after it, with an ending of their own.
    """
    name = op.name
    while name not in known:
        name, dot, _ = name.rpartition(".")
        assert dot, f"op %{op.name} comes from nowhere"
    return name


def _moved(op: Op, layout: OpLayout, mesh: ProcessMesh) -> OpLayout:
    _check(op, layout.mesh, mesh)
    return layout if layout.mesh == mesh else replace(layout, mesh=mesh)


def _check(op: Op, planned: ProcessMesh, mesh: ProcessMesh) -> None:
    if (planned.sizes, planned.weights) != (mesh.sizes, mesh.weights):
        raise ShardingError(f"{op} is laid out for {planned} but runs on {mesh}; formulate it for that mesh")
