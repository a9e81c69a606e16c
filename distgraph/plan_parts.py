"""The parts of a plan, each with its form in a plan file (docs/plan.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distgraph.documents import Node, Record
from distgraph.errors import ShardingError
from distgraph.folding import parse_spans, spans
from distgraph.mesh import ProcessMesh, is_axis_name
from distgraph.rule import OpLayout
from distgraph.spec import ShardSpec

KINDS = ("input", "param", "state")
_STAGE = re.compile(r"^(?P<spec>\[.*?) @(?P<stage>\d+)$")
_COMPUTED = re.compile(r"^(?P<kind>[\w.]+)(?: @(?P<stage>\d+))? \{(?P<axes>[^}]*)\} -> (?P<results>.*)$")


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
    parameters: int
    inputs: Mapping[str, str]

    def document(self) -> dict[str, Any]:
        """The form in a file."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "parameters": self.parameters,
            "inputs": dict(self.inputs),
        }

    @classmethod
    def read(cls, node: Node) -> Program:
        """From a file."""
        node.only("name", "fingerprint", "parameters", "inputs")
        return cls(
            name=node["name"].text(),
            fingerprint=node["fingerprint"].text(),
            parameters=node["parameters"].count(),
            inputs={name: entry.text() for name, entry in node["inputs"].items()},
        )


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

    def document(self) -> Record:
        """The form in a file."""
        return Record(
            layers=spans(range(self.first, self.last)),
            mesh=self.mesh.described,
            ranks=spans(self.mesh.members),
            devices=spans(self.devices),
        )

    @classmethod
    def read(cls, node: Node, after: int) -> Stage:
        """From a file; `after` is the number of layers before it."""
        node.only("layers", "mesh", "ranks", "devices")
        layers = node["layers"].read(parse_spans, 'numbers such as "0-11"')
        if layers != tuple(range(after, after + len(layers))):
            node["layers"].refuse(f"consecutive layers from {after} on")
        sizes, weights = node["mesh"].read(_parse_axes, 'a mesh such as "dp=2, tp=4" or "dp=3:1"')
        ranks = node["ranks"].read(parse_spans, 'numbers such as "0-7"')
        shape = tuple(sizes.values())
        if len(ranks) != int(np.prod(shape)):
            node["ranks"].refuse(f"{int(np.prod(shape))} ranks, as many as the mesh has")
        try:
            mesh = ProcessMesh(np.array(ranks).reshape(shape), tuple(sizes), weights)
        except ShardingError:
            node["ranks"].refuse("distinct ranks")
        devices = node["devices"].read(parse_spans, 'numbers such as "0-7"')
        if devices and len(devices) != len(ranks):
            node["devices"].refuse(f"{len(ranks)} devices, as many as ranks, or none")
        return cls(mesh=mesh, first=after, last=after + len(layers), devices=devices)


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
    """Where a tensor with a name lies: `kind` is input, param or state."""

    kind: str
    stage: int
    spec: ShardSpec

    def __str__(self) -> str:
        return f"{self.spec} @{self.stage}"

    @classmethod
    def parse(cls, kind: str, text: str) -> Stored:
        """Inverse of `str`. Raises ValueError or ShardingError."""
        match = _STAGE.match(text)
        if match is None:
            raise ValueError(text)
        return cls(kind, int(match["stage"]), ShardSpec.parse(match["spec"]))


@dataclass(frozen=True, slots=True)
class Computed:
    """How an op is computed and how its results are stored; prints as `matmul {m:dp, n:tp} -> [dp, tp]`.

    Attributes:
        kind: of the op.
        axes: index of the op's rule -> axes that split it.
        partial: axis -> linear group whose operands are partial over it.
        results: a layout each.
        stage: whose mesh computes it; None, in a layer, for that where it is placed (see `LayerOps`).
        stored: per result the stage on whose mesh it lies, None for that which computes it; empty where all
            are None.
    """

    kind: str
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    partial: tuple[tuple[str, int], ...] = ()
    results: tuple[ShardSpec, ...] = ()
    stage: int | None = None
    stored: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        parts = [f"{index}:{'*'.join(axes)}" for index, axes in self.axes]
        parts += [f"partial {axis}:{group}" for axis, group in self.partial]
        at = "" if self.stage is None else f" @{self.stage}"
        stored = self.stored or (None,) * len(self.results)
        results = (
            f"{spec}" if kept is None else f"{spec} @{kept}"
            for spec, kept in zip(self.results, stored, strict=True)
        )
        return f"{self.kind}{at} {{{', '.join(parts)}}} -> {'; '.join(results)}"

    @classmethod
    def parse(cls, text: str) -> Computed:
        """Inverse of `str`. Raises ValueError or ShardingError."""
        match = _COMPUTED.match(text)
        if match is None:
            raise ValueError(text)
        axes, partial = [], []
        for part in filter(None, map(str.strip, match["axes"].split(","))):
            name, _, value = part.removeprefix("partial ").partition(":")
            if part.startswith("partial "):
                partial.append((name, int(value)))
            else:
                axes.append((name, tuple(value.split("*"))))
        results = [result.partition(" @") for result in match["results"].split("; ")]
        specs = tuple(ShardSpec.parse(spec) for spec, _, _ in results)
        stored = tuple(int(kept) if kept else None for _, _, kept in results)
        stage = None if match["stage"] is None else int(match["stage"])
        none = all(kept is None for kept in stored)
        return cls(match["kind"], tuple(axes), tuple(partial), specs, stage, () if none else stored)

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
        return " | ".join([", ".join(self.decomposed), _placed_text(self.placed), *map(str, self.ops)])

    @classmethod
    def parse(cls, text: str) -> LayerOps:
        """Inverse of `str`. Raises ValueError or ShardingError."""
        decomposed, placed, *ops = text.split(" | ")
        return cls(_listed(decomposed), _parse_placed(placed), tuple(map(Computed.parse, ops)))

    def document(self, layers: tuple[int, ...]) -> dict[str, Any]:
        """The form in a file, for all layers that have it."""
        return {
            "layers": spans(layers),
            "decomposed": ", ".join(self.decomposed),
            "placed": _placed_text(self.placed),
            "ops": [str(op) for op in self.ops],
        }

    @classmethod
    def read(cls, node: Node, stages: int) -> tuple[tuple[int, ...], LayerOps]:
        """From a file with so many stages: the layers, and what they have."""
        node.only("layers", "decomposed", "placed", "ops")
        layers = node["layers"].read(parse_spans, 'numbers such as "0-11"')
        placed = _read_placed(node["placed"], stages)
        ops = tuple(_read_computed(entry, stages) for entry in node["ops"].list())
        return layers, cls(_listed(node["decomposed"].text()), placed, ops)


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
        return " | ".join([", ".join(self.decomposed), _placed_text(self.placed), *ops])

    @classmethod
    def parse(cls, text: str) -> Rest:
        """Inverse of `str`. Raises ValueError or ShardingError."""
        decomposed, placed, *lines = text.split(" | ")
        ops = (line.partition(" ") for line in lines)
        found = tuple((name, Computed.parse(op)) for name, _, op in ops)
        return cls(_listed(decomposed), _parse_placed(placed), found)

    def document(self) -> dict[str, Any]:
        """The form in a file."""
        return {
            "decomposed": ", ".join(self.decomposed),
            "placed": _placed_text(self.placed),
            "ops": {name: str(op) for name, op in self.ops},
        }

    @classmethod
    def read(cls, node: Node, stages: int) -> Rest:
        """From a file with so many stages."""
        node.only("decomposed", "placed", "ops")
        placed = _read_placed(node["placed"], stages)
        ops = tuple((name, _read_computed(entry, stages)) for name, entry in node["ops"].items())
        return cls(_listed(node["decomposed"].text()), placed, ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A forecast in short: seconds of a step, and of every stage the peak bytes of its fullest device."""

    seconds: float
    memory: tuple[int, ...] = ()

    def document(self) -> dict[str, Any]:
        """The form in a file."""
        return {"seconds": self.seconds, "memory": list(self.memory)}

    @classmethod
    def read(cls, node: Node) -> Estimate:
        """From a file."""
        node.only("seconds", "memory")
        return cls(
            seconds=node["seconds"].number(), memory=tuple(entry.count() for entry in node["memory"].list())
        )


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
    terms: Mapping[str, float] = field(default_factory=dict)
    runner_up: str = ""
    runner_up_seconds: float | None = None
    note: str = ""
    instead: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The form in a file."""
        return {
            "chosen": self.chosen,
            "terms": Record(self.terms),
            "runner_up": self.runner_up,
            "runner_up_seconds": self.runner_up_seconds,
            "note": self.note,
            "instead": dict(self.instead),
        }

    @classmethod
    def read(cls, node: Node) -> Decision:
        """From a file."""
        node.only("chosen", "terms", "runner_up", "runner_up_seconds", "note", "instead")
        instead = node.get("instead")
        return cls(
            chosen=node["chosen"].text(),
            terms={name: entry.number() for name, entry in node["terms"].items()},
            runner_up=node["runner_up"].text(),
            runner_up_seconds=optional(node["runner_up_seconds"]),
            note=node["note"].text(),
            instead={} if instead is None else {line: entry.text() for line, entry in instead.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How a plan was found.

    Attributes:
        mode: of the search; "annotations" for the plan of a program as it was compiled.
        status: "optimal", "feasible", "interrupted", ... as the search says.
        bound: no plan takes fewer seconds a step by its forecast (docs/plan.md); None where nothing is known.
        gap: (forecast - bound) / bound.
        seconds: that the search took.
        settings: what it was asked for.
    """

    mode: str = "annotations"
    status: str = ""
    bound: float | None = None
    gap: float | None = None
    seconds: float | None = None
    settings: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The form in a file."""
        numbers = {"bound": self.bound, "gap": self.gap, "seconds": self.seconds}
        return {"mode": self.mode, "status": self.status, **numbers, "settings": dict(self.settings)}

    @classmethod
    def read(cls, node: Node) -> Found:
        """From a file."""
        node.only("mode", "status", "bound", "gap", "seconds", "settings")
        settings = {name: entry.scalar() for name, entry in node["settings"].items()}
        return cls(
            mode=node["mode"].text(),
            status=node["status"].text(),
            bound=optional(node["bound"]),
            gap=optional(node["gap"]),
            seconds=optional(node["seconds"]),
            settings=settings,
        )


def _read_computed(node: Node, stages: int) -> Computed:
    found = node.read(Computed.parse, 'an op such as "matmul {m:dp, n:tp} -> [dp, tp]"')
    if any(stage is not None and stage >= stages for stage in (found.stage, *found.stored)):
        node.refuse(f"stages below {stages}")
    return found


def _read_placed(node: Node, stages: int) -> tuple[tuple[str, int], ...]:
    found = node.read(_parse_placed, 'ops and stages such as "57@1, 60@1"')
    if any(stage >= stages for _, stage in found):
        node.refuse(f"stages below {stages}")
    return found


def _listed(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


def _placed_text(placed: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{op}@{stage}" for op, stage in placed)


def _parse_placed(text: str) -> tuple[tuple[str, int], ...]:
    pairs = (part.rpartition("@") for part in _listed(text))
    return tuple((op, int(stage)) for op, _, stage in pairs)


def optional(node: Node) -> float | None:
    """A number or null."""
    return None if node.value is None else node.number()


def _parse_axes(text: str) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Sizes of axes, and weights of those that have some; see `ProcessMesh.described`."""
    sizes, weights = {}, {}
    for part in text.split(","):
        name, _, numbers = part.partition("=")
        axis, given = name.strip(), tuple(int(number) for number in numbers.split(":"))
        if min(given) < 1 or not is_axis_name(axis):
            raise ValueError(text)
        sizes[axis] = given[0] if len(given) == 1 else len(given)
        if len(given) > 1:
            weights[axis] = given
    return sizes, weights
