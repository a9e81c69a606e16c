"""Reduce the gradients of a step in buckets: several in one message, in the order in which they are computed.

In:   a lowered graph.
Out:  the same program, in which the all_reduces of gradients over one group are fused into buckets, each of
      which starts as soon as its last gradient is complete.
Invariant: same numbers; to the last bit in one process and over MPI, where a message reduces every element
    in the order of the ranks, whatever its place in the message. Gradients that different tasks complete are
    in different buckets.

    %a = comm.all_reduce(%x)
    %b = comm.all_reduce(%y)     ->     %a, %b = comm.all_reduce(%x, %y)

A message of n bytes lasts l + n b: l to start and b for each byte, both from the price of the collective. If
all gradients of a group have S bytes and a bucket B, the messages cost S / B times l to start, and the last
one, with B b, ends after the backward part. The sum S l / B + B b is least for B = sqrt(S l / b). A bucket is
closed when it has B bytes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

from distgraph.ir.collective_registry import collective_of, is_collective
from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import Graph, Op, Value
from distgraph.passes.communication.fuse_reductions import fuse, fusion_key, groups_by_level, is_fusible
from distgraph.passes.pass_registry import PassContext, register_pass
from distgraph.passes.redistribution.planner import BYTE_PRICES, Price, block_volume, latency_price


@register_pass("bucket_gradients", stage="lowered", after=("lower",))
def _run(graph: Graph, context: PassContext) -> Graph:
    """Reduce several gradients in one message."""
    return bucket_gradients(graph, context.price)


def bucket_gradients(graph: Graph, price: Price = latency_price) -> Graph:
    """Fuse the all_reduces of gradients; `price` is the cost of one collective.

    A price that counts bytes alone has no cost of a start: then that of `latency_price` counts.
    """
    gradients = {op.name for op in graph.ops if _reduces_gradient(graph, op)}
    if len(gradients) < 2:
        return graph
    levels = _mesh_levels(graph)

    def key(op: Op) -> Hashable | None:
        return (fusion_key(graph, op), levels.get(op.name, 0)) if op.name in gradients else None

    buckets: list[list[Op]] = []
    position = {value.name: n for n, op in enumerate(graph.ops) for value in op.results}
    for group in groups_by_level(graph, key):
        limit = bucket_bytes(graph, group, latency_price if price in BYTE_PRICES else price)
        group.sort(key=lambda op: position[_computed(graph, op.operands[0]).name])
        buckets += _cut(graph, group, limit)
    return fuse(graph, buckets)


def _reduces_gradient(graph: Graph, op: Op) -> bool:
    if not is_fusible(op) or not op.results[0].size:
        return False
    summed = graph.producers[op.operands[0].name]
    return summed.kind == "accumulate" and summed.role == "backward"


def _computed(graph: Graph, value: Value) -> Value:
    """What an `accumulate` or a message that follows at once gets."""
    producer = graph.producers[value.name]
    while producer.kind == "accumulate" or is_collective(producer):
        value = producer.operands[0]
        producer = graph.producers[value.name]
    return value


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
    return itemsize(value.dtype) * block_volume(value.shape, attr.mesh, attr.spec)


def _mesh_levels(graph: Graph) -> dict[str, int]:
    """Value -> changes of mesh on the longest path to it, which are those of one task; none on one mesh."""
    ranks = {mesh: mesh.rank_set for mesh in graph.meshes}
    if len(set(ranks.values())) == 1:
        return {}
    places = {name: ranks[attr.mesh] for name, attr in graph.attrs.items()}
    levels: dict[str, int] = {}
    for op in graph.ops:
        here = places[op.name]
        level = max((levels[v.name] + (places[v.name] != here) for v in op.operands), default=0)
        levels.update((value.name, level) for value in op.results)
    return levels
