"""When the tasks of a recorded order run: a longest path, without actors and events.

*In:* a task graph with its credits, the order of every device, seconds of tasks and edges. *Out:* intervals.
*Invariant:* the times at which the actors would run under the simulated clock (see `simulate`).

Once the order of every device is given, nothing is left to decide. Instance k of task t begins at the largest
of

    the end of what stands before it on each of its devices,
    end(s, k) + seconds(s -> t) for every source s (of its last instance where t runs once),
    end(r, k - b) for every target r that may hold b results at a time,
    the end of what stands two places before (r, k - d) on each device of r, for every ring of d buffers that
    t writes and r receives from (a place earlier where a posted receive writes the ring).

Source: the recurrence of timed event graphs, Baccelli, Cohen, Olsder and Quadrat, Synchronization and
Linearity (1992), section 2.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from distgraph.runtime.schedule.task import Ring, TaskGraph
from distgraph.runtime.schedule.timeline import Interval


def followed(
    graph: TaskGraph,
    orders: Sequence[Sequence[tuple[str, int]]],
    devices: Mapping[str, Sequence[int]],
    seconds: Mapping[str, float],
    last: Mapping[str, float],
    delays: Mapping[tuple[str, str], float],
    rings: Iterable[Ring] = (),
) -> tuple[Interval, ...] | None:
    """Every task instance by its start; None where the orders are not those of a whole step.

    Args:
        graph: with the buffer limits that hold.
        orders: (task, micro-batch) pairs of every device, first to last.
        devices: of every task.
        seconds, last: of every task, and of those per micro-batch with the last one.
        delays: (source, target) -> seconds from the end of the one to its data being there; else 0.
        rings: buffers that messages are sent from.
    """
    runs = _Runs(graph, devices, delays)
    lines = runs.lines(orders)
    if lines is None:
        return None
    runs.hold(rings, lines)
    if not runs.follow(lines, seconds, last):
        return None
    # what takes no time keeps its place among others that begin then
    return tuple(Interval(*run) for run in sorted(runs.found, key=itemgetter(2)))


class _Runs:
    """Instances timed so far, as (task, micro-batch, start, end); inside, tasks go by their numbers."""

    def __init__(
        self, graph: TaskGraph, devices: Mapping[str, Sequence[int]], delays: Mapping[tuple[str, str], float]
    ) -> None:
        self.names = [task.name for task in graph.tasks]
        self.number = {name: i for i, name in enumerate(self.names)}
        self.devices = [list(devices[name]) for name in self.names]
        self.instances = [graph.instances(task) for task in graph.tasks]
        self.found: list[tuple[str, int, float, float]] = []
        self.ends: list[list[float]] = [[] for _ in self.names]
        self.sources: list[list[tuple[int, float]]] = [[] for _ in self.names]
        self.targets: list[list[tuple[int, int]]] = [[] for _ in self.names]
        self.beside: list[list[int]] = [[] for _ in self.names]  # whom the end of one may set free
        for edge in graph.edges:
            source, target = self.number[edge.source], self.number[edge.target]
            self.sources[target].append((source, delays.get((edge.source, edge.target), 0.0)))
            if edge.buffers is not None:
                self.targets[source].append((target, edge.buffers))
                self.beside[target].append(source)
            self.beside[source].append(target)
        self.once = [not task.per_micro for task in graph.tasks]
        self.ended: list[list[float]] = []  # ends on every device, by place
        self.posts: dict[int, list[list[tuple[int, int]]]] = {}  # receiver -> by micro: device, place
        self.held: dict[tuple[int, int], list[tuple[int, int]]] = {}  # device, place -> what it waits for

    def lines(self, orders: Sequence[Sequence[tuple[str, int]]]) -> list[list[int]] | None:
        """Tasks of every device; None unless each runs all instances of its own tasks, in turn."""
        found: list[list[int]] = []
        for device, order in enumerate(orders):
            due = {name: 0 for name, task in self.number.items() if device in self.devices[task]}
            for name, micro in order:
                if due.get(name) != micro:
                    return None
                due[name] += 1
            if any(count != self.instances[self.number[name]] for name, count in due.items()):
                return None
            found.append([self.number[name] for name, _ in order])
        return found

    def hold(self, rings: Iterable[Ring], lines: Sequence[Sequence[int]]) -> None:
        """Note which places wait for which posts."""
        self.ended = [[] for _ in lines]
        places: dict[tuple[int, int], list[int]] = {}  # (task, device) -> place of every micro-batch
        for device, line in enumerate(lines):
            for place, task in enumerate(line):
                places.setdefault((task, device), []).append(place)
        for ring in rings:
            writer, receiver = self.number[ring.writer], self.number[ring.receiver]
            by_device = [[(d, p - 2) for p in places[receiver, d]] for d in self.devices[receiver]]
            self.posts[receiver] = [list(posts) for posts in zip(*by_device, strict=True)]
            for device in self.devices[writer]:
                for micro, place in enumerate(places[writer, device][ring.depth :]):
                    if place - ring.posting >= 0:
                        self.held.setdefault((device, place - ring.posting), []).append((receiver, micro))

    def _posted(self, device: int) -> float | None:
        """When all posts are made that the next place of a device waits for; None while that is not known."""
        ready = 0.0
        for receiver, micro in self.held.get((device, len(self.ended[device])), ()):
            for other, place in self.posts[receiver][micro]:
                if place >= len(self.ended[other]):
                    return None
                ready = max(ready, self.ended[other][place] if place >= 0 else 0.0)
        return ready

    def follow(
        self, lines: Sequence[Sequence[int]], seconds: Mapping[str, float], last: Mapping[str, float]
    ) -> bool:
        """Time every instance; False where all that is left waits for each other."""
        rest = [iter(line) for line in lines]
        head = [next(line, -1) for line in rest]
        free = [0.0] * len(lines)
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
            known = [time for time in posted if time is not None]
            if len(known) < len(posted):
                blocked.append(task)
                continue
            begin = max(begin, *known, *(free[device] for device in devices))
            done = len(self.ends[task])
            closing = not self.once[task] and done == self.instances[task] - 1
            end = begin + (final if closing else body)[task]
            self.found.append((self.names[task], done, begin, end))
            self.ends[task].append(end)
            for device in devices:
                free[device] = end
                self.ended[device].append(end)
                head[device] = follower = next(rest[device], -1)
                if follower >= 0:
                    waiting.append(follower)
            waiting += self.beside[task] + blocked
            blocked = []
        return all(task < 0 for task in head)

    def _ready(self, task: int) -> float | None:
        """When the next instance has its data and room for its results; None while that is not known."""
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
