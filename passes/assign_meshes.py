"""Assigns meshes, the first phase of completion: every op gets a mesh.

In:   a graph in which some values have a mesh (annotations) and some ops a placement.
Out:  the mesh of every op. A source that several meshes read is cloned for each of them if any mesh can
      produce it (constants, scalar inputs); other sources are on the mesh of their first reader.
Invariant: deterministic in program order. An op that the user placed keeps its mesh. The mesh of any other op
      is, in this order of precedence, that of an annotated result; of the forward op of a backward op, of the
      parameter of an optimizer op; of an annotated operand (if one mesh contains the other the larger, else
      that of the later operand); of the operand that was produced last; of the next op in program order that
      has a mesh. Scalar operands count only if all operands are scalars. Of scalars, and where one operand is
      an input of the program, the operand behind most changes of mesh counts instead of the last one: so a
      sum of losses, and an auxiliary loss of a stage in the middle, do not lead back up the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distgraph.errors import ShardingError
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import lookup


def place(graph: Graph, default: ProcessMesh | None = None) -> tuple[Graph, dict[str, ProcessMesh]]:
    """Assign a mesh to every op; `default` is the mesh of a graph without annotations.

    Returns:
        The graph, with cloned sources, and op name -> mesh.

    Raises:
        ShardingError: no annotation names a mesh, and there is no default.
    """
    candidates = dict.fromkeys(attr.mesh for attr in graph.attrs.values())
    candidates.update(dict.fromkeys(graph.placements.values()))
    if not candidates:
        if default is None:
            raise ShardingError(
                f"graph @{graph.name} has no annotation that names a mesh; annotate a tensor with "
                "dg.shard_tensor or give a default mesh"
            )
        candidates[default] = None
    if len(candidates) == 1:
        (mesh,) = candidates
        return graph, {op.name: mesh for op in graph.ops}
    meshes = _assign(graph)
    return clone_sources(graph, meshes)


def on_meshes(graph: Graph, default: ProcessMesh | None = None) -> Graph:
    """The graph with annotations that name axes alone as annotations on the meshes of their ops.

    Annotations of the same tensor that name a mesh stay: they may split it further, as ZeRO does.

    Raises:
        ShardingError: no annotation names a mesh and there is no default, or a mesh does not have an axis.
    """
    if not graph.axis_attrs:
        return graph
    meshes = place(graph, default)[1]
    named = {
        name: graph.axis_attrs[name].on(meshes[op.name], name)
        for name, op in graph.producers.items()
        if name in graph.axis_attrs and name not in graph.attrs
    }
    placements = {op.name: meshes[op.name] for op in graph.ops if op.kind not in SOURCES}
    several = len(set(placements.values())) > 1  # a reader of an annotated tensor stays on its own mesh
    return replace(
        graph,
        attrs={**graph.attrs, **named},
        placements=placements if several else graph.placements,
        axis_attrs={},
    )


def on_other_meshes(graph: Graph, other: Mapping[ProcessMesh, ProcessMesh]) -> Graph:
    """The graph with its annotations and placements on `other` meshes, which have the axes of the former."""
    if all(mesh == each for mesh, each in other.items()):
        return graph
    attrs = {name: replace(attr, mesh=other[attr.mesh]) for name, attr in graph.attrs.items()}
    placements = {name: other[mesh] for name, mesh in graph.placements.items()}
    return replace(graph, attrs=attrs, placements=placements)


def _assign(graph: Graph) -> dict[str, ProcessMesh]:
    meshes: dict[str, ProcessMesh] = {}
    of_value: dict[str, ProcessMesh] = {}
    position = {v.name: i for i, op in enumerate(graph.ops) for v in op.results}
    depth: dict[str, int] = {}
    undecided: list[Op] = []  # ops whose mesh is that of the next op with a mesh
    for op in graph.ops:
        mesh = graph.placements.get(op.name) or _annotated(graph, op.results)
        if mesh is None and op.kind in SOURCES:
            continue  # decided by its readers
        if mesh is None and op.role == "backward" and op.link:
            mesh = meshes.get(op.link) or of_value.get(op.link)
        if mesh is None and op.role == "optimize" and op.link:
            mesh = of_value.get(op.link)
        if mesh is None:
            mesh = _annotated(graph, op.operands) or _latest(graph, op.operands, of_value, position, depth)
        if mesh is None:
            undecided.append(op)
            continue
        _set_mesh(graph, op, mesh, meshes, of_value)
        reached = max(
            (depth[v.name] + (of_value[v.name] != mesh) for v in op.operands if v.name in depth), default=0
        )
        for value in op.operands:
            depth.setdefault(value.name, reached)  # a source, on the mesh of its first reader
        depth.update(dict.fromkeys((v.name for v in op.results), reached))
        for earlier in undecided:
            _set_mesh(graph, earlier, mesh, meshes, of_value)
        undecided.clear()
    last = next(reversed(meshes.values()))
    for op in undecided:
        _set_mesh(graph, op, last, meshes, of_value)
    for op in graph.ops:
        if op.name not in meshes:  # a source without readers
            _set_mesh(graph, op, last, meshes, of_value)
    return meshes


def _set_mesh(
    graph: Graph, op: Op, mesh: ProcessMesh, meshes: dict[str, ProcessMesh], of_value: dict[str, ProcessMesh]
) -> None:
    """Set the mesh of an op, and of the sources that it is the first to read."""
    meshes[op.name] = mesh
    for value in op.results:
        of_value[value.name] = mesh
    for value in op.operands:
        if value.name not in of_value:
            source = graph.producers[value.name]
            attr = graph.attrs.get(value.name)
            _set_mesh(graph, source, attr.mesh if attr else mesh, meshes, of_value)


def _annotated(graph: Graph, values: Sequence[Value]) -> ProcessMesh | None:
    """The mesh of the annotated values: of two meshes the one that contains the other, else the later."""
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
    graph: Graph,
    values: Sequence[Value],
    of_value: Mapping[str, ProcessMesh],
    position: Mapping[str, int],
    depth: Mapping[str, int],
) -> ProcessMesh | None:
    """The mesh of the value that was produced last, or a larger mesh of another value that contains it.

    Args:
        graph, values: the operands of an op.
        of_value, position: mesh and place in the program of every value so far.
        depth: changes of mesh before a value, which come first for scalars and inputs of the program.
    """
    placed = [v for v in values if v.name in of_value]
    if not placed:
        return None
    shaped = [v.name for v in placed if v.shape]
    names = shaped or [v.name for v in placed]
    downstream = not shaped or any(graph.producers[name].kind == "input" for name in names)
    best = of_value[max(names, key=lambda name: (depth.get(name, 0) * downstream, position[name]))]
    for name in names:
        if of_value[name].size > best.size and of_value[name].contains(best):
            best = of_value[name]
    return best


def clone_sources(graph: Graph, meshes: dict[str, ProcessMesh]) -> tuple[Graph, dict[str, ProcessMesh]]:
    """Clone sources that any mesh can produce, so that every mesh that reads one has its own copy.

    `meshes` (op name -> mesh) is extended by the copies, which are named after their source.
    """
    ops: list[Op] = []
    clones: dict[tuple[str, ProcessMesh], Value] = {}
    cloneable = {
        op.name: op
        for op in graph.ops
        if not op.operands and op.name not in graph.attrs and (lookup(op.kind).anywhere or _scalar_input(op))
    }
    for op in graph.ops:
        operands = []
        for value in op.operands:
            source = cloneable.get(value.name)
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
