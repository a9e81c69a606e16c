"""The edges between tasks, from the ops that the tasks have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distgraph.ir.graph import Graph, Op

if TYPE_CHECKING:
    from distgraph.passes.split_tasks import Part


def task_edges(graph: Graph, tasks: Sequence[Part]) -> tuple[tuple[str, str], ...]:
    """(source, target) of every value that one task reads from another, and of every transfer."""
    made: dict[str, str] = {}
    sends: dict[str, str] = {}
    for part in tasks:
        for op in part.body:
            if is_send(graph, op, part):
                sends[op.name] = part.name
            else:
                made.update((value.name, part.name) for value in op.results)
    edges: dict[tuple[str, str], None] = {}
    for part in tasks:
        for op in part.body:
            if op.name in sends and not is_send(graph, op, part):
                edges[sends[op.name], part.name] = None
                continue
            for value in op.operands:
                source = made.get(value.name)
                if source is not None and source != part.name:
                    edges[source, part.name] = None
    return tuple(edges)


def is_send(graph: Graph, op: Op, part: Part) -> bool:
    """Whether an op of a task is the sending end of a transfer to another mesh."""
    if op.kind != "comm.transfer":
        return False
    ranks = part.mesh.rank_set
    return graph.attrs[op.operands[0].name].mesh.rank_set == ranks != graph.attrs[op.name].mesh.rank_set
