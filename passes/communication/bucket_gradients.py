"""Reduce the gradients of a step in buckets: several in one message, in the order in which they are computed.

In:   a lowered graph.
Out:  the same program, in which the all_reduces (under ZeRO the reduce_scatters) of gradients over one group
      are fused into buckets, each of which starts as soon as its last gradient is complete.
Invariant: same numbers; to the last bit in one process and over MPI, where a message reduces every element
    in the order of the ranks, whatever its place in the message. Gradients that different tasks complete are
    in different buckets: those of different meshes or levels, and those of different tasks of the user where
    one of these reads the sum itself (see `task_waits`).

    %a = comm.all_reduce(%x)
    %b = comm.all_reduce(%y)     ->     %a, %b = comm.all_reduce(%x, %y)

For the size of a bucket see `message_buckets`. What `shard_gradients` scatters in every micro-batch it places
bucket by bucket: those reduce_scatters share a message that stand together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from distgraph.ir.collective_registry import is_collective
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.passes.communication.fuse_reductions import fuse, fusion_key, groups_by_level, is_fusible
from distgraph.passes.communication.message_buckets import bucket_bytes, cut, mesh_levels, single_bytes
from distgraph.passes.communication.task_waits import task_waits
from distgraph.passes.pass_registry import PassContext, register_pass
from distgraph.passes.redistribution.planner import Price, latency_price

_REDUCTIONS = ("comm.all_reduce", "comm.reduce_scatter")


@register_pass("bucket_gradients", stage="lowered", after=("narrow_gradients",))
def _run(graph: Graph, context: PassContext) -> Graph:
    """Reduce several gradients in one message."""
    return bucket_gradients(graph, context.price)


def bucket_gradients(graph: Graph, price: Price = latency_price) -> Graph:
    """Fuse the reductions of gradients; `price` is the cost of one collective."""
    once = {op.name for op in graph.ops if reduces_sum(graph, op)}
    runs = _runs(graph)
    if len(once) + len(runs) < 2:
        return graph
    levels, waits = mesh_levels(graph), task_waits(graph)

    def key(op: Op) -> Hashable | None:
        if op.name not in once and op.name not in runs:
            return None
        return fusion_key(graph, op), levels.get(op.name, 0), runs.get(op.name), waits.get(op.name)

    buckets: list[list[Op]] = []
    position = {value.name: n for n, op in enumerate(graph.ops) for value in op.results}
    groups = groups_by_level(graph, key)
    fusible: dict[Hashable, list[Op]] = {}  # what is scattered in other runs counts for the size of a bucket
    for op in (op for op in graph.ops if op.name in runs):
        fusible.setdefault(fusion_key(graph, op), []).append(op)
    for group in groups:
        counted = fusible.get(fusion_key(graph, group[0]), group) if group[0].name in runs else group
        group.sort(key=lambda op: position[_computed(graph, op.operands[0]).name])
        limit = bucket_bytes(graph, counted, price)
        buckets += cut(graph, group, limit, single_bytes(graph, counted, limit))
    return fuse(graph, buckets)


def reduces_sum(graph: Graph, op: Op) -> bool:
    """Whether an op reduces a gradient of the step, which the micro-batches have added up."""
    if op.kind not in _REDUCTIONS or not is_fusible(op) or not op.results[0].size:
        return False
    summed = graph.producers[op.operands[0].name]
    return summed.kind == "accumulate" and summed.role == "backward"


def scatters_part(graph: Graph, op: Op) -> bool:
    """Whether an op scatters the gradient of one micro-batch, whose parts are added up."""
    if op.kind != "comm.reduce_scatter" or op.role != "backward" or not is_fusible(op):
        return False
    users = graph.users[op.name]
    return bool(op.results[0].size and users) and all(user.kind == "accumulate" for user in users)


def _runs(graph: Graph) -> dict[str, int]:
    """Reduce_scatter of the gradient of a micro-batch -> number of the run of such ops that it is in."""
    return dict(_numbered_runs(graph))


def _numbered_runs(graph: Graph) -> Iterator[tuple[str, int]]:
    number = 0
    for op in graph.ops:
        if scatters_part(graph, op):
            yield op.name, number
        elif op.kind not in SOURCES:
            number += 1


def _computed(graph: Graph, value: Value) -> Value:
    """What an `accumulate` or a message that follows at once gets."""
    producer = graph.producers[value.name]
    while producer.kind == "accumulate" or is_collective(producer):
        value = producer.operands[0]
        producer = graph.producers[value.name]
    return value
