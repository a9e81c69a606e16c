"""Sums of gradients from several meshes leave the micro-batch part.

In:   a serial graph and the mesh of every op (see `place`).
Out:  the same program: where an `accumulate` reads a sum whose terms are made on different meshes, each term
      is accumulated where it is made and the sum is taken once a step.
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


def postpone(graph: Graph, meshes: Mapping[str, ProcessMesh]) -> tuple[Graph, dict[str, ProcessMesh]]:
    """Rewrite the accumulations of sums across meshes; returns the graph and the mesh of every op."""
    home = dict(meshes)
    if len(set(home.values())) == 1:
        return graph, home
    ops: list[Op] = []
    for op in graph.ops:
        ops.extend(_split(graph, op, home) if op.kind == "accumulate" else [op])
    read = {value.name for op in graph.ops for value in op.operands}
    kept = {value.name for op in ops for value in op.operands} | graph.live_out
    sums = {op.name for op in graph.ops if op.kind == "add" and op.role == "backward"}
    dead = (sums & read) - kept
    return graph.with_ops(op for op in ops if op.name not in dead), home


def spread_over_meshes(
    graph: Graph, meshes: Mapping[str, ProcessMesh]
) -> tuple[Graph, dict[str, ProcessMesh]]:
    """What several meshes ask of a graph whose ops have theirs: free sources are cloned, one a mesh, and sums
    across meshes leave the micro-batch part.

    Args:
        graph: a serial graph.
        meshes: op name -> mesh, of every op.

    Returns:
        the graph, and the mesh of every op.
    """
    return postpone(*clone_sources(graph, dict(meshes)))


def _split(graph: Graph, op: Op, home: dict[str, ProcessMesh]) -> list[Op]:
    """Accumulations of the terms of a sum, and the sum of the accumulations."""
    total = graph.producers[op.operands[0].name]
    if (
        total.kind != "add"
        or total.role != "backward"
        or len(graph.users[total.name]) != 1
        or total.name in graph.live_out
    ):
        return [op]
    if not _crosses(graph, total, home):
        return [op]
    made: list[Op] = []
    terms: list[Value] = []
    for number, term in enumerate(total.operands):
        value = replace(op.result, name=f"{op.name}.{number}")
        part = replace(op, operands=(term,), results=(value,), link=total.link or op.link)
        home[part.name] = home[graph.producers[term.name].name]
        made += _split(graph, part, home)
        terms.append(value)
    home[op.name] = home[total.name]
    return [*made, replace(op, kind="add", operands=tuple(terms), attrs={})]


def _crosses(graph: Graph, total: Op, home: Mapping[str, ProcessMesh]) -> bool:
    """Whether the terms of a sum (through sums of sums) are made on more than one mesh."""
    for value in total.operands:
        producer = graph.producers[value.name]
        if home[producer.name] != home[total.name]:
            return True
        if producer.kind == "add" and producer.role == "backward" and _crosses(graph, producer, home):
            return True
    return False
