"""Completion: derives a mesh and a layout for every value and every op from a few annotations.

In:   a graph (forward, or forward + backward + optimizer) in which some values are annotated by the user.
Out:  the same program; every value has a DistAttr and every op an OpLayout. A fused op that needs an unsplit
      dim is decomposed if the operand is split along it.
Invariant: annotations do not change; no dim loses an axis of its annotation; the result does not depend on a
      visiting order, and a second completion changes nothing. Axes of one rank split nothing; only
      annotations mention them.

    %x  : f32[64, 128] [dp, _] = input          # user             %x  : f32[64, 128] [dp, _]
    %w1 : f32[128, 512] [_, tp] = param         # user             %w1 : f32[128, 512] [_, tp]
    %h  : f32[64, 512] = matmul(%x, %w1)                    ->     %h  : f32[64, 512] [dp, tp]
    %w2 : f32[512, 128] = param                                    %w2 : f32[512, 128] [tp, _]
    %y  : f32[64, 128] = matmul(%h, %w2)                           %y  : f32[64, 128] [dp, _]    #
    partial(tp), reduced

Phases: meshes (`assign_meshes`), axes (`propagate_shardings`), deferred reductions (`communication`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distgraph.errors import ShardingError
from distgraph.errors.arguments import checked_arguments
from distgraph.ir.gc_pause import collector_paused
from distgraph.ir.graph import SOURCES, Graph, Op
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import rule_of
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.assign_meshes import on_meshes, place
from distgraph.passes.communication.defer_cross_mesh_sums import defer_cross_mesh_sums
from distgraph.passes.communication.defer_partials import Partials, deferred_partials, passing_group
from distgraph.passes.decompose import decompose
from distgraph.passes.pass_registry import PassContext, register_pass
from distgraph.passes.propagate_shardings import Policy, Shardings, op_layout, propagate, value_spec
from distgraph.passes.redistribution.source_layout import follow
from distgraph.passes.serial.loops.flatten import flatten, has_loops
from distgraph.passes.serial.loops.restore import restore

_ROUNDS = 4  # a decomposition may contain a fused op that must be decomposed in turn


@checked_arguments(ShardingError)
@collector_paused()
def complete(graph: Graph, default: ProcessMesh | None = None, policy: Policy = "data") -> Graph:
    """Give every value and op its layout.

    Args:
        graph: annotated graph.
        default: mesh to use when nothing is annotated (everything is then replicated on it).
        policy: which annotation wins if two claim one axis: those of "data", of "parameters", the
            "nearest", or of equal ones the "last".

    Raises:
        ShardingError: an annotation does not fit, there is no mesh, or the annotations around an op that the
            user gave axes lead to others.
    """
    if has_loops(graph):
        return restore(complete(flat_on_meshes(graph, default), default, policy))
    graph = on_meshes(graph, default)
    pinned = {name: attr for name, attr in graph.attrs.items() if attr.pinned}
    serial = replace(graph, attrs=pinned)
    graph, meshes = defer_cross_mesh_sums(*place(serial, default))
    shardings = propagate(graph, meshes, policy)
    for _ in range(_ROUNDS):
        split = _to_decompose(graph, shardings, meshes)
        if not split:
            break
        # the serial graph is decomposed, because `place` must see the sums before they are deferred
        serial = decompose(serial, split, meshes if len({*meshes.values()}) > 1 else None)
        graph, meshes = defer_cross_mesh_sums(*place(serial, default))
        shardings = propagate(graph, meshes, policy)
    layouts = {op.name: op_layout(meshes[op.name], shardings.ops[op.name]) for op in graph.ops}
    deferred = deferred_partials(graph, layouts)
    completed = _assemble(graph, meshes, shardings, layouts, deferred)
    check_op_axes(completed)
    return replace(completed, op_axes={})


def flat_on_meshes(graph: Graph, default: ProcessMesh | None = None) -> Graph:
    """The graph with flat loops, each on one mesh: that of the loop.

    Raises:
        ShardingError: as `complete`.
    """
    flat = flatten(graph)
    if flat is graph or len({*flat.meshes, *graph.placements.values()}) < 2:
        return flat
    return flatten(graph, place(on_meshes(graph, default), default)[1])


def check_op_axes(completed: Graph) -> None:
    """Raises ShardingError if an op of a completed graph is split over other axes than the user gave it."""
    for op in completed.ops:
        given = completed.op_axes.get(op.name)
        if given is None or op.layout is None:
            continue
        if tuple(sorted(op.layout.without_unit_axes.axes)) != given.on(op.layout.mesh, str(op)):
            raise ShardingError(
                f"{op} is given the axes {given} ({given.origin.where}) but other annotations lead to "
                f"{op.layout}; take one of them out"
            )


def _to_decompose(graph: Graph, shardings: Shardings, meshes: Mapping[str, ProcessMesh]) -> tuple[str, ...]:
    """Decomposable ops with an operand that is split along a dim that the op needs unsplit."""
    names = []
    for name in shardings.split_whole:
        op = graph.producers[name]
        rule = rule_of(op)
        for value, term in zip(op.operands, rule.operands, strict=True):
            attr = graph.attrs.get(value.name)
            mesh = meshes[graph.producers[value.name].name] if attr is None else attr.mesh
            split_dims = {
                dim
                for axis, (dim, _, _) in shardings.values[value.name].items()
                if dim is not None and mesh.sizes.get(axis, 1) > 1
            }
            if any(rule.whole.intersection(term[dim]) for dim in split_dims):
                names.append(name)
                break
    return tuple(names)


def _assemble(
    graph: Graph,
    meshes: Mapping[str, ProcessMesh],
    shardings: Shardings,
    layouts: Mapping[str, OpLayout],
    deferred: Partials,
) -> Graph:
    """The completed graph."""
    attrs: dict[str, DistAttr] = {}
    ops: list[Op] = []
    partial_axes: dict[str, list[str]] = {}
    for name, axis in sorted(deferred):
        partial_axes.setdefault(name, []).append(axis)
    for op in graph.ops:
        mesh = meshes[op.name]
        for value in op.results:
            attr = graph.attrs.get(value.name)
            if attr is None:
                sharding = shardings.values[value.name]
                spec = value_spec(len(value.shape), mesh, sharding)
                axes = partial_axes.get(value.name)
                if axes:
                    dims = tuple(tuple(a for a in dim if a not in axes) for dim in spec.dims)
                    spec = ShardSpec(dims, tuple((a, "sum") for a in axes))
                attr = DistAttr(mesh, spec, _origin(sharding, op))
            attrs[value.name] = attr
        ops.append(op.with_layout(_layout_of(op, mesh, layouts[op.name], deferred, attrs, layouts)))
    lost = tuple(shardings.lost[key] for key in sorted(shardings.lost))
    return graph.with_ops(ops, attrs=attrs, lost=lost)


def _layout_of(
    op: Op,
    mesh: ProcessMesh,
    layout: OpLayout,
    deferred: Partials,
    attrs: Mapping[str, DistAttr],
    layouts: Mapping[str, OpLayout],
) -> OpLayout:
    """The layout of an op, with the axes over which its operands stay partial."""
    if op.kind in SOURCES or op.kind == "reshard":
        return follow(op, attrs[op.results[0].name])
    passed: dict[str, int] = {}
    for value in op.operands:
        for axis in mesh.axes:
            if (value.name, axis) in deferred and axis not in passed:
                group = passing_group(op, value.name, axis, deferred, layouts)
                if group is not None:
                    passed[axis] = group
    if not passed:
        return layout
    axes = tuple((index, tuple(a for a in split if a not in passed)) for index, split in layout.axes)
    return OpLayout(mesh, tuple((i, split) for i, split in axes if split), tuple(sorted(passed.items())))


def _origin(sharding: Mapping[str, tuple[int | None, int, Origin]], op: Op) -> Origin:
    from_user = dict.fromkeys(o.where for dim, _, o in sharding.values() if dim is not None)
    if not from_user:
        return Origin("default", "replicated: no claim reached it")
    return Origin("rule", f"of %{op.name} {op.kind}, from {', '.join(from_user)}")


@register_pass("complete", requires="serial", stage="completed", excludes=("choose_completion",))
def _run(graph: Graph, context: PassContext) -> Graph:
    """Give every value and op its layout, from the annotations."""
    return complete(graph, context.mesh)
