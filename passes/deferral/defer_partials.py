"""Partial results that need not be reduced yet.

A split index that is missing from a result leaves it partial over an axis. Where every reader is linear and
cheap, and the sum of several partials is smaller than the partials themselves, the reduction waits: two
all_reduces become one, and a gradient is reduced once a step instead of once a micro-batch (`accumulate` is
linear).

`deferred` computes the greatest set of (value, axis) such that every reader of a kept value passes it on;
the greatest fixpoint is unique, so the order in which values are visited does not matter. From it goes what
would only be reduced later.
"""

from __future__ import annotations

from collections.abc import Mapping

from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.index_rule import OpLayout, Rule
from distgraph.ir.op_registry import linear_groups, lookup, operand_layout, rule_of
from distgraph.passes.propagate_shardings import Settled

_COSTLY = ("matmul", "conv", "attention")  # cost classes through which a partial is never carried
Kept = set[tuple[str, str]]


def produced_partials(op: Op, layout: OpLayout) -> dict[str, frozenset[str]]:
    """Result name -> axes over which the op itself leaves a partial(sum) result."""
    rule = rule_of(op)
    if lookup(op.kind).reduction != "sum":
        return {}
    found = {}
    for i, value in enumerate(op.results):
        axes = frozenset(axis for index in rule.reduced(i) for axis in layout.of(index))
        if axes:
            found[value.name] = axes
    return found


def deferred(graph: Graph, settled: Settled, layouts: Mapping[str, OpLayout]) -> Kept:
    """(value, axis) pairs whose reduction waits for the readers."""
    own = {op.name: produced_partials(op, layouts[op.name]) for op in graph.ops}
    candidates = _candidates(graph, layouts, own)
    kept: Kept = {
        (name, axis)
        for name, axes in candidates.items()
        for axis in axes
        if name not in graph.attrs and name not in graph.live_out and graph.users[name]
    }
    waiting = sorted(kept)
    while waiting:
        name, axis = waiting.pop()
        if (name, axis) not in kept:
            continue
        producer = graph.producers[name]
        made = axis in own[producer.name].get(name, ()) or any(
            passing_group(producer, v.name, axis, kept, layouts) is not None for v in producer.operands
        )
        if made and all(passing_group(op, name, axis, kept, layouts) is not None for op in graph.users[name]):
            continue
        kept.discard((name, axis))
        # readers that needed this one no longer pass: look at what depends on them again
        for op in (producer, *graph.users[name]):
            waiting.extend((v.name, axis) for v in (*op.operands, *op.results) if (v.name, axis) in kept)
    return _without_idle_waits(graph, kept, layouts)


def _without_idle_waits(graph: Graph, kept: Kept, layouts: Mapping[str, OpLayout]) -> Kept:
    """Drop, from the last op to the first, what would wait for an op and then be reduced all the same.

    Reduced at once it can travel while other ops run: in tensor parallel backward, the gradient of an input
    is under way while that of the weight is computed, instead of only after the gradient of the activation
    between.
    """
    left = set(kept)
    for value in (value for op in reversed(graph.ops) for value in op.results):
        for axis in layouts[graph.producers[value.name].name].mesh.axes:
            readers = graph.users[value.name] if (value.name, axis) in kept else ()
            if readers and all(
                _gains_nothing(graph, reader, value, axis, left, layouts) for reader in readers
            ):
                left.discard((value.name, axis))
    return left


def _gains_nothing(
    graph: Graph, op: Op, value: Value, axis: str, kept: Kept, layouts: Mapping[str, OpLayout]
) -> bool:
    """Whether a reduction behind an op moves the same bytes as one before it: it adds no other partial
    value, its result is as large and reduced right behind it, and nobody wants that split over the axis (a
    reduce_scatter)."""
    result = op.results[0]
    if op.kind == "accumulate" or (result.name, axis) in kept or result.nbytes != value.nbytes:
        return False
    group = passing_group(op, value.name, axis, kept, layouts)
    if group is None or len(linear_groups(op)[group]) > 1:
        return group is None
    return not any(
        axis in axes
        for user in graph.users[result.name]
        for position, operand in enumerate(user.operands)
        if operand.name == result.name
        for axes in operand_layout(user, position, layouts[user.name]).dims
    )


def passing_group(op: Op, name: str, axis: str, kept: Kept, layouts: Mapping[str, OpLayout]) -> int | None:
    """Linear group through which an op passes a partial value on, or None when it must be reduced first."""
    if lookup(op.kind).cost in _COSTLY or axis not in layouts[op.name].mesh.sizes or len(op.results) != 1:
        return None
    if op.role == "optimize":
        return None  # a gradient is reduced as soon as it is there, beside the rest of the backward part
    if not _splits_last(rule_of(op), layouts[op.name], axis):
        return None
    for number, group in enumerate(linear_groups(op)):
        inside = [op.operands[i] for i in group]
        outside = [v for i, v in enumerate(op.operands) if i not in group]
        if any(v.name == name for v in outside) or all(v.name != name for v in inside):
            continue
        if any((v.name, axis) not in kept for v in inside):
            continue
        if op.results[0].nbytes <= sum(v.nbytes for v in inside):
            return number
    return None


def _splits_last(rule: Rule, layout: OpLayout, axis: str) -> bool:
    """Whether an op still reads and makes plain blocks when an axis splits no index of it any more: of a dim
    made of several indices, those behind one that is whole cannot be split."""
    split = {index for index, axes in layout.axes if layout.mesh.count(axes) > 1}
    over = {index for index, axes in layout.axes if axis in axes}
    return not any(
        split.intersection(dim[dim.index(index) + 1 :])
        for term in rule.operands + rule.results
        for dim in term
        for index in over.intersection(dim)
    )


def _candidates(
    graph: Graph, layouts: Mapping[str, OpLayout], own: Mapping[str, Mapping[str, frozenset[str]]]
) -> dict[str, frozenset[str]]:
    """Upper bound: partial by the op itself, or by a linear op all of whose group's operands are
    candidates."""
    found: dict[str, frozenset[str]] = {}
    for op in graph.ops:
        layout = layouts[op.name]
        found.update(own[op.name])
        if lookup(op.kind).cost in _COSTLY or len(op.results) != 1 or op.kind == "reshard":
            continue
        for group in linear_groups(op):
            axes = frozenset.intersection(*(found.get(op.operands[i].name, frozenset()) for i in group))
            axes = frozenset(a for a in axes if a in layout.mesh.sizes)
            if axes:
                found[op.results[0].name] = found.get(op.results[0].name, frozenset()) | axes
    return found
