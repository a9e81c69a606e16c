"""Measured timelines: the times of every task and wait on every rank, for some training steps.

*In:* the records of `recorder.py`.
*Out:* a JSON file, which reports compare with a forecast.
*Invariant:* times are seconds since all ranks entered the step; the tasks of one rank are in the order in
which they ran and do not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from distgraph.errors import RuntimeFault
from distgraph.runtime.schedule.task import TaskGraph
from distgraph.serialization.atomic_files import write_atomically
from distgraph.serialization.documents import MOST_BYTES as DOCUMENT_BYTES
from distgraph.serialization.documents import read_json, refuse
from distgraph.serialization.fields import BeforeValidator, Limits, known_fields

MOST_BYTES: Final = 4 * DOCUMENT_BYTES
"""Largest size of a file: 5 steps of 1,000 ranks with 500 tasks and messages each."""
_Seconds = Annotated[float, Limits(strict=True, ge=-1e9, le=1e9)]
_Count = Annotated[int, Limits(strict=True, ge=0, lt=2**31)]


def _rank(key: object) -> int:
    """The rank in a key of a JSON object, which is a text."""
    if isinstance(key, str) and key.isdecimal() and len(key) < 10 and str(int(key)) == key:
        return int(key)
    raise ValueError('ranks such as "0" as keys')


@known_fields
@dataclass(frozen=True)
class MeasuredRun:
    """One task instance on one rank; times in seconds since the step began."""

    task: str
    micro: _Count
    start: _Seconds
    end: _Seconds


@known_fields
@dataclass(frozen=True)
class MeasuredMessage:
    """One collective, send or receive on one rank.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send or recv.
        task, micro: the task instance that started it.
        start, end: its start and the end of the wait for it, in seconds since the step began.
        waited: length of that wait in seconds.
    """

    kind: str
    task: str
    micro: _Count
    start: _Seconds
    end: _Seconds
    waited: Annotated[_Seconds, Limits(ge=0)]


@known_fields
@dataclass(frozen=True)
class MeasuredRank:
    """The task instances and messages of one rank in a step."""

    runs: tuple[MeasuredRun, ...]
    messages: tuple[MeasuredMessage, ...]

    def waited(self, run: MeasuredRun) -> float:
        """Seconds for which a task instance waited for communication."""
        seconds = 0.0
        for message in self.messages:
            start = max(message.end - message.waited, run.start)
            seconds += max(0.0, min(message.end, run.end) - start)
        return seconds


@known_fields
@dataclass(frozen=True)
class MeasuredStep:
    """One step, numbered from 1, on all ranks."""

    number: _Count
    ranks: dict[Annotated[int, BeforeValidator(_rank)], MeasuredRank]

    @property
    def seconds(self) -> float:
        """Length of the step: the end of the last task or message of any rank."""
        runs = [run.end for rank in self.ranks.values() for run in rank.runs]
        messages = [message.end for rank in self.ranks.values() for message in rank.messages]
        return max((*runs, *messages), default=0.0)


@known_fields
@dataclass(frozen=True)
class MeasuredTimeline:
    """Some steps of one program; `tasks` has the kind of every task by its name."""

    tasks: dict[str, str]
    micro_batches: Annotated[_Count, Limits(ge=1)]
    steps: tuple[MeasuredStep, ...]

    @property
    def median(self) -> MeasuredStep:
        """The step of median length; of an even number of steps, the shorter of the middle two."""
        return sorted(self.steps, key=lambda step: step.seconds)[(len(self.steps) - 1) // 2]

    def write(self, path: str | Path) -> None:
        """Write the file. Raises RuntimeFault where it cannot be written."""
        from distgraph.serialization.models import adapter  # noqa: PLC0415 (loads pydantic)

        write_atomically(path, adapter(MeasuredTimeline).dump_json(self), RuntimeFault, durable=False)

    @staticmethod
    def read(path: str | Path) -> MeasuredTimeline:
        """Read a file.

        Raises:
            RuntimeFault: the file does not exist, is no measured timeline, or holds no step.
        """
        from distgraph.serialization.models import validate  # noqa: PLC0415 (loads pydantic)

        document = read_json(path, RuntimeFault, MOST_BYTES)
        timeline = validate(
            MeasuredTimeline, document, str(path), RuntimeFault, "distgraph.callbacks.Timeline"
        )
        if not timeline.steps:
            raise RuntimeFault(f"timeline {path} has no step; record at least one")
        for number, step in enumerate(timeline.steps):
            for rank, measured in step.ranks.items():
                place: list[str | int] = ["steps", number, "ranks", str(rank)]
                parts: list[MeasuredRun | MeasuredMessage] = [*measured.runs, *measured.messages]
                for part in parts:
                    if part.task not in timeline.tasks:
                        expected = f"tasks among {', '.join(timeline.tasks) or 'none'}"
                        refuse(RuntimeFault, str(path), place, expected, part.task)
                    if part.end < part.start or part.micro >= timeline.micro_batches:
                        expected = f"times in order, of {timeline.micro_batches} micro-batches"
                        refuse(RuntimeFault, str(path), place, expected)
        return timeline

    def check(self, graph: TaskGraph) -> None:
        """Compare the recorded program with that of a forecast.

        Raises:
            RuntimeFault: they differ in tasks, micro-batches or ranks.
        """
        measured_facts = (sorted(self.tasks), self.micro_batches, sorted(self.median.ranks))
        forecast_facts = (sorted(t.name for t in graph.tasks), graph.micro_batches, list(graph.ranks))
        for what, measured, forecast in zip(
            ("tasks", "micro-batches", "ranks"), measured_facts, forecast_facts, strict=True
        ):
            if measured != forecast:
                raise RuntimeFault(
                    f"timeline: {what} {_listed(measured)} were measured but {_listed(forecast)} are "
                    "forecast; record it with the script, plan and batch size that are forecast"
                )


def _listed(fact: object) -> str:
    return ", ".join(map(str, fact)) if isinstance(fact, list) else str(fact)
