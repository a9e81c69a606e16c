"""Incremental decoding: from the prediction of a whole sequence, the program that computes some positions.

A causal language model maps tokens [b, n] to logits [b, n, v], and the logits at a position depend on the
tokens up to it only. The program derived here computes `width` positions from any one on, and keeps the keys
and values of all positions before it as states (a cache), so that a step costs what its positions cost. The
model is written as for training and contains nothing of this.

The derivation follows the index rules of the ops backwards from the logits. The index that runs over
positions is narrowed from n to `width` on every op between tokens and logits; what depends on the position
but not on the tokens (tables and angles of positions) is narrowed too, or cut at the first position of the
step. Where causal attention reads keys and values of all positions, they are written into their cache and
read from it. An op that reads other positions in another way (attention without a causal mask, a norm over
positions) has no such program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from distgraph.errors import GraphError
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import Attrs, local_attrs, rule_of
from distgraph.ir.sharding_spec import DistAttr, ShardSpec

START, LAST = "generate.start", "generate.last"
"""Scalar inputs: the first position of the step, and the position within the step whose logits are wanted."""


def incremental_program(graph: Graph, tokens: str, width: int) -> Graph:
    """The program for `width` positions of a sequence.

    Args:
        graph: serial prediction of a whole sequence; its only output, or that named logits, is [b, n, v].
        tokens: name of the input that holds the tokens, integers [b, n].
        width: positions a step, from 1 to n.

    Returns:
        a serial graph with the input [b, width], the scalar inputs `START` and `LAST`, the output [b, 1, v]
        and two states [b, g, n, d] for each attention, which are updated.

    Raises:
        GraphError: there is no such output; an op reads positions otherwise than causal
            attention does.
    """
    (source,) = (op for op in graph.sources("input") if op.attrs["name"] == tokens)
    named = dict(graph.outputs)
    label = "logits" if "logits" in named else next(iter(named))
    logits, length = named[label], source.result.shape[1]
    unclear = len(named) > 1 and label != "logits"
    if unclear or len(logits.shape) != 3 or logits.shape[:2] != source.result.shape:
        outputs = ", ".join(f"{label} {value.type}" for label, value in graph.outputs)
        raise GraphError(
            f"model returns {outputs} for tokens {source.result.type} but generation needs one tensor of "
            f"logits [{source.result.shape[0]}, {length}, vocabulary], alone or named logits; return them so"
        )
    return _Derivation(graph, source, width, length).program(label, logits)


@dataclass(slots=True)
class _Derivation:
    """State of one derivation: the ops of the new program so far, and the values that it has already."""

    graph: Graph
    tokens: Op
    width: int
    length: int
    ops: list[Op] = field(default_factory=list)
    updates: list[tuple[str, Value]] = field(default_factory=list)
    narrow: dict[tuple[str, int], Value] = field(default_factory=dict)  # value and its dim of positions
    complete: set[str] = field(default_factory=set)  # ops that are part of the new program unchanged
    names: set[str] = field(default_factory=set)
    placements: dict[str, ProcessMesh] = field(default_factory=dict)
    scalars: dict[str, Value] = field(default_factory=dict)
    starts: dict[tuple[int, int, str, ProcessMesh | None], Value] = field(default_factory=dict)
    dependent: set[str] = field(default_factory=set)  # values that depend on the tokens

    def program(self, label: str, logits: Value) -> Graph:
        """The new program."""
        self.names = set(self.graph.values)
        self.dependent = {self.tokens.name}
        for op in self.graph.ops:
            if any(value.name in self.dependent for value in op.operands):
                self.dependent.update(value.name for value in op.results)
        if logits.name not in self.dependent:
            raise GraphError(f"logits {logits.type} do not depend on the tokens; nothing can be generated")
        every = self._narrowed(logits, 1)
        origin = self.graph.producers[logits.name]
        starts = self._starts(every, 1, LAST, origin)
        shape = (every.shape[0], 1, every.shape[2])
        chosen = self._emit("dynamic_slice", (every, starts), shape, {"sizes": shape}, origin)
        present = {value.name for op in self.ops for value in op.results}
        kept_attrs = {name: self._attr(name) for name in self.graph.attrs if name in present}
        placed = {n: mesh for n, mesh in self.graph.placements.items() if n in present}
        return replace(
            self.graph,
            ops=tuple(self.ops),
            outputs=((label, chosen),),
            updates=tuple(self.updates),
            attrs=kept_attrs,
            placements=placed | self.placements,
            algorithms={n: each for n, each in self.graph.algorithms.items() if n in present},
            layer_starts=tuple(name for name in self.graph.layer_starts if name in present),
        )

    def _attr(self, name: str) -> DistAttr:
        """The annotation of a value; positions are not split, for there are few."""
        attr = self.graph.attrs[name]
        dims = [dim for value, dim in self.narrow if value == name and name in self.dependent]
        spec = tuple(() if dim in dims else axes for dim, axes in enumerate(attr.spec.dims))
        return replace(attr, spec=ShardSpec(spec, attr.spec.partial)) if dims else attr

    def _whole(self, value: Value, reader: Op) -> Value:
        """A value that does not depend on the tokens, unchanged."""
        if value.name in self.dependent:
            raise GraphError(
                f"{reader} reads %{value.name} {value.type} at all positions, so no position can be computed "
                f"alone; generation needs attention by ops.attention(..., causal=True), and every other op "
                f"to treat positions one by one"
            )
        op = self.graph.producers[value.name]
        if op.name not in self.complete:
            for operand in op.operands:
                self._whole(operand, op)
            self.complete.add(op.name)
            self.ops.append(op)
        return value

    def _narrowed(self, value: Value, dim: int) -> Value:
        """A value of which a dim runs over positions, at those of the step.

        The positions may be the minor part of the dim, as where batch and sequence are joined in one dim.
        """
        key = value.name, dim
        if key not in self.narrow:
            op = self.graph.producers[value.name]
            if op.kind == "attention":
                self._attend(op, value, dim)
            elif op.kind in SOURCES:
                self._cut(op, dim)
            elif op.kind == "reshape":
                self._narrow_reshape(op, dim)
            else:
                self._narrow_op(op, value, dim)
        return self.narrow[key]

    def _narrow_op(self, op: Op, value: Value, dim: int) -> None:
        rule = rule_of(op)
        indices = rule.results[op.results.index(value)][dim]
        index = indices[0] if len(indices) == 1 else ""
        carriers = rule.dims_of(index) if index else ()
        alone = all(
            len((rule.results if is_result else rule.operands)[tensor][d]) == 1
            for is_result, tensor, d in carriers
        )
        bound = rule.whole | rule.located | rule.sliding | frozenset(rule.joint)
        if not index or not alone or index in bound or rule.sizes[index] % self.length:
            self._cut_or_refuse(op, value, dim)
            return
        dims = {(is_result, tensor): d for is_result, tensor, d in carriers}
        if len(dims) != len(carriers):
            self._cut_or_refuse(op, value, dim)
            return
        operands = tuple(
            self._narrowed(v, dims[False, n]) if (False, n) in dims else self._whole(v, op)
            for n, v in enumerate(op.operands)
        )
        weights = {} if self.width == self.length else {"step": (self.width, self.length - self.width)}
        mesh = ProcessMesh.grid(step=len(weights.get("step", (1,)))).weighted(**weights)
        attrs = local_attrs(replace(op, layout=OpLayout(mesh, ((index, ("step",)),))), 0)
        results = self._results(op, {tensor: d for (is_result, tensor), d in dims.items() if is_result})
        self._append(replace(op, operands=operands, results=results, attrs=attrs), op)

    def _narrow_reshape(self, op: Op, dim: int) -> None:
        """Positions are the same minor part of a dim of both shapes if equal sizes follow these dims."""
        (operand,), after = op.operands, op.result.shape
        before, rest = operand.shape, math.prod(after[dim + 1 :])
        dims = [d for d, n in enumerate(before) if math.prod(before[d + 1 :]) == rest and not n % self.length]
        if not dims:
            self._cut_or_refuse(op, op.result, dim)
            return
        narrow = self._narrowed(operand, dims[0])
        (result,) = self._results(op, {0: dim})
        self._append(replace(op, operands=(narrow,), results=(result,), attrs={"shape": result.shape}), op)

    def _results(self, op: Op, dims: Mapping[int, int]) -> tuple[Value, ...]:
        """Results of an op at the positions of the step; those of ops on tokens keep their names."""
        results = []
        for number, value in enumerate(op.results):
            shape = list(value.shape)
            if number in dims:
                shape[dims[number]] = shape[dims[number]] // self.length * self.width
            name = value.name if value.name in self.dependent else self._fresh(f"{value.name}.step")
            results.append(Value(name, tuple(shape), value.dtype))
            if number in dims:
                self.narrow[value.name, dims[number]] = results[-1]
        return tuple(results)

    def _cut_or_refuse(self, op: Op, value: Value, dim: int) -> None:
        """Cut a value that does not depend on the tokens after it is computed for all positions."""
        self._whole(value, op)  # raises where it does
        self._cut(op, dim)

    def _cut(self, op: Op, dim: int) -> None:
        """The tokens of the step; or the part of a table of positions that belongs to the step."""
        value = op.results[0]
        if value.shape[dim] != self.length:
            raise GraphError(
                f"{op} has {value.shape[dim]} elements in dim {dim} but there are {self.length} positions; "
                f"generation needs tables of positions to have one row for each"
            )
        shape = (*value.shape[:dim], self.width, *value.shape[dim + 1 :])
        if op.name == self.tokens.name:
            cut = Value(value.name, shape, value.dtype)
            self.ops.append(replace(op, results=(cut,)))
        else:
            starts = self._starts(self._whole(value, op), dim, START, op)
            cut = self._emit("dynamic_slice", (value, starts), shape, {"sizes": shape}, op)
        self.narrow[value.name, dim] = cut

    def _attend(self, op: Op, value: Value, dim: int) -> None:
        """Attention of the queries of the step to the keys and values in the cache."""
        q, k, v = op.operands
        causal = bool(op.attrs.get("causal"))
        if not causal and not self.dependent.intersection((k.name, v.name)):  # of what does not change
            operands = self._narrowed(q, 2), self._whole(k, op), self._whole(v, op)
            self._append(replace(op, operands=operands, results=self._results(op, {0: 2, 1: 2})), op)
            return
        if not causal:
            raise GraphError(
                f"{op} has no causal mask, so every position depends on later ones; generation needs "
                f"attention with causal=True"
            )
        if dim != 2 or value != op.results[0] or not q.shape[2] == k.shape[2] == self.length:
            self._whole(value, op)  # raises
        queries = self._narrowed(q, 2)
        keys = self._cached(op, k, "keys")
        values = self._cached(op, v, "values")
        shape = (*value.shape[:2], self.width, value.shape[3])
        result = Value(value.name, shape, value.dtype)
        step_operands = queries, keys, values, self._scalar(START)
        attrs = {"scale": op.attrs["scale"]}
        step = replace(op, kind="attention_from", operands=step_operands, results=(result,), attrs=attrs)
        self._append(step, op)
        self.narrow[value.name, 2] = result

    def _cached(self, op: Op, value: Value, role: str) -> Value:
        """All positions of keys or values: those of the step are written into the state that keeps them."""
        new = self._narrowed(value, 2)
        name = self._fresh(f"cache of {op.scope or op.name}: {role}")
        state = Value(name, value.shape, value.dtype)
        attrs = {"name": name, "init": ("zeros",), "transient": True}
        self._append(replace(op, kind="state", operands=(), results=(state,), attrs=attrs), op)
        starts = self._starts(new, 2, START, op)
        updated = self._emit("dynamic_update_slice", (state, new, starts), value.shape, {}, op)
        self.updates.append((name, updated))
        return updated

    def _starts(self, value: Value, dim: int, scalar: str, origin: Op) -> Value:
        """Start of a block on every dim: a scalar input on one, 0 on the others."""
        rank = len(value.shape)
        key = rank, dim, scalar, self.graph.placements.get(origin.name)
        if key not in self.starts:
            unit = Value(self._fresh("unit.step"), (rank,), "i64")
            one = np.eye(rank, dtype=np.int64)[dim]
            self._append(Op("constant", (), (unit,), {"value": one}, "forward", origin.scope), origin)
            self.starts[key] = self._emit("multiply", (unit, self._scalar(scalar)), (rank,), {}, origin)
        return self.starts[key]

    def _scalar(self, name: str) -> Value:
        if name not in self.scalars:
            value = self.scalars[name] = Value(self._fresh(name), (), "i64")
            self.ops.append(Op("input", (), (value,), {"name": name}, "data"))
        return self.scalars[name]

    def _emit(
        self, kind: str, operands: tuple[Value, ...], shape: tuple[int, ...], attrs: Attrs, origin: Op
    ) -> Value:
        """Append an op on behalf of another one, in whose module and on whose mesh it is."""
        result = Value(self._fresh(f"{kind}.step"), shape, operands[0].dtype)
        self._append(Op(kind, operands, (result,), attrs, "forward", origin.scope, origin.source), origin)
        return result

    def _append(self, op: Op, origin: Op) -> None:
        self.ops.append(op)
        if origin.name in self.graph.placements:
            self.placements[op.name] = self.graph.placements[origin.name]

    def _fresh(self, hint: str) -> str:
        name, count = hint, 0
        while name in self.names:
            count += 1
            name = f"{hint}.{count}"
        self.names.add(name)
        return name
