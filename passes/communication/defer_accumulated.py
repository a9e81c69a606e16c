"""Defers the reductions of planned layouts until the micro-batches are added up.

In:   a completed graph, whose layouts come from a search.
Out:  the same program, in which a sum over ranks is reduced after the `accumulate` that adds up its
      micro-batches, if only ops that are linear in it stand between the two.
Invariant: no layout changes but for partial sums, no annotation changes, no message is larger, and none is
    sent more often. A sum that is scattered before its `accumulate` stays: no rank keeps the whole of it.

    %g = reduce_sum(%x)      # all_reduce(%g)        %g = reduce_sum(%x)
    %r = reshape(%g)                            ->   %r = reshape(%g)
    %a = accumulate(%r)                              %a = accumulate(%r)     # all_reduce(%a)

With one micro-batch both cost a search the same, which picks either. After the `accumulate`, gradients share
messages (see `bucket_gradients`), and no op waits for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.index_rule import OpLayout, result_spec
from distgraph.ir.op_registry import lookup, operand_layout, rule_of
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.passes.communication.defer_partials import (
    Partials,
    leaves_none,
    passing_group,
    produced_partials,
)


def defer_accumulated(graph: Graph) -> Graph:
    """Reduce what micro-batches add up after its `accumulate` in a completed graph."""
    layouts = {op.name: op.layout for op in graph.ops if op.layout is not None}
    planned = {(name, axis) for name, attr in graph.attrs.items() for axis, _ in attr.spec.partial}
    deferred = _candidates(graph, layouts, planned)
    pairs = [(op, v, axis) for op in graph.ops for v in op.results for axis in layouts[op.name].mesh.axes]
    pairs = [pair for pair in reversed(pairs) if (pair[1].name, pair[2]) in deferred]
    count = 0
    while count != len(deferred):
        count = len(deferred)
        for op, value, axis in pairs:
            if not _stays(graph, op, value, axis, deferred | planned, layouts):
                deferred.discard((value.name, axis))
    return _deferred(graph, deferred, planned, layouts) if deferred else graph


def _candidates(graph: Graph, layouts: Mapping[str, OpLayout], planned: Partials) -> Partials:
    """(value, axis) pairs of values that are all_reduced, or that could pass on such a sum."""
    candidates: Partials = set()
    for op in graph.ops:
        if op.kind in SOURCES or op.kind == "accumulate" or op.kind == "reshard":
            continue
        for number, value in enumerate(op.results):
            attr = graph.attrs[value.name]
            produced = result_spec(rule_of(op), number, layouts[op.name], lookup(op.kind).reduction)
            if attr.pinned or value.name in graph.live_out or attr.spec.dims != produced.dims:
                continue
            made = _made(graph, op, value, layouts)
            passed = {
                axis
                for operand in op.operands
                for axis in attr.mesh.axes
                if _group(graph, op, operand, axis, candidates | planned, layouts) is not None
            }
            of_value = {(value.name, axis) for axis in made | passed}
            candidates |= of_value - planned
    return candidates


def _stays(
    graph: Graph, op: Op, value: Value, axis: str, deferred: Partials, layouts: Mapping[str, OpLayout]
) -> bool:
    """Whether a value is a partial sum if all values of the set are, and each reader passes it on to an
    `accumulate`."""
    passed = any(_group(graph, op, v, axis, deferred, layouts) is not None for v in op.operands)
    if not passed and axis not in _made(graph, op, value, layouts):
        return False
    readers = graph.users[value.name]
    return bool(readers) and all(
        _group(graph, reader, value, axis, deferred, layouts) is not None
        and (_reduces(graph, reader, axis) or (reader.result.name, axis) in deferred)
        for reader in readers
    )


def _made(graph: Graph, op: Op, value: Value, layouts: Mapping[str, OpLayout]) -> frozenset[str]:
    """Axes over which an op itself makes a result a partial sum."""
    made = {} if leaves_none(graph, op) else produced_partials(op, layouts[op.name])
    return made.get(value.name, frozenset())


def _group(
    graph: Graph, op: Op, value: Value, axis: str, deferred: Partials, layouts: Mapping[str, OpLayout]
) -> int | None:
    """Linear group in which an op could read a value as a partial sum, in the layout it has; None if there
    is none."""
    layout, attr = layouts[op.name], graph.attrs[value.name]
    if (value.name, axis) not in deferred or layout.mesh != attr.mesh:
        return None
    if any(axis in split for _, split in layout.axes):
        return None
    for position, operand in enumerate(op.operands):
        if operand.name == value.name and operand_layout(op, position).dims != attr.spec.dims:
            return None
    return passing_group(op, value.name, axis, deferred, layouts)


def _reduces(graph: Graph, op: Op, axis: str) -> bool:
    """Whether an op is an `accumulate` whose result is then all_reduced over an axis, and not scattered."""
    if op.kind != "accumulate" or op.layout is None:
        return False
    attr = graph.attrs[op.result.name]
    same = result_spec(rule_of(op), 0, op.layout).dims == attr.spec.dims
    return same and not any(axis in split for split in attr.spec.dims)


def _deferred(graph: Graph, deferred: Partials, planned: Partials, layouts: Mapping[str, OpLayout]) -> Graph:
    """The graph with some values as partial sums."""
    attrs = dict(graph.attrs)
    for name, axis in sorted(deferred):
        attrs[name] = _partial_over(attrs[name], axis)
    ops = []
    for op in graph.ops:
        groups = dict(_groups(graph, op, deferred, planned, layouts))
        if groups:
            layout = layouts[op.name]
            partial = tuple(sorted({**dict(layout.partial), **groups}.items()))
            op = op.with_layout(replace(layout, partial=partial))
        ops.append(op)
    return graph.with_ops(ops, attrs=attrs)


def _groups(
    graph: Graph, op: Op, deferred: Partials, planned: Partials, layouts: Mapping[str, OpLayout]
) -> Iterator[tuple[str, int]]:
    """(axis, linear group) of every deferred sum that an op reads."""
    for value in op.operands:
        for axis in layouts[op.name].mesh.axes:
            if (value.name, axis) in deferred:
                group = _group(graph, op, value, axis, deferred | planned, layouts)
                assert group is not None, f"{op} reads %{value.name} and does not pass it on"
                yield axis, group


def _partial_over(attr: DistAttr, axis: str) -> DistAttr:
    return replace(attr, spec=ShardSpec(attr.spec.dims, (*attr.spec.partial, (axis, "sum"))))
