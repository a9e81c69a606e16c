"""Defers sums of gradients from several meshes, so that they are computed once a step.

In:   a serial graph and the mesh of every op (see `assign_meshes`).
Out:  the same program: if an `accumulate` reads a sum of terms from different meshes, each term is
    accumulated on its mesh and the sum is computed once a step. A sum that the user has annotated stays.
Invariant: same numbers up to rounding (accumulation is linear); graphs of one mesh do not change.

    %s = add(%a, %b)      # %a on stage 0, %b on stage 1      %p = accumulate(%a)   %q = accumulate(%b)
    %g = accumulate(%s)   # %b crosses per micro-batch   ->   %g = add(%p, %q)      # %q crosses once

A parameter that two stages share (a tied embedding) has such a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.assign_meshes import clone_sources


def defer_cross_mesh_sums(
    graph: Graph, meshes: Mapping[str, ProcessMesh]
) -> tuple[Graph, dict[str, ProcessMesh]]:
    """Rewrite the accumulations of sums across meshes; returns the graph and the mesh of every op."""
    mesh_of = dict(meshes)
    if len(set(mesh_of.values())) == 1:
        return graph, mesh_of
    ops: list[Op] = []
    for op in graph.ops:
        ops.extend(_split(graph, op, mesh_of) if op.kind == "accumulate" else [op])
    read = {value.name for op in graph.ops for value in op.operands}
    live = {value.name for op in ops for value in op.operands} | graph.live_out
    sums = {op.name for op in graph.ops if op.kind == "add" and op.role == "backward"}
    dead = (sums & read) - live
    return graph.with_ops(op for op in ops if op.name not in dead), mesh_of


def spread_over_meshes(
    graph: Graph, meshes: Mapping[str, ProcessMesh]
) -> tuple[Graph, dict[str, ProcessMesh]]:
    """Adapt a serial graph to the meshes of its ops: clone its sources, defer sums across meshes.

    Returns:
        The graph, and the mesh of every op.
    """
    return defer_cross_mesh_sums(*clone_sources(graph, dict(meshes)))


def _split(graph: Graph, op: Op, mesh_of: dict[str, ProcessMesh]) -> list[Op]:
    """Accumulations of the terms of a sum, and the sum of the accumulations."""
    total = graph.producers[op.operands[0].name]
    attr = graph.attrs.get(total.name)
    if (
        total.kind != "add"
        or total.role != "backward"
        or len(graph.users[total.name]) != 1
        or total.name in graph.live_out
        or (attr is not None and attr.pinned)
    ):
        return [op]
    if not _crosses(graph, total, mesh_of):
        return [op]
    accumulations: list[Op] = []
    terms: list[Value] = []
    for number, term in enumerate(total.operands):
        value = replace(op.result, name=f"{op.name}.{number}")
        part = replace(op, operands=(term,), results=(value,), link=total.link or op.link)
        mesh_of[part.name] = mesh_of[graph.producers[term.name].name]
        accumulations += _split(graph, part, mesh_of)
        terms.append(value)
    mesh_of[op.name] = mesh_of[total.name]
    return [*accumulations, replace(op, kind="add", operands=tuple(terms), attrs={})]


def _crosses(graph: Graph, total: Op, mesh_of: Mapping[str, ProcessMesh]) -> bool:
    """Whether the terms of a sum (including those of inner sums) come from more than one mesh."""
    for value in total.operands:
        producer = graph.producers[value.name]
        if mesh_of[producer.name] != mesh_of[total.name]:
            return True
        if producer.kind == "add" and producer.role == "backward" and _crosses(graph, producer, mesh_of):
            return True
    return False
