"""The graph: values and ops in program order, immutable, with the layout of every value once it is known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from distgraph.errors import GraphError
from distgraph.ir.dtypes import itemsize
from distgraph.ir.index_rule import OpLayout, Rule
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.printer import print_graph
from distgraph.ir.sharding_spec import AxisAttr, DistAttr, OpAxes

ROLES = ("data", "forward", "backward", "optimize")
STORED = ("input", "param", "state")  # kinds of tensors that ranks hold before a step
SOURCES = (*STORED, "constant")  # kinds without operands that bring data into the graph


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the program: a name unique in its graph, the global shape, a short dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * itemsize(self.dtype)

    @property
    def type(self) -> str:
        """`f32[64, 128]`."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        kind: name in the op registry.
        operands, results: values; the name of the first result is the op's own name.
        attrs: static parameters; numbers, strings, tuples, arrays or subgraphs; never mutated.
        role: data, forward, backward or optimize.
        scope: module path such as "blocks.3.attn.q_proj".
        source: file:line of the user's call.
        link: name of the forward op that a backward op belongs to.
        layout: how the op is computed, once completed.
        task: name of the user's task that the op belongs to (`dg.task`); empty outside of them, and for what
            passes insert.
    """

    kind: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    role: str = "forward"
    scope: str = ""
    source: str = ""
    link: str = ""
    layout: OpLayout | None = None
    task: str = ""
    _rule: Rule | None = field(default=None, init=False, repr=False, compare=False)  # see ops.rule_of

    @property
    def name(self) -> str:
        """Name of the op: that of its first result."""
        return self.results[0].name

    @property
    def result(self) -> Value:
        """The only result."""
        (value,) = self.results
        return value

    @property
    def moves_data(self) -> bool:
        """Whether the op computes nothing: it communicates, or adds up the results of micro-batches."""
        return self.kind.startswith("comm.") or self.kind == "accumulate"

    @property
    def is_named(self) -> bool:
        """Whether the user's task says where the op runs; what moves data follows its operand."""
        return bool(self.task) and not self.moves_data

    def with_layout(self, layout: OpLayout | None) -> Op:
        """The same op under another layout. It keeps the rule, which depends on no layout."""
        fields = self.attrs, self.role, self.scope, self.source, self.link, layout, self.task
        op = Op(self.kind, self.operands, self.results, *fields)
        object.__setattr__(op, "_rule", self._rule)
        return op

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"%{self.name} {self.kind}{where}"


@dataclass(frozen=True)
class Graph:
    """A program in single static assignment form.

    Attributes:
        name: name of the graph in its text form and in messages.
        ops: in program order; every operand is a result of an earlier op.
        outputs: label -> value that a run returns.
        updates: name of a param or state value -> value that replaces it at the end of a step.
        attrs: value name -> mesh and spec; before completion only the annotations of the user, after it those
            of every value.
        micro_batches: how often the part before `accumulate` runs in one step; shapes are those of one
            micro-batch.
        placements: op name -> mesh that computes it, where the user placed the op.
        algorithms: name of a contraction -> the distributed algorithm that computes it, where one is chosen.
            A backward contraction without an entry has that of the forward op that it is linked to.
        lost: layout preferences that completion had to drop, for `conflicts()`.
        layer_starts: names of the forward ops with which layers begin, where the user marked them.
        unplaced_boundary: file:line of the first pipeline boundary behind ops of which none has a mesh.
        axis_attrs: value name -> layout by names of axes, where the user gave one without a mesh; empty after
            completion, when `attrs` has them.
        op_axes: op name -> axes that split its indices, where the user gave them; empty after completion.
    """

    name: str
    ops: tuple[Op, ...]
    outputs: tuple[tuple[str, Value], ...] = ()
    updates: tuple[tuple[str, Value], ...] = ()
    attrs: Mapping[str, DistAttr] = field(default_factory=dict)
    micro_batches: int = 1
    placements: Mapping[str, ProcessMesh] = field(default_factory=dict)
    lost: tuple[Any, ...] = field(default=(), compare=False)
    algorithms: Mapping[str, MatmulAlgorithm] = field(default_factory=dict)
    layer_starts: tuple[str, ...] = field(default=(), compare=False)
    unplaced_boundary: str = field(default="", compare=False)
    axis_attrs: Mapping[str, AxisAttr] = field(default_factory=dict, compare=False)
    op_axes: Mapping[str, OpAxes] = field(default_factory=dict, compare=False)

    @cached_property
    def producers(self) -> dict[str, Op]:
        """Value name -> op that computes it."""
        return {value.name: op for op in self.ops for value in op.results}

    @cached_property
    def users(self) -> dict[str, tuple[Op, ...]]:
        """Value name -> ops that read it, in program order."""
        users: dict[str, list[Op]] = {value.name: [] for op in self.ops for value in op.results}
        for op in self.ops:
            for name in dict.fromkeys(value.name for value in op.operands):
                users[name].append(op)
        return {name: tuple(ops) for name, ops in users.items()}

    @cached_property
    def values(self) -> dict[str, Value]:
        """Name -> value, in program order."""
        return {value.name: value for op in self.ops for value in op.results}

    @cached_property
    def meshes(self) -> tuple[ProcessMesh, ...]:
        """Distinct meshes in order of first appearance."""
        return tuple(dict.fromkeys(attr.mesh for attr in self.attrs.values()))

    @cached_property
    def live_out(self) -> frozenset[str]:
        """Names of values that are live after the graph: outputs and updates."""
        return frozenset(v.name for _, v in self.outputs) | frozenset(v.name for _, v in self.updates)

    def sources(self, *kinds: str) -> tuple[Op, ...]:
        """Ops without operands that bring data in: input, param, state, constant (all of them by default)."""
        selected = kinds or SOURCES
        return tuple(op for op in self.ops if op.kind in selected)

    def value(self, name: str) -> Value:
        """A value by name, with or without its %. Raises GraphError when there is none."""
        try:
            return self.values[name.removeprefix("%")]
        except KeyError:
            raise GraphError(f"graph @{self.name} has no value %{name.removeprefix('%')}") from None

    def with_ops(self, ops: Iterable[Op], **changes: Any) -> Graph:
        """The same graph with other ops (and other fields)."""
        return replace(self, ops=tuple(ops), **changes)

    def __str__(self) -> str:
        return print_graph(self)
