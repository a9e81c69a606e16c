"""Reduce gradients into parts as they are made, in every micro-batch, and accumulate the parts.

In:   a lowered graph in which the gradient of a step is scattered over ranks (ZeRO-2, Rajbhandari et al.,
      2020).
Out:  the same program, in which no rank keeps a whole gradient: each is reduced and scattered as soon as it
      is computed, and its buffer is free when the message has been sent.
Invariant: same numbers up to rounding: with several micro-batches, sums over ranks come before those over
    micro-batches. A rank waits for a message before the gradients whose messages are under way would together
    be larger than two of the largest.

    %s = accumulate(%g)                %t = comm.reduce_scatter(%g)
    %r = comm.reduce_scatter(%s)  ->   ...                            # of the next layer
                                       %r = accumulate(%t)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from distgraph.ir.graph import Graph, Op
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.op_registry import rule_of
from distgraph.ir.sharding_spec import DistAttr, Origin
from distgraph.passes.pass_registry import register_pass

IN_FLIGHT = 2
"""Gradients of the largest size whose messages may be under way at the same time."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """A reduce_scatter of the gradient of one micro-batch, and the `accumulate` of its result."""

    scatter: Op
    accumulate: Op
    attr: DistAttr  # of the result of the scatter
    nbytes: int  # of a rank's block of the whole gradient


@dataclass(slots=True)
class _Queue:
    """Gradients of one mesh whose messages are under way, and the bytes that they may have together."""

    limit: int
    pairs: deque[_Pair]

    @property
    def nbytes(self) -> int:
        return sum(pair.nbytes for pair in self.pairs)


@register_pass("shard_gradients", stage="lowered", after=("lower",))
def shard_gradients(graph: Graph) -> Graph:
    """Scatter each gradient as soon as it is made."""
    pairs = {pair.scatter.operands[0].name: pair for pair in _pairs(graph)}
    if not pairs:
        return graph
    sums = {graph.producers[pair.accumulate.name].operands[0].name: pair for pair in pairs.values()}
    replaced = {*sums, *(pair.accumulate.name for pair in pairs.values())}
    ops: list[Op] = []
    queues = {pair.attr.mesh: _Queue(0, deque()) for pair in pairs.values()}
    for pair in pairs.values():
        queue = queues[pair.attr.mesh]
        queue.limit = max(queue.limit, IN_FLIGHT * pair.nbytes)
    for op in graph.ops:
        if op.name in sums:  # where the whole gradient was added up
            queue, pair = queues[sums[op.name].attr.mesh], sums[op.name]
            while pair in queue.pairs:
                ops.append(queue.pairs.popleft().accumulate)
        if op.name in replaced:
            continue
        ops.append(op)
        for pair in (pairs[value.name] for value in op.results if value.name in pairs):
            queue = queues[pair.attr.mesh]
            while queue.pairs and queue.nbytes + pair.nbytes > queue.limit:
                ops.append(queue.pairs.popleft().accumulate)
            ops.append(pair.scatter)
            queue.pairs.append(pair)
    attrs = {name: attr for name, attr in graph.attrs.items() if name not in sums}
    attrs.update((pair.scatter.name, pair.attr) for pair in pairs.values())
    return graph.with_ops(ops, attrs=attrs)


def _pairs(graph: Graph) -> Iterator[_Pair]:
    """The gradients that are scattered where they are summed, each once."""
    scattered: set[str] = set()
    for op in graph.ops:
        users = graph.users[op.name] if op.kind == "accumulate" and op.name not in graph.live_out else ()
        if len(users) != 1 or users[0].kind != "comm.reduce_scatter" or op.operands[0].name in scattered:
            continue
        (scatter,), (operand,) = users, op.operands
        scattered.add(operand.name)
        attr, whole = graph.attrs[scatter.name], graph.attrs[operand.name]
        part = replace(operand, name=f"{op.name}.part")
        early = replace(scatter, operands=(operand,), results=(part,), role="backward")
        late = replace(op, operands=(part,), results=scatter.results, layout=_layout(op, attr))
        parts = whole.mesh.count(axis for dim in whole.spec.dims for axis in dim)
        origin = Origin("op", f"%{scatter.name}")
        yield _Pair(early, late, replace(attr, origin=origin), operand.nbytes // parts)


def _layout(op: Op, attr: DistAttr) -> OpLayout:
    """The layout of an `accumulate` of blocks that are stored as `attr` says."""
    dims = zip(rule_of(op).results[0], attr.spec.dims, strict=True)
    axes = tuple(sorted((term[0], split) for term, split in dims if term and split))
    return OpLayout(attr.mesh, axes, tuple((axis, 0) for axis, _ in attr.spec.partial))
