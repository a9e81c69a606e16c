"""Write measured numbers into a resource file, with the errors of the fits.

*In:* the file that was profiled (or the shipped `local`), and the measured numbers.
*Out:* YAML that `load_cluster` reads.
*Invariant:* only numbers that were measured change; comments at the head of the file stay, others do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Final

import yaml

from distgraph.errors import ResourceError
from distgraph.resources import load_cluster
from distgraph.resources.cluster import MeasuredTable
from distgraph.resources.load import parse_cluster, read_document
from distgraph.resources.schema import DEVICE_NUMBERS, LINK_NUMBERS
from distgraph.resources.units import SIZE, Origin, format_bytes, parse
from distgraph.runtime.forecast.forecast_error_shares import ASSUMED
from distgraph.runtime.profile.cost_fitting import ComputeFit, LinkFit
from distgraph.runtime.profile.processor_use import Disturbance
from distgraph.serialization.atomic_files import write_atomically

FEWEST_ROUNDS: Final = 3
"""Rounds of which a median is safe from one bad round."""
_PROFILED: Final = Origin("measured", None, "distgraph profile")


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of a profile.

    Attributes:
        compute: by origin of the devices in the resource file.
        links: None where there was one rank.
        tables: of collectives on patterns of groups.
        disturbances: by origin of the devices, and of messages under "": where other programs disturbed the
            measurements in every round, or it is not known whether they did.
        rounds: for each measurement, the number of rounds from which its seconds follow.
    """

    compute: Mapping[str, ComputeFit]
    links: LinkFit | None
    tables: tuple[MeasuredTable, ...]
    disturbances: Mapping[str, Disturbance] = field(default_factory=dict)
    rounds: tuple[int, ...] = ()

    def warnings(self) -> list[str]:
        """Lines on what may be wrong: parts that other programs may have disturbed, and too few rounds."""
        lines = []
        for part, disturbance in self.disturbances.items():
            subject = f"profile: {part or 'links'}: {disturbance}"
            if disturbance.disturbed:
                lines.append(
                    f"{subject}, in every round; the file states larger errors for their numbers. End the "
                    "other programs and run the same command again, which repeats these measurements"
                )
            else:
                lines.append(f"{subject}; whether they were disturbed is not known")
        few = sum(rounds < FEWEST_ROUNDS for rounds in self.rounds)
        if few:
            lines.append(
                f"profile: {few} of {len(self.rounds)} measurements have fewer than {FEWEST_ROUNDS} "
                "undisturbed rounds, so one bad round can decide their numbers; run the same command again, "
                "which adds rounds"
            )
        return lines

    def origin(self, part: str, error: float | None = None) -> Origin:
        """Origin of the numbers of a part, see `disturbances`, whose fit has this error."""
        disturbance = self.disturbances.get(part)
        if disturbance is None:
            return replace(_PROFILED, error=error)
        if disturbance.disturbed:
            error = (ASSUMED["measured"] if error is None else error) + disturbance.error
        error = None if error is None else round(error, 3)
        return replace(_PROFILED, error=error, source=f"{_PROFILED.source}, {disturbance}")

    def summary(self) -> str:
        """One line on the errors of the fits."""
        parts = []
        for fitted in self.compute.values():
            rates = fitted.compute.matmul.items()
            parts += [f"matmul {dtype} within {rate.error['efficiency']:.1%}" for dtype, rate in rates]
            tables = [
                t.error for by in fitted.compute.ops.values() for t in by.values() if t.error is not None
            ]
            if tables:
                parts.append(f"{len(tables)} kinds of ops within {sum(tables) / len(tables):.1%}")
        if self.links is not None:
            parts += [f"{name} of links within {error:.1%}" for name, error in self.links.error.items()]
        return "mean errors of the fits: " + ", ".join(parts)


class _Writer(yaml.SafeDumper):
    """Lists of numbers on one line, everything else on lines of its own."""

    def represent_sequence(
        self, tag: str, sequence: Any, flow_style: bool | None = None
    ) -> yaml.SequenceNode:
        plain = all(not isinstance(item, (dict, list)) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=plain)


def write_measured(output: str, source: str, ranks: int, measured: Measured) -> None:
    """Write the resource file.

    Args:
        output: its path.
        source: the file or shipped name that was profiled; "" for this machine.
        ranks: devices of this machine, where that is what was profiled.
        measured: the new numbers.

    Raises:
        ResourceError: the source cannot be read, or the output not be written.
    """
    document, head = read_document(source or "local")
    if not source:
        _resize(document, ranks)
        head = "# This machine, measured by distgraph profile.\n"
    _apply(document, measured)
    text = head + as_yaml(document)
    parse_cluster(text, output)  # what cannot be loaded is not written
    write_atomically(output, text, ResourceError)


def as_yaml(document: Mapping[str, Any]) -> str:
    """A document as YAML, in the order of its entries."""
    return yaml.dump(document, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=110)


def _resize(document: dict[str, Any], ranks: int) -> None:
    """The shipped local machine with another number of devices."""
    document["about"] = "this machine, one device per core, measured by distgraph profile"
    device = document["machines"][0]["devices"]
    total = load_cluster("local").devices[0].memory * device["count"]
    device["count"], device["memory"] = ranks, f"{total / ranks / 2**20:.6g} MiB"
    for name in ("measured", "memory_bandwidth", "compute"):
        device.pop(name, None)
        device["origin"].pop(name, None)


def _apply(document: dict[str, Any], measured: Measured) -> None:
    for origin, fitted in measured.compute.items():
        entry = entry_at(document, origin)
        if fitted.memory_bandwidth:
            entry["memory_bandwidth"] = format_bandwidth(fitted.memory_bandwidth)
        if fitted.measured:
            rates = entry.setdefault("measured", {})
            rates.update({dtype: f"{rate / 1e9:.5g} GFLOP/s" for dtype, rate in fitted.measured.items()})
        entry["compute"] = _entry(fitted.compute)
        stated = {"compute": True, "memory_bandwidth": fitted.memory_bandwidth, "measured": fitted.measured}
        set_origins(entry, {name: measured.origin(origin) for name, given in stated.items() if given})
    if measured.links is not None:
        origins = {name: measured.origin("", round(error, 3)) for name, error in measured.links.error.items()}
        _apply_links(document, measured.links, origins)
    if measured.tables:
        new = [{**_entry(table), "origin": str(measured.origin(""))} for table in measured.tables]
        document["measured"] = [
            entry
            for entry in document.get("measured", [])
            if not any(_replaces(other, entry) for other in new)
        ] + new


def _apply_links(document: dict[str, Any], links: LinkFit, origins: Mapping[str, Origin]) -> None:
    document["launch"], document["origin"] = format_time(links.launch), str(origins["latency"])
    formats = {"latency": (links.latency, format_time), "bandwidth": (links.bandwidth, format_bandwidth)}
    for name, (fitted, write) in formats.items():
        for origin, number in fitted.items():
            if "[]" not in origin:
                entry = entry_at(document, origin)
                entry[name] = write(number)
                set_origins(entry, {name: origins[name]})


def set_origins(entry: dict[str, Any], origins: Mapping[str, Origin]) -> None:
    """State where new numbers of an entry come from; the origins of its other numbers stay."""
    before = entry.get("origin", {})
    if isinstance(before, str):  # of all numbers of the entry
        before = {name: before for name in (*DEVICE_NUMBERS, *LINK_NUMBERS) if name in entry}
    unchanged = {name: origin for name, origin in before.items() if name.partition(".")[0] not in origins}
    entry["origin"] = unchanged | {name: str(origin) for name, origin in origins.items()}


def entry_at(document: Any, origin: str) -> Any:
    """The mapping at a path such as machines[0].devices[1] or machines[0].nics.attach."""
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", origin):
        document = document[name] if name else document[int(index)]
    return document[0] if isinstance(document, list) else document


def _entry(value: Any, name: str = "") -> Any:
    """A record of measurements as an entry of a resource file, without what is None or empty."""
    if is_dataclass(value):
        stated = {field.name: getattr(value, field.name) for field in fields(value)}
        return {key: _entry(each, key) for key, each in stated.items() if each not in (None, (), {})}
    if isinstance(value, Mapping):
        return {key: _entry(each, name) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_entry(each, name) for each in value]
    if isinstance(value, str) or (isinstance(value, int) and name not in _FORMATS):
        return value
    return _FORMATS.get(name, _round)(value)


def _replaces(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Whether a new measured table applies to all that an old one applies to, and replaces it."""
    names = ("collective", "machines", "devices_per_machine", "model")
    if any(new.get(name) != old.get(name) for name in names):
        return False
    first, second = (
        None if entry.get("groups") is None else {frozenset(group) for group in entry["groups"]}
        for entry in (new, old)
    )
    return second is None or first == second


def format_time(seconds: float) -> str:
    """Seconds as a time of a resource file."""
    return f"{seconds * 1e6:.5g} us"


def _format_size(nbytes: float) -> str:
    text = format_bytes(nbytes)
    return text if parse(text, SIZE) == nbytes else f"{nbytes:.12g} B"


def format_bandwidth(bandwidth: float) -> str:
    """Bytes per second as a bandwidth of a resource file."""
    return f"{bandwidth / 1e9:.5g} GB/s"


def _round(number: float) -> float:
    return float(f"{number:.4g}")


_FORMATS: Final[Mapping[str, Callable[[float], Any]]] = {
    **dict.fromkeys(("launch", "op", "task", "step", "message", "times", "busy"), format_time),
    **dict.fromkeys(("copied", "moved", "rates", "tile_rates"), lambda seconds: f"{seconds * 1e9:.5g} ns"),
    **dict.fromkeys(("bytes", "sizes"), _format_size),
    "flops": lambda work: f"{work:.12g} FLOP",
}
"""Field -> how its numbers are written; others as rounded numbers."""
