"""What `distgraph inspect` prints of a schedule: its table as text, and what each stage holds.

*In:* text with a table, or its first line alone, with the name of a known schedule.
*Out:* text that `distgraph.plan.schedule_text` reads again, with comments.
"""

from __future__ import annotations

import re

from distgraph.errors import GraphError
from distgraph.plan.pipeline_schedules import Action, schedule_names, schedule_policy
from distgraph.plan.schedule_text import HEADER, TextTable, parse_schedule
from distgraph.runtime.schedule.task import pipeline
from distgraph.runtime.schedule.task_order import schedule

_CHUNKS = 2  # visits to a stage under schedules that have several
_MOST = 4096  # actions of one phase
_LIKE_HEADER = re.compile(r"\S+\s+[nm]=.*")
_TASK = re.compile(r"(?P<phase>forward|backward|weight)\.s\d+(?:\.c(?P<chunk>\d+))?")


def is_schedule(text: str) -> bool:
    """Whether a text begins as that of a schedule does."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return _LIKE_HEADER.fullmatch(first) is not None


def schedule_report(text: str, where: str) -> str:
    """The verified table of a text, or of the schedule that it names, and what its stages hold.

    Raises:
        GraphError: the text does not fit (see `parse_schedule`), or names no schedule, or too large a table.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    header = HEADER.fullmatch(lines[0].strip()) if len(lines) == 1 else None
    if header is not None:
        if header["name"] not in schedule_names():
            raise GraphError(
                f"{where}: schedule {header['name'][:80]!r} does not exist; it is one of "
                f"{', '.join(schedule_names())}, or a table stands below its first line"
            )
        table = known_table(header["name"], int(header["stages"]), int(header["micro"]))
    else:
        table = parse_schedule(text, where)
    clocks = 1 + max(time for _, time in table.actions)
    busy = len(table.actions) / (clocks * table.stages)
    notes = [f"# {clocks} times; {busy:.0%} of the cells do something"]
    for stage in range(table.stages):
        held = table.in_flight(stage, table.stages, table.micro_batches)
        notes.append(f"# stage {stage} holds up to {held} micro-batches")
    return "\n".join([str(table), *notes])


def known_table(name: str, stages: int, micro_batches: int) -> TextTable:
    """The table of a schedule that is known by its name, where every part of a micro-batch takes one time.

    Raises:
        GraphError: the table would have more than 4,096 forwards, or the pipeline comes back up its stages.

    Example:
        >>> print(known_table("1f1b", 2, 2))
        1f1b n=2 m=2
        F0 -
        F1 F0
        -  B0
        B0 F1
        -  B1
        B1 -
    """
    policy = schedule_policy(name)
    if policy.folded:
        raise GraphError(
            f"schedule {name}: its pipeline comes back through the stages, which no table as text does; "
            "inspect another schedule"
        )
    if stages * micro_batches > _MOST:
        raise GraphError(
            f"schedule {name}: a table of {stages} stages and {micro_batches} micro-batches is too large to "
            f"print; ask for at most {_MOST} in all"
        )
    chunks = _CHUNKS if policy.chunked_table is not None else 1
    ranks = [(stage,) for stage in range(stages)]
    weight = policy.splits_backward
    graph = pipeline(ranks, micro_batches, optimize=False, chunks=chunks, weight=weight)
    actions: dict[tuple[int, int], Action] = {}
    for stage, column in enumerate(schedule(graph, policy).columns):
        for step in column.steps:
            match = _TASK.fullmatch(step.task)
            assert match is not None, step.task
            actions[stage, step.clock] = Action(match["phase"], stage, step.micro, int(match["chunk"] or 0))
    return TextTable(name, stages, micro_batches, chunks, actions)
