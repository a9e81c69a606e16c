"""The numbers of a cluster and of a runtime that measured steps can determine, and their application.

*In:* a cluster and a runtime model as their files state them. *Out:* `Number`s: parameters of a fit, each
with the way in which seconds depend on it; a cluster and a runtime with other values.
*Invariant:* the numbers are those that the files hold, by the path in the file. Equal things have one number:
all devices of a model, all links of a kind. A number that stands for several (the three half lengths, the
bandwidths of a kind) changes all by one factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from distgraph.resources import Cluster
from distgraph.resources.cluster import Compute, Device, Link
from distgraph.resources.host_times import HostTimes
from distgraph.resources.runtimes.runtime_model import RuntimeModel
from distgraph.resources.units import Origin
from distgraph.runtime.profile.calibration.robust_fit import Parameter

Values = Mapping[str, float]
_HOST: Final = {"op": 1e-5, "micro_batch": 1e-4, "step": 1e-3}
"""Where a fit starts for times of the host that no file states, in seconds."""
_SPREADS: Final = {"measured": 1.1, "fitted": 1.2, "published": 1.3, "data sheet": 1.5, "guess": 2.0}
"""By kind of origin, the factor within which a number most likely is if its origin states no error."""
_UNSTATED: Final = 4.0
"""The same for a number that no file states."""
RUNTIME: Final = ("host.", "messages.", "kernels.")
"""Beginnings of the names of numbers of the runtime; others are of the cluster."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number to fit.

    Attributes:
        parameter: its name, start and bounds.
        faster: whether a larger value makes a step faster (a rate), else a step takes longer (a time).
    """

    parameter: Parameter
    faster: bool

    def growth(self, value: float, base: float) -> float:
        """Relative change of the seconds that are proportional to the number."""
        return (base / value if self.faster else value / base) - 1.0


def numbers(cluster: Cluster, runtime: RuntimeModel) -> tuple[Number, ...]:
    """All numbers that may be fitted, with their values in the files as starts."""
    fitted: list[Number] = []
    for model, device in _devices(cluster).items():
        fitted += _of_device(cluster, model, device, device.compute)
    links = {(link.kind, link.origin): link for link in cluster.links if scalable(link)}
    for kind in dict.fromkeys(kind for kind, _ in links):
        first = next(link for (other, _), link in links.items() if other == kind)
        for name, number in (("bandwidth", first.bandwidth), ("latency", first.latency)):
            if number:
                origin = cluster.origin_of(f"{first.origin}.{name}")
                fitted.append(_number(f"links.{kind}.{name}", number, origin, faster=name == "bandwidth"))
    if cluster.launch:
        fitted.append(_number("launch", cluster.launch, cluster.origin_of("launch")))
    return (*fitted, *_of_runtime(cluster, runtime))


def scalable(link: Link) -> bool:
    """Whether a link has an entry of its own in the resource file: levels of a tree have none."""
    return "[]" not in link.origin


def _devices(cluster: Cluster) -> dict[str, Device]:
    """The first device of each model."""
    devices: dict[str, Device] = {}
    for device in cluster.devices:
        devices.setdefault(device.model, device)
    return devices


def _of_device(cluster: Cluster, model: str, device: Device, compute: Compute) -> list[Number]:
    fitted = []
    for dtype, rate in compute.matmul.items():
        path = f"compute.matmul.{dtype}"
        origin = cluster.origin_of(f"{device.origin}.{path}")
        name = f"devices.{model}.{path}"
        fitted.append(_number(f"{name}.efficiency", rate.efficiency, origin, faster=True, most=1.0))
        lengths = [half for half in rate.half if half]
        if lengths:
            fitted.append(_number(f"{name}.half", lengths[0], origin, spread=2.0))
    for field, faster, most in (("memory_efficiency", True, 1.0), ("launch", False, None)):
        number = getattr(compute, field)
        if number:
            origin = cluster.origin_of(f"{device.origin}.compute.{field}")
            fitted.append(
                _number(f"devices.{model}.compute.{field}", number, origin, faster=faster, most=most)
            )
    return fitted


def _of_runtime(cluster: Cluster, runtime: RuntimeModel) -> list[Number]:
    """Times of the host, the start of messages, and the bytes of an update where the runtime states them."""
    hosts = cluster.devices[0].compute.host.replaced_by(runtime.host)
    fitted = []
    for field, guess in _HOST.items():
        stated = getattr(hosts, field)
        spread = 2.0 if stated else _UNSTATED
        fitted.append(_number(f"host.{field}", stated or guess, None, spread=spread, width=100.0))
    start = runtime.messages.start or cluster.launch
    if start:
        stated = 2.0 if runtime.messages.start else _UNSTATED
        fitted.append(_number("messages.start", start, None, spread=stated, width=100.0))
    if runtime.kernels.update_bytes:
        fitted.append(_number("kernels.update_bytes", runtime.kernels.update_bytes, None, spread=1.5))
    return fitted


def _number(
    name: str,
    start: float,
    origin: Origin | None,
    *,
    faster: bool = False,
    most: float | None = None,
    spread: float | None = None,
    width: float = 10.0,
) -> Number:
    """A number within `width` times its start, and at most `most`."""
    if spread is None:
        spread = _UNSTATED / 2 if origin is None else _SPREADS[origin.kind]
        if origin is not None and origin.error is not None:
            spread = 1.0 + max(0.05, origin.error)
    high = start * width if most is None else min(start * width, most)
    return Number(Parameter(name, start, start / width, max(high, start), spread), faster)


def applied(cluster: Cluster, runtime: RuntimeModel, values: Values) -> tuple[Cluster, RuntimeModel]:
    """The cluster and the runtime with other values of some numbers."""
    groups = {device.origin: device for device in cluster.devices}
    computes = {origin: _compute(device, values) for origin, device in groups.items()}
    devices = tuple(replace(device, compute=computes[device.origin]) for device in cluster.devices)
    starts = {number.parameter.name: number.parameter.start for number in numbers(cluster, runtime)}

    def factor(name: str) -> float:
        return values[name] / starts[name] if name in values else 1.0

    links = tuple(
        replace(
            link,
            bandwidth=link.bandwidth and link.bandwidth * factor(f"links.{link.kind}.bandwidth"),
            latency=link.latency and link.latency * factor(f"links.{link.kind}.latency"),
        )
        if scalable(link)
        else link
        for link in cluster.links
    )
    launch = values.get("launch", cluster.launch)
    host = HostTimes(**{f: values[f"host.{f}"] for f in _HOST if f"host.{f}" in values})
    changed = replace(
        runtime,
        host=runtime.host.replaced_by(host),
        messages=replace(runtime.messages, start=values.get("messages.start", runtime.messages.start)),
        kernels=replace(
            runtime.kernels,
            update_bytes=values.get("kernels.update_bytes", runtime.kernels.update_bytes),
        ),
    )
    return replace(cluster, devices=devices, links=links, launch=launch), changed


def _compute(device: Device, values: Values) -> Compute:
    compute, path = device.compute, f"devices.{device.model}.compute"
    rates = {}
    for dtype, rate in compute.matmul.items():
        lengths = [half for half in rate.half if half]
        factor = values.get(f"{path}.matmul.{dtype}.half", lengths[0]) / lengths[0] if lengths else 1.0
        first, second, third = (half * factor for half in rate.half)
        efficiency = values.get(f"{path}.matmul.{dtype}.efficiency", rate.efficiency)
        rates[dtype] = replace(rate, efficiency=efficiency, half=(first, second, third))
    return replace(
        compute,
        matmul=rates,
        memory_efficiency=values.get(f"{path}.memory_efficiency", compute.memory_efficiency),
        launch=values.get(f"{path}.launch", compute.launch),
    )
