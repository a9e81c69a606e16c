"""The search space of `layout_local_search`: ops with their options, values with their readers, as indices.

In:   a completed graph.
Out:  for every op its possible layouts and, for each of these, the layouts in which it produces its results
    and reads its operands; for every value its producer and its readers.
Invariant: in no option is a contraction computed in fewer parts than by completion (unless its result is
      annotated), or a parameter or state stored in fewer. Annotated values have one option, and so have ops
      that a distributed algorithm computes, with what they read and return.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import SOURCES, Graph, Op
from distgraph.ir.index_rule import OpLayout, choices, operand_spec, result_spec
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import (
    freeze,
    linear_groups,
    lookup,
    operand_layout,
    operand_mesh,
    operand_windows,
    result_layout,
    result_mesh,
    rule_of,
)
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.analysis.layout_change_cost import LayoutNumbers, ValueKind
from distgraph.passes.analysis.redistribution_cost import TOUCH
from distgraph.passes.redistribution.halo import nearest

_OPTIONS = 64  # layouts of one op, at most, for each order of its ranks
_ORDERS = 4  # other orders of the ranks of one mesh, at most


# what a value is to an op: the position of the result, that of the result which it replaces (or -1), and
# positions of operands
Place = tuple[int, ...]
Layouts = tuple[tuple[int, ...], ...]  # for every option, indices of layouts


@dataclass(frozen=True, slots=True)
class Options:
    """The possible layouts of an op; ops that may be laid out alike share them, as those of repeated layers.

    Attributes:
        number: index among all `Options` of a graph.
        layouts: how the op may be computed; first as by completion.
        produced: for every one of them the layout of each result.
        read: for every one of them the layout of each operand.
    """

    number: int
    layouts: tuple[OpLayout, ...]
    produced: Layouts
    read: Layouts


@dataclass(slots=True)
class Node:
    """An op with its options.

    Attributes:
        name: name of the op.
        options: its possible layouts.
        operands, results: indices of values.
        around: indices of the values whose cost depends on the option.
        kind: kind of the op and shapes of its operands.
    """

    name: str
    options: Options
    operands: tuple[int, ...]
    results: tuple[int, ...]
    around: tuple[int, ...] = ()
    kind: tuple[object, ...] = ()


@dataclass(slots=True)
class Edge:
    """A value with its producer and readers.

    Attributes:
        name: name of the value.
        kind: index of its `ValueKind`; values of one kind share their costs.
        producer, position: index of the op that produces it, and of the result.
        readers: (index of an op, index of the operand) of every read.
        replaces: index of the parameter whose new value it is, or -1.
        times: number of times that it is produced in a step.
        touch: cost of copying the whole value locally.
    """

    name: str
    kind: int
    producer: int
    position: int
    readers: list[tuple[int, int]]
    replaces: int
    times: int
    touch: float


class LayoutSpace:
    """Ops, values and layouts of one graph by index."""

    def __init__(self, graph: Graph, times: dict[str, int]) -> None:
        self.graph = graph
        self.layouts = LayoutNumbers()
        self.orders = rank_orders(graph)
        self._options_of: dict[object, Options] = {}
        self._neighbours: dict[int, tuple[int, ...]] = {}
        self._places: dict[int, tuple[Place, ...]] = {}
        position = {name: i for i, name in enumerate(graph.values)}
        self.nodes = [self._node(op, position) for op in graph.ops]
        kinds: dict[ValueKind, int] = {}
        self.edges = self._edges(position, times, kinds)
        self.kinds = list(kinds)
        self._connect()

    def _node(self, op: Op, position: dict[str, int]) -> Node:
        assert op.layout is not None
        pinned = self.graph.attrs[op.name].pinned
        fixed = self._fixed(op, pinned)
        chosen = fixed is not None or op.name in self.graph.algorithms  # an algorithm allows few layouts only
        key = (_signature(op), op.layout, op.role, pinned, chosen, fixed)
        options = self._options_of.get(key)
        if options is None:
            allowed = (op.layout,) if chosen else self._allowed(op, op.layout)
            numbers = self._numbers(op, allowed) if fixed is None else ((fixed[0],), (fixed[1],))
            options = self._options_of[key] = Options(len(self._options_of), allowed, *numbers)
        shapes = tuple(v.shape for v in op.operands)
        operands = tuple(position[v.name] for v in op.operands)
        results = tuple(position[v.name] for v in op.results)
        return Node(op.name, options, operands, results, kind=(op.kind, shapes))

    def _fixed(self, op: Op, pinned: bool) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Indices of the layouts in which an op produces and reads values, if its index rule does not tell.

        That is so for a reshard, a source with an annotation, and a loop, whose body decides.
        """
        number = self.layouts.number
        if op.kind == "reshard" or (op.kind in SOURCES and pinned):
            made = tuple(number(self.graph.attrs[value.name]) for value in op.results)
            return made, made * len(op.operands)
        if lookup(op.kind).boundary is None:
            return None
        begins = ((result_mesh(op, i), result_layout(op, i)) for i in range(len(op.results)))
        ends = ((operand_mesh(op, i), operand_layout(op, i)) for i in range(len(op.operands)))
        made, read = (tuple(number(DistAttr(*pair)) for pair in pairs) for pairs in (begins, ends))
        return made, read

    def _numbers(self, op: Op, allowed: tuple[OpLayout, ...]) -> tuple[Layouts, Layouts]:
        """For every option, indices of the layouts in which an op produces and reads values."""
        rule, linear, reduction = rule_of(op), linear_groups(op), lookup(op.kind).reduction
        number = self.layouts.number
        produced = tuple(
            tuple(
                number(DistAttr(o.mesh, result_spec(rule, i, o, reduction))) for i in range(len(op.results))
            )
            for o in allowed
        )
        read = tuple(
            tuple(
                number(DistAttr(o.mesh, operand_spec(rule, i, o, linear)), operand_windows(op, i, o))
                for i in range(len(op.operands))
            )
            for o in allowed
        )
        return produced, read

    def _allowed(self, op: Op, completed: OpLayout) -> tuple[OpLayout, ...]:
        costly = lookup(op.kind).cost == "matmul"
        groups = () if len(op.results) != 1 or costly or op.role == "optimize" else linear_groups(op)
        options = [o for o in choices(rule_of(op), completed.mesh, groups) if o != completed]
        annotated = op.role == "forward" and self.graph.attrs[op.name].pinned  # perhaps replicated on purpose
        if (costly and not annotated) or op.kind in ("param", "state"):
            options = [o for o in options if _parts(o) >= _parts(completed)]
        options = [completed, *options[: _OPTIONS - 1]]
        others = self.orders.get(completed.mesh, ()) if op.operands else ()
        return (*options, *(replace(option, mesh=mesh) for mesh in others for option in options))

    def _edges(
        self, position: dict[str, int], times: dict[str, int], kinds: dict[ValueKind, int]
    ) -> list[Edge]:
        graph = self.graph
        replaced = {new.name: position[old] for old, new in graph.updates}
        leaving = {value.name for _, value in graph.outputs}
        computed = (graph.producers[name] for name in graph.algorithms)
        fixed = {value.name for op in computed for value in (*op.operands, *op.results)}
        edges = []
        for number, op in enumerate(graph.ops):
            for place, value in enumerate(op.results):
                attr = graph.attrs[value.name]
                pinned = attr if attr.pinned or value.name in fixed else None
                source = op.kind in SOURCES
                size = itemsize(value.dtype)
                kind = ValueKind(value.shape, size, pinned, value.name in leaving, source)
                number_of_kind = kinds.setdefault(kind, len(kinds))
                replaces = replaced.get(value.name, -1)
                touch = TOUCH * value.nbytes
                edges.append(
                    Edge(value.name, number_of_kind, number, place, [], replaces, times[value.name], touch)
                )
        for number, node in enumerate(self.nodes):
            for place, value_number in enumerate(node.operands):
                edges[value_number].readers.append((number, place))
        return edges

    def _connect(self) -> None:
        updated_by: dict[int, list[int]] = {}
        for number, edge in enumerate(self.edges):
            if edge.replaces >= 0:
                updated_by.setdefault(edge.replaces, []).append(number)
        free = [
            self.graph.ops[e.producer].kind in SOURCES and self.kinds[e.kind].shape == () for e in self.edges
        ]
        for node in self.nodes:
            # scalar inputs cost nothing and would make all ops neighbours of each other
            around = dict.fromkeys(v for v in (*node.operands, *node.results) if not free[v])
            for value in node.results:
                around.update(dict.fromkeys(updated_by.get(value, ())))
            node.around = tuple(around)

    def neighbours(self, number: int) -> tuple[int, ...]:
        """Indices of the ops that produce or read the values around an op."""
        neighbours = self._neighbours.get(number)
        if neighbours is None:
            near: dict[int, None] = {}
            for value in self.nodes[number].around:
                edge = self.edges[value]
                near[edge.producer] = None
                near.update(dict.fromkeys(reader for reader, _ in edge.readers))
                if edge.replaces >= 0:
                    near[self.edges[edge.replaces].producer] = None
            near.pop(number, None)
            neighbours = self._neighbours[number] = tuple(near)
        return neighbours

    def places(self, number: int) -> tuple[Place, ...]:
        """For every value around an op, what it is to the op."""
        places = self._places.get(number)
        if places is None:
            places = self._places[number] = tuple(self._place(number, v) for v in self.nodes[number].around)
        return places

    def _place(self, number: int, value: int) -> Place:
        edge = self.edges[value]
        replaced = self.edges[edge.replaces] if edge.replaces >= 0 else None
        results = (e.position if e is not None and e.producer == number else -1 for e in (edge, replaced))
        return *results, *(operand for reader, operand in edge.readers if reader == number)


def _signature(op: Op) -> object:
    """A key that is equal for ops with equal possible layouts on one mesh, apart from annotations."""
    rule, declared = rule_of(op), lookup(op.kind)
    if op.kind in SOURCES or not (rule.sliding or callable(declared.linear)):
        return op.kind, id(rule)  # rules are kept by the ops, and shared by ops of equal shapes
    attrs = tuple(sorted((name, freeze(attr)) for name, attr in op.attrs.items()))
    return op.kind, id(rule), tuple(v.shape for v in (*op.operands, *op.results)), attrs


def rank_orders(graph: Graph) -> dict[ProcessMesh, tuple[ProcessMesh, ...]]:
    """For every mesh: its other rank orders, under which an op reads less from other ranks."""
    orders: dict[ProcessMesh, dict[ProcessMesh, None]] = {}
    for op in graph.ops:
        if op.layout is not None and rule_of(op).sliding:
            mesh = nearest(op, op.layout)
            if mesh != op.layout.mesh:
                orders.setdefault(op.layout.mesh, {})[mesh] = None
    return {mesh: tuple(others)[:_ORDERS] for mesh, others in orders.items()}


def _parts(layout: OpLayout) -> int:
    return layout.mesh.count(axis for _, axes in layout.axes for axis in axes)
