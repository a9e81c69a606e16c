"""Schedules as text: a table of what each stage does at each time, which a user writes or edits.

    two-by-two n=2 m=4           # name, number of stages, number of micro-batches
    F0 -                         # one line for each time, one column for each stage
    F1 F0
    -  F1                        # F = forward, B = backward of a micro-batch, - = nothing
    -  B0
    B0 B1
    B1 -
    ...

`W2` is the part of the backward part that computes gradients of parameters, where the schedule splits it (as
ZB-H1 does); then every backward has one. `F2.1` is micro-batch 2 on its second visit to the stage, in a
pipeline that reaches every stage several times, in the same order. `F2:mlp` is the user's task "mlp"
(`dg.task`) of that part; `F2` is then what of the part no cell names. Lines that begin with # and empty lines
are skipped, and so is what stands once in a step (`O0`, the update) and lines that name the columns: what
`print(schedule(...))` prints of a linear pipeline may be edited.

A table is verified when it is read: every micro-batch has each of its parts once on every stage, and every
part stands below those whose results it needs. What is read becomes a `SchedulePolicy`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from distgraph.errors import GraphError
from distgraph.plan.pipeline_schedules import (
    Action,
    SchedulePolicy,
    Table,
    register_schedule,
    schedule_names,
    schedule_policy,
)
from distgraph.serialization.documents import read_text

HEADER = re.compile(r"(?P<name>\S+) n=(?P<stages>[1-9]\d{0,4}) m=(?P<micro>[1-9]\d{0,5})")
"""First line of a schedule: its name, the number of stages and of micro-batches."""
_CELL = re.compile(
    r"(?P<phase>[FBW])(?P<micro>\d{1,6})(?:\.(?P<chunk>\d{1,4}))?(?::(?P<task>[A-Za-z][A-Za-z0-9_.\-]*))?"
)
_ONCE = re.compile(r"[LGO]\d+")
_COLUMN = re.compile(r"\d+(?:,\d+)*:.*")
_PHASES = {"F": "forward", "B": "backward", "W": "weight"}
_LETTERS = {phase: letter for letter, phase in _PHASES.items()}


@dataclass(frozen=True)
class TextTable:
    """The table of a schedule that was given as text.

    Attributes:
        name: of the schedule.
        stages, micro_batches, chunks: those of its pipeline; chunks are visits of a micro-batch to a stage.
        actions: (stage, time) -> action.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    actions: Mapping[tuple[int, int], Action]

    def __call__(self, stages: int, micro_batches: int, chunks: int = 1) -> Table:
        """The table for a program, which may have fewer micro-batches, such as those of a short batch.

        Raises:
            GraphError: the program has another number of stages or chunks, or more micro-batches.
        """
        if (stages, chunks) != (self.stages, self.chunks) or micro_batches > self.micro_batches:
            size = _size(self.stages, self.chunks, self.micro_batches)
            raise GraphError(
                f"schedule {self.name}: its table is for {size} but the program has "
                f"{_size(stages, chunks, micro_batches)}; write a table for these"
            )
        return {key: action for key, action in self.actions.items() if action.micro_batch < micro_batches}

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of parameters are computed apart."""
        return any(action.phase == "weight" for action in self.actions.values())

    def in_flight(self, stage: int, stages: int, micro_batches: int) -> int:
        """Most micro-batches, counted by chunk, whose activations a stage holds at the same time.

        A micro-batch is held from its forward to its backward, or to the weight part where there is one.
        """
        ends = "weight" if self.splits_backward else "backward"
        actions = [self.actions[key] for key in sorted(key for key in self.actions if key[0] == stage)]
        left = Counter((a.micro_batch, a.chunk) for a in actions if a.phase == ends)
        alive, most = set[tuple[int, int]](), 0
        for action in actions:
            visit = (action.micro_batch, action.chunk)
            if action.phase == "forward":
                alive.add(visit)
            left[visit] -= action.phase == ends
            most = max(most, len(alive))
            if not left[visit]:
                alive.discard(visit)
        return most

    @cached_property
    def labels(self) -> Mapping[tuple[str, int, int], tuple[str, ...]]:
        """(phase, stage, chunk) -> tasks that cells name, with "" for a cell without a name."""
        labels: dict[tuple[str, int, int], dict[str, None]] = {}
        for action in self.actions.values():
            labels.setdefault((action.phase, action.stage, action.chunk), {})[action.task] = None
        return {place: tuple(names) for place, names in labels.items()}

    def policy(self) -> SchedulePolicy:
        """The schedule."""
        chunked = self.chunks > 1
        return SchedulePolicy(
            self.name,
            table=None if chunked else self,
            chunked_table=self if chunked else None,
            splits_backward=self.splits_backward,
            in_flight=self.in_flight,
        )

    def __str__(self) -> str:
        clocks = 1 + max(time for _, time in self.actions)
        rows = [["-"] * self.stages for _ in range(clocks)]
        for (stage, time), action in self.actions.items():
            rows[time][stage] = _cell(action)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (" ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join([f"{self.name} n={self.stages} m={self.micro_batches}", *lines])


def parse_schedule(text: str, where: str = "schedule") -> TextTable:
    """Read a table, and verify it.

    Args:
        text: see the docstring of the module.
        where: of the text, for errors.

    Raises:
        GraphError: a line does not fit the form; an action is missing, stands twice or in no column of its
            stage, or does not stand below what it needs.

    Example:
        >>> table = parse_schedule("mine n=2 m=1\\nF0 -\\n- F0\\n- B0\\nB0 -")
        >>> print(table.actions[1, 1], table.in_flight(0, 2, 1))
        Action(phase='forward', stage=1, micro_batch=0, chunk=0, task='') 1
    """
    numbered = [(n, line.partition("#")[0].strip()) for n, line in enumerate(text.splitlines(), start=1)]
    lines = [(n, line) for n, line in numbered if line]
    header = HEADER.fullmatch(lines[0][1]) if lines else None
    if header is None:
        first = lines[0][1] if lines else ""
        raise GraphError(
            f'{where}: expected a first line such as "mine n=2 m=4", got {first[:60]!r}; give a name, and '
            "the numbers of stages and micro-batches from 1 up"
        )
    stages, micro_batches = int(header["stages"]), int(header["micro"])
    actions: dict[tuple[int, int], Action] = {}
    rows = [(n, line) for n, line in lines[1:] if _COLUMN.fullmatch(line) is None]
    for time, (number, line) in enumerate(rows):
        cells = line.split()
        if len(cells) != stages:
            raise GraphError(
                f"{where}: line {number} has {len(cells)} columns but n={stages} stages; give each stage a "
                'cell such as F0 or "-"'
            )
        for stage, cell in enumerate(cells):
            if cell == "-" or _ONCE.fullmatch(cell):
                continue
            match = _CELL.fullmatch(cell)
            if match is None:
                raise GraphError(
                    f'{where}: line {number}: expected a cell such as F0, B0, W0, F0.1, F0:mlp or "-", '
                    f"got {cell[:40]!r}"
                )
            micro, chunk = int(match["micro"]), int(match["chunk"] or 0)
            actions[stage, time] = Action(_PHASES[match["phase"]], stage, micro, chunk, match["task"] or "")
    chunks = 1 + max((action.chunk for action in actions.values()), default=0)
    table = TextTable(header["name"], stages, micro_batches, chunks, actions)
    _verify(table, where)
    return table


def _verify(table: TextTable, where: str) -> None:
    """Check that every action stands once, and below what it needs. Raises GraphError."""
    times: dict[Action, int] = {}
    for (_, time), action in sorted(table.actions.items(), key=lambda item: item[0][1]):
        if action in times:
            raise GraphError(
                f"{where}: {_text(action)} stands at time {times[action]} and at time {time}; keep one"
            )
        times[action] = time
    phases = tuple(_LETTERS)[: 2 + table.splits_backward]
    for action in _all_actions(table, phases):
        if action not in times:
            raise GraphError(f"{where}: {_text(action)} is missing; add it to column {action.stage}")
    for action, time in times.items():
        if action.micro_batch >= table.micro_batches:
            raise GraphError(
                f"{where}: {_text(action)} but the first line says m={table.micro_batches}; micro-batches "
                "are numbered from 0"
            )
        for needed in _needs(action, table):
            if needed not in times:  # parts whose tasks are named: the compiled program decides
                continue
            if times[needed] >= time:
                raise GraphError(
                    f"{where}: {_text(action)} stands at time {time} but needs {_text(needed)}, which stands "
                    f"at time {times[needed]}; move it below"
                )


def _all_actions(table: TextTable, phases: tuple[str, ...]) -> Iterator[Action]:
    for phase in phases:
        for stage in range(table.stages):
            for chunk in range(table.chunks):
                for micro in range(table.micro_batches):
                    for task in table.labels.get((phase, stage, chunk), ("",)):
                        yield Action(phase, stage, micro, chunk, task)


def _needs(action: Action, table: TextTable) -> Iterator[Action]:
    """The actions whose results an action needs, as far as the table alone can tell."""
    if action.task:
        if action.phase != "forward":
            yield replace(action, phase="forward" if action.phase == "backward" else "backward")
        return
    stage, micro, chunk, last = action.stage, action.micro_batch, action.chunk, table.stages - 1
    if action.phase == "weight":
        yield Action("backward", stage, micro, chunk)
    elif action.phase == "backward":
        yield Action("forward", stage, micro, chunk)
        if stage < last:
            yield Action("backward", stage + 1, micro, chunk)
        elif chunk < table.chunks - 1:
            yield Action("backward", 0, micro, chunk + 1)
    elif stage > 0:
        yield Action("forward", stage - 1, micro, chunk)
    elif chunk > 0:
        yield Action("forward", last, micro, chunk - 1)


def _text(action: Action) -> str:
    return f"{_cell(action)} on stage {action.stage}"


def _cell(action: Action) -> str:
    chunk = f".{action.chunk}" if action.chunk else ""
    task = f":{action.task}" if action.task else ""
    return f"{_LETTERS[action.phase]}{action.micro_batch}{chunk}{task}"


def _size(stages: int, chunks: int, micro_batches: int) -> str:
    visits = f" that are reached {chunks} times" if chunks > 1 else ""
    return f"{stages} stages{visits} and {micro_batches} micro-batches"


def given_schedule(given: str) -> str:
    """The name of a schedule that is given by its name, as text, or by the path of a file with text.

    Text is registered under the name of its first line; the same text may be given again.

    Raises:
        GraphError: what is given is none of them, the text does not fit, or its name is taken.
    """
    if given in schedule_names():
        return given
    is_text = "\n" in given
    if not is_text and not _is_file(given):
        raise GraphError(
            f"schedule {given[:80]!r} of Strategy does not exist; the schedules are "
            f"{', '.join(schedule_names())}, and a text or the path of a file with a table "
            "(docs/parallelism/schedules.md)"
        )
    where = "schedule of Strategy" if is_text else given
    table = parse_schedule(given if is_text else read_text(given, GraphError), where)
    if table.name in schedule_names():
        existing = schedule_policy(table.name)
        if table not in (existing.table, existing.chunked_table):
            raise GraphError(
                f"{where}: the name {table.name!r} is that of another schedule; choose another name"
            )
        return table.name
    return register_schedule(table.policy()).name


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # too long for a path, or with characters that no path has
        return False


def text_table(schedule: str) -> TextTable | None:
    """The table of a schedule that was given as text; None for all others."""
    policy = schedule_policy(schedule)
    table = policy.table or policy.chunked_table
    return table if isinstance(table, TextTable) else None
