"""Order of tasks: the order in which each rank runs its tasks, decided once; it can be printed and parsed.

`schedule` runs the actors under the simulated clock and records the order. Every rank follows its recorded
order, so that ranks which share a task (and the collectives inside it) always agree, whatever the real
durations are. A recorded order cannot deadlock, because it has been simulated once.

Text form: a first line with the policy and the numbers of columns and micro-batches; the ranks and tasks of
each column, unless they are those of a pipeline with one rank per stage; then one line per clock, with one
column per group of ranks that have the same order. F0 = forward of micro-batch 0, - = idle. Every task takes
one clock.

    1f1b n=2 m=2                                1f1b n=2 m=2
    F0 -                                        0: F=forward.s0 B=backward.s0
    F1 F0                                       1,2: F=forward.s1 B=backward.s1
    -  B0                                       F0 -
    ...                                         ...

Invariant: `parse(str(schedule)) == schedule`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from distgraph.errors import GraphError, RuntimeFault
from distgraph.plan.pipeline_schedules import SchedulePolicy, schedule_policy
from distgraph.runtime.schedule.simulate import Timeline, simulate, symbols
from distgraph.runtime.schedule.steady_state import unit_timeline
from distgraph.runtime.schedule.task import UPDATES, TaskGraph
from distgraph.serialization.text_table import text_table

_HEADER = re.compile(r"(?P<policy>\S+) n=(?P<columns>\d+) m=(?P<micro>\d+)")
_LEGEND = re.compile(r"(?P<ranks>\d+(?:,\d+)*):(?P<names>(?: [A-Z][a-z]*=\S+)*)")
_CELL = re.compile(r"(?P<symbol>[A-Z][a-z]*)(?P<micro>\d+)")


@dataclass(frozen=True, slots=True)
class Step:
    """One task instance in a rank's order; the clock is its line in the grid."""

    clock: int
    task: str
    micro: int


@dataclass(frozen=True, slots=True)
class Column:
    """A group of ranks with the same order.

    Args:
        ranks: the ranks, ascending.
        names: (symbol in the grid, task) of each task they run.
        steps: the order.
    """

    ranks: tuple[int, ...]
    names: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Schedule:
    """The order of task instances on every rank; prints as a grid and parses back."""

    policy: str
    micro_batches: int
    columns: tuple[Column, ...]

    @cached_property
    def posts(self) -> dict[str, NDArray[np.int64]]:
        """Task -> for each micro-batch the clock at which all its ranks have posted their receives.

        The worker posts the receives of place p of its order when the task of place p - 2 is done.
        """
        posts: dict[str, NDArray[np.int64]] = {}
        for column in self.columns:
            for place, step in enumerate(column.steps):
                clocks = posts.setdefault(step.task, np.zeros(self.micro_batches, np.int64))
                if place > 1:
                    clocks[step.micro] = max(clocks[step.micro], column.steps[place - 2].clock + 1)
        return posts

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(rank for column in self.columns for rank in column.ranks))

    @property
    def clocks(self) -> int:
        """Number of lines of the grid."""
        return 1 + max((column.steps[-1].clock for column in self.columns if column.steps), default=-1)

    def order(self, rank: int) -> tuple[tuple[str, int], ...]:
        """The (task, micro-batch) pairs of one rank, first to last.

        Raises:
            GraphError: the rank runs nothing in this schedule.
        """
        for column in self.columns:
            if rank in column.ranks:
                return tuple((step.task, step.micro) for step in column.steps)
        raise GraphError(
            f"rank {rank} is not in the schedule, which has ranks {', '.join(map(str, self.ranks))}"
        )

    def orders(self) -> dict[int, tuple[tuple[str, int], ...]]:
        """The order of every rank."""
        result: dict[int, tuple[tuple[str, int], ...]] = {}
        for column in self.columns:
            result.update(
                dict.fromkeys(column.ranks, tuple((step.task, step.micro) for step in column.steps))
            )
        return dict(sorted(result.items()))

    def grid(self) -> str:
        """One line per clock, one column per group of ranks."""
        table = [["-"] * len(self.columns) for _ in range(self.clocks)]
        for index, column in enumerate(self.columns):
            symbol = {task: name for name, task in column.names}
            for step in column.steps:
                table[step.clock][index] = f"{symbol[step.task]}{step.micro}"
        return "\n".join(text_table(table, gap=" "))

    def __str__(self) -> str:
        lines = [f"{self.policy} n={len(self.columns)} m={self.micro_batches}"]
        plain = all(
            column.ranks == (index,)
            and column.names == _plain_names(index, {name for name, _ in column.names})
            for index, column in enumerate(self.columns)
        )
        if not plain:
            for column in self.columns:
                names = "".join(f" {symbol}={task}" for symbol, task in column.names)
                lines.append(f"{','.join(map(str, column.ranks))}:{names}")
        return "\n".join([*lines, self.grid()])


def _plain_names(stage: int, letters: set[str]) -> tuple[tuple[str, str], ...]:
    """(symbol, task) of a pipeline of one rank per stage, for the symbols that are used."""
    kinds = (("F", "forward"), ("B", "backward"), ("W", "weight"), ("O", "optimize"))
    return tuple((letter, f"{kind}.s{stage}") for letter, kind in kinds if letter in letters)


def schedule(
    graph: TaskGraph,
    policy: str | SchedulePolicy = "1f1b",
    durations: Mapping[str, float] | None = None,
) -> Schedule:
    """Decide the order of every rank by running the actors under the simulated clock.

    Tasks that update parameters come last on every rank: the values of a step are checked before them (see
    `execute.finite_check`).

    Args:
        graph: the task graph of one step.
        policy: name or declaration of a schedule.
        durations: seconds by task name or kind; None: one second each. They decide the order; the printed
            grid always gives each task one clock.

    Returns:
        The schedule, which has been run once and so cannot deadlock.

    Raises:
        GraphError: the graph or a duration makes no sense.
        RuntimeFault: the graph's own buffer limits deadlock under this policy; the message draws the grid.

    Example:
        >>> from distgraph.runtime.schedule.task import pipeline
        >>> print(schedule(pipeline([(0,), (1,)], 2, optimize=False), "gpipe"))
        gpipe n=2 m=2
        F0 -
        F1 F0
        -  F1
        -  B0
        B0 B1
        B1 -
    """
    chosen = schedule_policy(policy)
    if durations is None:
        return _unit_schedule(graph, chosen)
    orders = simulate(graph, durations, policy=chosen).orders()
    return _recorded(graph, chosen, simulate(graph, None, policy=chosen, order=orders))


@lru_cache(maxsize=8)
def _unit_schedule(graph: TaskGraph, policy: SchedulePolicy) -> Schedule:
    """The order where every task takes one clock; programs that differ in layouts alone have the same."""
    return _recorded(graph, policy, unit_timeline(graph, policy))


def _recorded(graph: TaskGraph, policy: SchedulePolicy, timeline: Timeline) -> Schedule:
    """The order of a timeline, with tasks that update parameters at its end."""
    orders = timeline.orders()
    orders_updates_last = _updates_last(graph, orders)
    if orders_updates_last != orders:
        timeline = simulate(graph, None, policy=policy, order=orders_updates_last)
    columns = []
    for ranks, runs in zip(timeline.columns, timeline.by_column(), strict=True):
        names = symbols([task for task in graph.tasks if ranks[0] in task.ranks])
        steps = tuple(Step(round(run.start), run.task, run.micro) for run in runs)
        columns.append(Column(ranks, tuple((symbol, task) for task, symbol in names.items()), steps))
    return Schedule(policy.name, graph.micro_batches, tuple(columns))


def _updates_last(
    graph: TaskGraph, orders: Mapping[int, tuple[tuple[str, int], ...]]
) -> dict[int, tuple[tuple[str, int], ...]]:
    """The orders with update tasks moved to the end; all other tasks stay in order.

    Only another update reads the result of an update.
    """
    updates = {task.name for task in graph.tasks if task.kind == UPDATES}
    distinct = {id(order): order for order in orders.values()}  # ranks of one column share theirs
    moved = {number: _moved_last(order, updates) for number, order in distinct.items()}
    return {rank: moved[id(order)] for rank, order in orders.items()}


def _moved_last(order: tuple[tuple[str, int], ...], tasks: set[str]) -> tuple[tuple[str, int], ...]:
    """An order with some tasks moved to its end; the same object where they are there."""
    moved = tuple(sorted(order, key=lambda step: step[0] in tasks))
    return order if moved == order else moved


def parse(text: str) -> Schedule:
    """Read the text form back. Lines that start with # and empty lines are skipped.

    Raises:
        GraphError: a line that does not fit the form; the message gives the line.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    header = _HEADER.fullmatch(lines[0]) if lines else None
    if header is None:
        raise GraphError(
            f'schedule: expected a first line such as "1f1b n=3 m=4", got {lines[0] if lines else ""!r}'
        )
    count = int(header["columns"])
    legend = [match for line in lines[1 : 1 + count] if (match := _LEGEND.fullmatch(line))]
    if legend and len(legend) != count:
        raise GraphError(f"schedule: n={count} but {len(legend)} lines that name the ranks of a column")
    steps: list[list[tuple[int, str, int]]] = [[] for _ in range(count)]
    for clock, line in enumerate(lines[1 + len(legend) :]):
        cells = line.split()
        if len(cells) != count:
            raise GraphError(f"schedule: expected {count} columns, got {len(cells)} in {line!r}")
        for column, text_of_cell in zip(steps, cells, strict=True):
            if text_of_cell == "-":
                continue
            cell = _CELL.fullmatch(text_of_cell)
            if cell is None:
                raise GraphError(
                    f'schedule: expected a cell such as "F0" or "-", got {text_of_cell!r} in {line!r}'
                )
            column.append((clock, cell["symbol"], int(cell["micro"])))
    columns = []
    for index, entries in enumerate(steps):
        ranks, names = (
            _parse_legend(legend[index])
            if legend
            else ((index,), _plain_names(index, {c[1] for c in entries}))
        )
        task = dict(names)
        unknown = next((symbol for _, symbol, _ in entries if symbol not in task), None)
        if unknown is not None:
            raise GraphError(
                f"schedule: {unknown} in column {index} has no name; the column has {', '.join(task)}"
            )
        columns.append(
            Column(ranks, names, tuple(Step(clock, task[symbol], micro) for clock, symbol, micro in entries))
        )
    return Schedule(header["policy"], int(header["micro"]), tuple(columns))


def _parse_legend(match: re.Match[str]) -> tuple[tuple[int, ...], tuple[tuple[str, str], ...]]:
    names = [pair.split("=", 1) for pair in match["names"].split()]
    return tuple(map(int, match["ranks"].split(","))), tuple((symbol, task) for symbol, task in names)


def check(
    planned: Schedule,
    graph: TaskGraph,
    durations: Mapping[str, float] | None = None,
) -> Timeline:
    """Simulate a schedule with a task graph, to check it before it is run.

    Args:
        planned: the schedule.
        graph: the task graph.
        durations: seconds by task name or kind; None: one second each.

    Returns:
        The timeline of the step.

    Raises:
        GraphError: the schedule is for another number of micro-batches, or for other ranks.
        RuntimeFault: the schedule deadlocks, leaves a task out or repeats one; the message draws the grid.
    """
    if planned.micro_batches != graph.micro_batches:
        raise GraphError(
            f"schedule has m={planned.micro_batches} but the task graph has {graph.micro_batches} "
            "micro-batches; make a new schedule"
        )
    if planned.ranks != graph.ranks:
        raise GraphError(
            f"schedule has ranks {planned.ranks} but the task graph has {graph.ranks}; make a new schedule"
        )
    timeline = simulate(graph, durations, policy=schedule_policy(planned.policy), order=planned.orders())
    for rank, order in timeline.orders().items():
        if order != planned.order(rank):
            task, micro = planned.order(rank)[len(order)]
            raise RuntimeFault(
                f"rank {rank} has {task} {micro} in its order after all its work is done; remove it"
            )
    return timeline
