"""Taking down when the tasks of a step run on a rank, and when the rank waits.

*In:* a worker that is asked to run a step with a `Recorder`.
*Out:* `MeasuredRank`.
*Invariant:* nothing is done where there is no recorder: the generated code calls its transport directly. With
one, it calls a `Watched` transport for this step. The clock is read at the borders of tasks and messages; on
a GPU the stream is waited for at every border of a task, so that what was issued has been done.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from distgraph.runtime.execute.measured_timeline import (
    MeasuredMessage,
    MeasuredRank,
    MeasuredRun,
    MeasuredStep,
    MeasuredTimeline,
)
from distgraph.runtime.program.codegen import CompiledTask
from distgraph.runtime.schedule.task import TaskGraph
from distgraph.runtime.transport.transport import MESSAGES, Group, Request, Transport

_OUTSIDE = ("", -1)  # of any task: waits at the end of a step


class Recorder:
    """What one rank did in one step.

    Args:
        clock: seconds, ever growing.

    Attributes:
        origin: when the step began here.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.settle: Callable[[], None] = _nothing
        self.current = _OUTSIDE
        self.origin = 0.0
        self._runs: list[tuple[str, int, float, float]] = []
        self._messages: list[tuple[str, str, int, float, float, float]] = []

    def begin(self, transport: Transport | None, group: Group, xp: Any) -> None:
        """The step begins, once all its ranks are here."""
        if xp is not np:
            self.settle = xp.cuda.get_current_stream().synchronize
        if transport is not None and len(group) > 1:
            transport.barrier(group)
        self.origin = self.clock()

    @contextmanager
    def watching(self, tasks: Iterable[CompiledTask], transport: Transport | None) -> Iterator[None]:
        """Tasks communicate over a watched transport until the end of the block."""
        scopes = [task.scope for task in tasks] if transport is not None else []
        watched = Watched(transport, self) if transport is not None else None
        for scope in scopes:
            scope["comm"] = watched
        try:
            yield
        finally:
            for scope in scopes:
                scope["comm"] = transport

    def run(self, name: str, micro: int, task: Callable[[int], None]) -> None:
        """Run a task and take it down."""
        self.current = (name, micro)
        start = self.clock()
        task(micro)
        self.settle()
        self._runs.append((name, micro, start, self.clock()))
        self.current = _OUTSIDE

    def post(self, name: str, micro: int, task: Callable[[int], None]) -> None:
        """Start the receives of a task."""
        self.current = (name, micro)
        task(micro)
        self.current = _OUTSIDE

    def message(self, kind: str, by: tuple[str, int], start: float, waits: float) -> None:
        """Take down a message that has been waited for since `waits`."""
        end = self.clock()
        self._messages.append((kind, *by, start, end, end - waits))

    def content(self, zero: float) -> MeasuredRank:
        """What was taken down, in seconds after `zero` on the clock."""
        runs = tuple(MeasuredRun(t, m, start - zero, end - zero) for t, m, start, end in self._runs)
        messages = tuple(
            MeasuredMessage(kind, t, m, start - zero, end - zero, waited)
            for kind, t, m, start, end, waited in self._messages
        )
        return MeasuredRank(runs, messages)


def contents(
    recorders: Mapping[int, Recorder], gather: Callable[[dict[int, Any]], Mapping[int, Any]]
) -> dict[int, MeasuredRank]:
    """What the ranks of this process took down, on one time axis.

    Ranks of one machine read one clock, and their step begins when the first of them leaves the barrier of
    `Recorder.begin`; those of other machines count from their own first.

    Args:
        recorders: of the ranks of this process.
        gather: brings together what all processes have by rank.
    """
    here = platform.node()
    zero: dict[str, float] = {}
    for host, origin in gather({rank: (here, own.origin) for rank, own in recorders.items()}).values():
        zero[host] = min(origin, zero.get(host, origin))
    return {rank: own.content(zero[here]) for rank, own in recorders.items()}


def _nothing() -> None:
    """On a CPU what has returned has been done."""


class _WatchedRequest:
    """A request whose wait is taken down. See `Request`."""

    __slots__ = ("_by", "_kind", "_recorder", "_request", "_start")

    def __init__(self, request: Request, kind: str, recorder: Recorder, start: float) -> None:
        self._request, self._kind, self._recorder, self._start = request, kind, recorder, start
        self._by = recorder.current

    def wait(self) -> None:
        """See `Request`."""
        waits = self._recorder.clock()
        self._request.wait()
        self._recorder.message(self._kind, self._by, self._start, waits)

    def done(self) -> bool:
        """See `Request`."""
        return self._request.done()


class Watched:
    """A transport whose messages are taken down; everything else is that of the transport.

    Args:
        transport: that does the work.
        recorder: that is told.
    """

    def __init__(self, transport: Transport, recorder: Recorder) -> None:
        self._transport, self._recorder = transport, recorder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        if name not in MESSAGES:
            return found

        def started(*args: Any) -> _WatchedRequest:
            start = self._recorder.clock()
            return _WatchedRequest(found(*args), name, self._recorder, start)

        return started


class Recording:
    """Steps that have been recorded, gathered from all ranks.

    Attributes:
        tasks: name -> kind of every task of the program; set with the first step.
        micro_batches: of a step.
        steps: so far.
    """

    def __init__(self) -> None:
        self.tasks: dict[str, str] = {}
        self.micro_batches = 1
        self.steps: list[MeasuredStep] = []

    def add(self, graph: TaskGraph, number: int, ranks: Mapping[int, MeasuredRank]) -> None:
        """Add a step; one of another program than those before begins the recording anew."""
        tasks = {task.name: task.kind for task in graph.tasks}
        if (tasks, graph.micro_batches) != (self.tasks, self.micro_batches):
            self.tasks, self.micro_batches, self.steps = tasks, graph.micro_batches, []
        self.steps.append(MeasuredStep(number, dict(sorted(ranks.items()))))

    def timeline(self) -> MeasuredTimeline:
        """All steps so far."""
        return MeasuredTimeline(self.tasks, self.micro_batches, tuple(self.steps))
