"""Programs with flat loops: the ops of a body stand once in the program itself, between ops of its boundary.

*In:* a graph with loops. *Out:* the same program in which each loop is replaced by its body; `restore` leads
back.
The op of the first result holds the kind and the attributes of the loop (attribute `loop`).
*Invariant:* values of a body `b` of loop `%l` are named `l/b/...`, and results of loops keep their names; ops
that are added to a flat program are named after an op of the body, as `decompose` does, or belong outside.

    %h, %y = scan(%h0, %xs, %w) {body=...}   ->   %h/body/carry0 = loop.enter(%h0)
                                                  %h/body/x0     = loop.item(%xs)
                                                  %h/body/w      = loop.fixed(%w)
                                                  %h/body/1      = ...
                                                  %h             = loop.leave(%h/body/carry0, %h/body/1)
                                                  %y             = loop.stack(%h/body/1) {length=8}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from distgraph.errors import ShardingError
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.loops import CARRY, FIXED, TURN, Loop, source_values
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import lookup
from distgraph.ir.sharding_spec import AxisAttr, DistAttr, OpAxes, ShardSpec
from distgraph.ops.control import loop_boundary as boundary

BODY, CONDITION = "body", "condition"
HELD, KIND, RESULTS = "loop", "loop_kind", "loop_results"
"""Attributes of the op of the first result of a flat loop: those of the loop, its kind, names of results."""

_NONE: Mapping[str, Value] = MappingProxyType({})


def has_loops(graph: Graph) -> bool:
    """Whether a graph has loops."""
    return any(lookup(op.kind).bodies for op in graph.ops)


def is_flat(graph: Graph) -> bool:
    """Whether a graph has flat loops."""
    return any(HELD in op.attrs for op in graph.ops if op.kind in boundary.OUT_OF)


def loops_around(name: str, loops: Collection[str]) -> Iterator[str]:
    """Names of the flat loops whose bodies have an op or a value, the outermost first."""
    parts = name.split("/")
    for count in range(1, len(parts) - 1):
        loop = "/".join(parts[:count])
        if loop in loops and parts[count] in (BODY, CONDITION):
            yield loop


def flat_layers(flat: Graph, layers: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Layers of ops of a program with loops, in the flat program: a loop with all ops of its body."""
    firsts = [op for op in flat.ops if op.kind in boundary.OUT_OF and HELD in op.attrs]
    if not firsts:
        return list(layers)
    result = {value: op.name for op in firsts for value in op.attrs[RESULTS]}
    layer_of = {name: number for number, layer in enumerate(layers) for name in layer}
    names_of: list[list[str]] = [[] for _ in layers]
    for op in flat.ops:
        loop = next(loops_around(op.name, layer_of), None) or result.get(op.name, op.name)
        number = layer_of.get(loop)
        if number is not None and op.role == "forward" and op.kind not in SOURCES:
            names_of[number].append(op.name)
    return [tuple(names) for names in names_of]


def flatten(graph: Graph, meshes: Mapping[str, ProcessMesh] | None = None) -> Graph:
    """The graph with flat loops.

    Args:
        graph: any graph before `reshard`.
        meshes: op name -> mesh; the ops of a loop get its mesh as their placement. None for one mesh.

    Raises:
        ShardingError: a body is annotated with another mesh than that of its loop.
    """
    if not has_loops(graph):
        return graph
    flat = _Flat(meshes or {})
    flat.add(graph, "", None)
    return graph.with_ops(
        flat.ops,
        attrs={**graph.attrs, **flat.attrs},
        axis_attrs={**graph.axis_attrs, **flat.axis_attrs},
        op_axes={**graph.op_axes, **flat.op_axes},
        placements={**graph.placements, **flat.placements},
        algorithms={**graph.algorithms, **flat.algorithms},
    )


class _Flat:
    """A flat program so far."""

    def __init__(self, meshes: Mapping[str, ProcessMesh]) -> None:
        self.meshes = meshes
        self.link, self.role = "", "forward"  # of the loop that is added
        self.ops: list[Op] = []
        self.attrs: dict[str, DistAttr] = {}
        self.axis_attrs: dict[str, AxisAttr] = {}
        self.op_axes: dict[str, OpAxes] = {}
        self.placements: dict[str, ProcessMesh] = {}
        self.algorithms: dict[str, MatmulAlgorithm] = {}

    def add(
        self, graph: Graph, prefix: str, mesh: ProcessMesh | None, replacements: Mapping[str, Value] = _NONE
    ) -> None:
        """Add the ops of a graph, whose names get a prefix; `replacements` are values with another name."""

        def renamed(value: Value) -> Value:
            return replacements.get(value.name) or (
                replace(value, name=prefix + value.name) if prefix else value
            )

        for op in graph.ops:
            if op.results[0].name in replacements:
                continue
            link = prefix + op.link if op.link in graph.values else self.link
            moved = replace(
                op,
                operands=tuple(map(renamed, op.operands)),
                results=tuple(map(renamed, op.results)),
                link=link if prefix else op.link,
                role=self.role if op.role == "forward" else op.role,  # a recomputed loop is backward
            )
            if lookup(op.kind).bodies:
                self.add_loop(moved, mesh or self.meshes.get(op.name))
            else:
                self.append(moved, mesh)
        if prefix:
            self.merge(graph, prefix, mesh, replacements)

    def append(self, op: Op, mesh: ProcessMesh | None) -> None:
        """Add one op of a body on the mesh of its loop."""
        self.ops.append(op)
        if mesh is not None and op.kind not in SOURCES:
            self.placements[op.name] = mesh

    def merge(
        self, graph: Graph, prefix: str, mesh: ProcessMesh | None, replacements: Mapping[str, Value]
    ) -> None:
        """Add what a body says of its values and ops."""
        for name, attr in graph.attrs.items():
            if name in replacements:
                continue
            if mesh is not None and attr.mesh.rank_set != mesh.rank_set and attr.pinned:
                raise ShardingError(
                    f"%{name} in {graph.name} of loop %{prefix.split('/')[0]} is annotated {attr} "
                    f"({attr.origin.where}) but the loop is computed on {mesh}: a loop has one mesh, without "
                    "pipeline stages; annotate it on that mesh"
                )
            self.attrs[prefix + name] = attr
        self.axis_attrs |= {prefix + name: attr for name, attr in graph.axis_attrs.items()}
        self.op_axes |= {prefix + name: axes for name, axes in graph.op_axes.items()}
        self.algorithms |= {prefix + name: algorithm for name, algorithm in graph.algorithms.items()}

    def add_loop(self, op: Op, mesh: ProcessMesh | None) -> None:
        """Add the ops of a loop."""
        loop = Loop(op)
        prefix = f"{op.name}/{BODY}/"
        sources = source_values(loop.body)
        replacements: dict[str, Value] = {}
        operands = dict(zip(loop.operand_names, op.operands, strict=True))
        for name, inner in sources.items():
            value = replacements[inner.name] = replace(inner, name=prefix + inner.name)
            read = () if name == TURN else (operands[name],)
            self.append(_boundary_op(op, _kind_into(name), read, value), mesh)
        before = self.link, self.role
        self.link, self.role = op.link, op.role
        if loop.condition is not None:
            self.add_condition(loop, prefix, mesh)
        self.add(loop.body, prefix, mesh, replacements)
        self.link, self.role = before

        self.merge_sources(loop.body, prefix, sources.values())
        self.add_results(loop, prefix, mesh)

    def add_results(self, loop: Loop, prefix: str, mesh: ProcessMesh | None) -> None:
        """Add the ops that make the results of a loop."""

        def inside(value: Value) -> Value:
            return replace(value, name=prefix + value.name)

        made: list[tuple[str, tuple[Value, ...]]] = []
        made += [(boundary.LEAVE, (inside(begin), inside(end))) for begin, end in loop.carries]
        made += [(boundary.SUM, (inside(value),)) for value in loop.summed]
        made += [(boundary.STACK, (inside(value),)) for value in loop.stacked]
        names = tuple(value.name for value in loop.op.results)
        for (kind, read), result in zip(made, loop.op.results, strict=True):
            attrs: dict[str, object] = {"length": loop.turns} if kind == boundary.STACK else {}
            if result.name == loop.op.name:
                attrs |= {HELD: dict(loop.op.attrs), KIND: loop.op.kind, RESULTS: names}
            self.append(replace(_boundary_op(loop.op, kind, read, result), attrs=attrs), mesh)

    def merge_sources(self, body: Graph, prefix: str, sources: Iterable[Value]) -> None:
        """Add the layouts of the sources of a body."""
        self.attrs |= {prefix + v.name: body.attrs[v.name] for v in sources if v.name in body.attrs}
        self.axis_attrs |= {
            prefix + v.name: body.axis_attrs[v.name] for v in sources if v.name in body.axis_attrs
        }

    def add_condition(self, loop: Loop, body_prefix: str, mesh: ProcessMesh | None) -> None:
        """Add the ops of a condition, which read what a turn begins with."""
        condition, prefix = loop.condition, f"{loop.op.name}/{CONDITION}/"
        assert condition is not None
        shared = source_values(loop.body)
        replacements = {
            value.name: replace(shared[name], name=body_prefix + shared[name].name)
            for name, value in source_values(condition).items()
        }
        self.add(condition, prefix, mesh, replacements)
        ((_, go),) = condition.outputs
        read = replacements.get(go.name) or replace(go, name=prefix + go.name)
        test = _boundary_op(loop.op, boundary.TEST, (read,), Value(f"{prefix}?", (), "bool"))
        self.append(test, mesh)
        if test.layout is not None:  # of a completed graph: every rank of the loop knows the condition
            self.attrs[test.name] = DistAttr(test.layout.mesh, ShardSpec(()))


def _kind_into(source: str) -> str:
    """The op that gives a source of a body its value."""
    kinds = {TURN: boundary.TURN, CARRY: boundary.ENTER, FIXED: boundary.FIXED}
    return kinds.get(source.rstrip("0123456789"), boundary.ITEM)


def _boundary_op(loop: Op, kind: str, operands: Sequence[Value], result: Value) -> Op:
    layout = None if loop.layout is None else OpLayout(loop.layout.mesh)
    return replace(loop, kind=kind, operands=tuple(operands), results=(result,), attrs={}, layout=layout)
