"""The file of a plan (docs/planning/plan.md) as pydantic models, and the parts of a plan from them.

*In:* the plain data of a JSON document. *Out:* the fields of a `distgraph.plan.plan.Plan`. *Invariant:* every
text with a form of its own is parsed, every number of a stage or layer is one that there is, nothing is given
twice, and what short texts such as `0-999999999` stand for is bounded before it is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn

import numpy as np
from pydantic import BeforeValidator, Field, PlainValidator

from distgraph.errors import GraphError, ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.range_notation import MOST_NAMES, parse_spans, spans, unfold
from distgraph.plan.export.module_interface import Part, Read, Surface, in_order
from distgraph.plan.pipeline_schedules import schedule_names
from distgraph.plan.placement import PlacedRanks
from distgraph.plan.plan_components import (
    FORMAT,
    KINDS,
    VERSION,
    Computed,
    Decision,
    Estimate,
    Layer,
    LayerOps,
    Program,
    Rest,
    SearchRecord,
    Stage,
    Stored,
    parse_axes,
    parse_placed,
    placed_text,
    split_names,
)
from distgraph.serialization.documents import Step, refuse, shown
from distgraph.serialization.fields import Some, parsed
from distgraph.serialization.models import Entry, validate

if TYPE_CHECKING:
    pass

MOST_RANKS: Final = 1 << 20
"""Of all stages together: a cluster has at most 65,536 devices, and a rank may be in several stages."""
_SEE: Final = "docs/planning/plan.md"

Placed = tuple[tuple[str, int], ...]


def _seconds_or_reason(value: object) -> float | str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1e18:
        raise ValueError("a number greater than 0, or a text")
    return float(value)


def _schedule(text: object) -> str:
    if not isinstance(text, str) or text not in schedule_names():
        raise ValueError(f"one of {', '.join(schedule_names())}")
    return text


_NAMES: Final = 'names of ops such as "12, 12.3"'
_PLACED: Final = 'ops and stages such as "57@1, 60@1"'
_MESH: Final = 'a mesh such as "dp=2, tp=4" or "dp=3:1"'
_LAYOUT: Final = 'a layout such as "[_, tp] @0"'

PlacedText = Annotated[Placed, PlainValidator(parsed(parse_placed, _PLACED))]
NamesText = Annotated[tuple[str, ...], PlainValidator(parsed(split_names, _NAMES))]
MeshText = Annotated[
    tuple[dict[str, int], dict[str, tuple[int, ...]]], PlainValidator(parsed(parse_axes, _MESH))
]
ScheduleText = Annotated[str, BeforeValidator(_schedule)]


class StageEntry(Entry):
    """One of `stages`."""

    layers: str
    mesh: MeshText
    ranks: str
    devices: str


class PlacedEntry(Entry):
    """One of `placement`."""

    machine: str
    type: str
    model: str
    memory: Some
    count: Some
    ranks: str
    devices: str


class OpsEntry(Entry):
    """One of `ops`: the ops of all layers that have the same."""

    layers: str
    decomposed: NamesText
    placed: PlacedText
    ops: list[Computed]


class RestEntry(Entry):
    """`rest`."""

    decomposed: NamesText
    placed: PlacedText
    ops: dict[str, Computed]


class TensorsEntry(Entry):
    """`tensors`."""

    input: dict[str, Annotated[Stored, PlainValidator(parsed(partial(Stored.parse, "input"), _LAYOUT))]]
    param: dict[str, Annotated[Stored, PlainValidator(parsed(partial(Stored.parse, "param"), _LAYOUT))]]
    state: dict[str, Annotated[Stored, PlainValidator(parsed(partial(Stored.parse, "state"), _LAYOUT))]]


class PlanFile(Entry):
    """The whole file; fields that `Plan` has too are the same there, unless `_Reader` and `document` say."""

    format: Literal["distgraph plan"]
    version: int
    program: Program
    cluster: str
    batch: Some
    micro_batches: Some
    schedule: ScheduleText
    stages: list[StageEntry]
    placement: list[PlacedEntry] = Field(default_factory=list)
    recompute: str
    zero: Literal[0, 1, 2, 3] = 0
    forecast: Estimate | None
    baselines: dict[str, Annotated[float | str, PlainValidator(_seconds_or_reason)]]
    search: SearchRecord
    decisions: dict[str, Decision]
    layers: list[Layer]
    tensors: TensorsEntry
    ops: list[OpsEntry]
    rest: RestEntry
    surface: Surface | None


def read_fields(document: object, file: str) -> dict[str, Any]:
    """The fields of a plan.

    Raises:
        GraphError: it is no plan, of another version, or malformed; names file and path.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise GraphError(
            f"{file}: expected a plan, {{'format': {FORMAT!r}, ...}}, found something else; write one with "
            "distgraph plan"
        )
    version = document.get("version", 0)
    if isinstance(version, int) and not isinstance(version, bool) and version != VERSION:
        raise GraphError(
            f"{file}: plan has version {shown(version)} but this distgraph reads version {VERSION}; search "
            "again, or use the distgraph that wrote it"
        )
    return _Reader(validate(PlanFile, document, file, GraphError, _SEE), file).fields()


class _Reader:
    """What a single entry does not say: numbers of stages and layers, names that stand for several."""

    def __init__(self, plan_file: PlanFile, file: str) -> None:
        self.plan_file, self.file = plan_file, file
        self.layers = len(plan_file.layers)
        self.stages = self._stages()
        self.tensors = self._tensors()

    def fields(self) -> dict[str, Any]:
        forecast = self.plan_file.forecast
        if forecast is not None and len(forecast.memory) not in (0, len(self.stages)):
            expected = f"{len(self.stages)} numbers, one a stage, or none"
            self._refuse(["forecast", "memory"], expected, forecast.memory)
        fields = {name: value for name, value in self.plan_file if name not in ("format", "version")}
        return fields | {
            "layers": tuple(self.plan_file.layers),
            "stages": self.stages,
            "placement": self._placement(),
            "recompute": self._recompute(),
            "tensors": self.tensors,
            "ops": self._ops(),
            "rest": self._rest(),
            "surface": self._surface(),
        }

    def _refuse(self, path: Sequence[Step], expected: str, got: object) -> NoReturn:
        refuse(GraphError, self.file, path, expected, got)

    def _spans(self, path: Sequence[Step], text: str, most: int, what: str) -> tuple[int, ...]:
        try:
            return parse_spans(text, most)
        except ValueError:
            self._refuse(path, f'numbers such as "0-7", at most {most} {what}', text)

    def _stages(self) -> tuple[Stage, ...]:
        stages: list[Stage] = []
        done, ranks = 0, 0
        for number, entry in enumerate(self.plan_file.stages):
            stages.append(self._stage(entry, ["stages", number], done, MOST_RANKS - ranks))
            done, ranks = stages[-1].last, ranks + len(stages[-1].mesh.members)
        if done != self.layers or not stages:
            expected = f"stages that compute all {self.layers} layers"
            self._refuse(["stages"], expected, [stage.layers for stage in self.plan_file.stages])
        return tuple(stages)

    def _stage(self, entry: StageEntry, path: list[Step], after: int, most: int) -> Stage:
        layers = self._spans([*path, "layers"], entry.layers, self.layers, "layers")
        if layers != tuple(range(after, after + len(layers))):
            self._refuse([*path, "layers"], f"consecutive layers from {after} on", entry.layers)
        sizes, weights = entry.mesh
        size = math.prod(sizes.values())
        ranks = self._spans([*path, "ranks"], entry.ranks, most, "ranks in all stages together")
        if len(ranks) != size:
            self._refuse([*path, "ranks"], f"{size} ranks, as many as the mesh has", entry.ranks)
        if max(ranks) >= MOST_RANKS:
            self._refuse([*path, "ranks"], f"ranks below {MOST_RANKS}", entry.ranks)
        try:
            mesh = ProcessMesh(np.array(ranks).reshape(tuple(sizes.values())), tuple(sizes), weights)
        except ShardingError:
            self._refuse([*path, "ranks"], "distinct ranks", entry.ranks)
        devices = self._spans([*path, "devices"], entry.devices, len(ranks), "devices, as many as ranks")
        if devices and (len({*devices}) != len(ranks) or max(devices) >= MOST_RANKS):
            self._refuse(
                [*path, "devices"], f"{len(ranks)} devices, as many as ranks, or none", entry.devices
            )
        return Stage(mesh=mesh, first=after, last=after + len(layers), devices=devices)

    def _placement(self) -> tuple[PlacedRanks, ...]:
        stage_ranks = {rank for stage in self.stages for rank in stage.mesh.members}
        most = max(stage_ranks) + 1
        parts: list[PlacedRanks] = []
        for number, entry in enumerate(self.plan_file.placement):
            path: list[Step] = ["placement", number]
            ranks = self._spans([*path, "ranks"], entry.ranks, most, "ranks")
            devices = self._spans([*path, "devices"], entry.devices, len(ranks), "devices, as many as ranks")
            if not ranks or list(ranks) != sorted({*ranks}) or ranks[-1] >= most:
                self._refuse([*path, "ranks"], f"ascending ranks below {most}", entry.ranks)
            if len({*devices}) != len(ranks) or max(devices) >= entry.count:
                expected = f"{len(ranks)} devices below {entry.count}, as many as ranks"
                self._refuse([*path, "devices"], expected, entry.devices)
            parts.append(PlacedRanks(**dict(entry) | {"ranks": ranks, "devices": devices}))
        placed = sorted(rank for part in parts for rank in part.ranks)
        if parts and (len({*placed}) != len(placed) or not stage_ranks <= {*placed}):
            self._refuse(["placement"], f"ranks {spans(sorted(stage_ranks))}, each once", spans(placed))
        return tuple(parts)

    def _recompute(self) -> tuple[int, ...]:
        numbers = self._spans(["recompute"], self.plan_file.recompute, self.layers, "layers")
        if list(numbers) != sorted({*numbers}) or any(layer >= self.layers for layer in numbers):
            expected = f"ascending numbers below {self.layers}, of layers"
            self._refuse(["recompute"], expected, self.plan_file.recompute)
        return numbers

    def _names(self, path: Sequence[Step], pattern: str, taken: Mapping[str, object]) -> tuple[str, ...]:
        """Every name that a pattern stands for, none of which is known."""
        try:
            names = unfold(pattern, MOST_NAMES - len(taken))
        except GraphError:
            self._refuse(path, f"at most {MOST_NAMES} names in all", pattern)
        doubled = next((name for name in names if name in taken), None)
        if doubled is not None:
            self._refuse(path, "names that are given once", doubled)
        return names

    def _tensors(self) -> dict[str, Stored]:
        tensors: dict[str, Stored] = {}
        for kind in KINDS:
            entries: dict[str, Stored] = getattr(self.plan_file.tensors, kind)
            for pattern, stored in entries.items():
                path: list[Step] = ["tensors", kind, pattern]
                if stored.stage >= len(self.stages):
                    self._refuse(path, f"a stage below {len(self.stages)}", str(stored))
                axes = self.stages[stored.stage].mesh.axes
                if any(axis not in axes for axis in stored.spec.axes):
                    self._refuse(path, f"axes of stage {stored.stage}, {', '.join(axes)}", str(stored))
                tensors |= dict.fromkeys(self._names(path, pattern, tensors), stored)
        return tensors

    def _ops(self) -> tuple[LayerOps, ...]:
        ops_of: dict[int, LayerOps] = {}
        for number, entry in enumerate(self.plan_file.ops):
            path: list[Step] = ["ops", number]
            self._check_placed([*path, "placed"], entry.placed)
            for position, line in enumerate(entry.ops):
                self._check_stages([*path, "ops", position], line)
            left = self.layers - len(ops_of)
            layers = self._spans([*path, "layers"], entry.layers, left, "layers that no entry before has")
            ops = LayerOps(entry.decomposed, entry.placed, tuple(entry.ops))
            if any(layer in ops_of for layer in layers) or len({*layers}) != len(layers):
                self._refuse([*path, "layers"], "layers that are given once", entry.layers)
            ops_of |= dict.fromkeys(layers, ops)
        if sorted(ops_of) != list(range(self.layers)):
            self._refuse(["ops"], f"the ops of all {self.layers} layers", spans(sorted(ops_of)))
        return tuple(ops_of[number] for number in range(self.layers))

    def _rest(self) -> Rest:
        entry = self.plan_file.rest
        self._check_placed(["rest", "placed"], entry.placed)
        for name, line in entry.ops.items():
            self._check_stages(["rest", "ops", name], line)
        return Rest(entry.decomposed, entry.placed, tuple(entry.ops.items()))

    def _check_placed(self, path: Sequence[Step], placed: Placed) -> None:
        stages = len(self.stages)
        if any(stage >= stages for _, stage in placed):
            self._refuse(path, f"stages below {stages}", placed_text(placed))
        if len(dict(placed)) != len(placed):
            self._refuse(path, "ops that are given once", placed_text(placed))

    def _check_stages(self, path: Sequence[Step], line: Computed) -> None:
        stages = len(self.stages)
        if any(stage is not None and stage >= stages for stage in (line.stage, *line.stored)):
            self._refuse(path, f"stages below {stages}", str(line))

    def _surface(self) -> Surface | None:
        entry = self.plan_file.surface
        if entry is None:
            return None
        tensors: dict[str, Read] = {}
        model_tensors = {name for name, stored in self.tensors.items() if stored.kind != "state"}
        for pattern, read in entry.tensors.items():
            way: list[Step] = ["surface", "tensors", pattern]
            names = self._names(way, pattern, tensors)
            unknown = next((name for name in names if name not in model_tensors), None)
            if unknown is not None:
                self._refuse(way, "names of inputs and parameters among tensors", unknown)
            tensors |= dict.fromkeys(names, read)
        modules: dict[str, Part] = {}
        for pattern, part in entry.modules.items():
            path = ["surface", "modules", pattern]
            if not pattern:
                self._refuse(path, "a path that is not empty", pattern)
            if part.stage >= len(self.stages):
                self._refuse(path, f"a stage below {len(self.stages)}", str(part))
            modules |= dict.fromkeys(self._names(path, pattern, modules), part)
        return Surface(tensors, {path: modules[path] for path in in_order(modules)})
