"""Limits for actors at run time: how many results may be alive, so that the buffers suffice in any order.

*In:* the task graph, the policy, and the order that was recorded under the simulated clock.
*Out:* `AliveLimits`, from which `memory_plan` takes the number of buffers of every ring.
*Invariant:* the limits are at least those of the policy's credits and what is alive in the recorded order.

Buffers. A ring has at least as many buffers as each limit between the task that writes it and one that uses
it (one more where it is received into, since receives are posted while the buffer before is in use). A task
starts micro-batch k only when the others have finished micro-batch k - limit, so that the buffer which it
writes is free, in whatever order the tasks run.

No deadlock. Order all runs and posts of receives by their clocks in the recorded order, posts before runs,
as `ring_buffer_sizes` does. Of those that have not happened, take the first. If it is a run: what it reads
was computed and its receives were posted earlier; in the recorded order no more was alive when it started, so
no limit stands against it; and the schedule lets it be next. If it is a post: its limits are those of the
recorded order and one more, and a post into a buffer that is sent on depends only on posts before it. So one
can always go on, and the number of both is finite.

Waits inside of a task are no danger: decisions of leaders are ordered by cause and effect, because a leader
decides only on data that were sent and receives that were posted by decisions before. Every rank carries out
the decisions of its mesh in their order, and all that it waits for in one of them (data, the other ranks, a
send whose buffer it writes again) follows from decisions that caused it. So every rank carries out each.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from distgraph.plan.pipeline_schedules import SchedulePolicy
from distgraph.runtime.program.ring_buffer_sizes import Clocks, outstanding, window
from distgraph.runtime.schedule.actor_group import AliveLimits, Pair
from distgraph.runtime.schedule.flow_control import with_credits
from distgraph.runtime.schedule.task import UPDATES, Task, TaskGraph, topological_order
from distgraph.runtime.schedule.task_order import Schedule


def actor_limits(graph: TaskGraph, policy: SchedulePolicy, recorded: Schedule) -> AliveLimits:
    """The limits of a program, for tasks that run once per micro-batch."""
    count = graph.micro_batches
    tasks = {task.name: task for task in graph.tasks if task.per_micro and task.kind != UPDATES}
    places, clocks = _recorded(recorded, tasks)
    credits = {(e.source, e.target): e.buffers or 0 for e in with_credits(graph, policy).edges}
    later = _later(graph)
    within: dict[Pair, int] = {}
    across: dict[Pair, int] = {}
    posts: dict[Pair, int] = {}
    receiving = {
        (edge.source, edge.target)
        for edge in graph.edges
        if edge.source in tasks
        and edge.target in tasks
        and set(tasks[edge.source].ranks) != set(tasks[edge.target].ranks)
    }
    for name, task in tasks.items():
        for other in later[name] & tasks.keys():
            if set(tasks[other].ranks) == set(task.ranks):
                alive = window(places[name], places[other])
                within[name, other] = max(alive, credits.get((name, other), 0))
    for sender, target in receiving:
        reach = 1 + max(1, abs(tasks[target].stage - tasks[sender].stage))
        for name in (sender, *(n for n, other in within if other == sender)):
            apart = outstanding(clocks[name], recorded.posts[target], posting=False)
            limit = max(reach, apart, credits.get((name, target), 0), across.get((name, target), 0))
            across[name, target] = limit
    for name in {target for _, target in receiving}:
        posts[name, name] = 2
        posts |= {pair: limit + 1 for pair, limit in within.items() if pair[0] == name}
        for (source, target), limit in across.items():
            if source == name:
                apart = outstanding(recorded.posts[name], recorded.posts[target], posting=True)
                posts[name, target] = max(limit + 1, apart)
    return AliveLimits(*(_below(limits, count) for limits in (within, across, posts)))


def _below(limits: Mapping[Pair, int], count: int) -> dict[Pair, int]:
    """The limits that can be reached with this number of micro-batches."""
    return {pair: limit for pair, limit in limits.items() if limit < count}


def _recorded(recorded: Schedule, tasks: Mapping[str, Task]) -> tuple[dict[str, Clocks], dict[str, Clocks]]:
    """Task -> for each micro-batch its place in the order of its ranks, and the clock at which it runs."""
    places: dict[str, list[int]] = {name: [] for name in tasks}
    clocks: dict[str, list[int]] = {name: [] for name in tasks}
    for column in recorded.columns:
        for place, step in enumerate(column.steps):
            task = tasks.get(step.task)
            if task is not None and task.ranks[0] in column.ranks:
                places[step.task].append(place)
                clocks[step.task].append(step.clock)
    return (
        {name: np.array(numbers, np.int64) for name, numbers in places.items()},
        {name: np.array(numbers, np.int64) for name, numbers in clocks.items()},
    )


def _later(graph: TaskGraph) -> dict[str, set[str]]:
    """Task -> the tasks that depend on it."""
    targets: dict[str, list[str]] = {task.name: [] for task in graph.tasks}
    for edge in graph.edges:
        targets[edge.source].append(edge.target)
    later: dict[str, set[str]] = {}
    for name in reversed(topological_order(graph)):
        later[name] = set(targets[name]).union(*(later[target] for target in targets[name]))
    return later
