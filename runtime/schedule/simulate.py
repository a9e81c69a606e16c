"""The simulated clock: the actors of the runtime, driven by virtual time.

*In:* a task graph, a duration in seconds for each task, and a policy or a recorded order.
*Out:* a `Timeline`: when each task instance ran on each rank.
*Invariant:* a rank runs one task at a time; a task runs on all its ranks at once; nothing is preempted;
messages over the same directed link follow one another (see `LinkQueues`).

A policy is simulated by an event queue over the ranks; a recorded order is a longest path (`event_graph.py`),
and so is an order that a table forces where every task takes one clock (`RequestOrder.forced`).
A table of actions says nothing of two stages that share ranks, nor of recomputation; see `table_order.py`.
Ranks that always run the same tasks are one resource here, which is exact and makes the cost independent of
the size of a mesh. (A process-based simulation library did not fit: a device is not given to the first in a
queue but to one of several requests, each of which needs several devices.)

Example, one forward and one backward at a time (rows are time, columns are ranks):

    >>> from distgraph.runtime.schedule.task import pipeline
    >>> print(simulate(pipeline([(0,), (1,)], 2, optimize=False)).grid())
    F0 -
    F1 F0
    -  B0
    B0 F1
    -  B1
    B1 -
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from distgraph.errors import GraphError, RuntimeFault
from distgraph.ir.gc_pause import collector_paused
from distgraph.passes.analysis.link_contention import LinkQueues, LinkSeconds
from distgraph.plan.pipeline_schedules import SchedulePolicy, schedule_policy
from distgraph.runtime.schedule.actor import (
    Actor,
    BufferFreed,
    DataReady,
    DeviceFree,
    Finished,
    Instruction,
    Request,
    Run,
    Send,
    actors,
)
from distgraph.runtime.schedule.event_graph import order_times
from distgraph.runtime.schedule.flow_control import with_credits
from distgraph.runtime.schedule.request_order import RequestOrder
from distgraph.runtime.schedule.table_order import needs_order, order_of_ranks, stages_apart
from distgraph.runtime.schedule.task import Ring, TaskGraph, verify
from distgraph.runtime.schedule.timeline import SAME_TIME, Interval, Timeline, symbols

__all__ = ["Interval", "Timeline", "seconds_of", "simulate", "symbols"]

_DEVICE_FREE = DeviceFree()
_ROWS_SHOWN = 24
_COLUMNS_SHOWN = 16


def seconds_of(graph: TaskGraph, durations: Mapping[str, float] | None) -> dict[str, float]:
    """Duration of each task in seconds: the entry of its name, else of its kind; None gives every task one
    second.

    Raises:
        GraphError: no entry for a task, or a duration that is negative or not finite.
    """
    result = {}
    for task in graph.tasks:
        if durations is None:
            result[task.name] = 1.0
            continue
        if task.name not in durations and task.kind not in durations:
            raise GraphError(
                f"durations have no entry for task {task.name!r} nor for kind {task.kind!r}; add one"
            )
        seconds = durations[task.name] if task.name in durations else durations[task.kind]
        if not 0 <= seconds < float("inf"):
            raise GraphError(
                f"duration of task {task.name!r} is {seconds} s, expected a finite number from 0 up"
            )
        result[task.name] = float(seconds)
    return result


@collector_paused()
def simulate(
    graph: TaskGraph,
    durations: Mapping[str, float] | None = None,
    *,
    policy: str | SchedulePolicy = "1f1b",
    order: Mapping[int, Sequence[tuple[str, int]]] | None = None,
    transfer: float | Mapping[tuple[str, str], float] = 0.0,
    last: Mapping[str, float] | None = None,
    rings: Collection[Ring] = (),
    links: Mapping[tuple[str, str], LinkSeconds] | None = None,
) -> Timeline:
    """Run one step of the task graph under a virtual clock.

    Args:
        graph: the task graph.
        durations: seconds by task name or by kind (a name has precedence); None: one second each.
        policy: name or declaration of a schedule. It sets the credits and, without `order`, decides which
            request is granted first.
        order: for each rank, the (task, micro-batch) pairs in the order in which it must run them.
        transfer: seconds from the end of a task to its data being ready on ranks that did not run it; or
            those of each edge (source, target), 0 where it is not named.
        last: durations of tasks with the last micro-batch, by name, where they differ.
        rings: buffers that messages are sent from, of the programs that follow `order`.
        links: (source, target) -> seconds for which a message of this edge occupies every directed link on
            its way; by default messages take `transfer` however many are under way.

    Returns:
        The timeline of the step.

    Raises:
        GraphError: the graph is malformed (see `verify`), or a duration is missing or makes no sense.
        RuntimeFault: deadlock: the run stopped with work left. The message draws the grid up to that time
            and names for each rank what it waits for.
    """
    verify(graph)
    chosen = schedule_policy(policy)
    delays = _delays(graph, transfer)
    occupied = _occupied(graph, links or {})
    seconds = seconds_of(graph, durations)
    ends = seconds if last is None else {**seconds, **seconds_of(graph, {**seconds, **last})}
    limited = with_credits(graph, chosen)
    if order is None and chosen.has_table and needs_order(graph):
        order = _table_order(limited, chosen, seconds, ends)
    clock = _SimulatedClock(limited, chosen, seconds, ends, order, delays, occupied)
    recorded: Sequence[Sequence[tuple[str, int]]] | None = clock.order
    if durations is None and last is None and not delays and not occupied:
        recorded = recorded or clock.turns.forced()
    if recorded is not None:
        runs = order_times(clock.graph, recorded, clock.devices, seconds, ends, delays, rings, occupied)
        if runs is not None:
            return Timeline(clock.graph, runs, clock.columns)
    timeline = clock.run()  # of an order that deadlocks it reports what each rank waits for
    if rings:
        raise RuntimeFault(
            "deadlock: the order can be run, but not with rings of "
            f"{min(ring.depth for ring in rings)} buffers: a task waits for a receive that is posted later; "
            "give the senders more buffers"
        )
    return timeline


def _table_order(
    graph: TaskGraph, policy: SchedulePolicy, seconds: Mapping[str, float], last: Mapping[str, float]
) -> dict[int, list[tuple[str, int]]] | None:
    """The order of a policy with a table where the table alone does not give one; see `table_order.py`.

    Returns:
        None if the table deadlocks on stages that share nothing; then it does on the graph.
    """
    try:
        timeline = _SimulatedClock(stages_apart(graph), policy, seconds, last, None, {}, {}).run()
    except RuntimeFault:
        return None
    return order_of_ranks(graph, timeline)


def _delays(
    graph: TaskGraph, transfer: float | Mapping[tuple[str, str], float]
) -> dict[tuple[str, str], float]:
    """Seconds of each edge whose target runs on ranks that do not run its source."""
    for seconds in transfer.values() if isinstance(transfer, Mapping) else (transfer,):
        if not 0 <= seconds < float("inf"):
            raise GraphError(f"transfer time is {seconds} s, expected a finite number from 0 up")
    if not isinstance(transfer, Mapping):
        ranks = {task.name: frozenset(task.ranks) for task in graph.tasks}
        pairs = ((edge.source, edge.target) for edge in graph.edges)
        transfer = {(a, b): transfer for a, b in pairs if not ranks[b] <= ranks[a]}
    return {edge: seconds for edge, seconds in transfer.items() if seconds}


def _occupied(
    graph: TaskGraph, links: Mapping[tuple[str, str], LinkSeconds]
) -> dict[tuple[str, str], LinkSeconds]:
    """The links of each edge that sends something over one."""
    edges = {(edge.source, edge.target) for edge in graph.edges}
    for (source, target), occupied in links.items():
        if (source, target) not in edges:
            raise GraphError(
                f"links are given for {source!r} -> {target!r}, which is no edge of the task graph"
            )
        for seconds in occupied.values():
            if not 0 <= seconds < float("inf"):
                raise GraphError(
                    f"a message of {source!r} -> {target!r} occupies a link for {seconds} s, expected a "
                    "finite number from 0 up"
                )
    return {edge: occupied for edge, occupied in links.items() if any(occupied.values())}


@dataclass(frozen=True, slots=True)
class _HandedOver:
    """A message of `source` is handed over to its links; it arrives at `earliest` if they are free."""

    source: str
    micro: int
    earliest: float


class _SimulatedClock:
    """Virtual time, the actors, and the task that each device runs.

    A device here is a group of ranks that run the same tasks.
    """

    def __init__(
        self,
        graph: TaskGraph,
        policy: SchedulePolicy,
        seconds: Mapping[str, float],
        last: Mapping[str, float],
        order: Mapping[int, Sequence[tuple[str, int]]] | None,
        delays: Mapping[tuple[str, str], float],
        occupied: Mapping[tuple[str, str], LinkSeconds],
    ) -> None:
        self.links = LinkQueues(occupied)
        self.graph, self.policy, self.seconds, self.last, self.delays = graph, policy, seconds, last, delays
        self.per_micro = {task.name: task.per_micro for task in graph.tasks}
        self.actors = actors(graph)
        self.columns = _columns(graph, order)
        column = {ranks[0]: index for index, ranks in enumerate(self.columns)}
        self.devices = {
            task.name: [column[rank] for rank in task.ranks if rank in column] for task in graph.tasks
        }
        self.order = None if order is None else [tuple(order.get(ranks[0], ())) for ranks in self.columns]
        self.head = [0] * len(self.columns)  # position of each device in its recorded order
        self.turns = RequestOrder(graph, policy, self.devices, ruled=order is None)
        self.depth = self.turns.depth
        self.busy: list[str | None] = [None] * len(self.columns)
        self.requested: list[dict[str, tuple[int, ...]]] = [{} for _ in self.columns]  # requests, their keys
        self.instant = order is None and any(value == 0 for value in seconds.values())
        self.receivers: dict[str, list[str]] = {}  # task -> those that it sends messages over links
        for source, target in self.links.longest:
            self.receivers.setdefault(source, []).append(target)
        self.pushed = 0
        self.now = 0.0
        # (time, place of the task in the graph, order of entry, task, event): simultaneous events go down the
        # graph
        self.queue: list[tuple[float, int, int, str, Finished | DataReady | _HandedOver]] = []
        self.dirty: set[int] = set()
        self.intervals: list[Interval] = []

    def run(self) -> Timeline:
        for name, actor in self.actors.items():
            self._execute(name, actor.start())
        self._dispatch()
        while self.queue:
            horizon = self.queue[0][0] * (1 + SAME_TIME)
            while self.queue and self.queue[0][0] <= horizon:
                time, _, _, name, event = heapq.heappop(self.queue)
                self.now = max(self.now, time)
                if isinstance(event, _HandedOver):
                    arrival = self.links.send((event.source, name), self.now)
                    self._push(max(arrival, event.earliest), name, DataReady(event.source, event.micro))
                    continue
                if type(event) is Finished:
                    for device in self.devices[name]:
                        self.busy[device] = None
                    self.dirty.update(self.devices[name])
                self._execute(name, self.actors[name].handle(event))
            self._dispatch()
        timeline = Timeline(self.graph, tuple(self.intervals), self.columns)
        if not all(actor.done for actor in self.actors.values()):
            raise RuntimeFault(self._deadlock(timeline))
        return timeline

    def _execute(self, name: str, instructions: tuple[Instruction, ...]) -> None:
        for instruction in instructions:
            kind = type(instruction)
            if kind is Send:
                self._deliver(name, instruction.target, instruction.micro)  # type: ignore[union-attr]
            elif kind is Request:
                self._record_request(name, instruction.micro)
            elif kind is Run:
                final = self.per_micro[name] and instruction.micro == self.graph.micro_batches - 1
                seconds = (self.last if final else self.seconds)[name]
                self.intervals.append(Interval(name, instruction.micro, self.now, self.now + seconds))
                self._push(self.now + seconds, name, Finished(instruction.micro))
                self._hand_over(name, instruction.micro, self.now + seconds)
            else:
                source = instruction.source  # type: ignore[union-attr]
                self._execute(source, self.actors[source].handle(BufferFreed(name, instruction.micro)))

    def _hand_over(self, source: str, micro: int, end: float) -> None:
        """Announce the messages over links of a task that begins now and ends at `end`."""
        for target in self.receivers.get(source, ()):
            if self._is_queued(source, target, micro):
                earliest = end + self.delays.get((source, target), 0.0)
                time = max(self.now, earliest - self.links.longest[source, target])
                self._push(time, target, _HandedOver(source, micro, earliest))

    def _is_queued(self, source: str, target: str, micro: int) -> bool:
        """Whether a result goes over links: to a task that runs once, only the last one does."""
        if target not in self.receivers.get(source, ()):
            return False
        return self.per_micro[target] or not self.per_micro[source] or micro == self.graph.micro_batches - 1

    def _deliver(self, source: str, target: str, micro: int) -> None:
        if self._is_queued(source, target, micro):
            return
        event = DataReady(source, micro)
        delay = self.delays.get((source, target), 0.0)
        if delay:
            self._push(self.now + delay, target, event)
        else:
            self._execute(target, self.actors[target].handle(event))

    def _push(self, time: float, name: str, event: Finished | DataReady | _HandedOver) -> None:
        heapq.heappush(self.queue, (time, -self.depth[name], self.pushed, name, event))
        self.pushed += 1

    def _record_request(self, name: str, micro: int) -> None:
        key = self.turns.key(name, micro)
        for device in self.devices[name]:
            self.requested[device][name] = key
        self.dirty.update(self.devices[name])

    def _dispatch(self) -> None:
        dirty, self.dirty = self.dirty, set()
        if self.order is not None:
            self._grant_recorded(dirty)
            return
        if self.instant:
            # tasks without duration run first, and their events are handled before a longer task starts
            self._grant(dirty, instant_only=True)
            if self.queue and self.queue[0][0] <= self.now * (1 + SAME_TIME):
                self.dirty |= dirty
                return
        self._grant(dirty, instant_only=False)

    def _grant(self, dirty: set[int], *, instant_only: bool) -> None:
        """Grant free devices to the requests in the order of the policy's keys.

        A request that waits for one of its devices reserves the others, so that requests with larger keys
        cannot starve a task on many ranks.
        """
        keys = {
            name: key
            for device in dirty
            if self.busy[device] is None
            for name, key in self.requested[device].items()
        }
        reserved: set[int] = set()
        for name in sorted(keys, key=keys.__getitem__):
            devices = self.devices[name]
            if not self.turns.allows(name, self.actors[name].next_micro):
                continue
            free = all(self.busy[device] is None and device not in reserved for device in devices)
            if free and not (instant_only and self.seconds[name] > 0):
                self._start(name)
            else:
                reserved.update(devices)

    def _grant_recorded(self, dirty: set[int]) -> None:
        """Grant each device to the next task of its order, once all devices of the task have reached it."""
        for device in dirty:
            step = self._recorded(device)
            if step is None or self.busy[device] is not None:
                continue
            name, micro = step
            actor = self.actors.get(name)
            if actor is None or not actor.requested or actor.next_micro != micro:
                continue
            devices = self.devices[name]
            if all(self._recorded(other) == step and self.busy[other] is None for other in devices):
                for other in devices:
                    self.head[other] += 1
                self._start(name)

    def _recorded(self, device: int) -> tuple[str, int] | None:
        assert self.order is not None
        position = self.head[device]
        return self.order[device][position] if position < len(self.order[device]) else None

    def _start(self, name: str) -> None:
        for device in self.devices[name]:
            self.busy[device] = name
            del self.requested[device][name]
        self.turns.started(name, self.actors[name].next_micro)
        self._execute(name, self.actors[name].handle(_DEVICE_FREE))

    def _deadlock(self, timeline: Timeline) -> str:
        total = sum(self.graph.instances(task) for task in self.graph.tasks)
        lines = [
            f"deadlock: the run stopped with {total - len(self.intervals)} of {total} task instances not run"
        ]
        lines += [timeline.grid(rows=_ROWS_SHOWN)]
        waiting = [line for device in range(len(self.columns)) for line in self._waits(device)]
        lines += waiting[:_COLUMNS_SHOWN]
        if len(waiting) > _COLUMNS_SHOWN:
            lines.append(f"and {len(waiting) - _COLUMNS_SHOWN} more")
        lines.append("make the order of the ranks agree, or give the edges named above more buffers")
        return "\n".join(lines)

    def _waits(self, device: int) -> Iterator[str]:
        who = _ranks_text(self.columns[device])
        waits = f"{who} waits in" if len(self.columns[device]) == 1 else f"{who} wait in"
        if self.order is None:
            for name, devices in self.devices.items():
                if device in devices and not self.actors[name].done:
                    actor = self.actors[name]
                    yield f"{waits} {name} {actor.next_micro} for {self._reason(actor, device)}"
            return
        step = self._recorded(device)
        if step is None:
            missing = [
                name for name in self.devices if device in self.devices[name] and not self.actors[name].done
            ]
            if missing:
                yield f"{who}: the order ends but leaves out {', '.join(missing)}"
            return
        name, micro = step
        stopped = self.actors.get(name)
        if stopped is None or device not in self.devices[name]:
            yield f"{waits} {name} {micro}, which the task graph does not run there"
        elif stopped.next_micro != micro:
            earlier = f"{name} {stopped.next_micro}"
            yield f"{waits} {name} {micro} for {earlier} on the same ranks, which comes later or never"
        else:
            yield f"{waits} {name} {micro} for {self._reason(stopped, device)}"

    def _reason(self, actor: Actor, device: int) -> str:
        missing = list(actor.waits())
        if self.order is not None:
            for other in self.devices[actor.task.name]:
                step = self._recorded(other)
                if other != device and step != (actor.task.name, actor.next_micro):
                    position = "the end of its order" if step is None else f"{step[0]} {step[1]}"
                    missing.append(f"{_ranks_text(self.columns[other])}, which is at {position}")
        turn = (
            "all forwards of its ranks"
            if not self.turns.has_table
            else "its turn in the table of the schedule"
        )
        return " and ".join(missing) or turn


def _columns(
    graph: TaskGraph, order: Mapping[int, Sequence[tuple[str, int]]] | None
) -> tuple[tuple[int, ...], ...]:
    """Ranks that run the same tasks (in the same recorded order), grouped; ascending by first rank."""
    tasks_of: dict[int, list[str]] = {}
    for task in graph.tasks:
        for rank in task.ranks:
            tasks_of.setdefault(rank, []).append(task.name)
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted(tasks_of):
        key = (tuple(tasks_of[rank]), None if order is None else tuple(order.get(rank, ())))
        groups.setdefault(key, []).append(rank)
    return tuple(tuple(ranks) for ranks in groups.values())


def _ranks_text(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown}"
