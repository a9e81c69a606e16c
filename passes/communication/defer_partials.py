"""Defers the reduction of partial results past linear ops.

A split index that is missing from a result makes the result partial over an axis. If every reader is linear
and cheap, and the sum of several partials is smaller than the partials, the reduction is deferred: two
all_reduces become one, and a gradient is reduced once a step instead of once a micro-batch (`accumulate` is
linear).

`deferred_partials` computes the greatest set of (value, axis) such that every reader of a value in the set
passes the partial on. The greatest fixpoint is unique, so the order in which values are visited does not
matter. Reductions that gain nothing from being deferred are then removed from the set.
"""

from __future__ import annotations

from collections.abc import Mapping

from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.index_rule import OpLayout, Rule
from distgraph.ir.op_registry import linear_groups, lookup, operand_layout, rule_of

_SUMS = ("accumulate", "loop.sum")
"""Ops that add up what is computed several times in a step, so that their result is reduced less often."""

Partials = set[tuple[str, str]]
"""(value, axis) pairs: the value is partial over the axis."""


def produced_partials(op: Op, layout: OpLayout) -> dict[str, frozenset[str]]:
    """Result name -> axes over which the op itself makes the result a partial sum."""
    rule = rule_of(op)
    if lookup(op.kind).reduction != "sum":
        return {}
    partial = {}
    for i, value in enumerate(op.results):
        axes = frozenset(axis for index in rule.reduced(i) for axis in layout.of(index))
        if axes:
            partial[value.name] = axes
    return partial


def deferred_partials(graph: Graph, layouts: Mapping[str, OpLayout]) -> Partials:
    """(value, axis) pairs whose reduction is deferred past the readers of the value."""
    produced = {
        op.name: {} if _leaves_none(graph, op) else produced_partials(op, layouts[op.name])
        for op in graph.ops
    }
    candidates = _candidates(graph, layouts, produced)
    deferred: Partials = {
        (name, axis)
        for name, axes in candidates.items()
        for axis in axes
        if name not in graph.attrs and name not in graph.live_out and graph.users[name]
    }
    worklist = sorted(deferred)
    while worklist:
        name, axis = worklist.pop()
        if (name, axis) not in deferred:
            continue
        producer = graph.producers[name]
        is_partial = axis in produced[producer.name].get(name, ()) or any(
            passing_group(producer, v.name, axis, deferred, layouts) is not None for v in producer.operands
        )
        if is_partial and all(
            passing_group(op, name, axis, deferred, layouts) is not None for op in graph.users[name]
        ):
            continue
        deferred.discard((name, axis))
        # readers of this value no longer pass other partials on: test all values around them again
        for op in (producer, *graph.users[name]):
            values = (*op.operands, *op.results)
            worklist.extend((v.name, axis) for v in values if (v.name, axis) in deferred)
    return _without_useless_deferrals(graph, deferred, layouts)


def _leaves_none(graph: Graph, op: Op) -> bool:
    """Whether an op is the gradient of attention by a distributed algorithm, which leaves no partial sums."""
    return op.kind == "attention_grad" and op.link in graph.algorithms


def _without_useless_deferrals(graph: Graph, deferred: Partials, layouts: Mapping[str, OpLayout]) -> Partials:
    """Remove, from the last op to the first, partials that would be reduced right after an op anyway.

    A reduction that starts immediately can overlap with other ops: in the backward part of tensor
    parallelism, the gradient of an input is reduced while the gradient of the weight is computed, instead of
    only after the gradient of the activation in between.
    """
    left = set(deferred)
    for value in (value for op in reversed(graph.ops) for value in op.results):
        for axis in layouts[graph.producers[value.name].name].mesh.axes:
            readers = graph.users[value.name] if (value.name, axis) in deferred else ()
            if readers and all(
                _gains_nothing(graph, reader, value, axis, left, layouts) for reader in readers
            ):
                left.discard((value.name, axis))
    return left


def _gains_nothing(
    graph: Graph, op: Op, value: Value, axis: str, deferred: Partials, layouts: Mapping[str, OpLayout]
) -> bool:
    """Whether a reduction after an op sends the same bytes as one before it.

    This is so if the op adds no other partial value, its result has the same size and is reduced right after
    it, and no reader needs the result split over the axis (which would allow a reduce_scatter).
    """
    result = op.results[0]
    if op.kind in _SUMS or (result.name, axis) in deferred or result.nbytes != value.nbytes:
        return False
    group = passing_group(op, value.name, axis, deferred, layouts)
    if group is None or len(linear_groups(op)[group]) > 1:
        return group is None
    return not any(
        axis in axes
        for user in graph.users[result.name]
        for position, operand in enumerate(user.operands)
        if operand.name == result.name
        for axes in operand_layout(user, position, layouts[user.name]).dims
    )


def passing_group(
    op: Op, name: str, axis: str, deferred: Partials, layouts: Mapping[str, OpLayout]
) -> int | None:
    """Linear group through which an op passes a partial value on; None if it must be reduced first."""
    if lookup(op.kind).cost == "matmul" or axis not in layouts[op.name].mesh.sizes or len(op.results) != 1:
        return None
    if op.role == "optimize":
        return (
            None  # a gradient is reduced when it is complete, overlapping with the rest of the backward part
        )
    if not _has_plain_blocks(rule_of(op), layouts[op.name], axis):
        return None
    for number, group in enumerate(linear_groups(op)):
        inside = [op.operands[i] for i in group]
        outside = [v for i, v in enumerate(op.operands) if i not in group]
        if any(v.name == name for v in outside) or all(v.name != name for v in inside):
            continue
        if any((v.name, axis) not in deferred for v in inside):
            continue
        if op.results[0].nbytes <= sum(v.nbytes for v in inside):
            return number
    return None


def _has_plain_blocks(rule: Rule, layout: OpLayout, axis: str) -> bool:
    """Whether an op still reads and produces contiguous blocks if an axis splits none of its indices.

    In a dim that is composed of several indices, an index after an unsplit one cannot be split.
    """
    split = {index for index, axes in layout.axes if layout.mesh.count(axes) > 1}
    over = {index for index, axes in layout.axes if axis in axes}
    return not any(
        split.intersection(dim[dim.index(index) + 1 :])
        for term in rule.operands + rule.results
        for dim in term
        for index in over.intersection(dim)
    )


def _candidates(
    graph: Graph, layouts: Mapping[str, OpLayout], produced: Mapping[str, Mapping[str, frozenset[str]]]
) -> dict[str, frozenset[str]]:
    """Value -> axes over which it may be partial: by its op, or by linearity in a candidate operand."""
    candidates: dict[str, frozenset[str]] = {}
    for op in graph.ops:
        layout = layouts[op.name]
        candidates.update(produced[op.name])
        if lookup(op.kind).cost == "matmul" or len(op.results) != 1 or op.kind == "reshard":
            continue
        for group in linear_groups(op):
            operands = (candidates.get(op.operands[i].name, frozenset()) for i in group)
            axes = frozenset.intersection(*operands)
            axes = frozenset(a for a in axes if a in layout.mesh.sizes)
            if axes:
                result = op.results[0].name
                candidates[result] = candidates.get(result, frozenset()) | axes
    return candidates
