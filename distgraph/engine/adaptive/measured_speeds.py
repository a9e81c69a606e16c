"""Speeds of the devices of a running job: measured seconds of its ranks against their forecast.

*In:* records of some steps, the seconds that each rank was to compute by the forecast of the plan.
*Out:* device -> slowdown: how many times as long it takes as the resource file says, 1 for the fastest one.
*Invariant:* only ratios between ranks count, so a forecast that is wrong by one factor for all of them
changes nothing. Devices within the margin of what the plan was made for keep the number that it was made for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, median_low

from distgraph.errors import RuntimeFault
from distgraph.ir.range_notation import spans
from distgraph.resources import Cluster
from distgraph.runtime.execute.measured_timeline import MeasuredRank
from distgraph.runtime.schedule.task import TaskGraph


class RecordedSteps:
    """Records of steps by program, for `Engine`: a shorter last batch is another program.

    Attributes:
        steps: records of all ranks, one for each step of the program.
        left_out: number of steps of other programs.
    """

    def __init__(self, graph: TaskGraph, most: int) -> None:
        self._graph, self._most = graph, most
        self.steps: list[Mapping[int, MeasuredRank]] = []
        self.left_out = 0

    @property
    def complete(self) -> bool:
        """Whether there are as many steps as are needed."""
        return len(self.steps) >= self._most

    def add(self, graph: TaskGraph, number: int, ranks: Mapping[int, MeasuredRank]) -> None:
        """See `StepRecords`."""
        if graph is self._graph:
            self.steps.append(ranks)
        else:
            self.left_out += 1


def computing_seconds(steps: Sequence[Mapping[int, MeasuredRank]]) -> dict[int, float]:
    """Rank -> median over steps of the seconds in which it runs tasks and does not wait for communication.

    Raises:
        RuntimeFault: the steps were run by different ranks.
    """
    ranks = sorted(steps[0])
    for step in steps:
        if sorted(step) != ranks:
            raise RuntimeFault(
                f"Adapt: one recorded step ran on ranks {spans(ranks)} and another on ranks "
                f"{spans(sorted(step))}; steps that are compared must have the same ranks"
            )
    return {rank: median(_computing(step[rank]) for step in steps) for rank in ranks}


def _computing(record: MeasuredRank) -> float:
    return sum(run.end - run.start - record.waited(run) for run in record.runs)


def measured_slowdowns(
    measured: Mapping[int, float],
    forecast: Mapping[int, float],
    devices: Sequence[int],
    planned: Mapping[int, float],
    cluster: Cluster,
    margin: float,
) -> dict[int, float]:
    """The slowdown of the device of every rank that computes.

    Args:
        measured: seconds that each rank computed in a step.
        forecast: seconds that it was to compute, with the slowdowns `planned`.
        devices: device of every rank.
        planned: slowdowns for which the plan was made; 1 for devices that are left out.
        cluster: the devices. Those of one machine that differ by less than the margin get one number.
        margin: relative difference from `planned` that counts.

    Raises:
        RuntimeFault: other ranks were measured than are forecast.
    """
    if set(measured) != set(forecast):
        raise RuntimeFault(
            f"Adapt: ranks {spans(sorted(measured))} were measured but ranks {spans(sorted(forecast))} are "
            "forecast; this is an error of distgraph, please report it"
        )
    ratios = {
        devices[rank]: seconds / forecast[rank]
        for rank, seconds in measured.items()
        if seconds > 0 and forecast[rank] > 0
    }
    if len(ratios) < 2:
        return dict(planned)
    by_machine: dict[int, list[int]] = {}
    for device in ratios:
        by_machine.setdefault(cluster.devices[device].machine, []).append(device)
    for members in by_machine.values():
        values = [ratios[device] for device in members]
        if max(values) <= (1 + margin) * min(values):
            ratios |= dict.fromkeys(members, median_low(values))
    factors = {device: planned.get(device, 1.0) * ratio for device, ratio in ratios.items()}
    least = min(factors.values()) / min(planned.get(device, 1.0) for device in factors)
    factors = {device: factor / least for device, factor in factors.items()}
    changed = {d: f for d, f in factors.items() if differs(f, planned.get(d, 1.0), margin)}
    return {**planned, **dict.fromkeys(set(factors) - set(planned), 1.0), **_levels(changed, margin)}


def differs(one: float, other: float, margin: float) -> bool:
    """Whether two slowdowns differ by more than a margin."""
    return max(one, other) > (1 + margin) * min(one, other)


def changed_devices(now: Mapping[int, float], before: Mapping[int, float], margin: float) -> tuple[int, ...]:
    """Devices whose slowdown differs by more than a margin; 1 where it is not stated."""
    every = sorted({*now, *before})
    return tuple(d for d in every if differs(now.get(d, 1.0), before.get(d, 1.0), margin))


def _levels(factors: Mapping[int, float], margin: float) -> dict[int, float]:
    """Slowdowns that are within the margin of each other as one number of two digits.

    A search treats devices of equal numbers as one pool, and pools should be few.
    """
    levels: dict[int, float] = {}
    group: list[int] = []
    for device in [*sorted(factors, key=lambda device: factors[device]), None]:
        if device is not None and (not group or factors[device] <= (1 + margin) * factors[group[0]]):
            group.append(device)
            continue
        level = float(f"{median_low([factors[member] for member in group]):.2g}") if group else 1.0
        levels |= dict.fromkeys(group, level)
        group = [] if device is None else [device]
    return levels


def speeds_in_words(
    now: Mapping[int, float],
    planned: Mapping[int, float],
    changed: Sequence[int],
    devices: Sequence[int],
    cluster: Cluster,
) -> str:
    """What has changed, such as "rank 1 (machine b1) runs at 0.50 of the speed of the resource file, planned
    at 1.00".

    Args:
        now, planned: slowdowns.
        changed: devices that are named.
        devices: device of every rank.
        cluster: the devices.
    """
    groups: dict[tuple[str, float, float], list[int]] = {}
    for rank, device in enumerate(devices):
        if device in changed:
            machine = cluster.machines[cluster.devices[device].machine].name
            key = machine, now.get(device, 1.0), planned.get(device, 1.0)
            groups.setdefault(key, []).append(rank)
    parts = []
    for (machine, factor, before), ranks in groups.items():
        several = len(ranks) > 1
        who = f"rank{'s' * several} {spans(ranks)} (machine {machine}) run{'s' * (not several)}"
        parts.append(f"{who} at {1 / factor:.2f} of the described speed, planned at {1 / before:.2f}")
    return "; ".join(parts)
