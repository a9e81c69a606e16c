"""The task graph of one training step: the tasks, the ranks that run them, and their dependencies.

A task is a part of the step with one role (load, forward, backward, weight, send, recv, sync, optimize). It
runs together on all ranks of one mesh, once per micro-batch or once per step. An edge states that the target
uses a result of the source, and how many such results may be alive at once.

Invariant (checked by `verify`): names are unique, every edge joins two tasks of the graph, the graph has no
cycle, and the consumer of a bounded buffer never waits for more results than the buffer holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from distgraph.errors import GraphError

KINDS = ("load", "forward", "backward", "weight", "send", "recv", "sync", "optimize")

UPDATES = "optimize"
"""Kind of the tasks that write new parameters and states. They run after all others on every rank."""


@dataclass(frozen=True, slots=True)
class Task:
    """A part of the step on one mesh.

    Args:
        name: unique in its graph, for example "forward.s1".
        kind: one of `KINDS`.
        stage: position of the task's mesh in the pipeline, 0 = first.
        ranks: ranks that run the task together (SPMD); meshes of two tasks may overlap in part.
        per_micro: True: once per micro-batch. False: once per step, and then its micro-batch is always 0.
        label: name of the user's task that it is; empty if it is none.
        whole: name of the task of which it is a part, where the user split that one; else empty.
        recomputes: it computes forward values again for backward tasks, and no gradient.
    """

    name: str
    kind: str
    stage: int
    ranks: tuple[int, ...]
    per_micro: bool
    label: str = ""
    whole: str = ""
    recomputes: bool = False


@dataclass(frozen=True, slots=True)
class Edge:
    """The target uses a result of the source.

    Both per micro-batch: the same micro-batch. Per micro-batch to once: after the last micro-batch. Once to
    per micro-batch: every micro-batch waits for it.

    Args:
        source: name of the task that produces.
        target: name of the task that consumes.
        buffers: how many results of the source may be alive at once; a result is alive from the start of the
            source to the end of the target. None: the graph sets no limit; a schedule policy may set one.
    """

    source: str
    target: str
    buffers: int | None = None


@dataclass(frozen=True, slots=True)
class Ring:
    """Buffers that messages are sent from: one per micro-batch, reused in turn.

    A buffer is written again when the receives of the messages sent from it are posted. Each rank of the
    receiver posts them when it has finished the task two places before the receiver in its order.

    Args:
        writer: task that writes the buffers.
        receiver: task that receives what is sent from them.
        depth: number of buffers.
        posting: the buffers are written by a receive, which is posted one place before the task itself.
    """

    writer: str
    receiver: str
    depth: int
    posting: bool


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks and edges of one training step of `micro_batches` micro-batches: a DAG of any shape."""

    tasks: tuple[Task, ...]
    edges: tuple[Edge, ...]
    micro_batches: int

    def task(self, name: str) -> Task:
        """The task of this name.

        Raises:
            GraphError: there is no such task.
        """
        for task in self.tasks:
            if task.name == name:
                return task
        raise GraphError(
            f"task graph has no task {name!r}; it has {', '.join(task.name for task in self.tasks)}"
        )

    def instances(self, task: Task) -> int:
        """Number of instances of a task in one step."""
        return self.micro_batches if task.per_micro else 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that run a task, ascending."""
        return tuple(sorted({rank for task in self.tasks for rank in task.ranks}))

    @property
    def stages(self) -> int:
        """Number of positions in the pipeline."""
        return 1 + max((task.stage for task in self.tasks), default=-1)


def _predecessors(graph: TaskGraph) -> dict[str, list[str]]:
    """The sources of the edges to each task."""
    sources: dict[str, list[str]] = {task.name: [] for task in graph.tasks}
    for edge in graph.edges:
        sources[edge.target].append(edge.source)
    return sources


def _successors(graph: TaskGraph) -> dict[str, list[str]]:
    """The targets of the edges from each task."""
    targets: dict[str, list[str]] = {task.name: [] for task in graph.tasks}
    for edge in graph.edges:
        targets[edge.source].append(edge.target)
    return targets


def topological_order(graph: TaskGraph) -> tuple[str, ...]:
    """Names of the tasks in topological order, with ties in the order of `graph.tasks`.

    Raises:
        CycleError: the graph has a cycle.
    """
    place = {task.name: index for index, task in enumerate(graph.tasks)}
    sorter = TopologicalSorter(_predecessors(graph))
    sorter.prepare()
    ready: list[int] = []
    order: list[str] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, place[name])
        order.append(graph.tasks[heapq.heappop(ready)].name)
        sorter.done(order[-1])
    return tuple(order)


def phases(graph: TaskGraph) -> dict[str, str]:
    """The phase of each task: "before", "forward", "backward" or "after".

    A per-micro-batch task is "backward" when it is a backward task or follows one (the send of a gradient
    is), else "forward". A once-per-step task is "before" when some per-micro-batch task waits for it, else
    "after". No forward task waits for a backward task, so a policy may run all
    forward tasks first.
    """
    kinds = {task.name: task for task in graph.tasks}
    sources, targets = _predecessors(graph), _successors(graph)
    follows: set[str] = set()
    feeds_micro: set[str] = set()
    order = topological_order(graph)
    for name in order:
        if kinds[name].kind == "backward" or any(source in follows for source in sources[name]):
            follows.add(name)
    for name in reversed(order):
        if any(kinds[target].per_micro or target in feeds_micro for target in targets[name]):
            feeds_micro.add(name)
    result = {}
    for task in graph.tasks:
        if task.per_micro:
            result[task.name] = "backward" if task.name in follows else "forward"
        else:
            result[task.name] = "before" if task.name in feeds_micro else "after"
    return result


def barriers(graph: TaskGraph) -> dict[str, frozenset[str]]:
    """For each task, the once-per-step tasks before it that themselves wait for micro-batches.

    An edge between two tasks with different barriers may have to hold all micro-batches, so its buffers
    cannot be few.
    """
    kinds = {task.name: task for task in graph.tasks}
    sources = _predecessors(graph)
    has_micro: set[str] = set()
    result: dict[str, frozenset[str]] = {}
    for name in topological_order(graph):
        waited_for: frozenset[str] = frozenset()
        for source in sources[name]:
            waited_for |= result[source]
            if kinds[source].per_micro or source in has_micro:
                has_micro.add(name)
            if not kinds[source].per_micro and source in has_micro:
                waited_for |= {source}
        result[name] = waited_for
    return result


def verify(graph: TaskGraph) -> None:
    """Check that the graph is well-formed and can be run.

    Raises:
        GraphError: fewer than one micro-batch; a duplicated name or edge, an unknown kind, a task without
            ranks or with a rank twice, an edge to an unknown task, a cycle (its tasks are named), a buffer
            count below one, or a bounded edge whose consumer starts only after more results than it can hold.
    """
    if graph.micro_batches < 1:
        raise GraphError(f"task graph has {graph.micro_batches} micro-batches; a step needs at least 1")
    _verify_tasks(graph)
    _verify_edges(graph)
    try:
        TopologicalSorter(_predecessors(graph)).prepare()
    except CycleError as error:
        cycle = error.args[1]  # its first task is also the last
        raise GraphError(f"task graph has a cycle: {' -> '.join(cycle)}; remove one of these edges") from None
    _verify_buffers(graph)


def _descendants(targets: dict[str, list[str]], name: str) -> set[str]:
    """The tasks that are reached from a task by one edge or more."""
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        new = [target for target in targets[waiting.pop()] if target not in reached]
        reached.update(new)
        waiting.extend(new)
    return reached


def _verify_tasks(graph: TaskGraph) -> None:
    seen: set[str] = set()
    for task in graph.tasks:
        if task.name in seen:
            raise GraphError(f"task {task.name!r} appears twice; names in a task graph are unique")
        seen.add(task.name)
        if task.kind not in KINDS:
            raise GraphError(f"task {task.name!r} has kind {task.kind!r}, expected one of {', '.join(KINDS)}")
        if not task.ranks or len(set(task.ranks)) != len(task.ranks):
            raise GraphError(f"task {task.name!r} runs on ranks {task.ranks}; give at least one, each once")
        if task.stage < 0:
            raise GraphError(f"task {task.name!r} has stage {task.stage}; stages count from 0")


def _verify_edges(graph: TaskGraph) -> None:
    names = {task.name for task in graph.tasks}
    seen: set[tuple[str, str]] = set()
    for edge in graph.edges:
        for end, name in (("source", edge.source), ("target", edge.target)):
            if name not in names:
                raise GraphError(
                    f"edge {edge.source} -> {edge.target}: {end} {name!r} is no task of the graph"
                )
        if (edge.source, edge.target) in seen:
            raise GraphError(f"edge {edge.source} -> {edge.target} appears twice; join them into one")
        seen.add((edge.source, edge.target))
        if edge.buffers is not None and edge.buffers < 1:
            raise GraphError(
                f"edge {edge.source} -> {edge.target} has {edge.buffers} buffers; it needs at least 1"
            )


def _verify_buffers(graph: TaskGraph) -> None:
    """Check that a consumer which waits for all micro-batches, itself or by a barrier, has room for all."""
    tasks = {task.name: task for task in graph.tasks}
    waited_for, targets = barriers(graph), _successors(graph)
    for edge in graph.edges:
        if edge.buffers is None or edge.buffers >= graph.micro_batches or not tasks[edge.source].per_micro:
            continue
        between = set() if tasks[edge.target].per_micro else {edge.target}
        if waited_for[edge.source] != waited_for[edge.target]:
            between |= _descendants(targets, edge.source) & waited_for[edge.target]
        if between:
            count = graph.micro_batches
            raise GraphError(
                f"edge {edge.source} -> {edge.target} has {edge.buffers} buffers but {min(between)} waits "
                f"for all {count} micro-batches first; give it {count} buffers or no limit"
            )


def pipeline(
    stages: Sequence[tuple[int, ...]],
    micro_batches: int,
    *,
    backward: bool = True,
    optimize: bool = True,
    chunks: int = 1,
    weight: bool = False,
) -> TaskGraph:
    """The task graph of a linear pipeline: forward, backward and optimize on each stage.

    Args:
        stages: ranks of each stage, first to last; stages may differ in size.
        micro_batches: micro-batches of one step, at least 1.
        backward: False: inference, forward only.
        optimize: False: leave the once-per-step update out.
        chunks: how often the pipeline reaches each stage, from the first to the last and again.
        weight: True: gradients of parameters in tasks of their own, "weight.s0", ...

    Returns:
        Tasks "forward.s0", "backward.s0", "optimize.s0", ...; in further chunks "forward.s0.c1", ... No edge
        has a buffer limit; the schedule policy sets them.

    Example:
        >>> [task.name for task in pipeline([(0,), (1, 2)], 4).tasks][:3]
        ['forward.s0', 'forward.s1', 'backward.s0']
    """
    places = [(s, f"s{s}.c{c}" if c else f"s{s}") for c in range(chunks) for s in range(len(stages))]

    def named(kind: str) -> list[Task]:
        return [Task(f"{kind}.{end}", kind, s, tuple(stages[s]), True) for s, end in places]

    def joined(source: str, target: str) -> list[Edge]:
        return [Edge(f"{source}.{end}", f"{target}.{end}") for _, end in places]

    tasks = named("forward")
    edges = [Edge(f"forward.{a}", f"forward.{b}") for (_, a), (_, b) in pairwise(places)]
    if backward:
        tasks += named("backward")
        edges += joined("forward", "backward")
        edges += [Edge(f"backward.{b}", f"backward.{a}") for (_, a), (_, b) in pairwise(places)]
    if backward and weight:
        tasks += named("weight")
        edges += joined("forward", "weight") + joined("backward", "weight")
    if backward and optimize:
        tasks += [Task(f"optimize.s{s}", "optimize", s, tuple(r), False) for s, r in enumerate(stages)]
        last = "weight" if weight else "backward"
        edges += [Edge(f"{last}.{end}", f"optimize.s{s}") for s, end in places]
    graph = TaskGraph(tuple(tasks), tuple(edges), micro_batches)
    verify(graph)
    return graph
