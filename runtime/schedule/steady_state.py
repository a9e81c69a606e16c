"""A pipeline of many micro-batches from one of few: what happens again and again is simulated once.

*In:* a task graph and a policy that knows micro-batches by their differences only. *Out:* the timeline with
one clock a task. *Invariant:* the one of the whole simulation, step by step.

Before clock c let n_t(c) instances of task t have begun. With one clock a task these numbers are the whole
state of the actors. Where at c2 they are those at c1, each per-micro-batch task delta further, and no task
has come to its last instance, all from c1 on happens again: with R delta more micro-batches, the clocks
[c1, c2) come R times more. (The steady state of a timed event graph: Baccelli, Cohen, Olsder and Quadrat,
Synchronization and Linearity (1992), section 3.7; here it is looked for, not taken for granted.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from distgraph.plan.schedule_policies import SchedulePolicy
from distgraph.runtime.schedule.simulate import simulate
from distgraph.runtime.schedule.task import TaskGraph, verify
from distgraph.runtime.schedule.timeline import Interval, Timeline

_ROUNDS = 2  # micro-batches a stage with which a steady state is looked for


def clocked(graph: TaskGraph, policy: SchedulePolicy) -> Timeline:
    """The timeline of a policy where every task takes one clock.

    Raises:
        GraphError: the graph is malformed.
        RuntimeFault: deadlock.
    """
    verify(graph)  # buffers may be too few for all micro-batches alone
    few = _ROUNDS * (graph.stages + 2)
    while policy.relative and 2 * few < graph.micro_batches:
        short = simulate(replace(graph, micro_batches=few), policy=policy)
        again = _repeated(short)
        if again is None:
            break
        lacking = (graph.micro_batches - few) % again.micro
        if not lacking:
            return _prolonged(short, again, graph.micro_batches)
        few += lacking
    return simulate(graph, policy=policy)


@dataclass(frozen=True, slots=True)
class _Repeated:
    """Clocks [start, stop) happen again, each task `micro` micro-batches further."""

    start: int
    stop: int
    micro: int


def _repeated(timeline: Timeline) -> _Repeated | None:
    """The first clocks after which everything is as it was before them; None where there are none."""
    graph = timeline.graph
    begun = {task.name: 0 for task in graph.tasks}
    per_micro = [task.name for task in graph.tasks if task.per_micro]
    once = [task.name for task in graph.tasks if not task.per_micro]
    seen: dict[tuple[int, ...], tuple[int, int]] = {}
    clock = 0
    if not per_micro:
        return None
    for run in timeline.intervals:
        while clock < round(run.start):
            clock += 1
            first = begun[per_micro[0]]
            state = (*(begun[name] - first for name in per_micro), *(begun[name] for name in once))
            if max(begun[name] for name in per_micro) == graph.micro_batches:
                return None
            if state in seen:
                before, behind = seen[state]
                return _Repeated(before, clock, first - behind)
            seen[state] = clock, first
        begun[run.task] += 1
    return None


def _prolonged(short: Timeline, again: _Repeated, micro_batches: int) -> Timeline:
    """The timeline of more micro-batches."""
    graph = replace(short.graph, micro_batches=micro_batches)
    rounds = (micro_batches - short.graph.micro_batches) // again.micro
    per_micro = {task.name: task.per_micro for task in graph.tasks}

    def later(run: Interval, times: int) -> Interval:
        shift = times * (again.stop - again.start)
        micro = run.micro + times * again.micro if per_micro[run.task] else run.micro
        return Interval(run.task, micro, run.start + shift, run.end + shift)

    head = [run for run in short.intervals if run.start < again.stop]
    block = [run for run in head if run.start >= again.start]
    middle = [later(run, times) for times in range(1, rounds + 1) for run in block]
    tail = [later(run, rounds) for run in short.intervals[len(head) :]]
    return Timeline(graph, (*head, *middle, *tail), short.columns)
