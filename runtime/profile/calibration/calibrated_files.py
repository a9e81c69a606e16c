"""Write a calibrated resource file, and a runtime model next to it, with the errors of their forecasts.

*In:* a `Calibration`, the files that it started from. *Out:* YAML for `load_cluster` and `load_runtime`.
*Invariant:* only numbers that the runs determine change. Each has an origin, or a source, that says so and
how well it is known; comments at the head of the resource file stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from distgraph.errors import ResourceError
from distgraph.plan.forecast_errors import ForecastErrors
from distgraph.resources import Cluster
from distgraph.resources.cluster import Link
from distgraph.resources.load import parse_cluster, read_document
from distgraph.resources.runtimes.load_runtime import parse_runtime, runtime_document
from distgraph.resources.units import Origin
from distgraph.runtime.profile.calibration.calibrate import Calibration
from distgraph.runtime.profile.calibration.fitted_numbers import RUNTIME, scalable
from distgraph.runtime.profile.resource_writer import (
    as_yaml,
    entry_at,
    format_bandwidth,
    format_time,
    set_origins,
)
from distgraph.serialization.atomic_files import write_atomically

_ABOUT: Final = "fitted to measured steps (distgraph calibrate)"


def runtime_path(output: str) -> str:
    """Where the runtime model is written: next to the resource file."""
    return str(Path(output).with_suffix("")) + ".runtime.yaml"


def write_calibrated(output: str, cluster: str, runtime: str, calibration: Calibration) -> tuple[str, ...]:
    """Write the resource file, and the runtime model if some of its numbers were fitted.

    Args:
        output: path of the resource file.
        cluster, runtime: names or paths of the files that the calibration started from.
        calibration: the calibration.

    Returns:
        The paths that were written.

    Raises:
        ResourceError: a file cannot be read or written.
    """
    document, head = read_document(cluster)
    _apply_cluster(document, calibration)
    text = head + as_yaml(document)
    parse_cluster(text, output)  # what cannot be loaded is not written
    if not any(name.startswith(RUNTIME) for name in calibration.fit.values):
        write_atomically(output, text, ResourceError)
        return (output,)
    runtime_file = runtime_path(output)
    model = runtime_document(runtime)
    _apply_runtime(model, calibration)
    model_text = as_yaml(model)
    parse_runtime(model_text, runtime_file)
    write_atomically(output, text, ResourceError)
    write_atomically(runtime_file, model_text, ResourceError)
    return output, runtime_file


def _apply_cluster(document: dict[str, Any], calibration: Calibration) -> None:
    values, cluster = calibration.fit.values, calibration.cluster
    if "launch" in values:
        document["launch"] = format_time(values["launch"])
        document["origin"] = str(_origin(calibration, "launch"))
    for device in {device.origin: device for device in cluster.devices}.values():
        prefix = f"devices.{device.model}."
        names = [name.removeprefix(prefix) for name in values if name.startswith(prefix)]
        if names:
            _apply_device(entry_at(document, device.origin), names, prefix, calibration)
    _apply_links(document, cluster, calibration)
    document["errors"] = _stated(calibration.errors)


def _apply_device(entry: dict[str, Any], names: list[str], prefix: str, calibration: Calibration) -> None:
    """Numbers of `compute`, such as compute.launch and compute.matmul.f16.half."""
    model = prefix.removeprefix("devices.").removesuffix(".")
    device = next(device for device in calibration.cluster.devices if device.model == model)
    compute = entry.setdefault("compute", {})
    origins: dict[str, Origin] = {}
    for name in names:
        _, group, *rest = name.split(".")
        origin = _origin(calibration, prefix + name)
        if rest:  # matmul, dtype, efficiency or half
            rate = device.compute.matmul[rest[0]]
            half = [_short(each) for each in rate.half]
            bytes_of = {"copied": rate.copied, "moved": rate.moved}
            copied = {key: format_time(number) for key, number in bytes_of.items() if number is not None}
            steepness = {} if rate.exponent == 1 else {"exponent": rate.exponent}
            numbers = {"efficiency": _short(rate.efficiency), "half": half, **steepness, **copied}
            compute.setdefault("matmul", {})[rest[0]] = numbers
            path = f"compute.matmul.{rest[0]}"
            earlier = origins.get(path)
            origins[path] = origin if earlier is None or _error(origin) < _error(earlier) else earlier
        else:
            number = getattr(device.compute, group)
            compute[group] = format_time(number) if group == "launch" else _short(number)
            origins[name] = origin
    before = entry.get("origin", {})
    table = dict(before) if isinstance(before, dict) else {"": before}
    entry["origin"] = table | {name: str(origin) for name, origin in origins.items()}


def _apply_links(document: dict[str, Any], cluster: Cluster, calibration: Calibration) -> None:
    """Bandwidth and latency of every entry of a kind change by the factor of the kind."""
    entries = {(link.kind, link.origin) for link in cluster.links if scalable(link)}
    for kind, origin in sorted(entries):
        entry = entry_at(document, origin)
        for name, write in (("bandwidth", format_bandwidth), ("latency", format_time)):
            path = f"links.{kind}.{name}"
            if path in calibration.fit.values and name in entry:
                first = next(link for link in cluster.links if link.origin == origin)
                entry[name] = write(_of_entry(first, name, entry))
                set_origins(entry, {name: _origin(calibration, path)})


def _of_entry(link: Link, name: str, entry: Mapping[str, Any]) -> float:
    """The number of an entry: that of a link without the number of its lanes."""
    lanes = 1
    if name == "bandwidth" and entry.get("links"):
        first = entry["links"][0]
        lanes = first[2] if len(first) > 2 else 1
    return float(getattr(link, name)) / lanes


def _apply_runtime(document: dict[str, Any], calibration: Calibration) -> None:
    held_out = f"groups of runs; {calibration.errors.runs} runs, mean error {calibration.held_out_error:.1%}"
    sources = document.setdefault("sources", {})
    for path, value in calibration.fit.values.items():
        if not path.startswith(RUNTIME):
            continue
        section, name = path.split(".")
        document.setdefault(section, {})[name] = _short(value) if section == "kernels" else format_time(value)
        about = f"{_ABOUT}, within {calibration.fit.errors[path]:.0%}"
        sources[path] = {"kind": "fitted", "about": about, "held_out": held_out}


def _origin(calibration: Calibration, name: str) -> Origin:
    error = min(1.0, max(0.001, round(calibration.fit.errors[name], 3)))
    return Origin("fitted", error, f"{len(calibration.runs)} measured steps under {calibration.runtime.name}")


def _error(origin: Origin) -> float:
    return origin.error or 0.0


def _stated(errors: ForecastErrors) -> Mapping[str, Any]:
    """The errors as an entry of a resource file."""
    stated = {field.name: getattr(errors, field.name) for field in fields(errors)}
    return {name: value for name, value in stated.items() if value is not None}


def _short(number: float) -> float:
    return float(f"{number:.4g}")
