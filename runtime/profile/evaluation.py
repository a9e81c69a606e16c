"""From the measurements of a profile to the numbers of a resource file.

*In:* the cluster that was profiled, and the runs of a store.
*Out:* `Measured`.
*Invariant:* the fits use the mean over rounds for ops, whose sum is a step, and the median for messages,
whose times have long tails. Rounds that other programs disturbed do not count, unless they disturbed all.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from distgraph.errors import ResourceError
from distgraph.resources import Cluster
from distgraph.resources.cluster import Device, MeasuredTable
from distgraph.resources.host_times import HostTimes
from distgraph.runtime.forecast.op_cost import Work
from distgraph.runtime.profile import collective_probes
from distgraph.runtime.profile.cost_fitting import (
    ComputeFit,
    LinkFit,
    Message,
    fit_compute,
    fit_links,
    link_bounds,
)
from distgraph.runtime.profile.measurements import kept_runs, other_uses
from distgraph.runtime.profile.processor_use import Disturbance, OtherUse
from distgraph.runtime.profile.resource_writer import Measured
from distgraph.runtime.profile.robust_fitting import robust
from distgraph.runtime.profile.shared_cores import MOST_WORK_SECONDS, CoreSharing, host_times

Runs = Mapping[str, Mapping[str, Any]]
"""Of a `Store`."""
_LARGE_BYTES: Final = 2**16  # of messages whose transfer takes longer than their start
_DISTURBED: Final = 1e-3  # of a message: errors of busy parts are of another order, so all weigh the same
_LARGEST: Final = 3  # sizes of messages that tell which part computation hides of larger ones


def evaluate(
    cluster: Cluster, runs: Runs, ranks: int = 1, sharing: CoreSharing | None = None, blas: str = ""
) -> Measured:
    """Fit the numbers of the resource file to the measurements.

    Args:
        cluster: the cluster whose numbers are replaced.
        runs: runs of a `Store`.
        ranks: number of ranks that measured; with several, links must have been measured.
        sharing: how the ranks share cores; None where each has one.
        blas: library and kernels of matrix products, see `blas_kernels`.

    Raises:
        ResourceError: too little was measured.
    """
    samples: dict[str, list[tuple[Work, float]]] = {}
    host_steps: dict[str, list[tuple[int, float]]] = {}
    timed: list[tuple[collective_probes.Pattern, float]] = []
    for key, entry in runs.items():
        average = statistics.median if "message" in entry else statistics.fmean
        seconds = [average(column) for column in zip(*kept_runs(entry), strict=True)]
        if "works" in entry:
            works = [
                Work(**(work | {n: tuple(work[n]) for n in ("dims", "patches", "tiles")}))
                for work in entry["works"]
            ]
            samples.setdefault(key.partition("|")[0], []).extend(_means(works, seconds))
            continue
        if "tasks" in entry:
            host_steps.setdefault(key.partition("|")[0], []).append((entry["tasks"], seconds[0]))
            continue
        message = entry["message"]
        groups = tuple(tuple(group) for group in message["groups"])
        timed.append((collective_probes.Pattern(**message | {"groups": groups}), seconds[0]))
    kind_of_work = collective_probes.MESSAGE_WORK
    message_work = next((seconds for pattern, seconds in timed if pattern.kind == kind_of_work), None)
    timed = [(pattern, seconds) for pattern, seconds in timed if pattern.kind != kind_of_work]
    timed = _bounded_by_links(cluster, timed)
    shared = max((pattern.work for pattern, _ in timed), default=0.0)
    sent = [
        _message(pattern, seconds)
        for pattern, seconds in timed
        if pattern.work == shared and not pattern.overlapped
    ]
    if ranks > 1 and not sent:
        raise ResourceError(
            f"profile: the seconds sufficed for computation but not for the links between {ranks} ranks; run "
            f"the same command again, which goes on from there, or give more --seconds"
        )
    tables = _tables(cluster, timed, shared)
    network_busy = _network_busy(tables)
    compute = {}
    for origin, device_samples in samples.items():
        host = host_times(host_steps.get(origin, ()), message_work, network_busy)
        fit = _fit_of_device(cluster, origin, device_samples, host, sharing)
        compute[origin] = replace(fit, compute=replace(fit.compute, blas=blas))
    links: LinkFit | None = fit_links(cluster, sent) if sent else None
    rounds = [len(kept_runs(entry)) for entry in runs.values()]
    return Measured(compute, links, tuple(tables), _disturbances(runs), tuple(rounds))


def _disturbances(runs: Runs) -> dict[str, Disturbance]:
    """Parts of the file, see `part_of`, whose measurements were disturbed, or of which that is not known."""
    return {
        part: disturbed
        for part in dict.fromkeys(map(part_of, runs))
        if (disturbed := disturbance([entry for key, entry in runs.items() if part_of(key) == part]))
    }


def _means(works: Iterable[Work], seconds: Iterable[float]) -> list[tuple[Work, float]]:
    """Equal works of a program, each once, with the mean of their seconds."""
    spans: dict[Work, list[float]] = {}
    for work, span in zip(works, seconds, strict=True):
        spans.setdefault(work, []).append(span)
    return [(work, statistics.fmean(several)) for work, several in spans.items()]


def _fit_of_device(
    cluster: Cluster,
    origin: str,
    samples: Sequence[tuple[Work, float]],
    host: HostTimes,
    sharing: CoreSharing | None,
) -> ComputeFit:
    """The numbers of the devices with one origin, of which these are the works and seconds."""
    device = next(device for device in cluster.devices if device.origin == origin)
    fit = fit_compute(samples, device.peak, device.memory_bandwidth)
    cores, bound = (None, None) if sharing is None else cores_of(cluster, device, sharing)
    return replace(fit, compute=replace(fit.compute, host=host, cores=cores, bound=bound))


def cores_of(cluster: Cluster, device: Device, sharing: CoreSharing) -> tuple[float | None, bool | None]:
    """The cores that the devices of the machine of a device share, and whether neighbours are bound to each;
    None where each has a core.

    A control group that limits the machine leaves cores to all of its ranks, even if these are bound.
    """
    machines = [each.machine for each in cluster.devices]
    ranks = [share for place, share in zip(machines, sharing.shares, strict=False) if place == device.machine]
    most = max(ranks, default=1.0)
    if most <= 1:
        return None, None
    return machines.count(device.machine) / most, True if sharing.bound and not sharing.period else None


def part_of(key: str) -> str:
    """The devices of a key of a store, by their path in the resource file; "" for messages."""
    return key.partition("|")[0]


def disturbance(entries: Sequence[Mapping[str, Any]]) -> Disturbance | None:
    """What other programs used beside the measurements of a part, if they disturbed some or it is unknown."""
    disturbed: list[OtherUse] = []
    unknown: list[OtherUse] = []
    for entry in entries:
        uses = other_uses(entry)
        if all(use.disturbs for use in uses):
            disturbed.append(min(uses, key=lambda use: use.share or 0.0))
        elif all(use.share is None or use.disturbs for use in uses):
            unknown += [use for use in uses if use.share is None][:1]
    if not disturbed and not unknown:
        return None
    hosts = Counter(use.host for use in disturbed or unknown)
    share = statistics.fmean(use.share or 0.0 for use in disturbed) if disturbed else 0.0
    return Disturbance(hosts.most_common(1)[0][0], share, len(disturbed), len(unknown), len(entries))


def _tables(
    cluster: Cluster, timed: Iterable[tuple[collective_probes.Pattern, float]], work: float
) -> list[MeasuredTable]:
    """Tables of the collectives by their groups: the seconds behind `work` seconds of computation.

    The seconds beside products or without computation, if measured, become `busy`; of messages that were too
    large to be measured beside products, the median part of the largest that were. Between machines, `busy`
    of large messages is that of `_busy_line`.
    """
    Curve = dict[float, float]
    seconds_of: dict[tuple[str, tuple[tuple[int, ...], ...]], tuple[Curve, Curve]] = {}
    for pattern, seconds in timed:
        times, busy = seconds_of.setdefault((pattern.kind, pattern.groups), ({}, {}))
        (busy if pattern.overlapped or pattern.work < work else times)[pattern.nbytes] = seconds
    tables = []
    points: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for (kind, groups), (times, busy) in seconds_of.items():
        device_counts = [Counter(cluster.devices[device].machine for device in group) for group in groups]
        shapes = {(len(counts), count) for counts in device_counts for count in counts.values()}
        if len(shapes) > 1 or not times:
            continue
        shape = shapes.pop()
        both = sorted(times.keys() & busy.keys())
        points.setdefault(shape, []).extend((times[s], busy[s]) for s in both if _fits_products(s, times[s]))
        sizes = sorted(size for size in times if not both or size in both or size > both[-1])
        parts = [min(1.0, busy[size] / times[size]) for size in both[-_LARGEST:]]
        part = statistics.median(parts) if parts else 0.0
        column = tuple(min(times[size], busy.get(size, part * times[size])) for size in sizes)
        measured = tuple(times[size] for size in sizes)
        tables.append(
            MeasuredTable(kind, *shape, tuple(sizes), measured, None, groups, column if both else None)
        )
    lines = {shape: _busy_line(near) for shape, near in points.items() if shape[0] > 1 and near}
    return [_on_line(table, lines.get((table.machines, table.devices_per_machine))) for table in tables]


def _bounded_by_links(
    cluster: Cluster, timed: Sequence[tuple[collective_probes.Pattern, float]]
) -> list[tuple[collective_probes.Pattern, float]]:
    """Seconds of messages, those between machines behind computation no fewer than their bytes use a link.

    The ranks of a machine reach such a message one after the other, and the last of them computes while the
    messages of the others are on their way. So what the message adds to the computation may be less than the
    time for which it uses the link. Of messages that follow one another, the link carries one at a time.
    """
    machines = [device.machine for device in cluster.devices]

    def is_behind(pattern: collective_probes.Pattern) -> bool:
        between = any(len({machines[rank] for rank in group}) > 1 for group in pattern.groups)
        return between and pattern.work > 0 and not pattern.overlapped

    behind = [(pattern, seconds) for pattern, seconds in timed if is_behind(pattern)]
    if not behind:
        return list(timed)
    bounds = link_bounds(cluster, [_message(pattern, seconds) for pattern, seconds in behind])
    least = {pattern: bound for (pattern, _), bound in zip(behind, bounds, strict=True)}
    return [(pattern, max(seconds, least.get(pattern, 0.0))) for pattern, seconds in timed]


def _message(pattern: collective_probes.Pattern, seconds: float) -> Message:
    return Message(pattern.kind, pattern.groups[0], pattern.groups[1:], pattern.nbytes, seconds)


def _fits_products(nbytes: float, seconds: float) -> bool:
    """Whether a message is large, and the products beside it lasted as long as it takes."""
    return nbytes >= _LARGE_BYTES and seconds <= MOST_WORK_SECONDS


def _busy_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Start and slope >= 0 of the line on which `busy` of messages between machines lies over their seconds.

    What products do not hide is a difference of two noisy times, and one that is too small would forecast a
    gain of overlap. What is behind it depends little on the collective: to start a message takes as long for
    all sizes, and the processor moves its bytes at one speed. So all collectives between as many machines
    and devices determine one line, by a robust fit of the part that is not hidden.

    Args:
        points: (seconds, those that products do not hide) of messages from 64 KiB on.
    """
    seconds, busy = np.array(points).T
    rows = np.stack([np.ones_like(seconds), seconds], axis=1)
    start, slope = robust(rows, busy, like=seconds, far=_DISTURBED)
    return float(start), float(slope)


def _on_line(table: MeasuredTable, line: tuple[float, float] | None) -> MeasuredTable:
    """A table in which messages from 64 KiB on are busy as a line says, at most for all of their time."""
    if line is None or table.busy is None:
        return table
    start, slope = line
    busy = tuple(
        min(seconds, start + slope * seconds) if size >= _LARGE_BYTES else before
        for size, seconds, before in zip(table.sizes, table.times, table.busy, strict=True)
    )
    return replace(table, busy=busy)


def _network_busy(tables: Sequence[MeasuredTable]) -> float | None:
    """The part of messages between machines that no computation hides: the median over sizes and groups.

    Small messages do not count: what hides of them is less than what their start and end cost.
    """
    parts = [
        busy / seconds
        for table in tables
        if table.machines > 1 and table.busy is not None
        for size, seconds, busy in zip(table.sizes, table.times, table.busy, strict=True)
        if size >= _LARGE_BYTES
    ]
    return statistics.median(parts) if parts else None
