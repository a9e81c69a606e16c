"""Gather the parameters of a layer in one message, and the new parameters of a step in buckets.

In:   a lowered graph.
Out:  the same program, in which all_gathers of parameters over one group are fused: those that
      `gather_parameters` places together for one layer, those of stored parameters that are gathered once a
      step, and those of the new parameters after an update of parts (ZeRO-1 and 2).
Invariant: same numbers, to the last bit. Parameters of different layers are in different messages where they
    are gathered for each use. What an update gathers and reads itself, as Adafactor does, is in one message
    only if the same tasks of the user precede it (see `task_waits`).

    %a = comm.all_gather(%x) {dim=1}
    %b = comm.all_gather(%y) {dim=0}     ->     %a, %b = comm.all_gather(%x, %y) {dims=(1, 0)}

For the size of a bucket see `message_buckets`.
"""

from __future__ import annotations

from collections.abc import Hashable

from distgraph.ir.collective_registry import EACH_MICRO_BATCH
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.step_phases import AFTER, BEFORE, value_phases
from distgraph.passes.communication.fuse_reductions import fuse, fusion_key, groups_by_level, is_fusible
from distgraph.passes.communication.gather_parameters import layer_of
from distgraph.passes.communication.message_buckets import bucket_bytes, cut, mesh_levels, single_bytes
from distgraph.passes.communication.task_waits import task_waits
from distgraph.passes.pass_registry import PassContext, register_pass
from distgraph.passes.redistribution.planner import Price, latency_price

NEXT_STEP = "next step"
"""What a parameter is gathered for after its update."""


@register_pass("bucket_parameters", stage="lowered", after=("gather_parameters",))
def _run(graph: Graph, context: PassContext) -> Graph:
    """Gather several parameters in one message."""
    return bucket_parameters(graph, context.price)


def bucket_parameters(graph: Graph, price: Price = latency_price) -> Graph:
    """Fuse the all_gathers of parameters; `price` is the cost of one collective."""
    uses = _uses(graph)
    if len(uses) < 2:
        return graph
    levels, waits = mesh_levels(graph), task_waits(graph)

    def key(op: Op) -> Hashable | None:
        if op.name not in uses:
            return None
        waited = waits.get(op.name) if uses[op.name] == NEXT_STEP else None  # the others are of stored ones
        return fusion_key(graph, op), levels.get(op.name, 0), uses[op.name], waited

    buckets: list[list[Op]] = []
    for group in groups_by_level(graph, key):
        limit = bucket_bytes(graph, group, price)
        buckets += cut(graph, group, limit, single_bytes(graph, group, limit))
    return fuse(graph, buckets)


def _is_stored(graph: Graph, value: Value) -> bool:
    """Whether a value is a parameter as it is stored, perhaps in another dtype."""
    producer = graph.producers[value.name]
    while producer.kind == "cast":
        producer = graph.producers[producer.operands[0].name]
    return producer.kind == "param"


def _uses(graph: Graph) -> dict[str, Hashable]:
    """All_gather of a parameter -> what it is gathered for: a use of its layer, the step, or the next one."""
    uses: dict[str, Hashable] = {}
    if not any(op.kind == "comm.all_gather" for op in graph.ops):
        return uses
    phases, run = value_phases(graph), 0
    follow: set[str] = set()  # results of the present run of gathers, and what is made of one of them alone
    for op in graph.ops:
        if op.kind in SOURCES:
            continue
        gathers = op.kind == "comm.all_gather" and is_fusible(op) and op.results[0].size > 0
        if gathers and op.attrs.get(EACH_MICRO_BATCH):
            uses[op.name] = run, layer_of(op, op.operands[0].name)
        elif gathers and phases[op.name] == BEFORE and _is_stored(graph, op.operands[0]):
            uses[op.name] = "step"
        elif gathers and phases[op.name] == AFTER and op.role == "optimize":
            uses[op.name] = NEXT_STEP
        elif not (len(op.operands) == 1 and op.operands[0].name in follow):
            run += 1
            follow.clear()
            continue
        follow.add(op.name)
    return uses
