"""The size of a bucket: how many tensors of a step share a message.

A message of n bytes lasts l + n b: l to start and b for each byte, both from the price of the collective. If
all tensors of a group have S bytes and a bucket B, the messages cost S / B times l to start, and the last
one, with B b, is not hidden by computation. The sum S l / B + B b is least for B = sqrt(S l / b). A bucket is
closed when it has B bytes.

A message of pieces (`Collective.fusible`) is packed, which takes time and memory. So a tensor that fills a
bucket, or lasts `WORTH` times as long as the start of a message, is sent by itself, from where it is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from distgraph.ir.collective_registry import collective_of, wire_dtype
from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import Graph, Op
from distgraph.passes.redistribution.planner import BYTE_PRICES, Price, block_volume, latency_price

WORTH = 4
"""Starts of a message that a tensor lasts when packing it with others is no longer worth the copies."""


def bucket_bytes(graph: Graph, group: Sequence[Op], price: Price) -> float:
    """Bytes at which a bucket is closed, for the collectives of one group; infinite if bytes cost nothing.

    A price that counts bytes alone has no cost of a start: then that of `latency_price` counts.
    """
    price = latency_price if price in BYTE_PRICES else price
    first, total = group[0], sum(message_bytes(graph, op) for op in group)
    mesh, axes = graph.attrs[first.operands[0].name].mesh, tuple(first.attrs["axes"])
    members, declared = mesh.count(axes), collective_of(first.kind)
    assert declared is not None
    share = declared.sent_share(members)

    def seconds(nbytes: float) -> float:
        return price(declared.name, share * nbytes, members, mesh, axes)

    slope = (seconds(total) - seconds(total / 2)) / (total / 2)
    start = max(0.0, seconds(1) - slope)
    return math.sqrt(total * start / slope) if slope > 0 else math.inf


def single_bytes(graph: Graph, group: Sequence[Op], limit: float) -> float:
    """Bytes from which on a tensor is sent by itself, for collectives of one group with buckets of `limit`.

    The ratio l / b of the start of a message to the seconds for a byte is limit^2 / S.
    """
    declared = collective_of(group[0].kind)
    if declared is None or declared.fusible != "pieces" or math.isinf(limit):
        return math.inf
    return min(limit, WORTH * limit**2 / sum(message_bytes(graph, op) for op in group))


def cut(graph: Graph, ops: Iterable[Op], limit: float, single: float = math.inf) -> list[list[Op]]:
    """Consecutive ops in buckets, each closed when it has `limit` bytes; those of `single` bytes alone."""
    buckets: list[list[Op]] = [[]]
    size = 0.0
    for op in ops:
        if message_bytes(graph, op) >= single:
            buckets.insert(0, [op])  # the last one stays open
            continue
        if buckets[-1] and size >= limit:
            buckets.append([])
            size = 0.0
        buckets[-1].append(op)
        size += message_bytes(graph, op)
    return buckets


def message_bytes(graph: Graph, op: Op) -> int:
    """Bytes of the largest block that a collective of one tensor sends: the larger of before and after."""
    declared = collective_of(op.kind)
    value = op.results[0] if declared is not None and declared.growth > 0 else op.operands[0]
    attr = graph.attrs[value.name]
    return itemsize(wire_dtype(op)) * block_volume(value.shape, attr.mesh, attr.spec)


def mesh_levels(graph: Graph) -> dict[str, int]:
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
