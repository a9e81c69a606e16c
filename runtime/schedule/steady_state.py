"""The timeline of many micro-batches, made from a simulation of few by repeating the steady state.

*In:* a task graph and a policy that depends only on differences between micro-batches (`relative`).
*Out:* the timeline with one clock a task. *Invariant:* it equals the simulation of all micro-batches.

Let n_t(c) be the number of instances of task t that have begun before clock c. With one clock a task these
numbers are the whole state of the actors. If at clock c2 they equal those at c1, plus delta for each task
that runs once per micro-batch, and no task has reached its last instance, the clocks [c1, c2) are a period:
with R delta more micro-batches they are repeated R more times. (The steady state of a timed event graph:
Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity (1992), section 3.7. Here a period is
searched for and not assumed.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from distgraph.plan.pipeline_schedules import SchedulePolicy
from distgraph.runtime.schedule.simulate import simulate
from distgraph.runtime.schedule.task import TaskGraph, verify
from distgraph.runtime.schedule.timeline import Interval, Timeline

_ROUNDS = 2  # micro-batches per stage of the simulation in which a period is searched for


def unit_timeline(graph: TaskGraph, policy: SchedulePolicy) -> Timeline:
    """The timeline of a policy where every task takes one clock.

    Raises:
        GraphError: the graph is malformed.
        RuntimeFault: deadlock.
    """
    verify(graph)  # the buffers may suffice for few micro-batches and not for all
    few = _ROUNDS * (graph.stages + 2)
    while policy.relative and 2 * few < graph.micro_batches:
        short = simulate(replace(graph, micro_batches=few), policy=policy)
        period = _find_period(short)
        if period is None:
            break
        remainder = (graph.micro_batches - few) % period.micro
        if not remainder:
            return _extend(short, period, graph.micro_batches)
        few += remainder
    return simulate(graph, policy=policy)


@dataclass(frozen=True, slots=True)
class _Period:
    """The clocks [start, stop) repeat, with every micro-batch number increased by `micro`."""

    start: int
    stop: int
    micro: int


def _find_period(timeline: Timeline) -> _Period | None:
    """The first period of a timeline; None if there is none."""
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
                start, first_at_start = seen[state]
                return _Period(start, clock, first - first_at_start)
            seen[state] = clock, first
        begun[run.task] += 1
    return None


def _extend(short: Timeline, period: _Period, micro_batches: int) -> Timeline:
    """The timeline of more micro-batches, made by repeating the period."""
    graph = replace(short.graph, micro_batches=micro_batches)
    rounds = (micro_batches - short.graph.micro_batches) // period.micro
    per_micro = {task.name: task.per_micro for task in graph.tasks}

    def later(run: Interval, times: int) -> Interval:
        shift = times * (period.stop - period.start)
        micro = run.micro + times * period.micro if per_micro[run.task] else run.micro
        return Interval(run.task, micro, run.start + shift, run.end + shift)

    head = [run for run in short.intervals if run.start < period.stop]
    block = [run for run in head if run.start >= period.start]
    middle = [later(run, times) for times in range(1, rounds + 1) for run in block]
    tail = [later(run, rounds) for run in short.intervals[len(head) :]]
    return Timeline(graph, (*head, *middle, *tail), short.columns)
