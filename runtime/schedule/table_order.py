"""The order of a step under a table of actions that leaves questions open.

A table orders the actions of one stage. It says nothing of two stages that share ranks, nor of tasks that
compute forward values again for the backward tasks of several stages (`Task.recomputes`). Then the step is
simulated with each stage on a device that no other stage has (`stages_apart`), without the latter tasks. That
starts every task behind those it needs, and the actions of each stage in the order of the table. Every value
that is computed again is put into this sequence right before the first task that needs it.

Invariant: in this sequence every task follows all that it waits for. So ranks that each follow it never wait
for each other in a circle, and each stage follows its table.
"""

from __future__ import annotations

from dataclasses import replace

from distgraph.runtime.schedule.action_table import waits_for_turn
from distgraph.runtime.schedule.task import Edge, TaskGraph
from distgraph.runtime.schedule.timeline import Timeline


def needs_order(graph: TaskGraph) -> bool:
    """Whether a table leaves the order open: stages share ranks, or values are computed again in a task."""
    stage_of: dict[int, int] = {}
    shared = any(
        stage_of.setdefault(rank, task.stage) != task.stage
        for task in graph.tasks
        if waits_for_turn(task)
        for rank in task.ranks
    )
    return shared or any(task.recomputes for task in graph.tasks)


def stages_apart(graph: TaskGraph) -> TaskGraph:
    """The graph with a device for each stage, without tasks that recompute; what these need stays needed.

    Example:
        >>> from distgraph.runtime.schedule.task import pipeline
        >>> [task.ranks for task in stages_apart(pipeline([(0, 1), (1, 2)], 4, backward=False)).tasks]
        [(0,), (1,)]
    """
    edges = {(edge.source, edge.target): edge for edge in graph.edges}
    for name in _recomputing(graph):
        sources = [source for source, target in edges if target == name]
        targets = [target for source, target in edges if source == name]
        edges = {pair: edge for pair, edge in edges.items() if name not in pair}
        for source in sources:
            for target in targets:
                edges.setdefault((source, target), Edge(source, target))
    tasks = tuple(replace(task, ranks=(task.stage,)) for task in graph.tasks if not task.recomputes)
    return replace(graph, tasks=tasks, edges=tuple(edges.values()))


def order_of_ranks(graph: TaskGraph, timeline: Timeline) -> dict[int, list[tuple[str, int]]]:
    """Rank -> its (task, micro-batch) pairs, from the timeline of `stages_apart`."""
    ranks = {task.name: task.ranks for task in graph.tasks}
    per_micro = {task.name: task.per_micro for task in graph.tasks}
    again = dict.fromkeys(_recomputing(graph), 0)  # micro-batches that are in the order
    sources: dict[str, list[str]] = {name: [] for name in ranks}
    for edge in graph.edges:
        if edge.source in again:
            sources[edge.target].append(edge.source)
    order: dict[int, list[tuple[str, int]]] = {rank: [] for rank in graph.ranks}

    def recompute(name: str, count: int) -> None:
        while again[name] < count:
            number, again[name] = again[name], again[name] + 1
            add(name, number)

    def add(name: str, micro: int) -> None:
        for source in sources[name]:
            recompute(source, micro + 1 if per_micro[name] else graph.micro_batches)
        for rank in ranks[name]:
            order[rank].append((name, micro))

    for run in timeline.intervals:
        add(run.task, run.micro)
    for name in again:  # what nothing reads
        recompute(name, graph.micro_batches)
    return order


def _recomputing(graph: TaskGraph) -> list[str]:
    return [task.name for task in graph.tasks if task.recomputes]
