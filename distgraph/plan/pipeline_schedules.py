"""Pipeline schedules. Each is declared once, here or outside the package, and looked up by its name.

A declaration has three parts, and every reader takes its part from here:

- What the runtime does: credits and priorities, or an explicit table of actions. With credits, a task may
  start while the buffers on its outgoing edges have room, and of the tasks that may start the one with the
  smallest priority goes first (`runtime/schedule`). With a table, each rank runs its actions in the order of
  their times.
- What the search of stages may assume (`passes/search/inter_op`): how many micro-batches a stage holds at
  most, and how a step adds up.
- What other systems call the schedule (`plan/export`).

GPipe (Huang et al., 2019) runs all micro-batches forward and then all backward, and holds all of them. 1F1B
(Narayanan et al., PipeDream-2BW, 2021) turns to backward as early as it can: stage i = 0..p - 1 of p holds
min(m, p - i) of m micro-batches. It is nothing more than room for p - i micro-batches between a forward and
its backward, and backward first.

Eager 1F1B (Zhuang et al., On Optimizing the Communication of Model Parallelism, MLSys 2023, section 4) starts
forwards as early as room for 2 (p - i) - 1 micro-batches on stage i allows: a message in each direction is on
its way while a stage computes, for more memory. It is ahead where the links between stages are slow.

Interleaved 1F1B (Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM, SC 2021, section 2.2) is for pipelines that reach every stage v times, each time with another
chunk of the layers: the pipeline fills and drains in 1/v of the time, for more messages and more
micro-batches alive. ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.3) computes the
gradients of activations and of parameters in two parts; the second ones wait until a stage has nothing else
to do. With three parts of the same length the bubble is a third of that of 1F1B, and no stage holds more than
p micro-batches. ZB-V (`zero_bubble_v.py`) is for pipelines that go down the stages and come back up: with
such parts its bubble is a sixth of that of 1F1B, and every stage holds as much as the first one does there.

Example, the order of one stage after another as a table:

    >>> def one_stage_at_a_time(stages: int, micro_batches: int) -> Table:
    ...     numbers = range(micro_batches)
    ...     up = [Action("forward", stage, n) for stage in range(stages) for n in numbers]
    ...     down = [Action("backward", stage, n) for stage in reversed(range(stages)) for n in numbers]
    ...     return {(action.stage, time): action for time, action in enumerate(up + down)}
    >>> policy = SchedulePolicy("one stage at a time", table=one_stage_at_a_time)
    >>> policy.table(2, 1)[1, 1]
    Action(phase='forward', stage=1, micro_batch=0, chunk=0, task='')
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Protocol

from distgraph.errors import GraphError
from distgraph.plan.zero_bubble_v import zero_bubble_v


class StageTask(Protocol):
    """What credits depend on: the kind of a task ("forward", "recv", ...) and its stage, 0 for the first."""

    @property
    def kind(self) -> str: ...

    @property
    def stage(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Action:
    """A part of one micro-batch on one stage.

    Args:
        phase: "forward", "backward", or "weight" for the gradients of parameters where these are computed
            apart from the backward part.
        stage: position in the pipeline, 0 for the first.
        micro_batch: its number, from 0.
        chunk: number of earlier visits of the micro-batch to this stage, in forward order.
        task: name of the user's task (`dg.task`) that is meant; empty for all tasks of this part that the
            table does not name.
    """

    phase: str
    stage: int
    micro_batch: int
    chunk: int = 0
    task: str = ""


Credits = Callable[[StageTask, StageTask, int, bool], int | None]
Priority = Callable[[str, int, int], tuple[int, ...]]
Table = Mapping[tuple[int, int], Action]
"""(rank in the pipeline, time) -> action. Only the order of the times of one rank counts."""


def _unlimited(source: StageTask, target: StageTask, stages: int, turns: bool) -> int | None:
    return None


_FORWARD_FIRST = {"before": 0, "forward": 1, "backward": 2, "after": 3}
_BACKWARD_FIRST = {"before": 0, "backward": 1, "forward": 2, "after": 3}


def _forward_first(phase: str, micro_batch: int, request: int) -> tuple[int, ...]:
    return (_FORWARD_FIRST[phase], micro_batch)


def _backward_first(phase: str, micro_batch: int, request: int) -> tuple[int, ...]:
    return (_BACKWARD_FIRST[phase], micro_batch)


def _all_micro_batches(stage: int, stages: int, micro_batches: int) -> int:
    return micro_batches


@dataclass(frozen=True, slots=True)
class SchedulePolicy:
    """The declaration of a pipeline schedule.

    Args:
        name: as in `Strategy.schedule` and in plans; printed in schedules.
        credits: (source, target, stages, turns) -> number of results of the source that may be alive on an
            edge without a limit of its own; None for no limit. `turns` says that the edge leads from a
            forward to a backward task. Called for edges whose tasks both run once per micro-batch, with no
            once-per-step task between them.
        priority: (phase of the task, micro-batch, number of the request) -> key; the request with the
            smallest key goes first, and among equal keys the task further down the graph. The phase is
            "before", "forward", "backward" or "after" (see `phases` in `runtime/schedule/task.py`).
        forward_is_done_first: no backward task runs on a rank before all its forward tasks have started.
        relative: the priority depends only on differences between micro-batches and not on the number of the
            request, and nothing waits for the last micro-batch. Then the steady state of a pipeline is
            simulated once instead of for every micro-batch.
        table: (number of stages, number of micro-batches) -> table of actions, in place of priorities. Each
            rank starts the compute tasks of an action when those of its earlier actions have started.
            Transfers are ordered by the time of their action but do not wait for their turn.
        chunked_table: (stages, micro-batches, chunks) -> table of actions, for pipelines that reach every
            stage several times; in place of `table`.
        folded: with `chunked_table`: the pipeline goes down the stages and comes back up, so that every stage
            but the last, where it turns, has two chunks.
        splits_backward: the gradients of parameters are computed in tasks of their own (pass
            `split_backward`).
        in_flight: (stage, stages, micro-batches) -> number of micro-batches whose activations the stage holds
            at most. It may depend on the stage only by the number of stages behind it, stages - stage, and
            must not fall with that number.
        fill: share of the time of the other stages for which a step waits while the pipeline fills and
            drains: 1 where whole micro-batches fill it. That of ZB-H1 is for three parts of equal length,
            that of interleaved 1F1B for two chunks.
        waits_for_transfers: the transfer to the next stage is part of a stage's period, since only as many
            micro-batches are in flight as stages follow. False where enough are in flight to hide it.
        searched: the search looks for stages under this schedule (`Strategy(mode="auto")`).
        substituted: the search tries this schedule on the best pipelines that it has found under others.
        export_names: format of an export ("torch", "megatron") -> name of the schedule there. Formats
            without an entry do not have the schedule.
    """

    name: str
    credits: Credits = _unlimited
    priority: Priority = _forward_first
    forward_is_done_first: bool = False
    relative: bool = False
    table: Callable[[int, int], Table] | None = None
    chunked_table: Callable[[int, int, int], Table] | None = None
    folded: bool = False
    splits_backward: bool = False
    in_flight: Callable[[int, int, int], int] = _all_micro_batches
    fill: float = 1.0
    waits_for_transfers: bool = True
    searched: bool = False
    substituted: bool = False
    export_names: Mapping[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)  # functions and tables need no hash of their own

    @property
    def has_table(self) -> bool:
        """Whether the order is that of a table of actions."""
        return self.table is not None or self.chunked_table is not None


def _one_f_one_b_credits(source: StageTask, target: StageTask, stages: int, turns: bool) -> int | None:
    if not turns:  # one result in use while the next is made, and one more for each stage that an edge skips
        return 1 + max(1, abs(target.stage - source.stage))
    if source.stage != target.stage:  # follows from the limits of the stages between them
        return None
    # What a forward task reads and its backward task reads again (recv, load) may be one ahead.
    return stages - source.stage + (source.kind != "forward")


def _one_per_stage_left(stage: int, stages: int, micro_batches: int) -> int:
    return min(micro_batches, stages - stage)


def _eager_credits(source: StageTask, target: StageTask, stages: int, turns: bool) -> int | None:
    if not turns:  # as under 1F1B, and one more result on its way
        return 2 + max(1, abs(target.stage - source.stage))
    if source.stage != target.stage:
        return None
    return 2 * (stages - source.stage) - 1 + (source.kind != "forward")


def _twice_the_stages_left(stage: int, stages: int, micro_batches: int) -> int:
    return min(micro_batches, 2 * (stages - stage) - 1)


def _interleaved_table(stages: int, micro_batches: int, chunks: int) -> Table:
    """Megatron-LM's order: groups of micro-batches, as many as stages or more, through all chunks."""
    count = max(1, micro_batches // stages)
    ends = [-(-micro_batches * n // count) for n in range(count + 1)]
    groups = [range(start, stop) for start, stop in pairwise(ends)]
    size = max(stages, *map(len, groups))
    visits = [(chunk, n) for group in groups for chunk in range(chunks) for n in group]
    back = [(chunk, n) for group in groups for chunk in reversed(range(chunks)) for n in group]
    table = {}
    for stage in range(stages):
        up = [Action("forward", stage, n, chunk) for chunk, n in visits]
        down = [Action("backward", stage, n, chunk) for chunk, n in back]
        first = min(len(up), 2 * (stages - stage - 1) + (chunks - 1) * size + 1)
        order = [*up[:first], *_alternate(down, up[first:])]
        table.update({(stage, time): action for time, action in enumerate(order)})
    return table


def _alternate(first: list[Action], second: list[Action]) -> list[Action]:
    """Actions of two lists in turn, then those of the longer one."""
    return [action for pair in zip_longest(first, second) for action in pair if action is not None]


def _zero_bubble_table(stages: int, micro_batches: int) -> Table:
    """1F1B with gradients of parameters as many micro-batches late as stages precede one."""
    table = {}
    for stage in range(stages):
        ahead = min(micro_batches, stages - stage)
        order = [Action("forward", stage, n) for n in range(ahead)]
        for n in range(micro_batches):
            order.append(Action("backward", stage, n))
            if n >= stage:
                order.append(Action("weight", stage, n - stage))
            if n + ahead < micro_batches:
                order.append(Action("forward", stage, n + ahead))
        late = range(max(0, micro_batches - stage), micro_batches)
        order += [Action("weight", stage, n) for n in late]
        table.update({(stage, time): action for time, action in enumerate(order)})
    return table


def _zero_bubble_credits(source: StageTask, target: StageTask, stages: int, turns: bool) -> int | None:
    """As under 1F1B; the order of the table alone limits what weight tasks read."""
    return None if target.kind == "weight" else _one_f_one_b_credits(source, target, stages, turns)


def _v_table(stages: int, micro_batches: int, chunks: int) -> Table:
    """ZB-V; where the pipeline does not come back, ZB-H1."""
    if chunks == 1:
        return _zero_bubble_table(stages, micro_batches)
    return {place: Action(*part) for place, part in zero_bubble_v(stages, micro_batches).items()}


def _as_many_as_stages(stage: int, stages: int, micro_batches: int) -> int:
    return min(micro_batches, stages)


ONE_F_ONE_B = SchedulePolicy(
    "1f1b",
    _one_f_one_b_credits,
    _backward_first,
    relative=True,
    in_flight=_one_per_stage_left,
    searched=True,
    export_names={"torch": "Schedule1F1B", "megatron": "1f1b"},
)
EAGER_1F1B = SchedulePolicy(
    "eager-1f1b",
    _eager_credits,
    _backward_first,
    relative=True,
    in_flight=_twice_the_stages_left,
    waits_for_transfers=False,
    searched=True,
)
GPIPE = SchedulePolicy(
    "gpipe",
    forward_is_done_first=True,
    waits_for_transfers=False,
    searched=True,
    export_names={"torch": "ScheduleGPipe"},
)

INTERLEAVED_1F1B = SchedulePolicy(
    "interleaved-1f1b",
    chunked_table=_interleaved_table,
    fill=1 / 2,
    substituted=True,
)
ZB_H1 = SchedulePolicy(
    "zb-h1",
    _zero_bubble_credits,
    _backward_first,
    table=_zero_bubble_table,
    splits_backward=True,
    in_flight=_one_per_stage_left,
    fill=1 / 3,
    substituted=True,
)
ZB_V = SchedulePolicy(
    "zb-v",
    chunked_table=_v_table,
    folded=True,
    splits_backward=True,
    in_flight=_as_many_as_stages,
    fill=1 / 6,
)

_POLICIES = {
    policy.name: policy for policy in (ONE_F_ONE_B, GPIPE, EAGER_1F1B, INTERLEAVED_1F1B, ZB_H1, ZB_V)
}


def register_schedule(policy: SchedulePolicy) -> SchedulePolicy:
    """Add a schedule, so that strategies, plans, the search and exports know it by its name.

    Every rank's process has to register it before the schedule is named.

    Returns:
        The policy.

    Raises:
        GraphError: the name is taken, is empty or has blanks.
    """
    if re.fullmatch(r"\S+", policy.name) is None:
        raise GraphError(f"schedule {policy.name!r}: a registered schedule needs a name without blanks")
    if policy.name in _POLICIES:
        raise GraphError(f"schedule {policy.name!r} is declared twice; choose another name")
    _POLICIES[policy.name] = policy
    return policy


def schedule_names() -> tuple[str, ...]:
    """Names of all schedules, in the order of their registration."""
    return tuple(_POLICIES)


def searched_schedules() -> tuple[str, ...]:
    """Names of the schedules under which the search looks for stages."""
    return tuple(name for name, policy in _POLICIES.items() if policy.searched)


def substituted_schedules() -> tuple[str, ...]:
    """Names of the schedules that the search tries on pipelines which it has found under others."""
    return tuple(name for name, policy in _POLICIES.items() if policy.substituted)


def schedule_policy(policy: str | SchedulePolicy) -> SchedulePolicy:
    """The declaration of this name; a declaration is returned as it is.

    Raises:
        GraphError: no schedule has this name.
    """
    if isinstance(policy, SchedulePolicy):
        return policy
    if policy not in _POLICIES:
        raise GraphError(f"schedule {policy!r} does not exist; choose one of {', '.join(_POLICIES)}")
    return _POLICIES[policy]
