"""The actors of one mesh at run time: what it runs and which receives it posts next, without input or output.

*In:* the tasks of a step, limits of what may be alive, and events: data has arrived, a task has finished, a
mesh elsewhere has posted its receives.
*Out:* the next receives to post, and the next task to run among those that are ready.
*Invariant:* whatever the order of the events, no more results are alive than the limits say.

The actors are those of the simulated clock (`actor.py`), and so is the choice among their requests
(`request_order.py`). The first rank of each mesh, its *leader*, has a `GroupActors` and tells its decisions
to the other ranks; see `execute/actor_executor.py`. Tasks that update parameters take no part: they run when
all others have finished.

Example, a pipeline of two stages, of which this is the first, with the limits of 1F1B:

    >>> from distgraph.plan.pipeline_schedules import ONE_F_ONE_B
    >>> from distgraph.runtime.schedule.task import pipeline
    >>> within, across = {("forward.s0", "backward.s0"): 2}, {("forward.s0", "forward.s1"): 2}
    >>> limits = AliveLimits(within, across, posts={("backward.s0", "backward.s0"): 2})
    >>> plan = actor_plan(pipeline([(0,), (1,)], 3, optimize=False), ONE_F_ONE_B, limits)
    >>> group = GroupActors(plan, 0)
    >>> [group.choose(), group.finished(), group.choose(), group.finished(), group.choose()]
    [('forward.s0', 0), None, ('forward.s0', 1), None, None]
    >>> group.new_posts()
    [('backward.s0', 0), ('backward.s0', 1)]
    >>> group.arrived("backward.s1", "backward.s0", 0)
    >>> group.choose()
    ('backward.s0', 0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distgraph.errors import ShardingError
from distgraph.plan.pipeline_schedules import SchedulePolicy
from distgraph.runtime.schedule.actor import (
    Actor,
    BufferFreed,
    DataReady,
    DeviceFree,
    Finished,
    Instruction,
    Release,
    Request,
    Run,
    Send,
)
from distgraph.runtime.schedule.request_order import Key, RequestOrder
from distgraph.runtime.schedule.task import UPDATES, Edge, TaskGraph

Pair = tuple[str, str]
Instance = tuple[str, int]
_DEVICE_FREE = DeviceFree()


@dataclass(frozen=True, slots=True)
class AliveLimits:
    """How far one task may be ahead of another, in micro-batches; pairs without a limit are left out.

    Attributes:
        within: (task, later task of the same mesh) -> micro-batches that the first has started and the second
            has not finished.
        across: (task, task of another mesh that receives from it or from a later task of its mesh) ->
            micro-batches that the first has started and for which the second has not posted its receives.
        posts: (task that receives, task) -> micro-batches for which the first has posted receives and which
            the second, where it is of the same mesh, has not finished, or else has not posted receives for.
    """

    within: Mapping[Pair, int]
    across: Mapping[Pair, int]
    posts: Mapping[Pair, int]


@dataclass(frozen=True)
class ActorPlan:
    """What the actors of all meshes share: equal on all ranks.

    Attributes:
        graph: all tasks.
        policy: the schedule.
        limits: what may be alive.
        groups: ranks of every mesh that runs tasks, ascending.
        group_of: task -> its place in `groups`; tasks that update parameters have none.
        unseen: edges between meshes whose data the leader of the target cannot see arriving, because it
            receives nothing itself.
    """

    graph: TaskGraph
    policy: SchedulePolicy
    limits: AliveLimits
    groups: tuple[tuple[int, ...], ...]
    group_of: Mapping[str, int]
    unseen: frozenset[Pair] = frozenset()

    def crossing(self, edge: Edge) -> bool:
        """Whether an edge joins tasks of two meshes."""
        source, target = self.group_of.get(edge.source), self.group_of.get(edge.target)
        return source is not None and target is not None and source != target

    def ranks_of(self, task: str) -> tuple[int, ...]:
        """The ranks that run a task, ascending; the first is its leader."""
        return self.groups[self.group_of[task]]

    def tasks_of(self, group: int) -> tuple[str, ...]:
        """The tasks of a mesh."""
        return tuple(name for name, place in self.group_of.items() if place == group)

    def credits(self, target: str, senders: int) -> int:
        """For how many micro-batches the mesh `senders` waits for the posted receives of `target`."""
        limits = [
            limit
            for (task, other), limit in self.limits.across.items()
            if other == target and self.group_of[task] == senders
        ]
        return self.graph.micro_batches - min(limits) if limits else 0


def actor_plan(graph: TaskGraph, policy: SchedulePolicy, limits: AliveLimits) -> ActorPlan:
    """The plan of the actors of a program.

    Raises:
        ShardingError: two tasks share some of their ranks but not all, so that no rank can decide for both.
    """
    tasks = [task for task in graph.tasks if task.kind != UPDATES]
    groups: dict[frozenset[int], int] = {}
    owner: dict[int, str] = {}
    for task in tasks:
        groups.setdefault(frozenset(task.ranks), len(groups))
        for rank in task.ranks:
            other = graph.task(owner.setdefault(rank, task.name))
            if set(other.ranks) != set(task.ranks):
                raise ShardingError(
                    f'executor of Strategy is "actors" but rank {rank} runs {other.name} with ranks '
                    f"{sorted(other.ranks)} and {task.name} with ranks {sorted(task.ranks)}, so that no rank "
                    'can decide for both; use executor="static", or meshes that are equal or disjoint'
                )
    group_of = {task.name: groups[frozenset(task.ranks)] for task in tasks}
    return ActorPlan(graph, policy, limits, tuple(tuple(sorted(g)) for g in groups), group_of)


class GroupActors:
    """The actors of one mesh in one step.

    Args:
        plan: the plan of all actors.
        group: place of the mesh in `plan.groups`.
    """

    def __init__(self, plan: ActorPlan, group: int) -> None:
        self._plan, self._micro = plan, plan.graph.micro_batches
        names = frozenset(plan.tasks_of(group))
        tasks = [task for task in plan.graph.tasks if task.name in names]
        self._instances = {task.name: plan.graph.instances(task) for task in tasks}
        inputs: dict[str, dict[str, int]] = {name: {} for name in names}
        outputs: dict[str, list[Edge]] = {name: [] for name in names}
        self._senders: dict[str, list[str]] = {}  # task elsewhere -> tasks that wait for its receives
        self._targets: dict[str, list[str]] = {}  # the reverse
        self._receivers: dict[str, list[str]] = {}  # task that receives -> sources elsewhere
        for source, target, buffers in _edges(plan, names):
            if target in names:
                inputs[target][source] = plan.graph.instances(plan.graph.task(source))
                if source not in names:
                    self._receivers.setdefault(target, []).append(source)
            else:
                self._senders.setdefault(target, []).append(source)
                self._targets.setdefault(source, []).append(target)
            if source in names:
                outputs[source].append(Edge(source, target, buffers))
        self._actors = {
            task.name: Actor(task, inputs[task.name], outputs[task.name], self._instances[task.name])
            for task in tasks
        }
        devices = {
            t.name: [plan.group_of[t.name]] if t.name in plan.group_of else [] for t in plan.graph.tasks
        }
        self._turns = RequestOrder(plan.graph, plan.policy, devices, ruled=True)
        self._post_after = {
            name: [(u, limit) for (task, u), limit in plan.limits.posts.items() if task == name]
            for name in self._receivers
        }
        self.posted = dict.fromkeys(self._receivers, 0)
        self._done = dict.fromkeys((*names, *self._senders), 0)  # finished here, or receives posted elsewhere
        self._started = dict.fromkeys(names, 0)
        self._freed = {(name, target): 0 for target, waits in self._senders.items() for name in waits}
        self._requests: dict[str, Key] = {}
        self._running: Instance | None = None
        for name, actor in self._actors.items():
            self._execute(name, actor.start())

    @property
    def all_finished(self) -> bool:
        """Whether every task has run for every micro-batch."""
        return all(actor.done for actor in self._actors.values())

    def new_posts(self) -> list[Instance]:
        """The receives to post now, in this order, before anything else runs."""
        new = []
        for name in self._receivers:
            while self._may_post(name, self.posted[name]):
                new.append((name, self.posted[name]))
                self.posted[name] += 1
        return new

    def choose(self) -> Instance | None:
        """Start the task that is to run next, which must end by `finished`; None while none is ready."""
        for name in sorted(self._requests, key=self._requests.__getitem__):
            micro = self._actors[name].next_micro
            if self._turns.allows(name, micro):
                del self._requests[name]
                self._turns.started(name, micro)
                self._running = (name, micro)
                self._started[name] = micro + 1
                self._execute(name, self._actors[name].handle(_DEVICE_FREE))
                for target in self._targets.get(name, ()):
                    self._free(name, target)
                return self._running
        return None

    def finished(self) -> None:
        """The task that `choose` returned has finished."""
        assert self._running is not None
        (name, micro), self._running = self._running, None
        self._done[name] = micro + 1
        self._execute(name, self._actors[name].handle(Finished(micro)))

    def arrived(self, source: str, target: str, micro: int) -> None:
        """What `target` receives from `source` has arrived; for a task that runs once, once a step."""
        actor = self._actors[target]
        once = not actor.task.per_micro and self._plan.graph.task(source).per_micro
        for m in range(self._micro) if once else (micro,):
            self._execute(target, actor.handle(DataReady(source, m)))

    def receives_posted(self, target: str, micro: int) -> None:
        """The mesh of `target` has posted the receives of a micro-batch."""
        self._done[target] = micro + 1
        for name in self._senders[target]:
            self._free(name, target)

    def _free(self, name: str, target: str) -> None:
        """Give a task back the credits of a receiver. It may be early: then once the task has used them."""
        freed, used = self._freed[name, target], self._started[name]
        while freed < min(used, self._done[target]):
            self._execute(name, self._actors[name].handle(BufferFreed(target, freed)))
            freed += 1
        self._freed[name, target] = freed

    def waiting(self) -> str:
        """Text of what the unfinished tasks wait for."""
        texts = [
            f"{name} of micro-batch {actor.next_micro}: {' and '.join(actor.waits()) or 'its turn'}"
            for name, actor in self._actors.items()
            if not actor.done
        ]
        return f"what one of its tasks needs ({'; '.join(texts)})"

    def _may_post(self, name: str, micro: int) -> bool:
        if micro >= self._instances[name]:
            return False
        return all(self._done[u] > micro - limit for u, limit in self._post_after[name])

    def _execute(self, name: str, instructions: tuple[Instruction, ...]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Request):
                self._requests[name] = self._turns.key(name, instruction.micro)
            elif isinstance(instruction, Send) and instruction.target in self._actors:
                actor = self._actors[instruction.target]
                self._execute(instruction.target, actor.handle(DataReady(name, instruction.micro)))
            elif isinstance(instruction, Release) and instruction.source in self._actors:
                actor = self._actors[instruction.source]
                self._execute(instruction.source, actor.handle(BufferFreed(name, instruction.micro)))
            else:
                assert isinstance(instruction, Run | Send | Release)


def _edges(plan: ActorPlan, names: frozenset[str]) -> list[tuple[str, str, int | None]]:
    """(source, target, limit) of the data and the limits that concern the tasks of a mesh."""
    limits = plan.limits
    edges: dict[Pair, int | None] = {
        (edge.source, edge.target): limits.within.get((edge.source, edge.target))
        for edge in plan.graph.edges
        if edge.target in names
    }
    edges |= {pair: limit for pair, limit in limits.within.items() if pair[0] in names}
    edges |= {pair: limit for pair, limit in limits.across.items() if pair[0] in names}
    return [(source, target, limit) for (source, target), limit in edges.items()]
