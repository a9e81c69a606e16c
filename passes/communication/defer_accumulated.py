"""Defers the reductions of planned layouts until the micro-batches are added up.

In:   a completed graph, whose layouts come from a search.
Out:  the same program, in which a sum over ranks is reduced after the `accumulate` that adds up its
      micro-batches, if only ops that are linear in it stand between the two.
Invariant: no layout changes but for partial sums, no annotation changes, no message is larger, and there are
    no more of them: a sum that several ops read stays, and so does one that is scattered before its
    `accumulate`, since no rank keeps the whole of it, and one of attention, which a ring may compute whole.

    %g = reduce_sum(%x)      # all_reduce(%g)        %g = reduce_sum(%x)
    %r = reshape(%g)                            ->   %r = reshape(%g)
    %a = accumulate(%r)                              %a = accumulate(%r)     # all_reduce(%a)

With one micro-batch both cost a search the same, which picks either. After the `accumulate`, gradients share
messages (see `bucket_gradients`, for which a rank needs memory), and no op waits for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.index_rule import OpLayout, result_spec
from distgraph.ir.op_registry import lookup, operand_layout, rule_of
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.passes.communication.defer_partials import Partials, passing_group, produced_partials

_NO_SUMS = {*SOURCES, "accumulate", "reshard", "attention_grad"}
"""Ops of which no result is left as a partial sum."""


def defer_accumulated(graph: Graph) -> Graph:
    """Reduce what micro-batches add up after its `accumulate` in a completed graph."""
    layouts = {op.name: op.layout for op in graph.ops if op.layout is not None}
    planned = {
        (name, axis)
        for name, attr in graph.attrs.items()
        for axis, reduction in attr.spec.partial
        if reduction == "sum"
    }
    candidates = _candidates(graph, layouts, planned)
    partial, deferred = candidates | planned, set[tuple[str, str]]()
    for op in reversed(graph.ops):  # a value is deferred if its reader passes it on to an `accumulate`
        for value in op.results:
            for axis in layouts[op.name].mesh.axes:
                if (value.name, axis) in candidates:
                    (reader,) = graph.users[value.name]
                    if _group(graph, reader, axis, partial, layouts) is None:
                        continue
                    if _reduces(graph, reader, axis) or (reader.result.name, axis) in deferred:
                        deferred.add((value.name, axis))
    return _deferred(graph, deferred, partial, layouts) if deferred else graph


def _candidates(graph: Graph, layouts: Mapping[str, OpLayout], planned: Partials) -> Partials:
    """(value, axis) pairs of values with one reader that are all_reduced, or could pass on such a sum."""
    candidates: Partials = set()
    partial = set(planned)
    for op in graph.ops:
        if op.kind in _NO_SUMS:
            continue
        layout = layouts[op.name]
        made = produced_partials(op, layout)
        passed = [a for a in layout.mesh.axes if _group(graph, op, a, partial, layouts) is not None]
        for number, value in enumerate(op.results):
            axes = {*made.get(value.name, ()), *passed}
            if axes and _may_wait(graph, op, number, value, layout):
                new = {(value.name, axis) for axis in axes if layout.mesh.sizes[axis] > 1} - planned
                candidates |= new
                partial |= new
    return candidates


def _may_wait(graph: Graph, op: Op, number: int, value: Value, layout: OpLayout) -> bool:
    """Whether a result has one reader, and nothing but an all_reduce brings it into its layout."""
    attr = graph.attrs[value.name]
    if attr.pinned or value.name in graph.live_out or len(graph.users[value.name]) != 1:
        return False
    return attr.spec.dims == result_spec(rule_of(op), number, layout, lookup(op.kind).reduction).dims


def _group(graph: Graph, op: Op, axis: str, partial: Partials, layouts: Mapping[str, OpLayout]) -> int | None:
    """The linear group of all operands that are partial sums over an axis, if the op passes them on in the
    layouts that they have; None if it does not, or there are none."""
    layout = layouts[op.name]
    inside = [(n, value) for n, value in enumerate(op.operands) if (value.name, axis) in partial]
    if not inside or any(axis in split for _, split in layout.axes):
        return None
    for position, value in inside:
        attr = graph.attrs[value.name]
        if attr.mesh != layout.mesh or operand_layout(op, position).dims != attr.spec.dims:
            return None
    groups = {passing_group(op, value.name, axis, partial, layouts) for _, value in inside}
    return groups.pop() if len(groups) == 1 else None


def _reduces(graph: Graph, op: Op, axis: str) -> bool:
    """Whether an op is an `accumulate` whose result is then all_reduced over an axis, and not scattered."""
    if op.kind != "accumulate" or op.layout is None:
        return False
    attr = graph.attrs[op.result.name]
    same = result_spec(rule_of(op), 0, op.layout).dims == attr.spec.dims
    return same and not any(axis in split for split in attr.spec.dims)


def _deferred(graph: Graph, deferred: Partials, partial: Partials, layouts: Mapping[str, OpLayout]) -> Graph:
    """The graph with some values as partial sums."""
    attrs = dict(graph.attrs)
    for name, axis in sorted(deferred):
        attrs[name] = _partial_over(attrs[name], axis)
    ops = []
    for op in graph.ops:
        layout = layouts[op.name]
        groups = dict(layout.partial)
        for axis in layout.mesh.axes:
            if any((value.name, axis) in deferred for value in op.operands):
                group = _group(graph, op, axis, partial, layouts)
                assert group is not None, f"{op} reads a sum over {axis} and does not pass it on"
                groups[axis] = group
        if len(groups) > len(layout.partial):
            op = op.with_layout(replace(layout, partial=tuple(sorted(groups.items()))))
        ops.append(op)
    return graph.with_ops(ops, attrs=attrs)


def _partial_over(attr: DistAttr, axis: str) -> DistAttr:
    return replace(attr, spec=ShardSpec(attr.spec.dims, (*attr.spec.partial, (axis, "sum"))))
