"""Makes every change of layout an explicit op.

In:   a completed graph, in which an op may read or produce a value in another layout than it is stored in.
Out:  a graph in which every op reads and produces its values in the layouts in which they are stored;
    `reshard` ops make the differences explicit.
Invariant: the program is the same, and layouts mention no axis of one rank. A new value of a parameter is
      stored in the layout of the old one. Readers that need the same layout of a value share one reshard. A
      result is resharded directly after its op, so that communication can start early; an operand directly
      before its first reader. A value that ops of another mesh read in several layouts is sent there once,
      in the layout from which the others cost least, if that does not send more. If an op reads positions
      of neighbouring blocks of a split dim (see `operand_windows`), a `comm.halo` extends the local blocks:
      the same global tensor with overlapping blocks, in the same layout, or in that of a mesh with the same
      ranks in another order.

    %p : f32[64, 128] [dp, _] = matmul(%a, %w2)  {k:tp}     %p.raw : [dp, _] partial(tp) = matmul(%a, %w2)
                                                       ->   %p     : [dp, _]             = reshard(%p.raw)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distgraph.errors import GraphError
from distgraph.ir.collective_registry import is_collective
from distgraph.ir.dtypes import itemsize
from distgraph.ir.gc_pause import collector_paused
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.loops import with_bodies
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import (
    Windows,
    operand_layout,
    operand_mesh,
    operand_windows,
    result_layout,
    result_mesh,
)
from distgraph.ir.sharding_spec import DistAttr, Origin
from distgraph.passes.pass_registry import register_pass
from distgraph.passes.redistribution.cross_mesh import transfer_cost
from distgraph.passes.redistribution.planner import redistribute_cost
from distgraph.passes.redistribution.tiles import without_unit_axes

Arrivals = dict[tuple[str, ProcessMesh], DistAttr]


@register_pass("reshard", requires="completed", stage="resharded")
@collector_paused()
def reshard(graph: Graph) -> Graph:
    """Make every change of layout an explicit `reshard` op.

    Raises:
        GraphError: the graph is not completed.
    """
    incomplete = next((op for op in graph.ops if op.layout is None), None)
    if incomplete is not None:
        raise GraphError(f"{incomplete} has no layout; run the pass complete before reshard")
    graph = _without_unit_axes(graph.with_ops(with_bodies(op, reshard) for op in graph.ops))
    program = _Program(graph)
    for op in graph.ops:
        program.add(op)
    updates = tuple((old, program.updated(old, new)) for old, new in graph.updates)
    return graph.with_ops(program.ops, attrs=program.attrs, updates=updates)


class _Program:
    """The program with its changes of layout so far.

    Attributes:
        ops: its ops.
        attrs: layouts of all values, those of copies included.
        copies: (value, layout, windows) -> the copy in this layout, with a halo where there are windows.
        arrivals: (value, another mesh) -> the layout in which the value is sent to the mesh, if it is read
            there in several.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops: list[Op] = []
        self.attrs = {**graph.attrs, **_layouts_of_updates(graph)}
        self.copies: dict[tuple[str, DistAttr, Windows], Value] = {}
        self.arrivals = _arrivals(graph, self.attrs)

    def add(self, op: Op) -> None:
        """Add an op, with the changes of layout before and after it."""
        if op.kind == "reshard" or is_collective(op):
            self.ops.append(op)
            return
        operands = tuple(self._with_halo(op, i) for i in range(len(op.operands)))
        results, after = _results(op, self.attrs)
        both = zip((*operands, *results), (*op.operands, *op.results), strict=True)
        same = all(new is old for new, old in both)
        self.ops.append(op if same else replace(op, operands=operands, results=results))
        self.ops.extend(after)

    def updated(self, old: str, new: Value) -> Value:
        """The new value of a parameter in the layout of the value that it replaces."""
        layout = self.attrs[old]
        if self.attrs[new.name] == layout:
            return new
        return self._copy(replace(self.graph.producers[new.name], role="optimize"), new, layout, new)

    def _with_halo(self, op: Op, position: int) -> Value:
        """An operand in the layout in which an op reads it, with a halo if its windows need one."""
        windows = operand_windows(op, position)
        if not windows:
            return self._operand(op, position)
        value, layout = op.operands[position], _read_layout(op, position)
        if not fetches(self.attrs[value.name], layout):
            value = self._operand(op, position)
        return self._copy(op, value, layout, value, windows)

    def _operand(self, op: Op, position: int) -> Value:
        """An operand in the layout in which an op reads it."""
        value = op.operands[position]
        stored = self.attrs[value.name]
        if stored.mesh == operand_mesh(op, position) and stored.spec == operand_layout(op, position):
            return value  # as most are
        layout = _read_layout(op, position)
        arrival = self.arrivals.get((value.name, layout.mesh), layout)
        arrived = self._copy(op, value, arrival, value)
        return arrived if arrival == layout else self._copy(op, value, layout, arrived)

    def _copy(self, op: Op, value: Value, layout: DistAttr, source: Value, windows: Windows = ()) -> Value:
        """A value in another layout, made for an op of `source`: the value itself or a copy of it."""
        key = (value.name, layout, windows)
        if key not in self.copies:
            copy = replace(value, name=f"{value.name}.{'h' if windows else 'r'}{len(self.copies)}")
            self.copies[key], self.attrs[copy.name] = copy, layout
            change = _reshard_op(op, source, copy, layout)
            if windows:
                axes = tuple(axis for dim, _ in windows for axis in layout.spec.dims[dim])
                change = replace(change, kind="comm.halo", attrs={"axes": axes, "windows": windows})
            self.ops.append(change)
        return self.copies[key]


def _without_unit_axes(graph: Graph) -> Graph:
    """The graph with layouts that do not mention axes of one rank."""
    meshes = {*graph.meshes, *(op.layout.mesh for op in graph.ops if op.layout is not None)}
    if all(1 not in mesh.shape for mesh in meshes):
        return graph
    attrs = {
        name: replace(attr, spec=without_unit_axes(attr.spec, attr.mesh))
        for name, attr in graph.attrs.items()
    }
    ops = (op if op.layout is None else op.with_layout(op.layout.without_unit_axes) for op in graph.ops)
    return graph.with_ops(ops, attrs=attrs)


def _layouts_of_updates(graph: Graph) -> dict[str, DistAttr]:
    """New values of parameters that nothing else reads -> the layout of the old value."""
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


def fetches(stored: DistAttr, read: DistAttr) -> bool:
    """Whether a halo fetches windows directly from a layout on the same ranks in another order."""
    same = stored.mesh.rank_set == read.mesh.rank_set and stored.spec.partial == read.spec.partial
    return same and stored.mesh != read.mesh


def _read_layout(op: Op, position: int) -> DistAttr:
    """Layout in which an op reads an operand; for an operand with windows that of its blocks without them."""
    mesh = operand_mesh(op, position)
    return DistAttr(mesh, operand_layout(op, position), Origin("op", f"%{op.name} {op.kind}"))


def _arrivals(graph: Graph, attrs: Mapping[str, DistAttr]) -> Arrivals:
    """The layouts in which values are sent to a mesh whose ops read them in several layouts."""
    read: dict[tuple[str, ProcessMesh], dict[DistAttr, None]] = {}
    for op in graph.ops:
        if op.kind == "reshard" or is_collective(op) or op.layout is None:
            continue
        ranks = op.layout.mesh.rank_set
        for position, value in enumerate(op.operands):
            if attrs[value.name].mesh.rank_set == ranks:
                continue
            layout = _read_layout(op, position)
            if not layout.spec.partial:
                read.setdefault((value.name, layout.mesh), {}).setdefault(layout)
    return {
        key: arrival
        for key, layouts in read.items()
        if len(layouts) > 1
        and (arrival := _arrival(graph.values[key[0]], attrs[key[0]], list(layouts))) is not None
    }


def _arrival(value: Value, stored: DistAttr, layouts: list[DistAttr]) -> DistAttr | None:
    """The layout of arrival with the least total cost; None if separate transfers cost less."""
    shape, size = value.shape, itemsize(value.dtype)
    transfers = {layout: transfer_cost(shape, size, stored, layout) for layout in layouts}

    def total(arrival: DistAttr) -> float:
        mesh = arrival.mesh
        onward = (redistribute_cost(shape, size, mesh, arrival.spec, layout.spec) for layout in layouts)
        return transfers[arrival] + sum(onward)

    best = min(layouts, key=total)
    return best if total(best) <= sum(transfers.values()) else None


def _results(op: Op, attrs: dict[str, DistAttr]) -> tuple[tuple[Value, ...], list[Op]]:
    """The results of an op in the layouts in which it produces them, and the reshards after it."""
    if op.kind in SOURCES:
        return op.results, []
    results, after = [], []
    for position, value in enumerate(op.results):
        mesh, spec, stored = result_mesh(op, position), result_layout(op, position), attrs[value.name]
        if stored.mesh == mesh and stored.spec == spec:
            results.append(value)
            continue
        produced = DistAttr(mesh, spec, Origin("op", f"%{op.name} {op.kind}"))
        raw = replace(value, name=f"{value.name}.raw")
        attrs[raw.name] = produced
        results.append(raw)
        after.append(_reshard_op(op, raw, value, stored))
    return tuple(results), after


def _reshard_op(op: Op, source: Value, target: Value, attr: DistAttr) -> Op:
    return Op("reshard", (source,), (target,), {}, op.role, op.scope, op.source, op.link, OpLayout(attr.mesh))
