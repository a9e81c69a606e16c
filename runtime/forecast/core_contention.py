"""Ranks that share the cores of a machine: each computes faster while others wait.

*In:* tasks, and the timeline that follows from them.
*Out:* how many times as fast as the resource file says every rank computes in every task.
*Invariant:* ranks that run a task together compute and wait together, so they leave each other nothing.
Devices with cores of their own keep the speed of the resource file.

With r devices on C cores, of which k compute, a device is

    max(1, r / C) / max(1, k / C)

times as fast as the resource file says. A rank of another task counts for the part of its time in which it
computes. How long others compute depends on how fast they are, so the forecast times the tasks and computes
their speeds in turns.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from distgraph.resources import Cluster
from distgraph.runtime.forecast.task_forecast import TaskForecast
from distgraph.runtime.schedule.timeline import Timeline

MOST_TURNS, SETTLED = 6, 1e-3
"""Turns in which tasks are timed again, at most, and the relative change of the step below which there is no
further one."""
Speeds = Mapping[tuple[str, int], float]
"""(task, rank) -> how many times as fast as stated the rank computes; those that are missing as stated."""
Runs = Sequence[tuple[float, float, float]]
"""The runs of one rank in their order: start and end in seconds, and the part in which it computes."""


@dataclass(frozen=True, slots=True)
class CoreGroup:
    """Ranks on the cores that they share.

    Attributes:
        ranks: of the job.
        devices: of the machine, or of the part of it, whose numbers hold while all of them compute.
        cores: that these devices share.
    """

    ranks: tuple[int, ...]
    devices: int
    cores: float

    def speed(self, computing: float) -> float:
        """How many times as fast as stated a rank is while some ranks compute, itself among them; linear
        between whole numbers of ranks."""
        few = math.floor(computing)
        part = computing - few
        slow, fast = (1 / max(1.0, ranks / self.cores) for ranks in (few + 1, few))
        return max(1.0, self.devices / self.cores) * (part * slow + (1 - part) * fast)


def core_groups(cluster: Cluster, devices: Mapping[int, int]) -> dict[int, CoreGroup]:
    """Rank -> the group whose cores it shares; only ranks of machines with more devices than cores.

    Args:
        cluster: states the cores.
        devices: device of every rank that runs tasks.
    """
    counts = Counter(device.machine for device in cluster.devices)
    members: dict[tuple[int, int], list[int]] = {}
    sizes: dict[tuple[int, int], tuple[int, float]] = {}
    for rank, number in devices.items():
        device = cluster.devices[number]
        count, cores = counts[device.machine], device.compute.cores
        if cores is None or count <= cores:
            continue
        key, size = (device.machine, 0), (count, cores)
        if device.compute.bound and count % cores == 0:
            each = int(count / cores)
            key, size = (device.machine, device.local // each), (each, 1.0)
        members.setdefault(key, []).append(rank)
        sizes[key] = size
    return {rank: CoreGroup(tuple(ranks), *sizes[key]) for key, ranks in members.items() for rank in ranks}


def core_speeds(
    tasks: Mapping[str, TaskForecast], timeline: Timeline, groups: Mapping[int, CoreGroup]
) -> Speeds:
    """How fast the ranks of groups compute, on average over the runs of a task.

    Args:
        tasks: from which the timeline follows.
        timeline: when every task ran.
        groups: see `core_groups`.
    """
    column_of = {rank: column for column, ranks in enumerate(timeline.columns) for rank in ranks}
    ranks_of = {task.name: task.ranks for task in timeline.graph.tasks}
    newest = timeline.graph.micro_batches - 1
    runs: dict[int, list[tuple[float, float, float]]] = {}  # by column
    instances: dict[str, list[tuple[float, float]]] = {}
    for run in timeline.intervals:
        instances.setdefault(run.task, []).append((run.start, run.end))
        time = tasks[run.task].last if run.micro == newest else tasks[run.task].body
        part = time.compute / time.seconds if time.seconds else 0.0
        for column in {column_of[rank] for rank in ranks_of[run.task]}:
            runs.setdefault(column, []).append((run.start, run.end, part))
    for of_column in runs.values():
        of_column.sort()
    speeds: dict[tuple[str, int], float] = {}
    averages: dict[tuple[object, ...], float] = {}
    for name, spans in instances.items():
        seconds, members = sum(end - start for start, end in spans), set(ranks_of[name])
        for rank in ranks_of[name] if seconds else ():
            if (group := groups.get(rank)) is None:
                continue
            others = tuple(column_of[other] for other in group.ranks if other not in members)
            key = name, group, others
            if key not in averages:
                together = len(group.ranks) - len(others)
                runs_of_others = [runs.get(column, []) for column in others]
                averages[key] = sum(_work(group, together, runs_of_others, *span) for span in spans) / seconds
            speeds[name, rank] = averages[key]
    return speeds


def _work(
    group: CoreGroup,
    together: int,
    others: Sequence[Runs],
    start: float,
    end: float,
) -> float:
    """The integral of the speed of a rank from `start` to `end`.

    Args:
        group: of the rank.
        together: ranks of the group that run the task.
        others: of each other rank of the group.
        start, end: seconds of the timeline.
    """
    overlapping = [_between(runs, start, end) for runs in others]
    times = sorted({start, end, *(time for runs in overlapping for run in runs for time in run[:2])})
    times = [time for time in times if start <= time <= end]
    total = 0.0
    for begin, stop in pairwise(times):
        middle = (begin + stop) / 2
        computing = sum(part for runs in overlapping for first, last, part in runs if first <= middle < last)
        total += (stop - begin) * group.speed(together + computing)
    return total


def _between(runs: Runs, start: float, end: float) -> Runs:
    """The runs that overlap with a span of time; runs of one rank do not overlap each other."""
    first = max(0, bisect_left(runs, (start,)) - 1)
    return runs[first : bisect_left(runs, (end,))]
