"""The file in which `distgraph profile` keeps what it has measured, and how it is read.

    {"header": {"source": "", "ranks": 2, "places": "1 ranks a core", "blas": "openblas 0.3.31 SkylakeX",
                "format": 14},
     "runs": {"machines[0].devices|einsum/8x64": {"works": [...], "runs": [[1.2e-5, ...], ...],
                                                  "others": [{"host": "m0", "share": 0.02}, ...]}}}

A key is the path of the devices in the resource file and the name of what was measured. An entry holds one of
`works`, `tasks` and `message`, for each round the seconds of each work, or one number, and for each round the
host on which other programs used most of the processors, with the share; null where it could not be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from distgraph.errors import ResourceError
from distgraph.resources.cluster import MOST_DEVICES, AnyDtype
from distgraph.resources.schema import Collective
from distgraph.runtime.profile.processor_use import OtherUse
from distgraph.serialization.documents import read_json, refuse
from distgraph.serialization.models import Entry, validate

Amount = Annotated[float, Field(ge=0, le=1e24)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]
Rank = Annotated[int, Field(ge=0, lt=MOST_DEVICES)]


class Header(Entry):
    """The request that the measurements belong to; see `profiler.Store.open`."""

    source: str
    ranks: Annotated[int, Field(ge=1, le=MOST_DEVICES)]
    places: str
    blas: str
    format: int


class WorkEntry(Entry):
    """A `distgraph.runtime.forecast.op_cost.Work`."""

    kind: Literal["none", "matmul", "memory", "lookup", "launch"]
    flops: Amount
    nbytes: Amount
    dtype: AnyDtype
    dims: Annotated[list[Amount], Field(min_length=4, max_length=4)]
    op: str
    patches: Annotated[list[Amount], Field(min_length=2, max_length=2)]
    copied: Amount
    tiles: Annotated[list[Amount], Field(min_length=3, max_length=3)]


class MessageEntry(Entry):
    """A `distgraph.runtime.profile.collective_probes.Pattern`."""

    kind: Collective | Literal["attend"]
    groups: Annotated[list[Annotated[list[Rank], Field(min_length=2)]], Field(min_length=1)]
    nbytes: Annotated[int, Field(ge=0, lt=2**63)]
    work: Seconds = 0.0
    overlapped: bool = False


class OtherUseEntry(Entry):
    """A `distgraph.runtime.profile.processor_use.OtherUse`."""

    host: Annotated[str, Field(max_length=1000)]
    share: Annotated[float, Field(ge=0, le=1)] | None


class RunsEntry(Entry):
    """One measured item, and its seconds in every round."""

    works: Annotated[list[WorkEntry], Field(min_length=1)] | None = None
    tasks: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    message: MessageEntry | None = None
    runs: Annotated[list[list[Seconds]], Field(min_length=1)]
    others: list[OtherUseEntry]

    @model_validator(mode="after")
    def _one_of_three(self) -> RunsEntry:
        if (self.works is not None) + (self.tasks is not None) + (self.message is not None) != 1:
            raise ValueError("one of works, tasks and message")
        numbers = 1 if self.works is None else len(self.works)
        if any(len(seconds) != numbers for seconds in self.runs):
            raise ValueError(f"runs of {numbers} numbers each")
        if len(self.others) != len(self.runs):
            raise ValueError(f"others of {len(self.runs)} rounds")
        return self


class MeasurementsFile(Entry):
    """The whole file."""

    header: Header
    runs: dict[str, RunsEntry]


def read_measurements(path: Path, version: int) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Header and runs of a file of this version of the format, as they were written.

    Raises:
        ResourceError: it cannot be read, is of another version, or holds something else.
    """
    document = read_json(path, ResourceError)
    header = document.get("header") if isinstance(document, dict) else None
    if isinstance(header, dict) and header.get("format") != version:
        raise ResourceError(
            f"{path}: measurements of another version of distgraph, whose programs were others; use another "
            "output, or --fresh"
        )
    measurements = validate(MeasurementsFile, document, str(path), ResourceError)
    for key, entry in measurements.runs.items():
        if entry.message is not None:
            members = [rank for group in entry.message.groups for rank in group]
            if max(members) >= measurements.header.ranks or len(set(members)) < len(members):
                expected = f"disjoint groups of ranks below {measurements.header.ranks}"
                refuse(ResourceError, str(path), ["runs", key, "message", "groups"], expected)
    return document["header"], document["runs"]


def other_uses(entry: Mapping[str, Any]) -> list[OtherUse]:
    """What other programs used beside each round of an entry; nothing where the entry does not say."""
    nothing = {"host": "", "share": 0.0}
    return [OtherUse(**use) for use in entry.get("others", [nothing] * len(entry["runs"]))]


def kept_runs(entry: Mapping[str, Any]) -> list[list[float]]:
    """The rounds of an entry that count: the undisturbed ones, or the less disturbed half if all were."""
    pairs = sorted(zip(other_uses(entry), entry["runs"], strict=True), key=lambda pair: pair[0].share or 0.0)
    kept = [run for use, run in pairs if not use.disturbs]
    return kept or [run for _, run in pairs[: (len(pairs) + 1) // 2]]


def undisturbed_rounds(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Name of what was measured -> how often it was measured undisturbed, on all kinds of devices."""
    rounds: dict[str, int] = {}
    for key, entry in runs.items():
        name = key.partition("|")[2]
        count = sum(not use.disturbs for use in other_uses(entry))
        rounds[name] = min(count, rounds.get(name, count))
    return rounds
