"""Following an explicit table of actions: which compute task each device may start next.

A device here is a group of ranks that run the same tasks, as in the simulated clock. Its actions are those of
the table that it has compute tasks (forward or backward) for, in the order of their times. Tasks that only
compute forward values again are none of them: tables do not name them, and they do not wait for their turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from distgraph.errors import GraphError
from distgraph.plan.pipeline_schedules import Action, SchedulePolicy
from distgraph.runtime.schedule.task import Task, TaskGraph, topological_order

_COMPUTE_KINDS = ("forward", "backward", "weight")


class ActionTable:
    """The actions of a schedule's table that are not done yet, for each device.

    Raises:
        GraphError: the table has an action twice, or not one that the graph has tasks for; a schedule for
            several chunks, and a stage has more or fewer than another.
    """

    def __init__(
        self,
        graph: TaskGraph,
        policy: SchedulePolicy,
        phase: Mapping[str, str],
        devices: Mapping[str, Sequence[int]],
    ) -> None:
        self._tasks = {task.name: task for task in graph.tasks}
        self._phase = phase
        self._devices = devices
        self._chunk = self._chunks(graph, policy)
        chunks = 1 + max(self._chunk.values(), default=0)
        if policy.chunked_table is not None:
            table = policy.chunked_table(graph.stages, graph.micro_batches, chunks)
        else:
            assert policy.table is not None
            table = policy.table(graph.stages, graph.micro_batches)
        ordered = sorted(table, key=lambda key: (key[1], key[0]))
        self._time = {table[key]: time for time, key in enumerate(ordered)}
        self._named = {(a.phase, a.stage, a.chunk, a.task) for a in self._time if a.task}
        self._check_names(graph, policy)
        facts = f"its table for {graph.stages} stages and {graph.micro_batches} micro-batches"
        if len(self._time) < len(table):
            action, count = Counter(table.values()).most_common(1)[0]
            raise GraphError(f"schedule {policy.name}: {facts} has {_text(action)} {count} times; keep one")
        self._left: list[Counter[int]] = [
            Counter()
            for _ in range(1 + max((device for ids in devices.values() for device in ids), default=0))
        ]
        for task in graph.tasks:
            if not waits_for_turn(task):
                continue
            for micro in range(graph.micro_batches):
                action = self._action(task.name, micro)
                if action not in self._time:
                    which = f", which has task {task.name}" if task.label else ""
                    raise GraphError(f"schedule {policy.name}: {facts} has no {_text(action)}{which}; add it")
                for device in devices[task.name]:
                    self._left[device][self._time[action]] += 1
        self._order = [sorted(left) for left in self._left]
        self._next = [0] * len(self._order)

    def _chunks(self, graph: TaskGraph, policy: SchedulePolicy) -> dict[str, int]:
        """Compute task -> number of its chunk; 0 under a policy that does not tell chunks apart.

        Raises:
            GraphError: the policy does, and stages have different numbers of tasks; or it splits the backward
                part, and a micro-batch comes back to a stage.
        """
        wholes: dict[tuple[str, int], dict[str, None]] = {}
        whole_of: dict[str, str] = {}  # task -> the one that it is a part of, or itself
        for name in topological_order(graph):
            task = self._tasks[name]
            if waits_for_turn(task):
                whole_of[name] = task.whole or name
                wholes.setdefault((self._phase_of(name), task.stage), {})[whole_of[name]] = None
        groups = {key: [*names] for key, names in wholes.items()}
        chunks = self._chunks_of_wholes(graph, policy, groups, whole_of)
        return {name: chunks[whole] for name, whole in whole_of.items()}

    def _chunks_of_wholes(
        self,
        graph: TaskGraph,
        policy: SchedulePolicy,
        groups: Mapping[tuple[str, int], Sequence[str]],
        whole_of: Mapping[str, str],
    ) -> dict[str, int]:
        """The chunk of every task of a phase on a stage, before the user's tasks split it."""
        if policy.chunked_table is None:
            again = [s for (phase, s), names in groups.items() if phase == "forward" and len(names) > 1]
            if again and policy.splits_backward and graph.micro_batches > 1:
                raise GraphError(
                    f"schedule {policy.name}: a micro-batch comes back to stage {again[0]}, but the table of "
                    "the schedule has each stage once; name each mesh once along the pipeline, with the "
                    "losses on the last one (dg.on), or use schedule interleaved-1f1b or 1f1b"
                )
            return dict.fromkeys((name for names in groups.values() for name in names), 0)
        if policy.folded:
            return _folded_chunks(graph, policy, groups, whole_of)
        numbers = {key: len(names) for key, names in groups.items()}
        if len(set(numbers.values())) > 1:
            (phase, stage), most = max(numbers.items(), key=lambda item: item[1])
            (other, stage_number), least = min(numbers.items(), key=lambda item: item[1])
            forwards = {n for (kind, _), n in numbers.items() if kind == "forward"}
            if forwards == {1} and most > 1:  # one chunk, whose backward part has several tasks
                return dict.fromkeys(whole_of.values(), 0)
            if len(forwards) == 1 and most > max(forwards):
                raise _too_many(policy, stage, max(forwards), most)
            if len(forwards) == 1:
                raise GraphError(
                    f"schedule {policy.name}: a micro-batch has {most} chunks on stage {stage} but a "
                    f"backward part for {least} of them on stage {stage_number}: no trainable parameter is "
                    "in the others and before them; let the first chunks train a parameter, or use another "
                    "schedule"
                )
            raise GraphError(
                f"schedule {policy.name}: a micro-batch has {most} {phase} tasks on stage {stage} but "
                f"{least} {other} tasks on stage {stage_number}; let the pipeline reach every stage as often "
                "as the others, or use another schedule"
            )
        return {
            name: number
            for (phase, _), names in groups.items()
            for number, name in enumerate(names if phase == "forward" else reversed(names))
        }

    def _phase_of(self, name: str) -> str:
        """The phase of a task, and "weight" for a task of that kind."""
        kind = self._tasks[name].kind
        return kind if kind == "weight" else self._phase[name]

    def _action(self, name: str, micro: int) -> Action:
        task, phase, chunk = self._tasks[name], self._phase_of(name), self._chunk.get(name, 0)
        named = (phase, task.stage, chunk, task.label) in self._named
        return Action(phase, task.stage, micro, chunk, task.label if named else "")

    def _check_names(self, graph: TaskGraph, policy: SchedulePolicy) -> None:
        """Refuse a table that names a task which the graph does not have in that place."""
        labels: dict[tuple[str, int, int], list[str]] = {}
        for task in filter(waits_for_turn, graph.tasks):
            place = (self._phase_of(task.name), task.stage, self._chunk[task.name])
            labels.setdefault(place, []).append(task.label)
        for phase, stage, chunk, name in sorted(self._named):
            existing = labels.get((phase, stage, chunk), [])
            if name not in existing:
                tasks = ", ".join(filter(None, existing)) or "none"
                raise GraphError(
                    f"schedule {policy.name}: its table names task {name!r} in the {phase} part of stage "
                    f"{stage}, which has no task of that name; its tasks are: {tasks}"
                )

    def priority(self, name: str, micro: int) -> tuple[int, ...]:
        """Key of a request: the time of its action; tasks of no action come before or after all others."""
        action = self._action(name, micro)
        outside = len(self._time) if self._phase[name] == "after" else -1
        return (self._time.get(action, outside),)

    def orders(self, micro_batches: int) -> list[list[tuple[str, int]]] | None:
        """The instances of compute tasks of every device, in the order of their actions; None where several
        of a device are parts of one action."""
        due: list[dict[int, tuple[str, int]]] = [{} for _ in self._order]
        for task in filter(waits_for_turn, self._tasks.values()):
            for micro in range(micro_batches):
                time = self._time[self._action(task.name, micro)]
                for device in self._devices[task.name]:
                    if time in due[device]:
                        return None
                    due[device][time] = task.name, micro
        return [[of_device[time] for time in sorted(of_device)] for of_device in due]

    def allows(self, name: str, micro: int) -> bool:
        """Whether the task may start: all its devices have started the compute tasks of earlier actions."""
        task = self._tasks[name]
        if not waits_for_turn(task):
            return True
        time = self._time[self._action(name, micro)]
        return all(self._order[device][self._next[device]] == time for device in self._devices[name])

    def started(self, name: str, micro: int) -> None:
        """Note that a task has started."""
        task = self._tasks[name]
        if not waits_for_turn(task):
            return
        time = self._time[self._action(name, micro)]
        for device in self._devices[name]:
            self._left[device][time] -= 1
            self._next[device] += not self._left[device][time]


def waits_for_turn(task: Task) -> bool:
    """Whether a task waits for its turn in a table: not one that a table knows nothing of."""
    return task.per_micro and task.kind in _COMPUTE_KINDS and not task.recomputes


def _too_many(policy: SchedulePolicy, stage: int, chunks: int, tasks: int) -> GraphError:
    """The error for a stage with more backward tasks than chunks."""
    return GraphError(
        f"schedule {policy.name}: a micro-batch has {chunks} chunks on stage {stage} but {tasks} backward "
        "tasks: gradients that need no later chunk, such as those of an auxiliary loss of a chunk before "
        "the last one, are a task of their own; compute that loss from the last chunk, or use schedule 1f1b"
    )


def _folded_chunks(
    graph: TaskGraph,
    policy: SchedulePolicy,
    groups: Mapping[tuple[str, int], Sequence[str]],
    whole_of: Mapping[str, str],
) -> dict[str, int]:
    """Compute task -> 0 on the way down the stages, 1 on the way up; 0 where no stage is reached twice.

    Args:
        groups: (phase, stage) -> compute tasks, in topological order.
        whole_of: task -> the one of `groups` that it is a part of.

    Raises:
        GraphError: the pipeline does neither.
    """
    visits = [len(groups.get(("forward", stage), ())) for stage in range(graph.stages)]
    turning = [2] * (graph.stages - 1) + [1]
    if visits != turning and max(visits) > 1 and graph.micro_batches > 1:
        wrong = (stage for stage, count in enumerate(visits) if count != turning[stage])
        stage = next(wrong)
        raise GraphError(
            f"schedule {policy.name}: a micro-batch has {visits[stage]} forward tasks on stage {stage} but "
            f"{turning[stage]} in a pipeline that goes down the stages and comes back up; name the meshes in "
            "an order such as a, b, c, b, a, with the losses on the last one (dg.on), or use schedule "
            "interleaved-1f1b"
        )
    chunks: dict[str, int] = {}
    for (phase, stage), names in groups.items():
        if phase == "backward" and len(names) > visits[stage] > 1:
            raise _too_many(policy, stage, visits[stage], len(names))
        if phase == "forward":
            chunks.update((name, number) for number, name in enumerate(names))
        elif phase == "backward":  # the last chunk first; the first ones may train nothing
            chunks.update((name, max(0, visits[stage] - 1 - number)) for number, name in enumerate(names))
    chunks |= _weight_chunks(graph, groups, whole_of, chunks)
    return {name: chunks.get(name, 0) for names in groups.values() for name in names}


def _weight_chunks(
    graph: TaskGraph,
    groups: Mapping[tuple[str, int], Sequence[str]],
    whole_of: Mapping[str, str],
    chunks: Mapping[str, int],
) -> dict[str, int]:
    """Weight task without a chunk -> that of the backward task which it is a part of.

    It reads from that task, or else from the forward part of its chunk. Backward parts before that may have
    computed values again for it, and forward parts of earlier chunks may have values that its chunk uses.
    """
    phase_of = {name: phase for (phase, _), names in groups.items() if phase != "weight" for name in names}
    read: dict[str, dict[str, list[int]]] = {
        name: {"backward": [], "forward": [0]}
        for (phase, _), names in groups.items()
        if phase == "weight"
        for name in names
        if name not in chunks  # parts of a task that the user split count as that one
    }
    for edge in graph.edges:
        source, target = (whole_of.get(name, name) for name in (edge.source, edge.target))
        if target in read and source in chunks:
            read[target][phase_of[source]].append(chunks[source])
    return {name: min(of["backward"], default=max(of["forward"])) for name, of in read.items()}


def _text(action: Action) -> str:
    chunk = f", chunk {action.chunk}" if action.chunk else ""
    task = f" task {action.task}" if action.task else ""
    return f"{action.phase}{task} of micro-batch {action.micro_batch} on stage {action.stage}{chunk}"
