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

    Example:
        >>> from distgraph.runtime.schedule.task import pipeline
        >>> [edge.buffers for edge in with_credits(pipeline([(0,), (1,)], 4, optimize=False), "1f1b").edges]
        [2, 2, 1, 2]
    """
    credits_of = schedule_policy(policy).credits
    tasks = {task.name: task for task in graph.tasks}
    stages = graph.stages
    barriers_before = barriers(graph)
    phase = phases(graph)
    edges = []
    for edge in graph.edges:
        source, target = tasks[edge.source], tasks[edge.target]
        per_micro = source.per_micro and target.per_micro
        if (
            edge.buffers is None
            and per_micro
            and barriers_before[edge.source] == barriers_before[edge.target]
        ):
            turns = phase[edge.source] == "forward" and phase[edge.target] == "backward"
            edge = replace(edge, buffers=credits_of(source, target, stages, turns))
        edges.append(edge)
    return replace(graph, edges=tuple(edges))
