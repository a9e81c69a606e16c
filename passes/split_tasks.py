"""Splits a lowered graph into tasks that run once before, once for each, or once after the micro-batches.

In:   a lowered graph, in which changes of layout are `comm.*` ops.
Out:  tasks, each a sequence of ops on one mesh with one role, and the edges between them.
Invariant: an edge between tasks of different ranks is a transfer. The tasks form a DAG. Together they have
    every op that is not a source exactly once (a transfer twice: its send with the producer, its receive with
    the consumer). Meshes with the same ranks in another order or shape count as one mesh, represented by the
    first of them; a transfer between them is an ordinary op.

The kind of the task of an op follows from its inputs: *load* if it depends on no micro-batch, *forward* or
*backward* if it does. After an `accumulate` it is *optimize* if the op is part of the update of parameters
and states, and *sync* otherwise (the sum of a gradient over stages). A sync task reads no result of an
optimize task, so that all gradients of a step are complete before the first update. The *level* of an op is
the number of changes of mesh on the longest path to it; ops of one kind, mesh and level form a task. Ops that
follow an `accumulate` on the same mesh (the reduction of a gradient) are the *tail* of its task: they run
with the last micro-batch, so that communication starts as soon as the gradient is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter
from threading import Lock
from types import CodeType

from distgraph.ir.collective_registry import EACH_MICRO_BATCH, halo_windows, is_collective
from distgraph.ir.gc_pause import collector_paused
from distgraph.ir.graph import SOURCES, Graph, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import Windows, lookup
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.pass_registry import register_pass

Key = tuple[str, ProcessMesh, int]
UserKey = tuple[str, ProcessMesh, str]  # kind, mesh, name that the user gave
Block = tuple[tuple[int, ...], str, ShardSpec, Windows]  # shape, dtype, layout, halo (empty if none)


@dataclass(frozen=True, slots=True)
class Part:
    """One task of the step.

    Attributes:
        name: unique, such as "forward.s1".
        kind: load, forward, backward, sync or optimize.
        mesh: the ranks that run it together, as the first mesh with these ranks.
        stage: position of its mesh in the pipeline.
        per_micro: whether it runs once for each micro-batch, or once a step.
        body: its ops in program order; a `comm.transfer` is a send in the task of its source, a receive in
            that of its target.
        tail: names of the ops of the body that run with the last micro-batch only.
        label: name of the user's task (see `split_user_tasks`); empty where there is none.
        whole: name of the task that this one is a part of; empty if it is no part.
    """

    name: str
    kind: str
    mesh: ProcessMesh
    stage: int
    per_micro: bool
    body: tuple[Op, ...]
    tail: frozenset[str]
    label: str = ""
    whole: str = ""


@dataclass(frozen=True)
class Parts:
    """All tasks of a step, and properties of the whole program that are computed once for all ranks.

    Attributes:
        graph: the lowered graph.
        tasks: in a topological order.
        edges: (source task, target task) of every value that one task reads from another.
        phase: value name -> 0 before the micro-batches, 1 per micro-batch, 2 after them.
    """

    graph: Graph
    tasks: tuple[Part, ...]
    edges: tuple[tuple[str, str], ...]
    phase: dict[str, int]

    @cached_property
    def loops(self) -> dict[str, dict[str, Parts]]:
        """Name of a loop -> its bodies, each as one task."""
        return {
            op.name: {name: _one_task(op.attrs[name]) for name in lookup(op.kind).bodies}
            for op in self.graph.ops
            if lookup(op.kind).bodies
        }

    @cached_property
    def codes(self) -> dict[str, CodeType]:
        """Cache: generated text -> compiled code, for ranks with equal programs; see `compiling`."""
        return {}

    @cached_property
    def compiling(self) -> Lock:
        """The lock of `codes`: one rank compiles, the others wait for the result."""
        return Lock()

    @cached_property
    def packed(self) -> dict[tuple[tuple[int, int, int], ...], tuple[int, ...]]:
        """Cache: blocks of scratch memory -> offsets, for ranks with equal blocks; see `packing`."""
        return {}

    @cached_property
    def packing(self) -> Lock:
        """The lock of `packed`: one rank packs, the others wait for the result."""
        return Lock()

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Name of every communication op -> its position in the graph, the tag of its messages."""
        return {op.name: i for i, op in enumerate(self.graph.ops) if is_collective(op)}

    @cached_property
    def blocks(self) -> dict[ProcessMesh, dict[Block, list[str]]]:
        """Mesh -> kind of block -> names of the values on that mesh with such blocks."""
        graph, blocks = self.graph, dict[ProcessMesh, dict[Block, list[str]]]()
        for op in graph.ops:
            windows = halo_windows(op)
            for value in op.results:
                attr = graph.attrs[value.name]
                block = (value.shape, value.dtype, attr.spec, windows)
                blocks.setdefault(attr.mesh, {}).setdefault(block, []).append(value.name)
        return blocks

    @cached_property
    def sources(self) -> dict[ProcessMesh, list[tuple[int, str]]]:
        """Mesh -> (position in the program, name) of the values that exist before the step."""
        sources: dict[ProcessMesh, list[tuple[int, str]]] = {}
        for place, op in enumerate(self.graph.sources()):
            for value in op.results:
                sources.setdefault(self.graph.attrs[value.name].mesh, []).append((place, value.name))
        return sources

    def sources_of(self, rank: int) -> tuple[str, ...]:
        """Names of the values that a rank stores before the step, in program order."""
        of_rank = (value for mesh, values in self.sources.items() if rank in mesh for value in values)
        return tuple(name for _, name in sorted(of_rank))

    @cached_property
    def updates(self) -> dict[str, tuple[int, str]]:
        """Name of a parameter or state -> position among the updates, name of its new value."""
        return {old: (place, new.name) for place, (old, new) in enumerate(self.graph.updates)}

    @cached_property
    def transfers(self) -> dict[str, tuple[str, str]]:
        """Name of a transfer between tasks -> the task that sends, the task that receives."""
        ends: dict[str, dict[bool, str]] = {}
        for part in self.tasks:
            for op in part.body:
                if op.kind == "comm.transfer":
                    receives = self.graph.attrs[op.name].mesh.rank_set == part.mesh.rank_set
                    ends.setdefault(op.name, {})[receives] = part.name
        return {name: (end[False], end[True]) for name, end in ends.items() if len(end) == 2}

    @cached_property
    def before(self) -> dict[str, frozenset[str]]:
        """Task -> all tasks that have ended before it may begin."""
        sources: dict[str, list[str]] = {part.name: [] for part in self.tasks}
        for source, target in self.edges:
            sources[target].append(source)
        before: dict[str, frozenset[str]] = {}
        for name in TopologicalSorter(sources).static_order():
            before[name] = frozenset(sources[name]).union(*(before[source] for source in sources[name]))
        return before

    @cached_property
    def stages(self) -> dict[str, int]:
        """Task -> its stage."""
        return {part.name: part.stage for part in self.tasks}

    @cached_property
    def stage_of(self) -> dict[frozenset[int], int]:
        """Ranks of a mesh -> their stage."""
        return {part.mesh.rank_set: part.stage for part in self.tasks}


def _one_task(body: Graph) -> Parts:
    """A body of a loop as one task, which runs once a turn."""
    ops = tuple(op for op in body.ops if op.kind not in SOURCES)
    part = Part(body.name, "optimize", body.meshes[0], 0, per_micro=False, body=ops, tail=frozenset())
    return Parts(body, (part,), (), dict.fromkeys(body.values, 0))


@dataclass(slots=True)
class _State:
    graph: Graph
    mesh: dict[str, ProcessMesh] = field(default_factory=dict)  # value -> mesh that represents its ranks
    phase: dict[str, int] = field(default_factory=dict)
    level: dict[str, int] = field(default_factory=dict)  # op name -> level
    kind: dict[str, str] = field(default_factory=dict)  # op name -> kind of task
    tail: set[str] = field(default_factory=set)


@register_pass("split_tasks", requires="lowered", stage="tasks")
@collector_paused()
def phases(graph: Graph) -> Parts:
    """Split the graph into the tasks of a step, for all ranks."""
    places: dict[frozenset[int], ProcessMesh] = {}
    for attr in graph.attrs.values():
        places.setdefault(attr.mesh.rank_set, attr.mesh)
    state = _State(graph, {name: places[attr.mesh.rank_set] for name, attr in graph.attrs.items()})
    for op in graph.ops:
        _classify(state, op)
    _sink(state)
    return _collect(state)


def _classify(state: _State, op: Op) -> None:
    inputs = [state.phase[v.name] for v in op.operands]
    phase = max(inputs, default=0)
    declared = lookup(op.kind)
    batch = op.kind == "input" and op.results[0].shape != ()
    if batch or declared.micro or declared.every_micro_batch or op.attrs.get(EACH_MICRO_BATCH):
        phase = max(phase, 1)
    mesh = state.mesh[op.results[0].name]
    level, tail = 0, op.kind not in SOURCES
    for value in op.operands:
        producer = state.graph.producers[value.name]
        crossing = state.mesh[value.name] != mesh
        level = max(level, state.level[producer.name] + crossing)
        inside = state.phase[value.name] < 2 or producer.kind == "accumulate" or producer.name in state.tail
        tail = tail and inside and not (crossing and phase == 2)
    state.level[op.name] = level
    after_backward = any(state.kind[state.graph.producers[v.name].name] == "backward" for v in op.operands)
    if op.kind == "accumulate":
        state.kind[op.name] = "backward" if op.role == "backward" or after_backward else "forward"
        phase = 2
    elif phase == 0:
        state.kind[op.name] = "load"
    elif phase == 1:
        state.kind[op.name] = "backward" if op.role == "backward" or after_backward else "forward"
    else:
        updates = op.role == "optimize" and not _moves_gradient(state, op)
        state.kind[op.name] = "optimize" if updates else "sync"
        tasks = {
            (state.kind[p.name], state.level[p.name])
            for p in (state.graph.producers[v.name] for v in op.operands if state.phase[v.name] == 2)
        }
        if tail and op.role != "optimize" and len(tasks) == 1:
            ((state.kind[op.name], state.level[op.name]),) = tasks
            state.tail.add(op.name)
    for value in op.results:
        state.phase[value.name] = phase


def _moves_gradient(state: _State, op: Op) -> bool:
    """Whether an op communicates a gradient for an update, and is not part of the update itself."""
    producers = (state.graph.producers[v.name].name for v in op.operands)
    return is_collective(op) and all(state.kind.get(name) != "optimize" for name in producers)


def _sink(state: _State) -> None:
    """Move ops to the latest level that their readers allow, which gives fewer tasks.

    The ops of a task of the user stay together: none moves behind a level that another one has to stay at,
    which may bound the tasks before it.
    """
    earliest, bounds = state.level, dict[UserKey, int]()
    while True:
        state.level = dict(earliest)
        _sink_within(state, bounds)
        reached = _common_levels(state, earliest)
        if reached == bounds:
            return
        bounds = reached


def _common_levels(state: _State, earliest: Mapping[str, int]) -> dict[UserKey, int]:
    """The latest level that all ops of a task of the user can have, or the first one where there is none."""
    levels: dict[UserKey, list[tuple[int, int]]] = {}
    for op in state.graph.ops:
        if op.is_named and op.kind not in SOURCES and state.kind[op.name] != "load":
            levels.setdefault(_user_key(state, op), []).append((state.level[op.name], earliest[op.name]))
    return {
        key: max(min(late for late, _ in pairs), *(early for _, early in pairs))
        for key, pairs in levels.items()
    }


def _user_key(state: _State, op: Op) -> UserKey:
    return state.kind[op.name], state.mesh[op.name], op.task


def _sink_within(state: _State, bounds: Mapping[UserKey, int]) -> None:
    """Move ops to the latest level that their readers and the bounds of the user's tasks allow."""
    last: dict[tuple[str, ProcessMesh], int] = {}
    for op in state.graph.ops:
        if op.kind not in SOURCES:
            key = (state.kind[op.name], state.mesh[op.name])
            last[key] = max(last.get(key, 0), state.level[op.name])
    for op in reversed(state.graph.ops):
        if op.kind in SOURCES or op.name in state.tail or op.kind == "accumulate":
            continue
        kind, mesh = state.kind[op.name], state.mesh[op.name]
        bound = last[kind, mesh]
        if op.is_named:
            bound = min(bound, bounds.get(_user_key(state, op), bound))
        for value in op.results:
            for user in state.graph.users[value.name]:
                if state.mesh[user.name] != mesh:
                    bound = min(bound, state.level[user.name] - 1)
                elif state.kind[user.name] == kind:
                    bound = min(bound, state.level[user.name])
        state.level[op.name] = max(state.level[op.name], bound)


def _collect(state: _State) -> Parts:
    graph = state.graph
    bodies: dict[Key, list[Op]] = {}
    task_of: dict[str, Key] = {}  # value -> task that produces it
    edges: dict[tuple[Key, Key], None] = {}
    for op in graph.ops:
        if op.kind in SOURCES:
            continue
        key = (state.kind[op.name], state.mesh[op.name], state.level[op.name])
        bodies.setdefault(key, []).append(op)
        for value in op.results:
            task_of[value.name] = key
        for value in op.operands:
            source = task_of.get(value.name)
            if op.kind == "comm.transfer" and state.mesh[value.name] != key[1]:
                source = source or (key[0], state.mesh[value.name], state.level[op.name] - 1)
                if source != key:
                    bodies.setdefault(source, []).append(op)
            if source is not None and source != key:
                edges[source, key] = None
    stages = _stages(state, bodies)
    names: dict[Key, str] = {}
    for key in sorted(bodies, key=lambda k: (_ORDER[k[0]], k[2], stages[k[1]])):
        name = f"{key[0]}.s{stages[key[1]]}"
        names[key] = name if name not in names.values() else f"{name}.l{key[2]}"
    order = _arrange(graph, names, bodies)
    tasks = tuple(
        Part(
            names[key],
            key[0],
            key[1],
            stages[key[1]],
            key[0] in ("forward", "backward"),
            order[key],
            frozenset(op.name for op in bodies[key] if _in_tail(state, op, key)),
        )
        for key in names
    )
    return Parts(graph, tasks, tuple((names[a], names[b]) for a, b in edges), state.phase)


def _arrange(graph: Graph, keys: Iterable[Key], bodies: Mapping[Key, list[Op]]) -> dict[Key, tuple[Op, ...]]:
    """The order of the ops of every task: program order with two exceptions.

    * A communication op or an `accumulate` directly follows its operands, so that messages leave early. One
      that sends on what comes from a neighbour does not, because the rank would wait for that message first.
    * The optimize part follows the order in which gradients become complete, so that the first wait is for
      the oldest message.

    The sort key is (index of the last op that delays this op, index of the op), so that an op follows all of
    its operands.
    """
    index = {op.name: i for i, op in enumerate(graph.ops)}
    ready: dict[str, int] = {}  # value -> position of its op in the preceding tasks, counted over all of them
    count = 0
    ordered = {}
    for key in keys:
        last: dict[str, int] = {}
        for op in sorted(bodies[key], key=lambda op: index[op.name]):
            inside = [last[v.name] for v in op.operands if v.name in last]
            if key[0] in ("sync", "optimize"):
                level = max([*inside, *(ready.get(v.name, -1) for v in op.operands)], default=-1)
            else:
                level = max(inside) if inside and _is_eager(graph, op) else index[op.name]
            last.update((v.name, level) for v in op.results)
            last[op.name] = level
        ordered[key] = tuple(sorted(bodies[key], key=lambda op: (last[op.name], index[op.name])))
        for op in ordered[key]:
            count += 1
            ready.update((v.name, count) for v in op.results)
    return ordered


def _is_eager(graph: Graph, op: Op) -> bool:
    if op.kind == "accumulate":  # directly behind a collective it would wait for the message
        return not is_collective(graph.producers[op.operands[0].name])
    return is_collective(op) and not (
        _is_reordering(graph, op) and _is_reordering(graph, graph.producers[op.operands[0].name])
    )


def _is_reordering(graph: Graph, op: Op) -> bool:
    """Whether an op sends blocks between the ranks of one mesh in another order, as around a ring."""
    if op.kind != "comm.transfer":
        return False
    return graph.attrs[op.operands[0].name].mesh.rank_set == graph.attrs[op.name].mesh.rank_set


def _in_tail(state: _State, op: Op, key: Key) -> bool:
    if op.name in state.tail:
        return True
    sends = op.kind == "comm.transfer" and state.mesh[op.operands[0].name] == key[1] != state.mesh[op.name]
    return sends and key[0] in ("forward", "backward") and state.phase[op.operands[0].name] == 2


_ORDER = {"load": 0, "forward": 1, "backward": 2, "sync": 3, "optimize": 4}


def _stages(state: _State, bodies: dict[Key, list[Op]]) -> dict[ProcessMesh, int]:
    """Meshes in the order in which the forward part reaches them."""
    first: dict[ProcessMesh, tuple[int, int]] = {}
    for kind, mesh, level in bodies:
        position = (_ORDER[kind], level)
        first[mesh] = min(first.get(mesh, position), position)
    # load tasks do not determine the pipeline: meshes with forward tasks are ordered by their level
    forward: dict[ProcessMesh, int] = {}
    for kind, mesh, level in bodies:
        if kind == "forward":
            forward[mesh] = min(forward.get(mesh, level), level)
    ordered = sorted(first, key=lambda mesh: (forward.get(mesh, 1 << 30), first[mesh], mesh.members))
    return {mesh: i for i, mesh in enumerate(ordered)}
