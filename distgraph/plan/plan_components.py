"""The components of a plan: program, stages, layers, stored tensors, computed ops, decisions, the search.

Each component knows its form in a plan file (docs/planning/plan.md); `document` is the whole of the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

from distgraph.ir.index_rule import OpLayout
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.mesh import ProcessMesh, is_axis_name
from distgraph.ir.range_notation import fold, spans
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.plan.decisions import Decisions
from distgraph.plan.forecast_errors import ForecastErrors, Uncertain
from distgraph.serialization.documents import Record, plain
from distgraph.serialization.fields import (
    Count,
    Limits,
    Number,
    PlainValidator,
    Seconds,
    documented,
    documented_as_text,
)

if TYPE_CHECKING:
    from distgraph.plan.plan import Plan

KINDS = ("input", "param", "state")
_STAGE = re.compile(r"(?P<spec>\[[^@]*) @(?P<stage>[0-9]{1,9})")
_COMPUTED = re.compile(
    r"(?P<kind>[\w.]+)(?: by (?P<algorithm>\w+(?:\([^)]*\))?))?(?: @(?P<stage>[0-9]{1,9}))? "
    r"\{(?P<axes>[^}]*)\} -> (?P<results>.*)"
)
_DIGITS = re.compile(r"0|[1-9][0-9]{0,8}")
_MOST_AXES = 32  # of a mesh: NumPy's arrays have 64 dims at most


def _scalar(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError("a text, a number, true, false or null")


Scalar = Annotated[str | int | float | bool | None, PlainValidator(_scalar)]


@documented()
@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a plan is for.

    Attributes:
        name: of the model.
        fingerprint: hash of the serial training graph of one micro-batch; layouts are no part of it.
        parameters: how many numbers the model holds.
        inputs: name -> type of one micro-batch, such as "f32[8, 16]".
    """

    name: str
    fingerprint: str
    parameters: Count
    inputs: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive layers on one mesh.

    Attributes:
        mesh: the ranks.
        first: number of the first layer.
        last: number of the first layer that is no longer part of it; equal to `first` where the mesh computes
            no whole layer.
        devices: of the cluster, one a rank of `mesh.members`; empty where there is no cluster.
    """

    mesh: ProcessMesh
    first: int
    last: int
    devices: tuple[int, ...] = ()


@documented_as_text("a text")
@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A run of forward ops: the name of the first, and its module path for people."""

    first: str
    scope: str = ""

    def __str__(self) -> str:
        return f"{self.first} in {self.scope}" if self.scope else self.first

    @classmethod
    def parse(cls, text: str) -> Layer:
        """Inverse of `str`."""
        first, _, scope = text.partition(" in ")
        return cls(first=first, scope=scope)


@dataclass(frozen=True, slots=True)
class Stored:
    """Stage and layout of a tensor with a name: `kind` is input, param or state."""

    kind: str
    stage: int
    spec: ShardSpec

    def __str__(self) -> str:
        return f"{self.spec} @{self.stage}"

    @classmethod
    def parse(cls, kind: str, text: str) -> Stored:
        """Inverse of `str`. Raises ValueError or ShardingError."""
        match = _STAGE.fullmatch(text)
        if match is None:
            raise ValueError(text)
        return cls(kind, int(match["stage"]), ShardSpec.parse(match["spec"]))


@documented_as_text('an op such as "matmul {m:dp, n:tp} -> [dp, tp]"')
@dataclass(frozen=True, slots=True)
class Computed:
    """How an op is computed and how its results are stored; prints as `matmul {m:dp, n:tp} -> [dp, tp]`.

    Attributes:
        kind: of the op.
        axes: index of the op's rule -> axes that split it.
        partial: axis -> linear group whose operands are partial over it.
        results: a layout each.
        stage: whose mesh computes it; None, in a layer, for that where it is placed (see `LayerOps`).
        stored: per result the stage on whose mesh it is stored, None for that which computes it; empty where
            all are None.
        algorithm: the distributed algorithm of a matrix product; None where none is chosen.
    """

    kind: str
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    partial: tuple[tuple[str, int], ...] = ()
    results: tuple[ShardSpec, ...] = ()
    stage: int | None = None
    stored: tuple[int | None, ...] = ()
    algorithm: MatmulAlgorithm | None = None

    def __str__(self) -> str:
        parts = [f"{index}:{'*'.join(axes)}" for index, axes in self.axes]
        parts += [f"partial {axis}:{group}" for axis, group in self.partial]
        stage = "" if self.stage is None else f" @{self.stage}"
        stored = self.stored or (None,) * len(self.results)
        results = (
            f"{spec}" if layout is None else f"{spec} @{layout}"
            for spec, layout in zip(self.results, stored, strict=True)
        )
        by = "" if self.algorithm is None else f" by {self.algorithm}"
        return f"{self.kind}{by}{stage} {{{', '.join(parts)}}} -> {'; '.join(results)}"

    @classmethod
    def parse(cls, text: str) -> Computed:
        """Inverse of `str`. Raises ValueError or ShardingError."""
        match = _COMPUTED.fullmatch(text)
        if match is None:
            raise ValueError(text)
        axes, partial = [], []
        for part in split_names(match["axes"]):
            name, _, value = part.removeprefix("partial ").partition(":")
            if part.startswith("partial "):
                partial.append((name, parse_number(value)))
            else:
                axes.append((name, tuple(value.split("*"))))
        results = [result.partition(" @") for result in match["results"].split("; ")]
        specs = tuple(ShardSpec.parse(spec) for spec, _, _ in results)
        stored = tuple(parse_number(number) if separator else None for _, separator, number in results)
        stage = None if match["stage"] is None else int(match["stage"])
        none = all(number is None for number in stored)
        algorithm = None if match["algorithm"] is None else MatmulAlgorithm.parse(match["algorithm"])
        return cls(
            match["kind"], tuple(axes), tuple(partial), specs, stage, () if none else stored, algorithm
        )

    def layout(self, mesh: ProcessMesh) -> OpLayout:
        """The layout on a mesh."""
        return OpLayout(mesh, self.axes, self.partial)


@dataclass(frozen=True, slots=True)
class LayerOps:
    """The ops of a layer, forward, backward and optimiser, in program order.

    Attributes:
        decomposed: fused ops that are replaced by simpler ones, by position in the serial layer; "12.3" is
            part 3 of what op 12 is replaced by.
        placed: position in the serial layer -> stage, of ops whose stage is not that of the layer.
        ops: after that, without inputs, parameters and states.
    """

    decomposed: tuple[str, ...] = ()
    placed: tuple[tuple[str, int], ...] = ()
    ops: tuple[Computed, ...] = ()

    def __str__(self) -> str:
        return " | ".join([", ".join(self.decomposed), placed_text(self.placed), *map(str, self.ops)])

    @classmethod
    def parse(cls, text: str) -> LayerOps:
        """Inverse of `str`. Raises ValueError or ShardingError."""
        decomposed, placed, *ops = text.split(" | ")
        return cls(split_names(decomposed), parse_placed(placed), tuple(map(Computed.parse, ops)))


@dataclass(frozen=True, slots=True)
class Rest:
    """The ops that belong to no layer, by name.

    Attributes:
        decomposed: fused ops that are replaced by simpler ones.
        placed: op -> stage, of ops that are not placed where `ops` says that they are computed, or not among
            `ops` since completion replaced them.
        ops: after that, without inputs, parameters and states; each says its stage.
    """

    decomposed: tuple[str, ...] = ()
    placed: tuple[tuple[str, int], ...] = ()
    ops: tuple[tuple[str, Computed], ...] = ()

    def __str__(self) -> str:
        ops = (f"{name} {op}" for name, op in self.ops)
        return " | ".join([", ".join(self.decomposed), placed_text(self.placed), *ops])

    @classmethod
    def parse(cls, text: str) -> Rest:
        """Inverse of `str`. Raises ValueError or ShardingError."""
        decomposed, placed, *lines = text.split(" | ")
        ops = (line.partition(" ") for line in lines)
        computed = tuple((name, Computed.parse(op)) for name, _, op in ops)
        return cls(split_names(decomposed), parse_placed(placed), computed)


Shares = Mapping[str, Annotated[float, Limits(ge=0, le=1)]]
"""Kind of error -> part of a step, see `forecast_errors`."""


@documented("plan", "shares", "errors", "beside")
@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A forecast in short.

    Attributes:
        seconds: of a step.
        memory: of every stage the peak bytes of its fullest device.
        plan: `Plan.digest` of the plan that was forecast; empty where nobody noted it.
        shares: what the step goes to.
        errors: of forecasts on the cluster under the runtime; None where they are not known.
        beside: name of a baseline -> what its step goes to.
    """

    seconds: Seconds
    memory: tuple[Count, ...] = ()
    plan: str = ""
    shares: Shares = field(default_factory=dict)
    errors: ForecastErrors | None = None
    beside: Mapping[str, Shares] = field(default_factory=dict)

    @property
    def uncertain(self) -> Uncertain | None:
        """The seconds with their interval; None without errors."""
        return None if self.errors is None else Uncertain(self.seconds, self.shares, self.errors)

    def baseline(self, name: str, seconds: float) -> Uncertain | None:
        """The seconds of a baseline with their interval; None where its shares are not known."""
        if self.errors is None or name not in self.beside:
            return None
        return Uncertain(seconds, self.beside[name], self.errors)


@documented("instead")
@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One choice of a search and the best that was not taken.

    Attributes:
        chosen: in words, such as a layout or a number.
        terms: name -> seconds of a step that the choice costs.
        runner_up: the best other choice; empty where there is none.
        runner_up_seconds: forecast of a step with it in place of the choice, everything else as planned; None
            where that has no forecast, `note` says why.
        note: anything else.
        instead: line of the plan -> what it is with the runner-up; see `Plan.instead`. Empty where the
            runner-up is another program altogether.
    """

    chosen: str
    terms: Mapping[str, Number] = field(default_factory=dict)
    runner_up: str = ""
    runner_up_seconds: Seconds | None = None
    note: str = ""
    instead: Mapping[str, str] = field(default_factory=dict)


@documented()
@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPlan:
    """A plan of a search that no other plan beats in seconds, memory and devices together.

    Attributes:
        plan: what it decides, in words.
        seconds: of a step, by forecast.
        memory: peak bytes of its fullest device.
        devices: that it uses.
    """

    plan: str
    seconds: Seconds
    memory: Count
    devices: Count


@documented()
@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """A plan of a search whose steps were measured.

    Attributes:
        plan: what it decides, in words.
        forecast: seconds of a step, by forecast.
        seconds: of a step of the slowest rank, median of the measured steps; None where the plan did not run.
    """

    plan: str
    forecast: Seconds
    seconds: Number | None


@documented("front", "measured")
@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """How a plan was found.

    Attributes:
        mode: of the search; "annotations" for the plan of a program as it was compiled.
        status: "optimal", "feasible", "interrupted", ... as the search says.
        bound: no plan takes fewer seconds a step by its forecast (docs/planning/plan.md); None where
            nothing is known.
        gap: (forecast - bound) / bound.
        seconds: that the search took.
        settings: what it was asked for.
        front: plans that were forecast and fit, the fastest first; of any two neither has less seconds, less
            memory and fewer devices.
        measured: the plans that were run for some steps, the fastest first: this plan, then the others.
    """

    mode: str = "annotations"
    status: str = ""
    bound: Number | None = None
    gap: Number | None = None
    seconds: Number | None = None
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    front: tuple[FrontPlan, ...] = ()
    measured: tuple[MeasuredPlan, ...] = ()


def split_names(text: str) -> tuple[str, ...]:
    """Names between commas; none of an empty text. Raises ValueError: one of several is empty."""
    names = tuple(map(str.strip, text.split(","))) if text.strip() else ()
    if not all(names):
        raise ValueError(text)
    return names


def placed_text(placed: tuple[tuple[str, int], ...]) -> str:
    """Ops and their stages, such as "57@1, 60@1"."""
    return ", ".join(f"{op}@{stage}" for op, stage in placed)


def parse_placed(text: str) -> tuple[tuple[str, int], ...]:
    """Inverse of `placed_text`. Raises ValueError."""
    pairs = (part.rpartition("@") for part in split_names(text))
    return tuple((op, parse_number(stage)) for op, _, stage in pairs)


def parse_number(text: str) -> int:
    """A whole number from 0 up, of at most 9 digits, none of them a leading zero. Raises ValueError."""
    if not _DIGITS.fullmatch(text):
        raise ValueError(text)
    return int(text)


def parse_axes(text: str) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Sizes of axes, and weights of those that have some; inverse of `ProcessMesh.described`.

    Raises:
        ValueError: another form, an axis given twice, or more axes than arrays have.
    """
    sizes: dict[str, int] = {}
    weights: dict[str, tuple[int, ...]] = {}
    for part in text.split(","):
        name, _, numbers = part.partition("=")
        axis, given = name.strip(), tuple(parse_number(number.strip()) for number in numbers.split(":"))
        if min(given) < 1 or not is_axis_name(axis) or axis in sizes or len(sizes) == _MOST_AXES:
            raise ValueError(text)
        sizes[axis] = given[0] if len(given) == 1 else len(given)
        if len(given) > 1:
            weights[axis] = given
    return sizes, weights


FORMAT: Final = "distgraph plan"
VERSION: Final = 1
FIELDS: Final = (
    "format", "version", "program", "cluster", "batch", "micro_batches", "schedule", "stages", "placement",
    "recompute", "zero", "forecast", "baselines", "search", "decisions", "layers", "tensors", "ops", "rest",
    "surface",
)  # fmt: skip
"""The fields of a file, in order."""
DECIDED: Final = frozenset({"batch", "stages", "layers", "tensors", "ops", "rest", *Decisions().decided()})
"""The fields of a file that make the program."""


def document(plan: Plan) -> dict[str, Any]:
    """The file of a plan as plain data, in the order of `FIELDS`; inverse of `schema.read_fields`."""
    groups: dict[LayerOps, list[int]] = {}
    for number, ops in enumerate(plan.ops):
        groups.setdefault(ops, []).append(number)
    forecast, surface = plain(plan.forecast), plan.surface
    if forecast is not None:
        for name in ("plan", "shares", "errors", "beside"):
            if not forecast[name]:
                del forecast[name]
            elif name != "plan":
                forecast[name] = Record(forecast[name])
    search = plain(plan.search)
    for name in ("front", "measured"):
        if not search[name]:
            del search[name]
    written = {
        "format": FORMAT,
        "version": VERSION,
        "stages": [
            Record(
                layers=spans(range(stage.first, stage.last)),
                mesh=stage.mesh.described,
                ranks=spans(stage.mesh.members),
                devices=spans(stage.devices),
            )
            for stage in plan.stages
        ],
        "placement": [
            Record(plain(part) | {"ranks": spans(part.ranks), "devices": spans(part.devices)})
            for part in plan.placement
        ],
        "recompute": spans(plan.recompute),
        "forecast": forecast,
        "search": search,
        "decisions": {
            name: plain(each) | {"terms": Record(each.terms)} for name, each in plan.decisions.items()
        },
        "tensors": {
            kind: fold({name: str(stored) for name, stored in plan.tensors.items() if stored.kind == kind})
            for kind in KINDS
        },
        "ops": [{"layers": spans(numbers), **_moved(ops), "ops": ops.ops} for ops, numbers in groups.items()],
        "rest": {**_moved(plan.rest), "ops": dict(plan.rest.ops)},
        "surface": surface and {"tensors": fold(surface.tensors), "modules": fold(surface.modules)},
    }
    absent = {name for name in ("placement", "zero") if not getattr(plan, name)}
    names = [name for name in FIELDS if name not in absent]
    return {name: plain(written.get(name, getattr(plan, name, None))) for name in names}


def _moved(ops: LayerOps | Rest) -> dict[str, str]:
    return {"decomposed": ", ".join(ops.decomposed), "placed": placed_text(ops.placed)}
