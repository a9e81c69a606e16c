"""Flow control by credits: how many results of a task may be alive on each edge of the task graph.

A credit is the right to produce one more result. A task waits when it has none left, and gets one back when
the consumer is done with a result. Credits turn a pipeline of actors into 1F1B
(docs/parallelism/schedules.md).
"""

from __future__ import annotations

from dataclasses import replace

from distgraph.plan.pipeline_schedules import SchedulePolicy, schedule_policy
from distgraph.runtime.schedule.task import TaskGraph, barriers, phases


def with_credits(graph: TaskGraph, policy: str | SchedulePolicy) -> TaskGraph:
    """The graph with the policy's credits as the buffer limit of every edge without a limit.

    Under a policy with a table, tasks that compute forward values again have none: the tasks that need them
    follow the table.

    Example:
        >>> from distgraph.runtime.schedule.task import pipeline
        >>> [edge.buffers for edge in with_credits(pipeline([(0,), (1,)], 4, optimize=False), "1f1b").edges]
        [2, 2, 1, 2]
    """
    chosen = schedule_policy(policy)
    tasks = {task.name: task for task in graph.tasks}
    stages = graph.stages
    barriers_before = barriers(graph)
    phase = phases(graph)
    edges = []
    for edge in graph.edges:
        source, target = tasks[edge.source], tasks[edge.target]
        per_micro = source.per_micro and target.per_micro
        again = chosen.has_table and (source.recomputes or target.recomputes)
        if (
            edge.buffers is None
            and per_micro
            and not again
            and barriers_before[edge.source] == barriers_before[edge.target]
        ):
            turns = phase[edge.source] == "forward" and phase[edge.target] == "backward"
            edge = replace(edge, buffers=chosen.credits(source, target, stages, turns))
        edges.append(edge)
    return replace(graph, edges=tuple(edges))
