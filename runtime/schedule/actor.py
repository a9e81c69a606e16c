"""Actors: which task may run next, decided without a clock, a thread or any input or output.

A task is an actor. It receives events: data is ready upstream, a buffer is free downstream (a credit). When
it has the data and the buffers that it needs, it requests its device, and it runs when the device is granted.
When it has finished, it sends data downstream and releases a buffer upstream.

    event        DataReady  BufferFreed  DeviceFree  Finished
    instruction  Request    Run          Send        Release

The driver of the actors (see `simulate.py`) delivers `Send` of one actor as `DataReady` of another and
`Release` as `BufferFreed`. A schedule policy (`plan/pipeline_schedules.py`) or a recorded order decides whose
`Request` is answered with `DeviceFree`.

Invariant: an actor runs its micro-batches in order 0, 1, 2, ..., one at a time, and a request once made stays
valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distgraph.errors import RuntimeFault
from distgraph.runtime.schedule.task import Edge, Task, TaskGraph


@dataclass(frozen=True, slots=True)
class DataReady:
    """The result of `source` for one micro-batch has arrived."""

    source: str
    micro: int


@dataclass(frozen=True, slots=True)
class BufferFreed:
    """`target` has consumed this actor's result of one micro-batch."""

    target: str
    micro: int


@dataclass(frozen=True, slots=True)
class DeviceFree:
    """The device is free and granted to this actor."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The device has finished a `Run`."""

    micro: int


@dataclass(frozen=True, slots=True)
class Request:
    """The task can run and needs its device."""

    task: str
    micro: int


@dataclass(frozen=True, slots=True)
class Run:
    """Run the task on its device; answer with `Finished`."""

    task: str
    micro: int


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver the result: `DataReady` for `target`."""

    target: str
    micro: int


@dataclass(frozen=True, slots=True)
class Release:
    """The result of `source` is consumed: `BufferFreed` for `source`."""

    source: str
    micro: int


Event = DataReady | BufferFreed | DeviceFree | Finished
Instruction = Request | Run | Send | Release


@dataclass(slots=True)
class _Input:
    """Results that have arrived from one upstream task: the first `arrived`, and `early` ones after a gap."""

    source: str
    instances: int
    arrived: int = 0
    early: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Output:
    """The buffer of results that one downstream task has not consumed yet."""

    target: str
    buffers: int | None
    alive: int = 0


class Actor:
    """The state machine of one task for one step; the module's text lists its events and instructions.

    Args:
        task: the task.
        inputs: for each upstream task, how many results it makes in a step.
        outputs: the edges that leave the task, with their buffer limits.
        instances: how many times the task runs in a step.

    Example:
        >>> from distgraph.runtime.schedule.task import pipeline
        >>> actor = actors(pipeline([(0,), (1,)], 3))["forward.s1"]
        >>> actor.handle(DataReady("forward.s0", 0))
        (Request(task='forward.s1', micro=0),)
        >>> actor.handle(DeviceFree())
        (Run(task='forward.s1', micro=0),)
        >>> actor.handle(Finished(0))
        (Send(target='backward.s1', micro=0), Release(source='forward.s0', micro=0))
    """

    __slots__ = ("_inputs", "_instances", "_next", "_outputs", "_requested", "_running", "task")

    def __init__(
        self, task: Task, inputs: Mapping[str, int], outputs: Sequence[Edge], instances: int
    ) -> None:
        self.task = task
        self._inputs = {source: _Input(source, count) for source, count in inputs.items()}
        self._outputs = {edge.target: _Output(edge.target, edge.buffers) for edge in outputs}
        self._instances = instances
        self._next = 0
        self._running = False
        self._requested = False

    @property
    def next_micro(self) -> int:
        """The micro-batch that runs now or next; equals the number of instances when none is left."""
        return self._next

    @property
    def requested(self) -> bool:
        """True while the actor could run if it had its device."""
        return self._requested

    @property
    def done(self) -> bool:
        """True when every instance of the step has finished."""
        return self._next == self._instances

    def start(self) -> tuple[Instruction, ...]:
        """The first instruction of an actor that waits for nothing; call it once, before any event."""
        return self._request()

    def handle(self, event: Event) -> tuple[Instruction, ...]:
        """Handle one event. Returns the instructions that follow from it.

        Raises:
            RuntimeFault: an event that cannot happen: data twice, a buffer freed that held nothing, data from
                or a buffer of a task without an edge to this one, the end of a run that was not started.
        """
        kind = type(event)
        if kind is DataReady:
            return self._data_ready(event)  # type: ignore[arg-type]
        if kind is BufferFreed:
            return self._buffer_freed(event)  # type: ignore[arg-type]
        if kind is Finished:
            return self._finished(event)  # type: ignore[arg-type]
        if not self._requested:
            return ()
        self._requested = False
        self._running = True
        for output in self._outputs.values():
            output.alive += 1
        return (Run(self.task.name, self._next),)

    def waits(self) -> tuple[str, ...]:
        """Texts of what the next micro-batch waits for, apart from the device; empty if for nothing."""
        if self.done:
            return ()
        missing = []
        for input_ in self._inputs.values():
            last = self._needed(input_) - 1
            if input_.arrived <= last:
                which = str(last) if input_.arrived == last else f"{input_.arrived}..{last}"
                missing.append(f"data of micro-batch {which} from {input_.source}")
        missing += [
            f"a free buffer towards {output.target} ({output.alive} of {output.buffers} alive)"
            for output in self._outputs.values()
            if output.buffers is not None and output.alive >= output.buffers
        ]
        return tuple(missing)

    def _needed(self, input_: _Input) -> int:
        return min(self._next + 1, input_.instances) if self.task.per_micro else input_.instances

    def _request(self) -> tuple[Instruction, ...]:
        if self._requested or self._running or self._next == self._instances:
            return ()
        for input_ in self._inputs.values():
            if input_.arrived < self._needed(input_):
                return ()
        for output in self._outputs.values():
            if output.buffers is not None and output.alive >= output.buffers:
                return ()
        self._requested = True
        return (Request(self.task.name, self._next),)

    def _data_ready(self, event: DataReady) -> tuple[Instruction, ...]:
        input_ = self._inputs.get(event.source)
        if input_ is None or not 0 <= event.micro < input_.instances:
            raise RuntimeFault(
                f"{self.task.name} got data of {event.source} {event.micro}, which it does not use"
            )
        if event.micro < input_.arrived or event.micro in input_.early:
            raise RuntimeFault(f"{self.task.name} got data of {event.source} {event.micro} twice")
        if event.micro > input_.arrived:
            input_.early.add(event.micro)
            return ()
        input_.arrived += 1
        while input_.arrived in input_.early:
            input_.early.remove(input_.arrived)
            input_.arrived += 1
        return self._request()

    def _buffer_freed(self, event: BufferFreed) -> tuple[Instruction, ...]:
        output = self._outputs.get(event.target)
        if output is None or output.alive == 0:
            raise RuntimeFault(
                f"{event.target} freed a buffer of {self.task.name} {event.micro} that holds nothing"
            )
        output.alive -= 1
        return self._request()

    def _finished(self, event: Finished) -> tuple[Instruction, ...]:
        if not self._running or event.micro != self._next:
            raise RuntimeFault(f"{self.task.name} {event.micro} finished but was not running")
        self._running = False
        self._next += 1
        instructions: list[Instruction] = [*self._request()]
        instructions += [Send(target, event.micro) for target in self._outputs]
        for input_ in self._inputs.values():
            if not self.task.per_micro:
                instructions += [Release(input_.source, micro) for micro in range(input_.instances)]
            elif input_.instances == self._instances:
                instructions.append(Release(input_.source, event.micro))
            elif self.done:  # a once-per-step result serves all micro-batches and is consumed by the last
                instructions.append(Release(input_.source, 0))
        return tuple(instructions)


def actors(graph: TaskGraph) -> dict[str, Actor]:
    """One fresh actor per task, by name, for one step; the buffer limits are those of the graph's edges."""
    instances = {task.name: graph.instances(task) for task in graph.tasks}
    inputs: dict[str, dict[str, int]] = {task.name: {} for task in graph.tasks}
    outputs: dict[str, list[Edge]] = {task.name: [] for task in graph.tasks}
    for edge in graph.edges:
        inputs[edge.target][edge.source] = instances[edge.source]
        outputs[edge.source].append(edge)
    return {
        task.name: Actor(task, inputs[task.name], outputs[task.name], instances[task.name])
        for task in graph.tasks
    }
