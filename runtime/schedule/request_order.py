"""Which request for a device is granted first, by the declaration of a schedule.

The simulated clock and the executor of actors ask the same `RequestOrder`, so that what is forecast and what
runs follow one rule. A device here is a group of ranks that run the same tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from distgraph.plan.pipeline_schedules import SchedulePolicy
from distgraph.runtime.schedule.action_table import ActionTable, waits_for_turn
from distgraph.runtime.schedule.task import TaskGraph, phases, topological_order

Key = tuple[int, ...]


class RequestOrder:
    """The order of the requests of one step under a policy.

    Args:
        graph: the task graph.
        policy: the schedule.
        devices: task -> its devices.
        ruled: whether the policy decides the order; False where a recorded order does.

    Attributes:
        phase: task -> its phase; see `phases`.
        depth: task -> minus its place in the topological order, so that the task further down goes first.

    Raises:
        GraphError: the table of the policy does not fit the graph.
    """

    def __init__(
        self, graph: TaskGraph, policy: SchedulePolicy, devices: Mapping[str, Sequence[int]], *, ruled: bool
    ) -> None:
        self._graph, self._policy, self._devices = graph, policy, devices
        self.phase = phases(graph)
        self.depth = {name: -index for index, name in enumerate(topological_order(graph))}
        self._requests = 0
        self._forwards = dict.fromkeys((d for ids in devices.values() for d in ids), 0)  # not yet begun
        for task in graph.tasks:
            if self.phase[task.name] == "forward":
                for device in devices[task.name]:
                    self._forwards[device] += graph.instances(task)
        self._table = ActionTable(graph, policy, self.phase, devices) if ruled and policy.has_table else None

    @property
    def has_table(self) -> bool:
        """Whether a table of actions decides."""
        return self._table is not None

    def key(self, name: str, micro: int) -> Key:
        """The key of a new request; the smallest one goes first."""
        if self._table is None:
            key = self._policy.priority(self.phase[name], micro, self._requests)
        else:
            key = self._table.priority(name, micro)
        self._requests += 1
        return (*key, self.depth[name])

    def forced(self) -> list[list[tuple[str, int]]] | None:
        """The order of the task instances of every device where a table leaves no choice and every task takes
        one clock; else None.

        It leaves none where every other task runs once, and either goes first (`_goes_first`) or needs what
        its devices run last.
        """
        others = [task for task in self._graph.tasks if not waits_for_turn(task)]
        if self._table is None or any(task.per_micro for task in others):
            return None
        orders = self._table.orders(self._graph.micro_batches)
        if orders is None or not all(orders):
            return None
        sources: dict[str, set[str]] = {task.name: set() for task in self._graph.tasks}
        for edge in self._graph.edges:
            sources[edge.target].add(edge.source)
        heads: list[list[str]] = [[] for _ in orders]
        tails = [[order[-1][0]] for order in orders]
        for task in sorted(others, key=lambda task: -self.depth[task.name]):
            for device in self._devices[task.name]:
                if self._goes_first(task.name, orders[device][0][0], sources):
                    heads[device].insert(0, task.name)  # of several the one further down
                elif tails[device][-1] in sources[task.name]:
                    tails[device].append(task.name)
                else:
                    return None
        several = {name for names in heads if len(names) > 1 for name in names}
        if any(sources[name] or self.phase[name] == "after" for name in several):
            return None  # which of them goes first depends on the time
        return [
            [*((name, 0) for name in first), *order, *((name, 0) for name in last[1:])]
            for first, order, last in zip(heads, orders, tails, strict=True)
        ]

    def _goes_first(self, name: str, action: str, sources: Mapping[str, Set[str]]) -> bool:
        """Whether a task goes before the task of the first action of its device.

        That needs it; or it waits for nothing, and either has precedence, or the other waits for
        micro-batches, so that the device is free in the first clock.
        """
        if name in sources[action]:
            return True
        waits = any(self.phase[source] in ("forward", "backward") for source in sources[action])
        return not sources[name] and (self.phase[name] == "before" or waits)

    def _is_held(self, name: str) -> bool:
        """Whether a request waits for forward tasks of its devices without reserving them."""
        if not self._policy.forward_is_done_first or self.phase[name] != "backward":
            return False
        return any(self._forwards[device] for device in self._devices[name])

    def allows(self, name: str, micro: int) -> bool:
        """Whether it is the task's turn: False while forwards or earlier actions of the table come first."""
        return not self._is_held(name) and (self._table is None or self._table.allows(name, micro))

    def started(self, name: str, micro: int) -> None:
        """Note that a task has started."""
        if self.phase[name] == "forward":
            for device in self._devices[name]:
                self._forwards[device] -= 1
        if self._table is not None:
            self._table.started(name, micro)
