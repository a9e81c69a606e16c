"""First phase of completion: every op gets a mesh.

In:   a graph in which some values carry a mesh (annotations) and some ops a placement.
Out:  op name -> mesh for every op; sources that several meshes read are cloned, one a mesh, when they are
      free to load anywhere (constants, scalar inputs); others stay where their first reader is.
Invariant: deterministic in program order. An op that the user placed keeps its mesh; otherwise, in this
order:
      annotated results, annotated operands (the larger mesh where one contains the other, else the later
      one), the operand that was produced last, the next op in program order that has a mesh. A single number
      goes where tensors are: among operands it counts only where all are such. Backward ops take the mesh of
      their forward op, optimizer ops that of their parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distgraph.errors import ShardingError
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.mesh import ProcessMesh

_ANYWHERE = ("constant", "full", "iota")  # free to be made on every mesh that reads them


def place(graph: Graph, default: ProcessMesh | None = None) -> tuple[Graph, dict[str, ProcessMesh]]:
    """Meshes of all ops.

    Args:
        graph: annotated graph.
        default: mesh of a graph without any annotation.

    Returns:
        the graph (with cloned sources) and op name -> mesh.

    Raises:
        ShardingError: nothing names a mesh and there is no default.
    """
    known = dict.fromkeys(attr.mesh for attr in graph.attrs.values())
    known.update(dict.fromkeys(graph.placements.values()))
    if not known:
        if default is None:
            raise ShardingError(
                f"graph @{graph.name} has no annotation that names a mesh; annotate a tensor with "
                "dg.shard_tensor or give a default mesh"
            )
        known[default] = None
    if len(known) == 1:
        (mesh,) = known
        return graph, {op.name: mesh for op in graph.ops}
    meshes = _assign(graph)
    return clone_sources(graph, meshes)


def _assign(graph: Graph) -> dict[str, ProcessMesh]:
    meshes: dict[str, ProcessMesh] = {}
    of_value: dict[str, ProcessMesh] = {}
    position = {v.name: i for i, op in enumerate(graph.ops) for v in op.results}
    waiting: list[Op] = []
    for op in graph.ops:
        mesh = graph.placements.get(op.name) or _annotated(graph, op.results)
        if mesh is None and op.kind in SOURCES:
            continue  # decided by its readers
        if mesh is None and op.role == "backward" and op.link:
            mesh = meshes.get(op.link) or of_value.get(op.link)
        if mesh is None and op.role == "optimize" and op.link:
            mesh = of_value.get(op.link)
        if mesh is None:
            mesh = _annotated(graph, op.operands) or _latest(op.operands, of_value, position)
        if mesh is None:
            waiting.append(op)
            continue
        _settle(graph, op, mesh, meshes, of_value)
        for earlier in waiting:
            _settle(graph, earlier, mesh, meshes, of_value)
        waiting.clear()
    last = next(reversed(meshes.values()))
    for op in waiting:
        _settle(graph, op, last, meshes, of_value)
    for op in graph.ops:
        if op.name not in meshes:  # a source that nobody reads
            _settle(graph, op, last, meshes, of_value)
    return meshes


def _settle(
    graph: Graph, op: Op, mesh: ProcessMesh, meshes: dict[str, ProcessMesh], of_value: dict[str, ProcessMesh]
) -> None:
    meshes[op.name] = mesh
    for value in op.results:
        of_value[value.name] = mesh
    for value in op.operands:
        if value.name not in of_value:
            source = graph.producers[value.name]
            attr = graph.attrs.get(value.name)
            _settle(graph, source, attr.mesh if attr else mesh, meshes, of_value)


def _annotated(graph: Graph, values: Sequence[Value]) -> ProcessMesh | None:
    best: ProcessMesh | None = None
    for value in values:
        attr = graph.attrs.get(value.name)
        if attr is None:
            continue
        if (
            best is None
            or not best.contains(attr.mesh)
            or (attr.mesh.contains(best) and attr.mesh.size > best.size)
        ):
            best = attr.mesh
    return best


def _latest(
    values: Sequence[Value], of_value: Mapping[str, ProcessMesh], position: Mapping[str, int]
) -> ProcessMesh | None:
    placed = [v for v in values if v.name in of_value]
    if not placed:
        return None
    found = [v.name for v in placed if v.shape] or [v.name for v in placed]
    best = of_value[max(found, key=lambda name: position[name])]
    for name in found:
        if of_value[name].size > best.size and of_value[name].contains(best):
            best = of_value[name]
    return best


def clone_sources(graph: Graph, meshes: dict[str, ProcessMesh]) -> tuple[Graph, dict[str, ProcessMesh]]:
    """Give every mesh its own copy of the sources that it reads and that are free to load anywhere.

    Args:
        graph: a serial graph.
        meshes: op name -> mesh; gets those of the copies, which are named after the source with an ending.
    """
    ops: list[Op] = []
    clones: dict[tuple[str, ProcessMesh], Value] = {}
    free = {
        op.name: op
        for op in graph.ops
        if not op.operands and op.name not in graph.attrs and (op.kind in _ANYWHERE or _scalar_input(op))
    }
    for op in graph.ops:
        operands = []
        for value in op.operands:
            source = free.get(value.name)
            if source is None or meshes[source.name] == meshes[op.name]:
                operands.append(value)
                continue
            key = (source.name, meshes[op.name])
            if key not in clones:
                copy = replace(value, name=f"{value.name}.at{len(clones)}")
                clones[key] = copy
                meshes[copy.name] = meshes[op.name]
                ops.append(replace(source, results=(copy,)))
            operands.append(clones[key])
        same = all(new is old for new, old in zip(operands, op.operands, strict=True))
        ops.append(op if same else replace(op, operands=tuple(operands)))
    return graph.with_ops(ops), meshes


def _scalar_input(op: Op) -> bool:
    return op.kind == "input" and op.results[0].shape == ()
