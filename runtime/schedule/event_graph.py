"""The times of the tasks of a recorded order: a longest path, computed without actors and events.

*In:* a task graph with its credits, the order of every device, seconds of tasks and edges. *Out:* intervals.
*Invariant:* the times are those of the actors under the simulated clock (see `simulate`).

With the order of every device given, nothing is left to decide but the order of messages on links that they
share. Instance k of task t begins at the largest of

    the end of the task before it on each of its devices,
    arrival of the message of (s, k) for every source s (of its last instance where t runs once), which is
    end(s, k) + seconds(s -> t) unless it waits for a link,
    end(r, k - b) for every target r that may hold b results at a time,
    the end of the task two places before (r, k - d) on each device of r, for every ring of d buffers that t
    writes and r receives from (a place earlier where a posted receive writes the ring).

Messages queue for links in the order of time (see `LinkQueues`). Therefore instances and messages are handled
in the order in which they begin, once all that they depend on is known.

Source: the recurrence of timed event graphs, Baccelli, Cohen, Olsder and Quadrat, Synchronization and
Linearity (1992), section 2.5.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from distgraph.passes.analysis.link_contention import LinkQueues, LinkSeconds
from distgraph.runtime.schedule.task import Ring, TaskGraph
from distgraph.runtime.schedule.timeline import Interval


def order_times(
    graph: TaskGraph,
    orders: Sequence[Sequence[tuple[str, int]]],
    devices: Mapping[str, Sequence[int]],
    seconds: Mapping[str, float],
    last: Mapping[str, float],
    delays: Mapping[tuple[str, str], float],
    rings: Iterable[Ring] = (),
    links: Mapping[tuple[str, str], LinkSeconds] | None = None,
) -> tuple[Interval, ...] | None:
    """All task instances in order of their start; None where the orders are not those of a whole step.

    Args:
        graph: the task graph with its buffer limits.
        orders: (task, micro-batch) pairs of every device, first to last.
        devices: task -> devices that run it.
        seconds, last: duration of every task, and its duration with the last micro-batch.
        delays: (source, target) -> seconds from the end of the source to its data being at the target; 0
            if there is no entry.
        rings: buffers that messages are sent from.
        links: (source, target) -> the links that a message occupies.
    """
    path = _LongestPath(graph, devices, delays, LinkQueues(links or {}))
    tasks_of_devices = path.tasks_of_devices(orders)
    if tasks_of_devices is None:
        return None
    path.add_rings(rings, tasks_of_devices)
    if not path.compute(tasks_of_devices, seconds, last):
        return None
    # a stable sort: tasks without duration keep their place among others that begin at the same time
    return tuple(Interval(*run) for run in sorted(path.runs, key=itemgetter(2)))


@dataclass(frozen=True, slots=True, eq=False)
class _Message:
    """What an edge sends over links.

    Attributes:
        edge: names of its tasks.
        target: number of the task that receives it.
        first: the first instance of the source that sends a message.
        delay: seconds from the end of the source to the arrival if all links are free.
        arrivals: times of the messages so far.
    """

    edge: tuple[str, str]
    target: int
    first: int
    delay: float
    arrivals: list[float]


class _LongestPath:
    """Computes the times of task instances one after the other. Tasks are numbered inside.

    Attributes:
        runs: instances timed so far, as (task, micro-batch, start, end).
    """

    def __init__(
        self,
        graph: TaskGraph,
        devices: Mapping[str, Sequence[int]],
        delays: Mapping[tuple[str, str], float],
        queues: LinkQueues[tuple[str, str]],
    ) -> None:
        self.names = [task.name for task in graph.tasks]
        self.number = {name: i for i, name in enumerate(self.names)}
        self.devices = [list(devices[name]) for name in self.names]
        self.instances = [graph.instances(task) for task in graph.tasks]
        self.once = [not task.per_micro for task in graph.tasks]
        self.runs: list[tuple[str, int, float, float]] = []
        self.ends: list[list[float]] = [[] for _ in self.names]
        self.sources: list[list[tuple[int, float, list[float] | None]]] = [[] for _ in self.names]
        self.targets: list[list[tuple[int, int]]] = [[] for _ in self.names]
        self.dependents: list[list[int]] = [[] for _ in self.names]  # tasks that the end of one may enable
        self.messages: list[list[_Message]] = [[] for _ in self.names]  # those that a task sends over links
        self.queues = queues
        for edge in graph.edges:
            source, target = self.number[edge.source], self.number[edge.target]
            key = edge.source, edge.target
            delay = delays.get(key, 0.0)
            arrivals: list[float] | None = None
            if key in queues.longest:
                first = self.instances[source] - 1 if self.once[target] else 0
                message = _Message(key, target, first, delay, [])
                self.messages[source].append(message)
                arrivals = message.arrivals
            else:
                self.dependents[source].append(target)
            self.sources[target].append((source, delay, arrivals))
            if edge.buffers is not None:
                self.targets[source].append((target, edge.buffers))
                self.dependents[target].append(source)
        self.seconds: list[float] = []
        self.last: list[float] = []
        self.head: list[int] = []  # device -> its next task, -1 behind the last
        self.remaining: list[Iterator[int]] = []  # those behind it
        self.free: list[float] = []
        self.waiting = list(range(len(self.names)))  # tasks whose next instance may be able to begin
        self.blocked: list[int] = []  # those of them that wait for a posted receive
        self.beginnings: list[tuple[float, int, int, _Message | None]] = []  # known ones: time, task, message
        self.due = [False] * len(self.names)  # tasks whose next instance is among them
        self.ended: list[list[float]] = []  # device -> ends of its tasks, by place in its order
        self.posts: dict[int, list[list[tuple[int, int]]]] = {}  # receiver -> by micro-batch: (device, place)
        # (device, place) -> posted receives that it waits for, as (receiver, micro-batch)
        self.ring_waits: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def tasks_of_devices(self, orders: Sequence[Sequence[tuple[str, int]]]) -> list[list[int]] | None:
        """Task numbers in the order of each device; None unless it runs all instances of its tasks."""
        tasks_of_devices: list[list[int]] = []
        for device, order in enumerate(orders):
            due = {name: 0 for name, task in self.number.items() if device in self.devices[task]}
            for name, micro in order:
                if due.get(name) != micro:
                    return None
                due[name] += 1
            if any(count != self.instances[self.number[name]] for name, count in due.items()):
                return None
            tasks_of_devices.append([self.number[name] for name, _ in order])
        return tasks_of_devices

    def add_rings(self, rings: Iterable[Ring], tasks_of_devices: Sequence[Sequence[int]]) -> None:
        """Record which places in the orders wait for which posted receives."""
        self.ended = [[] for _ in tasks_of_devices]
        places: dict[tuple[int, int], list[int]] = {}  # (task, device) -> place of every micro-batch
        for device, tasks in enumerate(tasks_of_devices):
            for place, task in enumerate(tasks):
                places.setdefault((task, device), []).append(place)
        for ring in rings:
            writer, receiver = self.number[ring.writer], self.number[ring.receiver]
            by_device = [[(d, p - 2) for p in places[receiver, d]] for d in self.devices[receiver]]
            self.posts[receiver] = [list(posts) for posts in zip(*by_device, strict=True)]
            for device in self.devices[writer]:
                for micro, place in enumerate(places[writer, device][ring.depth :]):
                    if place - ring.posting >= 0:
                        self.ring_waits.setdefault((device, place - ring.posting), []).append(
                            (receiver, micro)
                        )

    def _posted(self, device: int) -> float | None:
        """Time of the last post that the next place of a device waits for; None while it is not known."""
        ready = 0.0
        for receiver, micro in self.ring_waits.get((device, len(self.ended[device])), ()):
            for other, place in self.posts[receiver][micro]:
                if place >= len(self.ended[other]):
                    return None
                ready = max(ready, self.ended[other][place] if place >= 0 else 0.0)
        return ready

    def compute(
        self,
        tasks_of_devices: Sequence[Sequence[int]],
        seconds: Mapping[str, float],
        last: Mapping[str, float],
    ) -> bool:
        """Compute the times of all instances; False where the rest deadlock."""
        self.seconds, self.last = ([spent[name] for name in self.names] for spent in (seconds, last))
        self.remaining = [iter(line) for line in tasks_of_devices]
        self.head = [next(line, -1) for line in self.remaining]
        self.free = [0.0] * len(tasks_of_devices)
        while self.waiting or self.beginnings:
            if self.waiting:
                task = self.waiting.pop()
                begin = None if self.due[task] else self._begin(task)
                if begin is None:
                    continue
                if not self.queues.longest:
                    self._run(task, begin)
                else:
                    self.due[task] = True
                    heapq.heappush(self.beginnings, (begin, task, 0, None))
                continue
            begin, task, _, message = heapq.heappop(self.beginnings)
            if message is None:
                self.due[task] = False
                self._run(task, begin)
            else:
                self._pass_on(message, begin)
        return all(task < 0 for task in self.head)

    def _begin(self, task: int) -> float | None:
        """Time at which the next instance begins; None while it is not known."""
        devices = self.devices[task]
        if self.head[devices[0]] != task or any(self.head[device] != task for device in devices[1:]):
            return None
        begin = self._ready(task)
        if begin is None:
            return None
        for device in devices:
            posted = self._posted(device)
            if posted is None:
                self.blocked.append(task)
                return None
            begin = max(begin, posted, self.free[device])
        return begin

    def _run(self, task: int, begin: float) -> None:
        done = len(self.ends[task])
        closing = not self.once[task] and done == self.instances[task] - 1
        end = begin + (self.last if closing else self.seconds)[task]
        self.runs.append((self.names[task], done, begin, end))
        self.ends[task].append(end)
        for device in self.devices[task]:
            self.free[device] = end
            self.ended[device].append(end)
            self.head[device] = following = next(self.remaining[device], -1)
            if following >= 0:
                self.waiting.append(following)
        for number, message in enumerate(self.messages[task]):
            if done >= message.first:
                handed_over = end + message.delay - self.queues.longest[message.edge]
                heapq.heappush(self.beginnings, (max(begin, handed_over), task, number + 1, message))
        self.waiting += self.dependents[task] + self.blocked
        self.blocked = []

    def _pass_on(self, message: _Message, time: float) -> None:
        """Send the next message of an edge when it is handed over."""
        source = self.number[message.edge[0]]
        end = self.ends[source][message.first + len(message.arrivals)]
        message.arrivals.append(max(self.queues.send(message.edge, time), end + message.delay))
        self.waiting.append(message.target)

    def _ready(self, task: int) -> float | None:
        """Time at which the next instance has its data and room for its results; None while not known."""
        micro, ready = len(self.ends[task]), 0.0
        for source, delay, arrivals in self.sources[task]:
            if arrivals is None:
                ends, count = self.ends[source], self.instances[source]
                needed = count if self.once[task] else min(micro + 1, count)
            else:
                ends, needed = arrivals, 1 if self.once[task] or self.once[source] else micro + 1
            if len(ends) < needed:
                return None
            ready = max(ready, ends[needed - 1] + (delay if arrivals is None else 0.0))
        for target, room in self.targets[task]:
            if micro >= room:
                freed = min(micro - room, self.instances[target] - 1)
                if len(self.ends[target]) <= freed:
                    return None
                ready = max(ready, self.ends[target][freed])
        return ready
