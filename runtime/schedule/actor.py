"""Actors: which task may run next, decided without a clock, a thread or any input or output.

A task is an actor. It receives events: data is ready upstream, a buffer is free downstream (a credit). When
it has the data and the buffers that it needs, it requests its device, and it runs when the device is granted.
When it has finished, it sends data downstream and releases a buffer upstream.

    event        DataReady  BufferFreed  DeviceFree  Finished
    instruction  Request    Run          Send        Release

The driver of the actors (see `simulate.py`) delivers `Send` of one actor as `DataReady` of another and
`Release` as `BufferFreed`. A schedule policy (`plan/schedule_policies.py`) or a recorded order decides whose
`Request` is answered with `DeviceFree`.

Invariant: an actor runs its micro-batches in order 0, 1, 2, ..., one at a time, and a request once made stays
valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distgraph.errors import RuntimeFault
from distgraph.runtime.schedule.task import Edge, Task, TaskGraph

__all__ = [
    "Actor",
    "BufferFreed",
    "DataReady",
    "DeviceFree",
    "Event",
    "Finished",
    "Instruction",
    "Release",
    "Request",
    "Run",
    "Send",
    "actors",
]


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
    """The device has finished what `Run` asked for."""

    micro: int


@dataclass(frozen=True, slots=True)
class Request:
    """The task could run now: it wants the device."""

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
class _Inlet:
    """What has arrived from one upstream task: a prefix of its micro-batches, and those that overtook it."""

    source: str
    instances: int
    arrived: int = 0
    early: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Outlet:
    """Results that one downstream task has not consumed yet."""

    target: str
    buffers: int | None
    alive: int = 0


class Actor:
    """The state machine of one task for one step; see the module's text for its events and instructions.

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

    __slots__ = ("_inlets", "_instances", "_next", "_outlets", "_requested", "_running", "task")

    def __init__(
        self, task: Task, inputs: Mapping[str, int], outputs: Sequence[Edge], instances: int
    ) -> None:
        self.task = task
        self._inlets = {source: _Inlet(source, count) for source, count in inputs.items()}
        self._outlets = {edge.target: _Outlet(edge.target, edge.buffers) for edge in outputs}
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
        """Take one event, change state, say what to do.

        Raises:
            RuntimeFault: an event that cannot happen: data twice, a buffer freed that held nothing, data from
                or a buffer of a task this one is not joined to, the end of a run that was not begun.
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
        for outlet in self._outlets.values():
            outlet.alive += 1
        return (Run(self.task.name, self._next),)

    def waits(self) -> tuple[str, ...]:
        """What the next micro-batch lacks, in words; empty when nothing but the device, or all is done."""
        if self.done:
            return ()
        lacks = []
        for inlet in self._inlets.values():
            last = self._needed(inlet) - 1
            if inlet.arrived <= last:
                which = str(last) if inlet.arrived == last else f"{inlet.arrived}..{last}"
                lacks.append(f"data of micro-batch {which} from {inlet.source}")
        lacks += [
            f"a free buffer towards {outlet.target} ({outlet.alive} of {outlet.buffers} alive)"
            for outlet in self._outlets.values()
            if outlet.buffers is not None and outlet.alive >= outlet.buffers
        ]
        return tuple(lacks)

    def _needed(self, inlet: _Inlet) -> int:
        return min(self._next + 1, inlet.instances) if self.task.per_micro else inlet.instances

    def _request(self) -> tuple[Instruction, ...]:
        if self._requested or self._running or self._next == self._instances:
            return ()
        for inlet in self._inlets.values():
            if inlet.arrived < self._needed(inlet):
                return ()
        for outlet in self._outlets.values():
            if outlet.buffers is not None and outlet.alive >= outlet.buffers:
                return ()
        self._requested = True
        return (Request(self.task.name, self._next),)

    def _data_ready(self, event: DataReady) -> tuple[Instruction, ...]:
        inlet = self._inlets.get(event.source)
        if inlet is None or not 0 <= event.micro < inlet.instances:
            raise RuntimeFault(
                f"{self.task.name} got data of {event.source} {event.micro}, which it does not use"
            )
        if event.micro < inlet.arrived or event.micro in inlet.early:
            raise RuntimeFault(f"{self.task.name} got data of {event.source} {event.micro} twice")
        if event.micro > inlet.arrived:
            inlet.early.add(event.micro)
            return ()
        inlet.arrived += 1
        while inlet.arrived in inlet.early:
            inlet.early.remove(inlet.arrived)
            inlet.arrived += 1
        return self._request()

    def _buffer_freed(self, event: BufferFreed) -> tuple[Instruction, ...]:
        outlet = self._outlets.get(event.target)
        if outlet is None or outlet.alive == 0:
            raise RuntimeFault(
                f"{event.target} freed a buffer of {self.task.name} {event.micro} that holds nothing"
            )
        outlet.alive -= 1
        return self._request()

    def _finished(self, event: Finished) -> tuple[Instruction, ...]:
        if not self._running or event.micro != self._next:
            raise RuntimeFault(f"{self.task.name} {event.micro} finished but was not running")
        self._running = False
        self._next += 1
        told: list[Instruction] = [*self._request()]
        told += [Send(target, event.micro) for target in self._outlets]
        for inlet in self._inlets.values():
            if not self.task.per_micro:
                told += [Release(inlet.source, micro) for micro in range(inlet.instances)]
            elif inlet.instances == self._instances:
                told.append(Release(inlet.source, event.micro))
            elif self.done:  # a once-per-step result serves all micro-batches and is consumed by the last
                told.append(Release(inlet.source, 0))
        return tuple(told)


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
