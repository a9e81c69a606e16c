"""Which request for a device is granted first, by the declaration of a schedule.

The simulated clock and the executor of actors ask the same `RequestOrder`, so that what is forecast and what
runs follow one rule. A device here is a group of ranks that run the same tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distgraph.plan.pipeline_schedules import SchedulePolicy
from distgraph.runtime.schedule.action_table import ActionTable
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
        self._policy, self._devices = policy, devices
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
