"""The file in which `distgraph profile` keeps what it has measured, and how it is read.

    {"header": {"source": "", "ranks": 2, "places": "1 ranks a core", "format": 5},
     "runs": {"machines[0].devices|einsum/8x64": {"works": [...], "runs": [[1.2e-5, ...], ...]}}}

A key is the path of the devices in the resource file and the name of what was measured. An entry holds one of
`works`, `tasks` and `message`, and for each round the seconds of each work, or one number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from distgraph.errors import ResourceError
from distgraph.resources.cluster import MOST_DEVICES, AnyDtype
from distgraph.resources.schema import Collective
from distgraph.serialization.documents import Entry, read_json, refuse, validate

Amount = Annotated[float, Field(ge=0, le=1e24)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]
Rank = Annotated[int, Field(ge=0, lt=MOST_DEVICES)]


class Header(Entry):
    """The request that the measurements belong to; see `profiler.Store.open`."""

    source: str
    ranks: Annotated[int, Field(ge=1, le=MOST_DEVICES)]
    places: str
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


class MessageEntry(Entry):
    """A `distgraph.runtime.profile.collective_probes.Pattern`."""

    kind: Collective | Literal["attend"]
    groups: Annotated[list[Annotated[list[Rank], Field(min_length=2)]], Field(min_length=1)]
    nbytes: Annotated[int, Field(ge=0, lt=2**63)]
    work: Seconds = 0.0
    overlapped: bool = False


class RunsEntry(Entry):
    """One measured item, and its seconds in every round."""

    works: Annotated[list[WorkEntry], Field(min_length=1)] | None = None
    tasks: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    message: MessageEntry | None = None
    runs: Annotated[list[list[Seconds]], Field(min_length=1)]

    @model_validator(mode="after")
    def _one_of_three(self) -> RunsEntry:
        if (self.works is not None) + (self.tasks is not None) + (self.message is not None) != 1:
            raise ValueError("one of works, tasks and message")
        numbers = 1 if self.works is None else len(self.works)
        if any(len(seconds) != numbers for seconds in self.runs):
            raise ValueError(f"runs of {numbers} numbers each")
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
