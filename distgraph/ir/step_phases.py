"""How often an op of a graph runs in one step: before, in each of, or after the micro-batches."""

from __future__ import annotations

from distgraph.ir.collective_registry import EACH_MICRO_BATCH
from distgraph.ir.graph import Graph
from distgraph.ir.op_registry import lookup

BEFORE, EACH, AFTER = 0, 1, 2


def value_phases(graph: Graph) -> dict[str, int]:
    """Value name -> `BEFORE` if it depends on no micro-batch, `EACH` on one of them, `AFTER` on all."""
    phase: dict[str, int] = {}
    for op in graph.ops:
        inside = max((phase[v.name] for v in op.operands), default=BEFORE)
        if (op.kind == "input" and op.results[0].shape != ()) or lookup(op.kind).micro:
            inside = max(inside, EACH)
        if op.attrs.get(EACH_MICRO_BATCH):
            inside = max(inside, EACH)
        if op.kind == "accumulate":
            inside = AFTER
        for value in op.results:
            phase[value.name] = inside
    return phase


def multiplicity(graph: Graph) -> dict[str, int]:
    """Value name -> how often it is made in one step."""
    return {name: graph.micro_batches if phase == EACH else 1 for name, phase in value_phases(graph).items()}
