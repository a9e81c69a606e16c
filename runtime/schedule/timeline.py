"""The timeline of a step: the time of every task instance, as intervals, as records by rank, and as a grid.

*In:* intervals of tasks, and groups of ranks that run the same tasks. *Out:* busy times, live micro-batches,
the grid. *Invariant:* intervals are in the order of their start; two of one rank do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distgraph.runtime.schedule.task import Task, TaskGraph
from distgraph.serialization.text_table import text_table

SAME_TIME = 1e-12  # relative; sums of the same durations in another order differ by a few ulp
_LETTERS = {
    "load": "L",
    "forward": "F",
    "backward": "B",
    "weight": "W",
    "send": "S",
    "recv": "R",
    "sync": "G",
    "optimize": "O",
}


@dataclass(frozen=True, slots=True)
class Interval:
    """One task instance, on all its ranks; start and end in seconds."""

    task: str
    micro: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The time of every task instance of a step.

    Args:
        graph: the task graph, with the buffer limits of the run.
        intervals: every task instance in the order in which they were started.
        columns: groups of ranks that run the same tasks at the same times; ascending by first rank.
    """

    graph: TaskGraph
    intervals: tuple[Interval, ...]
    columns: tuple[tuple[int, ...], ...]

    @property
    def makespan(self) -> float:
        """End of the last task, seconds."""
        return max((interval.end for interval in self.intervals), default=0.0)

    def of_rank(self, rank: int) -> tuple[Interval, ...]:
        """The task instances of one rank, in order."""
        names = {task.name for task in self.graph.tasks if rank in task.ranks}
        return tuple(run for run in self.intervals if run.task in names)

    def orders(self) -> dict[int, tuple[tuple[str, int], ...]]:
        """Rank -> its (task, micro-batch) pairs, in order. Ranks of one column share one tuple."""
        result: dict[int, tuple[tuple[str, int], ...]] = {}
        for ranks, runs in zip(self.columns, self.by_column(), strict=True):
            result.update(dict.fromkeys(ranks, tuple((run.task, run.micro) for run in runs)))
        return dict(sorted(result.items()))

    def busy(self) -> dict[int, float]:
        """Rank -> seconds in which it runs tasks; the rest of the makespan is its bubble."""
        result: dict[int, float] = {}
        for ranks, runs in zip(self.columns, self.by_column(), strict=True):
            result.update(dict.fromkeys(ranks, sum(run.end - run.start for run in runs)))
        return dict(sorted(result.items()))

    def grid(self, rows: int | None = None) -> str:
        """The grid of ranks and times as text.

        It has a line for each interval in which nothing starts or ends, and a column for each group of ranks
        that run the same tasks. F0 = forward of micro-batch 0 (see `symbols`), | = still running, - = idle.

        Args:
            rows: number of lines, counted from the end; None: all.
        """
        table = _table(self, self.by_column())
        return "\n".join(text_table(table if rows is None else table[max(0, len(table) - rows) :], gap=" "))

    def by_column(self) -> list[list[Interval]]:
        """The task instances of every group of ranks, in order."""
        column = {ranks[0]: index for index, ranks in enumerate(self.columns)}
        where = {
            task.name: [column[rank] for rank in task.ranks if rank in column] for task in self.graph.tasks
        }
        result: list[list[Interval]] = [[] for _ in self.columns]
        for run in self.intervals:
            for index in where[run.task]:
                result[index].append(run)
        return result


def symbols(tasks: Sequence[Task]) -> dict[str, str]:
    """Task -> its short symbol in the grid: the letter of its kind, then Fa, Fb, ... for more of that kind.

    Letters: L load, F forward, B backward, S send, R recv, G sync (of gradients), O optimize.
    """
    seen: dict[str, int] = {}
    result = {}
    for task in tasks:
        letter = _LETTERS[task.kind]
        count = seen.get(letter, 0)
        seen[letter] = count + 1
        suffix = ""
        while count:
            count, digit = divmod(count - 1, 26)
            suffix = chr(ord("a") + digit) + suffix
        result[task.name] = letter + suffix
    return result


def _table(timeline: Timeline, columns: list[list[Interval]]) -> list[list[str]]:
    """Cells by (line, column). A task without duration gets a line of its own, before others of its time."""
    tasks = timeline.graph.tasks
    moment: dict[float, float] = {}  # times that differ by rounding only are one line
    latest = 0.0
    for time in sorted({time for run in timeline.intervals for time in (run.start, run.end)}):
        latest = latest if time <= latest * (1 + 2 * SAME_TIME) else time
        moment[time] = latest
    times = sorted(set(moment.values()))
    levels = dict.fromkeys(times, 0)
    placed: list[tuple[float, int, int, str]] = []  # time, level, column, cell
    spans: list[tuple[float, float, int, str]] = []
    for index, runs in enumerate(columns):
        named = symbols([task for task in tasks if timeline.columns[index][0] in task.ranks])
        level, last = 0, -1.0
        for run in runs:
            cell = f"{named[run.task]}{run.micro}"
            start, end = moment[run.start], moment[run.end]
            if end > start:
                spans.append((start, end, index, cell))
                continue
            level = level + 1 if start == last else 0
            last = start
            levels[start] = max(levels[start], level + 1)
            placed.append((start, level, index, cell))
    line: dict[float, int] = {}
    count = 0
    for time in times:
        count += levels[time]
        line[time] = count  # the line of the interval that starts here
        count += 1
    table = [["-"] * len(columns) for _ in range(max(0, count - 1) if times else 0)]
    for time, level, index, cell in placed:
        table[line[time] - levels[time] + level][index] = cell
    for start, end, index, cell in spans:
        for number in range(line[start], line[end] - levels[end]):
            table[number][index] = cell if number == line[start] else "|"
    return table
