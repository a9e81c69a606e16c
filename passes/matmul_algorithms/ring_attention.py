"""Ring attention: keys and values go round the ranks that split a sequence, a block a step to the neighbour.

In:   attention of a completed graph, or its gradient, computed with the queries split over P ranks.
Out:  P steps. In step t a rank with block j of the queries has block j + t of the keys and values: the same
      tensors, on the mesh with its ranks in another order. The block of the next step is sent while the block
      before it is attended to. Partial results are merged by their log-sum-exp (`attention_blocks.py`).
Invariant: same values in the same layouts. No rank ever has more than two blocks of the keys and values.

    %o, %lse : [_, _, sp, _] = attention(%q, %k, %v) {s:sp}  # gathers %k and %v on mesh (sp=2)
    ->
    %k1 : [_, _, sp, _] on ranks 1, 0 = reshard(%k)          # to a neighbour; %v1 likewise
    %o0, %lse0 = ring_attention(%q, %k, %v) {shift=0}
    %o, %lse   = ring_attention_add(%o0, %lse0, %q, %k1, %v1) {shift=1}

In the gradient keys and values go round once more, and so do their gradients, to which each rank adds those
of its queries; after P moves they are where the keys are stored. With K and V the bytes of the keys and the
values of a rank, it sends (P - 1) (K + V) forward, and (P - 1) (K + V) + P (K + V) backward.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distgraph.errors import ShardingError
from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.matmul_algorithm import ATTENTION, MatmulAlgorithm
from distgraph.ir.op_registry import (
    infer_results,
    operand_layout,
    operand_mesh,
    result_layout,
    result_mesh,
    rule_of,
)
from distgraph.ir.sharding_spec import DistAttr, Origin
from distgraph.ops.blocks.attention_blocks import turned


@dataclass(slots=True)
class RingAttention:
    """One attention, or its gradient, and the ops that are to compute it.

    Attributes:
        op: the attention or its gradient.
        stored: layouts of the values of the graph.
        ops, attrs: emitted ops, and layouts of their results.
    """

    op: Op
    stored: Mapping[str, DistAttr]
    ops: list[Op] = field(default_factory=list)
    attrs: dict[str, DistAttr] = field(default_factory=dict)

    @property
    def layout(self) -> OpLayout:
        """How the op is computed."""
        assert self.op.layout is not None
        return self.op.layout

    @property
    def parts(self) -> int:
        """Ranks of the ring."""
        return self.layout.parts("s")

    # ------------------------------------------------------------------ the two rewrites

    def attend(self, *, leave_lse: bool) -> Value:
        """Emit the steps of attention.

        Args:
            leave_lse: whether to leave the second result as the graph has it; nothing reads it otherwise.

        Returns:
            the log-sum-exp, in f32 where that of the op is in 16 bits.
        """
        q, *moving = self._placed(self.op.operands, 0)
        made: tuple[Value, ...] = ()
        for step in range(self.parts):
            following = self._moved(moving, step + 1)
            kind = "ring_attention_add" if made else "ring_attention"
            name = "o" if step + 1 == self.parts else f"o{step}"
            made = self._step(kind, (*made, q, *moving), step, (name, name.replace("o", "lse")))
            moving = following
        if leave_lse:
            self._leave(made[1], self.op.results[1])
        self._leave(made[0], self.op.results[0])
        return made[1]

    def differentiate(self, lse: Value) -> None:
        """Emit the steps of the gradient of attention whose log-sum-exp is given."""
        do, q, k, v, o, _ = self.op.operands
        do, q, k, v, o, lse = self._placed((do, q, k, v, o, lse), 1)
        moving: list[Value] = [k, v]
        queries: Value | None = None
        totals: list[Value] = []
        for step in range(self.parts):
            following = self._moved(moving, step + 1)
            mesh = turned(self.layout.mesh, self.layout.of("s"), step)
            arriving = [
                self._reshard(total, replace(self._attr(total), mesh=mesh), f"{name}.arriving{step}")
                for total, name in zip(totals, ("dk", "dv"), strict=False)
            ]
            names = f"dq{step}", f"dk{step}", f"dv{step}"
            dq, *made = self._step("ring_attention_grad", (do, q, *moving, o, lse), step, names)
            queries = dq if queries is None else self._add(queries, dq, f"dq.sum{step}")
            totals = made if not arriving else [
                self._add(total, more, f"{name}.sum{step}")
                for total, more, name in zip(arriving, made, ("dk", "dv"), strict=True)
            ]  # fmt: skip
            moving = following
        assert queries is not None
        for value, result in zip((queries, *totals), self.op.results, strict=True):
            self._leave(value, result)

    # ------------------------------------------------------------------ emitting ops

    def _placed(self, operands: Sequence[Value], first: int) -> list[Value]:
        """The operands in the layouts in which the first step reads them."""
        kind = "ring_attention_grad" if first else "ring_attention"
        step = self._op(kind, operands, 0, [""] * (3 if first else 2))
        placed = []
        for position, value in enumerate(operands):
            attr = DistAttr(operand_mesh(step, position), operand_layout(step, position), self._origin)
            stored = self.stored[value.name]
            same = (stored.mesh, stored.spec) == (attr.mesh, attr.spec)
            placed.append(value if same else self._reshard(value, attr, f"in{position}"))
        return placed

    def _moved(self, blocks: Sequence[Value], step: int) -> list[Value]:
        """Keys and values as the next step reads them: those of a neighbour; none after the last step."""
        if step == self.parts:
            return []
        mesh = turned(self.layout.mesh, self.layout.of("s"), step)
        return [
            self._reshard(value, replace(self._attr(value), mesh=mesh), f"{name}{step}")
            for value, name in zip(blocks, "kv", strict=True)
        ]

    def _step(
        self, kind: str, operands: Sequence[Value], step: int, names: Sequence[str]
    ) -> tuple[Value, ...]:
        op = self._op(kind, operands, step, [f"{self.op.name}.{name}" for name in names])
        for position, value in enumerate(op.results):
            attr = DistAttr(result_mesh(op, position), result_layout(op, position), self._origin)
            self.attrs[value.name] = attr
        self.ops.append(op)
        return op.results

    def _op(self, kind: str, operands: Sequence[Value], step: int, names: Sequence[str]) -> Op:
        attrs: dict[str, Any] = {
            "causal": bool(self.op.attrs.get("causal")),
            "scale": self.op.attrs["scale"],
            "parts": self.parts,
            "shift": step,
        }
        inferred = infer_results(kind, operands, attrs)
        results = tuple(Value(name, tuple(s), d) for name, (s, d) in zip(names, inferred, strict=True))
        axes = tuple((index, split) for index, split in self.layout.axes if index != "t")
        layout = OpLayout(self.layout.mesh, axes)
        return replace(
            self.op, kind=kind, operands=tuple(operands), results=results, attrs=attrs, layout=layout
        )

    def _simple(self, kind: str, operands: Sequence[Value], attr: DistAttr, name: str, **attrs: Any) -> Value:
        """Add an op with one result, computed where its result is stored."""
        ((shape, dtype),) = infer_results(kind, operands, attrs)
        value = Value(name, tuple(shape), dtype)
        op = replace(self.op, kind=kind, operands=tuple(operands), results=(value,), attrs=attrs, layout=None)
        terms = rule_of(op).results[0]
        split = sorted((t[0], axes) for t, axes in zip(terms, attr.spec.dims, strict=True) if axes and t)
        partial = tuple((axis, 0) for axis, _ in attr.spec.partial if kind != "reshard")
        self.ops.append(replace(op, layout=OpLayout(attr.mesh, tuple(split), partial)))
        self.attrs[name] = attr
        return value

    def _reshard(self, value: Value, attr: DistAttr, name: str) -> Value:
        return self._simple("reshard", [value], attr, f"{self.op.name}.{name}")

    def _add(self, left: Value, right: Value, name: str) -> Value:
        return self._simple("add", [left, right], self._attr(left), f"{self.op.name}.{name}")

    def _leave(self, value: Value, result: Value) -> None:
        """Leave a result as the graph has it: in its type, and stored where it is stored."""
        made, stored = self._attr(value), self.stored[result.name]
        moved = (made.mesh, made.spec) != (stored.mesh, stored.spec)
        if value.dtype != result.dtype:
            name = f"{value.name}.cast" if moved else result.name
            value = self._simple("cast", [value], made, name, dtype=result.dtype)
        elif not moved:
            value = self._simple("identity", [value], made, result.name)
        if moved:
            self._simple("reshard", [value], stored, result.name)

    def _attr(self, value: Value) -> DistAttr:
        return self.attrs.get(value.name) or self.stored[value.name]

    @property
    def _origin(self) -> Origin:
        return Origin("op", f"%{self.op.name}")


def check_ring(op: Op, attrs: Mapping[str, DistAttr]) -> None:
    """Raise ShardingError where attention cannot be computed by a ring in its layout."""
    layout = op.layout
    assert layout is not None
    queries, keys = (op.operands[position].shape[2] for position in (0, 1))
    if queries != keys:
        raise ShardingError(
            f"{op}: algorithm ring needs as many queries as keys but there are {queries} and {keys}; leave "
            f"the algorithm out, and keys and values are gathered"
        )
    mesh, axes = layout.mesh, layout.of("s")
    if layout.parts("s") == 1:
        stored = ", ".join(
            f"{name} {attrs[v.name].spec}" for name, v in zip("qkv", op.operands, strict=False)
        )
        raise ShardingError(
            f"{op}: algorithm ring needs queries that are split along the sequence but they are computed as "
            f"{layout} on {mesh} from {stored}; annotate them, such as "
            f'dg.shard_op(ops.attention, mesh, in_specs=[["dp", None, "sp", None]] * 3, algorithm="ring")'
        )
    weighted = next((axis for axis in axes if axis in mesh.weights), None)
    if weighted is not None:
        raise ShardingError(
            f"{op}: algorithm ring needs equal shares but axis {weighted} of {mesh} has weights; split the "
            f"sequence over another axis"
        )


def by_rings(graph: Graph) -> Graph:
    """A completed graph in which a ring computes every attention whose layout it fits; the graph itself where
    there is none."""
    chosen = {}
    for op in graph.ops:
        if op.kind in ATTENTION and op.role == "forward" and op.name not in graph.algorithms and _fits(op):
            chosen[op.name] = MatmulAlgorithm("ring")
    return replace(graph, algorithms={**graph.algorithms, **chosen}) if chosen else graph


def _fits(op: Op) -> bool:
    layout = op.layout
    assert layout is not None
    equal = op.operands[0].shape[2] == op.operands[1].shape[2]
    return equal and layout.parts("s") > 1 and not set(layout.of("s")) & set(layout.mesh.weights)
