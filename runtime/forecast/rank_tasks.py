"""Times of the tasks of one rank, in the order in which it runs them.

*In:* a rank with its program and streams, and how fast it computes in every task.
*Out:* a `TaskForecast` for each task: with the last micro-batch, and with one in the middle.
*Invariant:* what a task does not wait for is counted where it is waited for: sums of gradients in the task
that updates parameters. Waits for parameters that a load task gathers are the exception, and are counted in
the load task: only the first run of another task waits for them, and that run has no times of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from distgraph.passes.partition import LocalTask
from distgraph.runtime.forecast.in_flight import NOTHING_IN_FLIGHT
from distgraph.runtime.forecast.program_structure import TimedRank
from distgraph.runtime.forecast.stream_model import scatters_gradients
from distgraph.runtime.forecast.task_forecast import TaskForecast, remaining, renamed
from distgraph.runtime.forecast.task_time import TaskTime
from distgraph.runtime.program.build import Build


def time_tasks(
    build: Build, timed: TimedRank, speeds: Mapping[str, float], *, trace: bool
) -> Iterator[TaskForecast]:
    """Time the tasks of a rank in their order.

    Args:
        build: the compiled program.
        timed: the rank.
        speeds: task -> how many times as fast as the resource file says the rank computes in it.
        trace: whether to list the spans of every task.
    """
    streams = timed.streams
    tasks = {task.name: task for task in timed.program.tasks}

    def body(task: LocalTask, speed: float) -> TaskTime:
        return streams.run(task, last=_reduces_each(timed, task), trace=trace, speed=speed)

    bodies = {
        name: body(tasks[other], speeds[name])
        for name, other in timed.task_names.items()
        if tasks[other].per_micro
    }
    newest = timed.program.graph.micro_batches - 1
    waits = _waits_for_loads(build, timed, speeds, bodies)
    pending: dict[str, float] = {}
    sums = NOTHING_IN_FLIGHT  # the links that sums of gradients still use
    postponed: list[LocalTask] = []
    for name, micro in build.schedule.order(timed.rank):
        if name in bodies and micro != newest:
            pending = remaining(pending, bodies[name].seconds) if pending else pending
            sums = sums.after(bodies[name].seconds)
            continue
        task = tasks[timed.task_names[name]]
        ends = not task.per_micro and task.kind != "load"
        last = streams.run(
            task,
            last=True,
            pending=pending if ends else None,
            postponed=postponed if ends else (),
            in_flight=sums if ends else NOTHING_IN_FLIGHT,
            trace=trace,
            speed=speeds[name],
        )
        postponed = [] if ends else [*postponed, *([task] if streams.postpones(task) else [])]
        pending = {**remaining(pending, last.seconds), **last.late}
        sums = sums.after(last.seconds)
        if task.kind != "load":
            sums = sums.joined(last.in_flight)
        wait = waits.get(name, 0.0)
        last = replace(last, seconds=last.seconds + wait, exposed=last.exposed + wait)
        times = (renamed(time, timed.values_here) for time in (bodies.get(name, last), last))
        yield TaskForecast(name, task.kind, build.parts.stages[name], timed.rank, *times)


def _reduces_each(timed: TimedRank, task: LocalTask) -> bool:
    """Whether every run of a task reduces gradients, and not only that of the last micro-batch."""
    return timed.streams.runtime.gradients.each_micro_batch and scatters_gradients(task)


def _waits_for_loads(
    build: Build, timed: TimedRank, speeds: Mapping[str, float], bodies: Mapping[str, TaskTime]
) -> dict[str, float]:
    """Load task -> seconds that the first run of every other task waits for what it gathers."""
    streams, tasks = timed.streams, {task.name: task for task in timed.program.tasks}
    newest = timed.program.graph.micro_batches - 1
    waits: dict[str, float] = {}
    load, in_flight = "", NOTHING_IN_FLIGHT
    delayed: set[str] = set()
    for name, micro in build.schedule.order(timed.rank):
        task, speed = tasks[timed.task_names[name]], speeds[name]
        if streams.hands_on(task):
            load, in_flight = name, streams.run(task, last=True, speed=speed).in_flight
        elif not in_flight.ends:
            continue
        elif name in delayed:
            in_flight = in_flight.after(bodies[name].seconds)
        else:
            newest_run = not task.per_micro or micro == newest
            alone = streams.run(task, last=True, speed=speed) if newest_run else bodies[name]
            last = newest_run or _reduces_each(timed, task)
            later = streams.run(task, last=last, in_flight=in_flight, speed=speed)
            waits[load] = waits.get(load, 0.0) + max(0.0, later.seconds - alone.seconds)
            in_flight = later.in_flight
            delayed.add(name)
    return waits
