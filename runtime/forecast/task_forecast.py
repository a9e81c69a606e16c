"""Times of one task of a step, and what a runtime adds to them.

*In:* times of tasks on one rank (`TaskTime`). *Out:* a `TaskForecast` for each task of the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from distgraph.runtime.forecast.in_flight import NOTHING_IN_FLIGHT
from distgraph.runtime.forecast.task_time import TaskTime


@dataclass(frozen=True, slots=True)
class TaskForecast:
    """Times of one task on its slowest rank, with the last micro-batch and with any other (`body`)."""

    name: str
    kind: str
    stage: int
    rank: int
    body: TaskTime
    last: TaskTime


def waiting(
    tasks: Mapping[str, TaskForecast], transfers: Mapping[tuple[str, str], float]
) -> dict[str, TaskForecast]:
    """Tasks whose ranks compute nothing while messages from and to other tasks are transferred."""
    waiting: dict[str, float] = dict.fromkeys(tasks, 0.0)
    for ends, seconds in transfers.items():
        for name in ends:
            waiting[name] += seconds

    def later(time: TaskTime, seconds: float) -> TaskTime:
        return replace(time, seconds=time.seconds + seconds, exposed=time.exposed + seconds)

    return {
        name: replace(task, body=later(task.body, waiting[name]), last=later(task.last, waiting[name]))
        for name, task in tasks.items()
    }


def gathering(tasks: Mapping[str, TaskForecast]) -> dict[str, TaskForecast]:
    """Tasks of which each forward and backward one gathers parameters that load tasks else gather once."""
    gathers = {
        task.stage: task.last.seconds
        for task in tasks.values()
        if task.kind == "load" and task.last.communication
    }

    def changed(task: TaskForecast, time: TaskTime) -> TaskTime:
        if task.stage in gathers and task.kind == "load":
            return replace(time, seconds=0.0, exposed=0.0)
        again = gathers.get(task.stage, 0.0) if task.kind in ("forward", "backward") else 0.0
        return replace(time, seconds=time.seconds + again, exposed=time.exposed + again)

    return {
        name: replace(task, body=changed(task, task.body), last=changed(task, task.last))
        for name, task in tasks.items()
    }


def renamed(time: TaskTime, names: Mapping[str, str]) -> TaskTime:
    """The times with other names for values, without what is in flight."""
    sends = {names[sent]: end for sent, end in time.sends.items()}
    late = {names[value]: end for value, end in time.late.items()}
    return replace(time, sends=sends, late=late, in_flight=NOTHING_IN_FLIGHT)


def remaining(pending: Mapping[str, float], seconds: float) -> dict[str, float]:
    """What is pending after some seconds: value -> seconds until its collective ends."""
    return {value: end - seconds for value, end in pending.items() if end > seconds}


def sent_bytes(tasks: Iterable[tuple[TaskForecast, int]]) -> dict[str, float]:
    """Bytes by kind of link that tasks send in a step, each with the number of micro-batches it runs in."""
    sent: dict[str, float] = {}
    for time, count in tasks:
        for link in {**time.body.wire, **time.last.wire}:
            total = (count - 1) * time.body.wire.get(link, 0.0) + time.last.wire.get(link, 0.0)
            sent[link] = sent.get(link, 0.0) + total
    return sent
