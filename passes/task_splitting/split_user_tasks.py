"""Split tasks further, into those that the user named with `dg.task`.

In:   the tasks of a step.
Out:  the same ops in more tasks: of every forward, backward, sync and optimize task, the ops of each name are
      a task of their own, and so are the ops of the user before, between and behind them.
Invariant: every op is in a part of the task in which it was; ops of a task keep their order; the tasks form a
      DAG. A program without names is unchanged.

    forward.s0: %a = tanh(%x) task "up"             forward.s0:up:        %a = tanh(%x)
                %b = comm.all_reduce(%a)       ->                         %b = comm.all_reduce(%a)
                %c = exp(%b)                        forward.s0:after.up:  %c = exp(%b)
                %d = tanh(%c) task "down"           forward.s0:down:      %d = tanh(%c)

The gradient of an op, and the update of a parameter, have the name of the op that they are of (of the first
that reads the parameter). A collective belongs to the task whose result it sends: a task that runs between it
and its reader runs while the message is under way. One of a source, such as a gathered parameter, belongs to
the task that reads it first, and so does a receive.

Named tasks of one part are put into an order in which each follows what it reads. Position 2 i + 1 is that
of named task i, and 2 i that of the other ops before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

from distgraph.errors import GraphError
from distgraph.ir.graph import Graph, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.pass_registry import register_pass
from distgraph.passes.split_tasks import Part, Parts
from distgraph.passes.task_splitting.task_edges import task_edges

_SPLIT = ("forward", "backward", "sync", "optimize")


@register_pass("split_user_tasks", stage="tasks", after=("split_tasks",))
def split_user_tasks(parts: Parts) -> Parts:
    """Split tasks by the names that ops have.

    Raises:
        GraphError: a name has ops on two meshes, or ops before and behind what is outside of it.
    """
    graph = parts.graph
    if not any(op.task for op in graph.ops):
        return parts
    _check_meshes(parts)
    tasks: list[Part] = []
    for part in parts.tasks:
        if part.kind in _SPLIT and any(op.task for op in part.body):
            tasks.extend(_PartSplit.of(graph, part).parts())
        else:
            tasks.append(part)
    return replace(parts, tasks=tuple(tasks), edges=task_edges(graph, tasks))


def _check_meshes(parts: Parts) -> None:
    """Refuse a name with forward ops on two meshes, or on one mesh before and behind another."""
    seen: dict[str, tuple[ProcessMesh, Op, str]] = {}
    for part in parts.tasks:
        for op in part.body:
            if part.kind != "forward" or not op.is_named:
                continue
            mesh, first, whole = seen.setdefault(op.task, (part.mesh, op, part.name))
            if mesh.rank_set != part.mesh.rank_set:
                raise GraphError(
                    f"task {op.task!r} has {first} on {mesh} and {op} on {part.mesh}; a task runs on one "
                    "mesh: give the ops of each stage a task of their own"
                )
            if whole != part.name:
                raise GraphError(
                    f"task {op.task!r} has {first} before and {op} behind ops of another mesh, so that it "
                    "would wait for itself; give them two names"
                )


@dataclass(frozen=True)
class _PartSplit:
    """One task that is split.

    Attributes:
        graph, part: of the task.
        made: value -> the op of the task that computes it.
        place: name -> position.
    """

    graph: Graph
    part: Part
    made: Mapping[str, Op]
    place: Mapping[str, int]

    @staticmethod
    def of(graph: Graph, part: Part) -> _PartSplit:
        """Order the names of a task. Raises GraphError where they wait for each other."""
        made = {
            value.name: op
            for op in part.body
            if not (op.kind == "comm.transfer" and graph.attrs[op.name].mesh.rank_set != part.mesh.rank_set)
            for value in op.results
        }
        before: dict[str, set[str]] = {}  # op -> names of which it needs something
        needs: dict[str, dict[str, None]] = {op.task: {} for op in part.body if op.is_named}
        for op in part.body:
            names = before[op.name] = set()
            for value in op.operands:
                if value.name in made:
                    source = made[value.name]
                    names |= before[source.name] | ({source.task} if source.is_named else set())
            if op.is_named:
                needs[op.task].update(dict.fromkeys(sorted(names - {op.task})))
        return _PartSplit(graph, part, made, _ordered(part, needs))

    def parts(self) -> list[Part]:
        """The tasks, in topological order."""
        position = self._positions()
        bodies: dict[int, list[Op]] = {}
        for op in self.part.body:
            bodies.setdefault(position[op.name], []).append(op)
        names = [*self.place]
        result = []
        for place in sorted(bodies):
            label = names[place // 2] if place % 2 else f"after.{names[place // 2 - 1]}" if place else ""
            result.append(
                replace(
                    self.part,
                    name=f"{self.part.name}:{label}" if label else self.part.name,
                    body=tuple(bodies[place]),
                    tail=self.part.tail & {op.name for op in bodies[place]},
                    label=label,
                    whole=self.part.name,
                )
            )
        return result

    def _positions(self) -> dict[str, int]:
        """Op -> position, at least that of each op that it reads."""
        latest = self._latest()
        position: dict[str, int] = {}
        for op in self.part.body:
            sources = [self.made[value.name] for value in op.operands if value.name in self.made]
            below = max((position[source.name] for source in sources), default=-1)
            if op.is_named:
                position[op.name] = self.place[op.task]
                if below > position[op.name]:
                    self._refuse(op, next(each for each in sources if position[each.name] == below))
            elif op.moves_data:
                position[op.name] = below if below >= 0 else latest[op.name]
            else:
                position[op.name] = 0 if below < 0 else below + below % 2
        return position

    def _latest(self) -> dict[str, int]:
        """Op -> the last position at which its readers can still be where they belong."""
        latest: dict[str, int] = {}
        for op in reversed(self.part.body):
            readers = [user for value in op.results for user in self.graph.users[value.name]]
            bound = min(
                (latest[user.name] for user in readers if user.name in latest), default=2 * len(self.place)
            )
            if op.is_named:
                bound = self.place[op.task]
            elif not op.moves_data:
                bound -= bound % 2
            latest[op.name] = bound
        return latest

    def _refuse(self, op: Op, source: Op) -> None:
        raise GraphError(
            f"task {op.task!r} of {self.part.name} would wait for itself: its op {op} needs {source}, which "
            "is outside of the task and needs something of it; put that op into the task, or give the ops "
            "behind it another task"
        )


def _ordered(part: Part, needs: Mapping[str, Mapping[str, None]]) -> dict[str, int]:
    """Name -> position, in topological order; among names without order by their first op."""
    sorter = TopologicalSorter(needs)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = error.args[1]
        raise GraphError(
            f"tasks of {part.name} wait for each other: {' -> '.join(map(repr, cycle))}; give the ops of "
            'each layer a task of their own, such as dg.task(f"attention{n}")'
        ) from None
    rank = {name: index for index, name in enumerate(needs)}
    order: list[str] = []
    ready: list[str] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()], key=rank.__getitem__)
        order.append(ready.pop(0))
        sorter.done(order[-1])
    return {name: 2 * index + 1 for index, name in enumerate(order)}
