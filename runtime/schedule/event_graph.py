"""The times of the tasks of a recorded order: a longest path, computed without actors and events.

*In:* a task graph with its credits, the order of every device, seconds of tasks and edges. *Out:* intervals.
*Invariant:* the times are those of the actors under the simulated clock (see `simulate`).

With the order of every device given, nothing is left to decide. Instance k of task t begins at the largest
of

    the end of the task before it on each of its devices,
    end(s, k) + seconds(s -> t) for every source s (of its last instance where t runs once),
    end(r, k - b) for every target r that may hold b results at a time,
    the end of the task two places before (r, k - d) on each device of r, for every ring of d buffers that t
    writes and r receives from (a place earlier where a posted receive writes the ring).

Source: the recurrence of timed event graphs, Baccelli, Cohen, Olsder and Quadrat, Synchronization and
Linearity (1992), section 2.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

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
    """
    path = _LongestPath(graph, devices, delays)
    tasks_of_devices = path.tasks_of_devices(orders)
    if tasks_of_devices is None:
        return None
    path.add_rings(rings, tasks_of_devices)
    if not path.compute(tasks_of_devices, seconds, last):
        return None
    # a stable sort: tasks without duration keep their place among others that begin at the same time
    return tuple(Interval(*run) for run in sorted(path.runs, key=itemgetter(2)))


class _LongestPath:
    """Computes the times of task instances one after the other. Tasks are numbered inside.

    Attributes:
        runs: instances timed so far, as (task, micro-batch, start, end).
    """

    def __init__(
        self, graph: TaskGraph, devices: Mapping[str, Sequence[int]], delays: Mapping[tuple[str, str], float]
    ) -> None:
        self.names = [task.name for task in graph.tasks]
        self.number = {name: i for i, name in enumerate(self.names)}
        self.devices = [list(devices[name]) for name in self.names]
        self.instances = [graph.instances(task) for task in graph.tasks]
        self.runs: list[tuple[str, int, float, float]] = []
        self.ends: list[list[float]] = [[] for _ in self.names]
        self.sources: list[list[tuple[int, float]]] = [[] for _ in self.names]
        self.targets: list[list[tuple[int, int]]] = [[] for _ in self.names]
        self.dependents: list[list[int]] = [[] for _ in self.names]  # tasks that the end of one may enable
        for edge in graph.edges:
            source, target = self.number[edge.source], self.number[edge.target]
            self.sources[target].append((source, delays.get((edge.source, edge.target), 0.0)))
            if edge.buffers is not None:
                self.targets[source].append((target, edge.buffers))
                self.dependents[target].append(source)
            self.dependents[source].append(target)
        self.once = [not task.per_micro for task in graph.tasks]
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
        remaining = [iter(line) for line in tasks_of_devices]
        head = [next(line, -1) for line in remaining]
        free = [0.0] * len(tasks_of_devices)
        body, final = ([spent[name] for name in self.names] for spent in (seconds, last))
        waiting, blocked = list(range(len(self.names))), list[int]()
        while waiting:
            task = waiting.pop()
            devices = self.devices[task]
            if head[devices[0]] != task or any(head[device] != task for device in devices[1:]):
                continue
            begin = self._ready(task)
            if begin is None:
                continue
            posted = [self._posted(device) for device in devices]
            times = [time for time in posted if time is not None]
            if len(times) < len(posted):
                blocked.append(task)
                continue
            begin = max(begin, *times, *(free[device] for device in devices))
            done = len(self.ends[task])
            closing = not self.once[task] and done == self.instances[task] - 1
            end = begin + (final if closing else body)[task]
            self.runs.append((self.names[task], done, begin, end))
            self.ends[task].append(end)
            for device in devices:
                free[device] = end
                self.ended[device].append(end)
                head[device] = next_task = next(remaining[device], -1)
                if next_task >= 0:
                    waiting.append(next_task)
            waiting += self.dependents[task] + blocked
            blocked = []
        return all(task < 0 for task in head)

    def _ready(self, task: int) -> float | None:
        """Time at which the next instance has its data and room for its results; None while not known."""
        micro, ready = len(self.ends[task]), 0.0
        for source, delay in self.sources[task]:
            ends, count = self.ends[source], self.instances[source]
            needed = count if self.once[task] else min(micro + 1, count)
            if len(ends) < needed:
                return None
            ready = max(ready, ends[needed - 1] + delay)
        for target, room in self.targets[task]:
            if micro >= room:
                freed = min(micro - room, self.instances[target] - 1)
                if len(self.ends[target]) <= freed:
                    return None
                ready = max(ready, self.ends[target][freed])
        return ready
