"""Reduce the gradients of a step in buckets: several in one message, in the order in which they are computed.

In:   a lowered graph.
Out:  the same program, in which the all_reduces of gradients over one group are fused into buckets, each of
      which starts as soon as its last gradient is complete.
Invariant: same numbers to the last bit, because a message reduces every element in the order of the ranks,
    whatever its place in the message. Gradients that different tasks complete are in different buckets.

    %a = comm.all_reduce(%x)
    %b = comm.all_reduce(%y)     ->     %a, %b = comm.all_reduce(%x, %y)

A message of n bytes lasts l + n b: l to start and b for each byte, both from the price of the collective. If
all gradients of a group have S bytes and a bucket B, the messages cost S / B times l to start, and the last
one, with B b, ends after the backward part. The sum S l / B + B b is least for B = sqrt(S l / b). A bucket is
closed when it has so many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

from distgraph.ir.collective_registry import collective_of, is_collective
from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import Graph, Op
from distgraph.passes.communication.fuse_reductions import fuse, fusion_key, groups_by_level
from distgraph.passes.pass_registry import PassContext, register_pass
from distgraph.passes.redistribution.planner import BYTE_PRICES, Price, latency_price


@register_pass("bucket_gradients", stage="lowered", after=("lower",))
def _run(graph: Graph, context: PassContext) -> Graph:
    """Reduce several gradients in one message."""
    return bucket_gradients(graph, context.price)


def bucket_gradients(graph: Graph, price: Price = latency_price) -> Graph:
    """Fuse the all_reduces of gradients; `price` is the cost of one collective.

    A price that counts bytes alone has no cost of a start: then that of `latency_price` counts.
    """
    levels = _mesh_levels(graph)

    def key(op: Op) -> Hashable | None:
        declared = collective_of(op.kind)
        if declared is None or not declared.fusible or len(op.operands) > 1 or not op.results[0].size:
            return None
        summed = graph.producers[op.operands[0].name]
        if summed.kind != "accumulate" or summed.role != "backward":
            return None
        return fusion_key(graph, op), levels[summed.name]

    buckets: list[list[Op]] = []
    ready = _ready_positions(graph)
    for group in groups_by_level(graph, key):
        limit = bucket_bytes(graph, group, latency_price if price in BYTE_PRICES else price)
        buckets += _cut(graph, sorted(group, key=lambda op: ready[op.operands[0].name]), limit)
    return fuse(graph, buckets)


def bucket_bytes(graph: Graph, group: list[Op], price: Price) -> float:
    """Bytes at which a bucket is closed, for the all_reduces of one group; infinite if bytes cost nothing."""
    first, total = group[0], sum(_nbytes(graph, op) for op in group)
    mesh, axes = graph.attrs[first.name].mesh, tuple(first.attrs["axes"])
    members, declared = mesh.count(axes), collective_of(first.kind)
    assert declared is not None
    share = declared.sent_share(members)

    def seconds(nbytes: float) -> float:
        return price(declared.name, share * nbytes, members, mesh, axes)

    slope = (seconds(total) - seconds(total / 2)) / (total / 2)
    start = max(0.0, seconds(1) - slope)
    return math.sqrt(total * start / slope) if slope > 0 else math.inf


def _cut(graph: Graph, ops: Iterable[Op], limit: float) -> list[list[Op]]:
    """Consecutive ops in buckets, each closed when it has `limit` bytes."""
    buckets: list[list[Op]] = [[]]
    size = 0.0
    for op in ops:
        if buckets[-1] and size >= limit:
            buckets.append([])
            size = 0.0
        buckets[-1].append(op)
        size += _nbytes(graph, op)
    return buckets


def _nbytes(graph: Graph, op: Op) -> int:
    """Bytes of the largest block of an operand."""
    value = op.operands[0]
    attr = graph.attrs[value.name]
    sizes = zip(value.shape, attr.spec.dims, strict=True)
    return itemsize(value.dtype) * math.prod(-(-n // attr.mesh.count(axes)) for n, axes in sizes)


def _ready_positions(graph: Graph) -> dict[str, int]:
    """Value -> position of the last op that delays it; an `accumulate` or a message follows at once."""
    ready: dict[str, int] = {}
    for position, op in enumerate(graph.ops):
        at = position
        if op.kind == "accumulate" or is_collective(op):
            at = max(ready[value.name] for value in op.operands)
        ready.update((value.name, at) for value in op.results)
    return ready


def _mesh_levels(graph: Graph) -> dict[str, int]:
    """Value -> changes of mesh on the longest path to it: those of one level are complete in one task."""
    levels: dict[str, int] = {}
    for op in graph.ops:
        ranks = graph.attrs[op.name].mesh.rank_set
        level = max(
            (levels[v.name] + (graph.attrs[v.name].mesh.rank_set != ranks) for v in op.operands), default=0
        )
        levels.update((value.name, level) for value in op.results)
    return levels
