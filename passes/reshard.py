"""Make every change of layout an explicit op.

In:   a completed graph, in which an op may read a value in another layout than it is stored in, or leave it
in one.
Out:  a graph in which every op reads and leaves its values exactly as they are stored; the differences are
`reshard` ops.
Invariant: same program; no layout names an axis of one rank, which splits nothing; a new value of a param
      lies as the old one; users that need the same layout of a value share one reshard; a result is resharded
      right where it is made (so that communication can start early), an operand right before its first
      reader. What ops of another mesh read in several layouts goes there once, in the layout from which the
      others cost least, where that sends no more. Where an op reads neighbours' positions of a split dim (see
      `operand_windows`), a `comm.halo` lengthens the local blocks: the same global tensor in the same layout,
      blocks that overlap; or in the layout of a mesh with the same ranks in another order.

    %p : f32[64, 128] [dp, _] = matmul(%a, %w2)  {k:tp}     %p.raw : [dp, _] partial(tp) = matmul(%a, %w2)
                                                       ->   %p     : [dp, _]             = reshard(%p.raw)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distgraph.errors import GraphError
from distgraph.ir.dtypes import itemsize
from distgraph.ir.gc_pause import collector_paused
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import Windows, operand_layout, operand_windows, result_layout
from distgraph.ir.sharding_spec import DistAttr, Origin
from distgraph.passes.pass_registry import register_pass
from distgraph.passes.redistribution.cross_mesh import transfer_cost
from distgraph.passes.redistribution.planner import redistribute_cost
from distgraph.passes.redistribution.tiles import without_unit_axes

Key = tuple[str, DistAttr] | tuple[str, DistAttr, Windows]
Landings = dict[tuple[str, ProcessMesh], DistAttr]


class Shared(dict[Key, Value]):
    """Copies made so far: value and layout (and windows) -> copy.

    Attributes:
        landings: value and another mesh -> layout in which the value goes there, where it is read in several.
    """

    def __init__(self, landings: Landings) -> None:
        super().__init__()
        self.landings = landings


@register_pass("reshard", requires="completed", stage="resharded")
@collector_paused()
def reshard(graph: Graph) -> Graph:
    """Make every change of layout an explicit `reshard` op.

    Raises:
        GraphError: the graph is not completed.
    """
    bare = next((op for op in graph.ops if op.layout is None), None)
    if bare is not None:
        raise GraphError(f"{bare} has no layout; run the pass complete before reshard")
    graph = _without_unit_axes(graph)
    attrs = dict(graph.attrs)
    attrs.update(_lying_as_replaced(graph))
    ops: list[Op] = []
    shared = Shared(_landings(graph, attrs))
    for op in graph.ops:
        if op.kind == "reshard":
            ops.append(op)
            continue
        operands = tuple(_with_halo(op, i, ops, attrs, shared) for i in range(len(op.operands)))
        results, after = _results(op, attrs)
        both = zip((*operands, *results), (*op.operands, *op.results), strict=True)
        same = all(new is old for new, old in both)
        ops.append(op if same else replace(op, operands=operands, results=results))
        ops.extend(after)
    updates = tuple((old, _as_replaced(graph, old, new, ops, attrs, shared)) for old, new in graph.updates)
    return graph.with_ops(ops, attrs=attrs, updates=updates)


def _without_unit_axes(graph: Graph) -> Graph:
    """The same layouts with no mention of axes of one rank."""
    meshes = {*graph.meshes, *(op.layout.mesh for op in graph.ops if op.layout is not None)}
    if all(1 not in mesh.shape for mesh in meshes):
        return graph
    attrs = {
        name: replace(attr, spec=without_unit_axes(attr.spec, attr.mesh))
        for name, attr in graph.attrs.items()
    }
    return graph.with_ops((replace(op, layout=_layout_without(op)) for op in graph.ops), attrs=attrs)


def _layout_without(op: Op) -> OpLayout:
    layout = op.layout
    assert layout is not None
    long = {axis for axis, size in layout.mesh.sizes.items() if size > 1}
    axes = ((index, tuple(axis for axis in split if axis in long)) for index, split in layout.axes)
    partial = tuple((axis, group) for axis, group in layout.partial if axis in long)
    return OpLayout(layout.mesh, tuple((index, split) for index, split in axes if split), partial)


def _lying_as_replaced(graph: Graph) -> dict[str, DistAttr]:
    """New values of params that nothing else reads are kept right where the old value lies."""
    returned = {value.name for _, value in graph.outputs}
    return {
        new.name: replace(graph.attrs[old], origin=Origin("rule", f"replaces %{old}"))
        for old, new in graph.updates
        if not graph.users[new.name]
        and new.name not in returned
        and not graph.attrs[new.name].pinned
        and graph.producers[new.name].kind not in SOURCES
        and graph.producers[new.name].kind != "reshard"
    }


def _as_replaced(
    graph: Graph, old: str, new: Value, ops: list[Op], attrs: dict[str, DistAttr], shared: Shared
) -> Value:
    """The new value of a param in the layout of the one that it replaces."""
    wanted = attrs[old]
    if attrs[new.name] == wanted:
        return new
    key = (new.name, wanted)
    if key not in shared:
        shared[key] = replace(new, name=f"{new.name}.r{len(shared)}")
        attrs[shared[key].name] = wanted
        ops.append(replace(_reshard_op(graph.producers[new.name], new, shared[key], wanted), role="optimize"))
    return shared[key]


def _with_halo(op: Op, position: int, ops: list[Op], attrs: dict[str, DistAttr], shared: Shared) -> Value:
    windows = operand_windows(op, position)
    if not windows:
        return _operand(op, position, ops, attrs, shared)
    value, wanted = op.operands[position], _wanted(op, position)
    if not fetches(attrs[value.name], wanted):
        value = _operand(op, position, ops, attrs, shared)
    key = (value.name, wanted, windows)
    if key not in shared:
        shared[key] = replace(value, name=f"{value.name}.h{len(shared)}")
        attrs[shared[key].name] = wanted
        made = _reshard_op(op, value, shared[key], wanted)
        axes = tuple(axis for dim, _ in windows for axis in wanted.spec.dims[dim])
        ops.append(replace(made, kind="comm.halo", attrs={"axes": axes, "windows": windows}))
    return shared[key]


def fetches(held: DistAttr, wanted: DistAttr) -> bool:
    """Whether windows of a layout are fetched straight from another one: the same ranks in another order."""
    same = held.mesh.rank_set == wanted.mesh.rank_set and held.spec.partial == wanted.spec.partial
    return same and held.mesh != wanted.mesh


def _wanted(op: Op, position: int) -> DistAttr:
    """Layout in which an op reads an operand, or the blocks that its windows belong to."""
    assert op.layout is not None
    return DistAttr(op.layout.mesh, operand_layout(op, position), Origin("op", f"%{op.name} {op.kind}"))


def _operand(op: Op, position: int, ops: list[Op], attrs: dict[str, DistAttr], shared: Shared) -> Value:
    value, wanted = op.operands[position], _wanted(op, position)
    if attrs[value.name] == wanted:
        return value
    landing = shared.landings.get((value.name, wanted.mesh), wanted)
    landed = _copy(op, value, landing, value, ops, attrs, shared)
    return landed if landing == wanted else _copy(op, value, wanted, landed, ops, attrs, shared)


def _copy(
    op: Op,
    value: Value,
    wanted: DistAttr,
    source: Value,
    ops: list[Op],
    attrs: dict[str, DistAttr],
    shared: Shared,
) -> Value:
    """A value in another layout, made of `source`, which is the value itself or a copy of it."""
    key = (value.name, wanted)
    if key not in shared:
        shared[key] = replace(value, name=f"{value.name}.r{len(shared)}")
        attrs[shared[key].name] = wanted
        ops.append(_reshard_op(op, source, shared[key], wanted))
    return shared[key]


def _landings(graph: Graph, attrs: Mapping[str, DistAttr]) -> Landings:
    """Where values go once that ops of another mesh read in several layouts."""
    wanted: dict[tuple[str, ProcessMesh], dict[DistAttr, None]] = {}
    for op in graph.ops:
        if op.kind == "reshard" or op.layout is None:
            continue
        ranks = op.layout.mesh.rank_set
        for position, value in enumerate(op.operands):
            if attrs[value.name].mesh.rank_set == ranks:
                continue
            there = _wanted(op, position)
            if not there.spec.partial:
                wanted.setdefault((value.name, there.mesh), {}).setdefault(there)
    return {
        key: landing
        for key, layouts in wanted.items()
        if len(layouts) > 1
        and (landing := _landing(graph.values[key[0]], attrs[key[0]], list(layouts))) is not None
    }


def _landing(value: Value, held: DistAttr, wanted: list[DistAttr]) -> DistAttr | None:
    """The layout to arrive in for which least is sent; None where that is more than to send each apart."""
    shape, size = value.shape, itemsize(value.dtype)
    arriving = {there: transfer_cost(shape, size, held, there) for there in wanted}

    def total(landing: DistAttr) -> float:
        mesh = landing.mesh
        onward = (redistribute_cost(shape, size, mesh, landing.spec, there.spec) for there in wanted)
        return arriving[landing] + sum(onward)

    best = min(wanted, key=total)
    return best if total(best) <= sum(arriving.values()) else None


def _results(op: Op, attrs: dict[str, DistAttr]) -> tuple[tuple[Value, ...], list[Op]]:
    if op.kind in SOURCES:
        return op.results, []
    layout = op.layout
    assert layout is not None
    results, after = [], []
    for position, value in enumerate(op.results):
        made = DistAttr(layout.mesh, result_layout(op, position), Origin("op", f"%{op.name} {op.kind}"))
        if attrs[value.name] == made:
            results.append(value)
            continue
        raw = replace(value, name=f"{value.name}.raw")
        attrs[raw.name] = made
        results.append(raw)
        after.append(_reshard_op(op, raw, value, attrs[value.name]))
    return tuple(results), after


def _reshard_op(op: Op, source: Value, target: Value, attr: DistAttr) -> Op:
    return Op("reshard", (source,), (target,), {}, op.role, op.scope, op.source, op.link, OpLayout(attr.mesh))
