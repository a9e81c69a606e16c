"""A measured timeline: when every task of some training steps ran on every rank, and when it waited.

*In:* what `recording` took down on the ranks.
*Out:* a JSON file, and what a report says of it beside a forecast.
*Invariant:* times are seconds from the moment at which all ranks entered the step; the tasks of one rank
stand in the order in which they ran and do not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter

from distgraph.errors import RuntimeFault
from distgraph.runtime.schedule.task import TaskGraph
from distgraph.serialization.atomic_files import write_atomically
from distgraph.serialization.documents import MOST_BYTES as OTHERS
from distgraph.serialization.documents import read_json, refuse, validate

MOST_BYTES: Final = 4 * OTHERS
"""Of a file: 5 steps of 1,000 ranks with 500 tasks and messages each."""
_CONFIG: Final = ConfigDict(extra="forbid", allow_inf_nan=False)
_Seconds = Annotated[float, Field(strict=True, ge=-1e9, le=1e9)]
_Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


def _rank(key: object) -> int:
    """Of a key of JSON, which is a text."""
    if isinstance(key, str) and key.isdecimal() and len(key) < 10 and str(int(key)) == key:
        return int(key)
    raise ValueError('ranks such as "0" as keys')


@dataclass(frozen=True)
class MeasuredRun:
    """One task instance on one rank.

    Attributes:
        task, micro: name of the task, number of the micro-batch.
        start, end: seconds of the step.
    """

    __pydantic_config__ = _CONFIG

    task: str
    micro: _Count
    start: _Seconds
    end: _Seconds


@dataclass(frozen=True)
class MeasuredMessage:
    """One collective, send or receive on one rank.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send or recv.
        task, micro: that started it.
        start, end: from its start to the end of the wait for it, seconds of the step.
        waited: of those, how long the rank stood still for it, at the end.
    """

    __pydantic_config__ = _CONFIG

    kind: str
    task: str
    micro: _Count
    start: _Seconds
    end: _Seconds
    waited: Annotated[_Seconds, Field(ge=0)]


@dataclass(frozen=True)
class MeasuredRank:
    """What one rank did in a step."""

    __pydantic_config__ = _CONFIG

    runs: tuple[MeasuredRun, ...]
    messages: tuple[MeasuredMessage, ...]

    def waited(self, run: MeasuredRun) -> float:
        """Seconds that a task instance stood still for communication."""
        found = 0.0
        for message in self.messages:
            start = max(message.end - message.waited, run.start)
            found += max(0.0, min(message.end, run.end) - start)
        return found


@dataclass(frozen=True)
class MeasuredStep:
    """One step on all ranks.

    Attributes:
        number: of the step, from 1.
        ranks: rank -> what it did.
    """

    __pydantic_config__ = _CONFIG

    number: _Count
    ranks: dict[Annotated[int, BeforeValidator(_rank)], MeasuredRank]

    @property
    def seconds(self) -> float:
        """To the end of the last task or message of any rank."""
        runs = [run.end for rank in self.ranks.values() for run in rank.runs]
        messages = [message.end for rank in self.ranks.values() for message in rank.messages]
        return max((*runs, *messages), default=0.0)


@dataclass(frozen=True)
class MeasuredTimeline:
    """Some steps of one program.

    Attributes:
        tasks: name -> kind of every task of the program.
        micro_batches: of a step.
        steps: those that were recorded.
    """

    __pydantic_config__ = _CONFIG

    tasks: dict[str, str]
    micro_batches: Annotated[_Count, Field(ge=1)]
    steps: tuple[MeasuredStep, ...]

    @property
    def median(self) -> MeasuredStep:
        """The step that took as long as the median one, of an even number the shorter of the middle two."""
        return sorted(self.steps, key=lambda step: step.seconds)[(len(self.steps) - 1) // 2]

    def write(self, path: str | Path) -> None:
        """Write the file. Raises RuntimeFault when that cannot be."""
        write_atomically(path, _FILE.dump_json(self), RuntimeFault, durable=False)

    @staticmethod
    def read(path: str | Path) -> MeasuredTimeline:
        """Read a file.

        Raises:
            RuntimeFault: there is none, it is no measured timeline, or no step is in it.
        """
        document = read_json(path, RuntimeFault, MOST_BYTES)
        found = validate(_FILE, document, str(path), RuntimeFault, "distgraph.callbacks.Timeline")
        if not found.steps:
            raise RuntimeFault(f"timeline {path} has no step; record it for longer")
        for at, step in enumerate(found.steps):
            for rank, did in step.ranks.items():
                parts: list[MeasuredRun | MeasuredMessage] = [*did.runs, *did.messages]
                for part in parts:
                    if part.task not in found.tasks:
                        known = f"tasks among {', '.join(found.tasks) or 'none'}"
                        refuse(RuntimeFault, str(path), ["steps", at, "ranks", str(rank)], known, part.task)
                    if part.end < part.start or part.micro >= found.micro_batches:
                        told = f"times in order, of {found.micro_batches} micro-batches"
                        refuse(RuntimeFault, str(path), ["steps", at, "ranks", str(rank)], told)
        return found

    def check(self, graph: TaskGraph) -> None:
        """Compare with the tasks of a forecast.

        Raises:
            RuntimeFault: it is of another program.
        """
        mine = (sorted(self.tasks), self.micro_batches, sorted(self.median.ranks))
        theirs = (sorted(t.name for t in graph.tasks), graph.micro_batches, list(graph.ranks))
        for what, measured, forecast in zip(("tasks", "micro-batches", "ranks"), mine, theirs, strict=True):
            if measured != forecast:
                raise RuntimeFault(
                    f"timeline: {what} {_listed(measured)} were measured but {_listed(forecast)} are "
                    "forecast; record it with the script, plan and batch size that are forecast"
                )


def _listed(found: object) -> str:
    return ", ".join(map(str, found)) if isinstance(found, list) else str(found)


_FILE: TypeAdapter[MeasuredTimeline] = TypeAdapter(MeasuredTimeline)
