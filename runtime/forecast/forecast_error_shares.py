"""What the seconds of a step go to, by kind of error, and the errors that a forecast on a cluster has.

*In:* a forecast's tasks and timeline, the cluster, the runtime. *Out:* shares of the step (`KINDS` of
`plan.forecast_errors`), and `ForecastErrors`.
*Invariant:* the shares of a step add up to 1. They are those of the ranks that compute or wait longest; idle
time of a pipeline is divided like the time of its tasks, since it grows with them.

A resource file that was calibrated states its errors (`errors`). In another one they follow from the origins
of its numbers: each number is off by what its origin says, or by `ASSUMED` where it says nothing, so that a
guess makes an interval wider than a measurement does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from distgraph.plan.forecast_errors import KINDS, WIDTH, ForecastErrors, of_kinds
from distgraph.resources import Cluster
from distgraph.resources.cluster import Device
from distgraph.resources.runtimes.runtime_model import RuntimeModel
from distgraph.resources.units import Origin
from distgraph.runtime.forecast.task_time import TaskTime

ASSUMED: Final = {"measured": 0.1, "fitted": 0.1, "published": 0.15, "data sheet": 0.3, "guess": 0.5}
"""Relative error within which a number lies with a probability of 80 % if its origin does not state one."""
UNSTATED: Final = 0.5
"""The same for a number without an origin."""
MODEL: Final = ForecastErrors(computation=0.08, inside=0.15, between=0.2, host=0.25, own=0.04)
"""Errors of the model of a step itself, with the right numbers: guesses, which a calibration replaces."""
MEMORY: Final = {"buffers": 0.02, "liveness": 0.13}
"""Errors of bytes by planner: buffers are allocated as planned, liveness is 12.5 % off in Alpa's tables."""


def step_shares(times: Iterable[tuple[TaskTime, int]], between: frozenset[str]) -> dict[str, float]:
    """Kind -> share of the seconds of a rank, from its tasks with the number of runs of each.

    `between` are the kinds of links between machines (`Cluster.kinds_between`).
    """
    seconds = dict.fromkeys(KINDS, 0.0)
    exposed, linked = 0.0, {"inside": 0.0, "between": 0.0}
    for time, runs in times:
        seconds["computation"] += runs * time.compute
        seconds["host"] += runs * max(0.0, time.seconds - time.compute - time.exposed)
        exposed += runs * time.exposed
        for link, each in time.linked.items():
            linked["between" if link in between else "inside"] += runs * each
    total = sum(linked.values())
    for kind, each in linked.items():
        seconds[kind] += exposed * each / total if total else exposed * (kind == "inside")
    whole = sum(seconds.values())
    return {kind: each / whole for kind, each in seconds.items()} if whole else {"computation": 1.0}


def errors_of(
    cluster: Cluster, devices: Iterable[int], runtime: RuntimeModel, dtypes: Iterable[str] = ()
) -> ForecastErrors:
    """The errors of forecasts on a cluster; of all dtypes that the devices have a rate for by default."""
    memory = cluster.errors.memory if cluster.errors is not None else 0.0
    memory = memory or MEMORY[runtime.memory.planner]
    if cluster.errors is not None and cluster.errors.runtime == runtime.name:
        return replace(cluster.errors, memory=memory)
    deviations = {
        kind: math.hypot(getattr(MODEL, kind), *each)
        for kind, each in _by_kind(cluster, devices, set(dtypes))
    }
    return replace(of_kinds(deviations, MODEL.own), memory=memory, about=_about(cluster, runtime))


def _about(cluster: Cluster, runtime: RuntimeModel) -> str:
    about = "from the origins of the numbers; no runs were measured"
    return about if cluster.errors is None else f"{about} under {runtime.name}"


def _by_kind(cluster: Cluster, devices: Iterable[int], dtypes: set[str]) -> Iterator[tuple[str, list[float]]]:
    """Kind -> standard deviations of its numbers, of which each counts as one part of the whole."""
    chosen = {cluster.devices[index].origin: cluster.devices[index] for index in devices}
    yield "computation", [_mean([_computation(cluster, device, dtypes) for device in chosen.values()])]
    across = cluster.kinds_between
    origins: dict[str, dict[str, float]] = {"inside": {}, "between": {}}
    for link in {link.origin: link for link in cluster.links}.values():
        kind = "between" if link.kind in across else "inside"
        origins[kind][link.origin] = _deviation(cluster, f"{link.origin}.bandwidth")
    for kind, seconds_of in origins.items():
        yield kind, [_mean(seconds_of.values())]
    yield "host", []


def _computation(cluster: Cluster, device: Device, dtypes: set[str]) -> float:
    """Standard deviation of the numbers of a device: products, and moving bytes, half each.

    An efficiency is fitted or guessed for the peak that the file states, whose error is not counted again.
    """
    compute, path = device.compute, f"{device.origin}.compute"
    rated = [dtype for dtype in compute.matmul if not dtypes or dtype in dtypes]
    names = [name for name in ("memory_efficiency", "launch") if getattr(compute, name) is not None]
    groups = ([f"matmul.{dtype}" for dtype in rated], names)
    deviations = [[_deviation(cluster, f"{path}.{name}") for name in group] for group in groups if group]
    return _mean([_mean(group) for group in deviations])


def _deviation(cluster: Cluster, path: str) -> float:
    """Standard deviation of a number from its origin."""
    origin = cluster.origin_of(path)
    return _stated(origin) / WIDTH


def _stated(origin: Origin | None) -> float:
    if origin is None:
        return UNSTATED
    return min(1.0, origin.error if origin.error is not None else ASSUMED[origin.kind])


def _mean(deviations: Iterable[float]) -> float:
    """Root of the mean square."""
    squares = [each**2 for each in deviations]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0
