"""The tasks of the user that collectives follow, so that a shared message lets no task wait for another one.

A message starts when all of its operands are there. If two tasks read what they send in one message, each of
them waits for the other one:

    %a = square(%x) task "up"             %a = square(%x) task "up"
    %b = comm.all_reduce(%a)              %d = square(%y) task "down"
    %c = sqrt(%b) task "up"          ->   %b, %e = comm.all_reduce(%a, %d)
    %d = square(%y) task "down"           %c = sqrt(%b) task "up"      # needs "down"
    %e = comm.all_reduce(%d)              %f = sqrt(%e) task "down"    # needs "up"
    %f = sqrt(%e) task "down"

Collectives with equal entries in `task_waits` may share a message: they follow the same tasks, or no op of a
task needs a result of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from distgraph.ir.graph import Graph, Op
from distgraph.ir.step_phases import AFTER, BEFORE, value_phases

Waits = frozenset[tuple[str, bool]]


def task_waits(graph: Graph) -> dict[str, Waits]:
    """Op of which an op of a task needs the result -> the tasks that precede it in its part of the step.

    Each is (name of a task, whether an op outside of all tasks stands between that task and the op).
    """
    if not any(op.is_named for op in graph.ops):
        return {}
    phases = value_phases(graph)
    parts = {op.name: _part(op, phases) for op in graph.ops}
    waits: dict[str, Waits] = {}
    for op in graph.ops:
        sources = [graph.producers[value.name].name for value in op.operands]
        before = Waits().union(*(waits[name] for name in sources if parts[name] == parts[op.name]))
        if op.is_named:
            before = Waits({(op.task, False)})
        elif not op.moves_data:
            before = Waits((task, True) for task, _ in before)
        waits[op.name] = before
    needed: set[str] = set()
    for op in reversed(graph.ops):
        readers = (user for value in op.results for user in graph.users[value.name])
        inside = (user for user in readers if parts[user.name] == parts[op.name])
        if any(user.is_named or user.name in needed for user in inside):
            needed.add(op.name)
    return {name: before for name, before in waits.items() if name in needed}


def _part(op: Op, phases: Mapping[str, int]) -> str:
    """The part of a step: no task waits inside of what precedes it, and none of one part for a later part."""
    if phases[op.name] == BEFORE:
        return "load"
    return "optimize" if phases[op.name] == AFTER and op.role == "optimize" else "micro-batch"
