"""Recording the times of the tasks and waits of a step on a rank.

*In:* a worker that runs a step with a `Recorder`.
*Out:* `MeasuredRank`.
*Invariant:* without a recorder nothing is recorded: the generated code calls its transport directly. With
one, it calls a `RecordingTransport` for this step. The clock is read at the start and end of tasks and
messages; on a GPU the host waits for the stream at the end of every task, so that its work is done.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from distgraph.runtime.execute.measured_timeline import (
    MeasuredMessage,
    MeasuredRank,
    MeasuredRun,
    MeasuredStep,
    MeasuredTimeline,
)
from distgraph.runtime.program.compiled_task import CompiledTask
from distgraph.runtime.schedule.task import TaskGraph
from distgraph.runtime.transport.transport import MESSAGES, Group, Request, Transport

_OUTSIDE = ("", -1)  # outside of any task, such as the waits at the end of a step


class Recorder:
    """Records one step of one rank.

    Attributes:
        origin: time of the clock at which the step began on this rank.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        # on a CPU, work is done when the call returns
        self.synchronize: Callable[[], None] = lambda: None
        self.current = _OUTSIDE
        self.origin = 0.0
        self._runs: list[tuple[str, int, float, float]] = []
        self._messages: list[tuple[str, str, int, float, float, float]] = []

    def begin(self, transport: Transport | None, group: Group, xp: Any) -> None:
        """Begin the step, when all its ranks have reached this call."""
        if hasattr(xp, "cuda"):
            self.synchronize = xp.cuda.get_current_stream().synchronize
        if transport is not None and len(group) > 1:
            transport.barrier(group)
        self.origin = self.clock()

    @contextmanager
    def attached(self, tasks: Iterable[CompiledTask], transport: Transport | None) -> Iterator[None]:
        """Context in which tasks communicate over a recording transport."""
        scopes = [task.scope for task in tasks] if transport is not None else []
        recording_transport = RecordingTransport(transport, self) if transport is not None else None
        for scope in scopes:
            scope["comm"] = recording_transport
        try:
            yield
        finally:
            for scope in scopes:
                scope["comm"] = transport

    def run(self, name: str, micro: int, task: Callable[[int], None]) -> None:
        """Run a task and record its times."""
        self.current = (name, micro)
        start = self.clock()
        task(micro)
        self.synchronize()
        self._runs.append((name, micro, start, self.clock()))
        self.current = _OUTSIDE

    def post(self, name: str, micro: int, task: Callable[[int], None]) -> None:
        """Start the receives of a task."""
        self.current = (name, micro)
        task(micro)
        self.current = _OUTSIDE

    def message(self, kind: str, by: tuple[str, int], start: float, waits: float) -> None:
        """Record a message that has been waited for since `waits`."""
        end = self.clock()
        self._messages.append((kind, *by, start, end, end - waits))

    def content(self, zero: float) -> MeasuredRank:
        """The records of the step, in seconds after the time `zero` of the clock."""
        runs = tuple(MeasuredRun(t, m, start - zero, end - zero) for t, m, start, end in self._runs)
        messages = tuple(
            MeasuredMessage(kind, t, m, start - zero, end - zero, waited)
            for kind, t, m, start, end, waited in self._messages
        )
        return MeasuredRank(runs, messages)


def contents(
    recorders: Mapping[int, Recorder], gather: Callable[[dict[int, Any]], Mapping[int, Any]]
) -> dict[int, MeasuredRank]:
    """The records of the ranks of this process on one time axis.

    Ranks of one machine read one clock. Time 0 of a machine is when the first of its ranks leaves the barrier
    of `Recorder.begin`.
    """
    here = platform.node()
    zero: dict[str, float] = {}
    for host, origin in gather(
        {rank: (here, recorder.origin) for rank, recorder in recorders.items()}
    ).values():
        zero[host] = min(origin, zero.get(host, origin))
    return {rank: recorder.content(zero[here]) for rank, recorder in recorders.items()}


class _RecordedRequest:
    """A request whose wait is recorded. See `Request`."""

    __slots__ = ("_by", "_kind", "_recorder", "_request", "_start")

    def __init__(self, request: Request, kind: str, recorder: Recorder, start: float) -> None:
        self._request, self._kind, self._recorder, self._start = request, kind, recorder, start
        self._by = recorder.current

    def wait(self) -> None:
        waits = self._recorder.clock()
        self._request.wait()
        self._recorder.message(self._kind, self._by, self._start, waits)

    def done(self) -> bool:
        return self._request.done()


class RecordingTransport:
    """A transport whose messages are recorded."""

    def __init__(self, transport: Transport, recorder: Recorder) -> None:
        self._transport, self._recorder = transport, recorder

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._transport, name)
        if name not in MESSAGES:
            return attribute

        def started(*args: Any) -> _RecordedRequest:
            start = self._recorder.clock()
            return _RecordedRequest(attribute(*args), name, self._recorder, start)

        return started


class StepRecords(Protocol):
    """What gets the records of every step while an engine records."""

    def add(self, graph: TaskGraph, number: int, ranks: Mapping[int, MeasuredRank]) -> None:
        """Add step `number` of a program on all ranks."""


class Recording:
    """The recorded steps of all ranks so far; see `MeasuredTimeline`."""

    def __init__(self) -> None:
        self.tasks: dict[str, str] = {}
        self.micro_batches = 1
        self.steps: list[MeasuredStep] = []

    def add(self, graph: TaskGraph, number: int, ranks: Mapping[int, MeasuredRank]) -> None:
        """Add a step. A step of another program than those before starts a new recording."""
        tasks = {task.name: task.kind for task in graph.tasks}
        if (tasks, graph.micro_batches) != (self.tasks, self.micro_batches):
            self.tasks, self.micro_batches, self.steps = tasks, graph.micro_batches, []
        self.steps.append(MeasuredStep(number, dict(sorted(ranks.items()))))

    def timeline(self) -> MeasuredTimeline:
        """All steps so far."""
        return MeasuredTimeline(self.tasks, self.micro_batches, tuple(self.steps))
