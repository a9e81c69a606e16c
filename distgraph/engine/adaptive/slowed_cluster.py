"""A cluster whose devices have the speeds that a running job has measured.

*In:* a cluster, and for some devices how many times as long they take as it says.
*Out:* the cluster with other numbers of these devices, from which forecasts and searches follow.
*Invariant:* links, memory and numbers of devices stay. Slowed devices have a model of their own, so that they
are another pool of a search than those that are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from distgraph.resources import Cluster
from distgraph.resources.cluster import Compute, Device, Machine, MeasuredTable, OpTable
from distgraph.resources.host_times import HostTimes


def slowed_cluster(cluster: Cluster, slowdowns: Mapping[int, float]) -> Cluster:
    """The cluster with slower devices.

    Measured times of collectives that are stated for the one model of all devices hold for slowed ones too.

    Args:
        cluster: as it was described.
        slowdowns: number of a device -> how many times as long its computation takes, above 0; 1 for devices
            that are left out.

    Example:
        >>> from distgraph.resources import load_cluster
        >>> slowed = slowed_cluster(load_cluster("local"), {1: 2.0})
        >>> [device.model for device in slowed.devices], slowed.flops(1, "f32")
        (['generic core', 'generic core at 0.50 of its speed'], 50000000000.0)
    """
    factors = {device: factor for device, factor in slowdowns.items() if factor != 1.0}
    if not factors:
        return cluster
    devices = tuple(_slowed(device, factors.get(device.index, 1.0)) for device in cluster.devices)
    one_model = len({device.model for device in cluster.devices}) == 1
    measured = tuple(_for_any(table) if one_model else table for table in cluster.measured)
    return replace(cluster, devices=devices, machines=_machines(cluster, factors), measured=measured)


def _for_any(table: MeasuredTable) -> MeasuredTable:
    return replace(table, model=None)


def _machines(cluster: Cluster, factors: Mapping[int, float]) -> tuple[Machine, ...]:
    """The machines; those with slowed devices have a template of their own, equal ones the same."""
    templates: dict[tuple[int, tuple[float, ...]], int] = {}
    unused = max(machine.template for machine in cluster.machines) + 1
    machines = []
    for machine in cluster.machines:
        speeds = tuple(factors.get(device, 1.0) for device in machine.devices)
        if set(speeds) <= {1.0}:
            machines.append(machine)
            continue
        template = templates.setdefault((machine.template, speeds), unused + len(templates))
        machines.append(replace(machine, template=template))
    return tuple(machines)


def _slowed(device: Device, factor: float) -> Device:
    if factor == 1.0:
        return device
    bandwidth = device.memory_bandwidth
    return replace(
        device,
        model=f"{device.model} at {1 / factor:.2f} of its speed",
        peak={dtype: rate / factor for dtype, rate in device.peak.items()},
        measured={dtype: rate / factor for dtype, rate in device.measured.items()},
        memory_bandwidth=None if bandwidth is None else bandwidth / factor,
        compute=_slowed_compute(device.compute, factor),
    )


def _slowed_compute(compute: Compute, factor: float) -> Compute:
    return replace(
        compute,
        launch=_times(compute.launch, factor),
        matmul={
            dtype: replace(rate, copied=_times(rate.copied, factor), moved=_times(rate.moved, factor))
            for dtype, rate in compute.matmul.items()
        },
        ops={
            kind: {dtype: _slowed_table(table, factor) for dtype, table in tables.items()}
            for kind, tables in compute.ops.items()
        },
        host=_slowed_host(compute.host, factor),
    )


def _slowed_table(table: OpTable, factor: float) -> OpTable:
    times, rates, tile_rates = (
        None if several is None else tuple(factor * seconds for seconds in several)
        for several in (table.times, table.rates, table.tile_rates)
    )
    launch = _times(table.launch, factor)
    return replace(table, times=times, rates=rates, tile_rates=tile_rates, launch=launch)


def _slowed_host(host: HostTimes, factor: float) -> HostTimes:
    """The times of a host; `network_busy` is a share, not a time."""
    changed = {
        each.name: _times(getattr(host, each.name), factor)
        for each in fields(HostTimes)
        if each.name != "network_busy"
    }
    return replace(host, **changed)


def _times(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else factor * seconds
