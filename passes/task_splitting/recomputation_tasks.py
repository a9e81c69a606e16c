"""Which backward tasks compute forward values again and no gradient.

A block of `dg.recompute` may be on several stages. Its last stage computes the values again in the task that
also computes gradients there; every other stage does so in a task before, on which that one waits:

    forward.s0 -> forward.s1 -> forward.s2
                                    |
    backward.s0 (again) -------> backward.s1 (again, gradients) -> backward.s0.l4 (gradients)
"""

from __future__ import annotations

from distgraph.ir.graph import Graph
from distgraph.passes.split_tasks import Parts


def recomputation_tasks(parts: Parts) -> frozenset[str]:
    """Names of the backward tasks without an op that depends on the gradient of the loss."""
    gradients = _gradients(parts.graph)
    whole = {part.name: part.whole or part.name for part in parts.tasks if part.kind == "backward"}
    computing = {
        whole[part.name]
        for part in parts.tasks
        if part.name in whole and any(op.name in gradients for op in part.body)
    }
    return frozenset(name for name, origin in whole.items() if origin not in computing)


def _gradients(graph: Graph) -> set[str]:
    """Names of the ops that depend on the gradient of the loss, and so on all gradients: of an op with a
    gradient that leads to no other, such as each of several losses that are added up."""
    losses = _losses(graph)
    names: set[str] = set()
    for op in graph.ops:
        first = op.role == "backward" and op.link in losses
        if first or any(graph.producers[value.name].name in names for value in op.operands):
            names.add(op.name)
    return names


def _losses(graph: Graph) -> set[str]:
    """Names of the ops with a gradient whose results lead to no other op with a gradient."""
    linked = {op.link for op in graph.ops if op.role == "backward"}
    leading: set[str] = set()
    losses: set[str] = set()
    for op in reversed(graph.ops):
        if op.role == "backward":
            continue
        further = any(user.name in leading for value in op.results for user in graph.users[value.name])
        if op.name in linked and not further:
            losses.add(op.name)
        if op.name in linked or further:
            leading.add(op.name)
    return losses
