"""Plan: everything that is decided about a distributed program, as data apart from the program.

A plan says which ranks form which stage, which layers a stage computes, into how many micro-batches a batch
is cut, which layers are computed again in the backward part, and the layout of every tensor and op. It is
written as JSON (docs/plan.md) with one item a line and equal layers in one entry, so that the plan of a
96-layer model stays small and two plans can be compared line by line.

`engine/applying.py` makes a program from a plan, `engine/extracting.py` a plan from a program.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from distgraph.documents import Node, dumps, write_atomically
from distgraph.errors import GraphError
from distgraph.export import Export, Surface, export
from distgraph.folding import fold, parse_spans, spans, unfold
from distgraph.plan_parts import (
    KINDS,
    Computed,
    Decision,
    Estimate,
    Found,
    Layer,
    LayerOps,
    Program,
    Rest,
    Stage,
    Stored,
    mesh_text,
)

__all__ = [
    "Plan", "Comparison", "Program", "Stage", "Layer", "Stored", "Computed", "LayerOps", "Estimate",
    "Decision", "Found", "Rest", "VERSION",
]  # fmt: skip

FORMAT = "distgraph plan"
VERSION = 1
_FIELDS = (
    "format", "version", "program", "cluster", "batch", "micro_batches", "schedule", "stages", "recompute",
    "forecast", "baselines", "search", "decisions", "layers", "tensors", "ops", "rest", "surface",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is decided about a program. Immutable; print it.

    Attributes:
        program: what it is for.
        cluster: name of the cluster that it was made for; empty where there was none.
        batch: samples of a step.
        micro_batches: parts into which the batch is cut.
        schedule: "1f1b" or "gpipe".
        layers: runs of the forward ops in program order; together they are all of them.
        stages: in order of layers; those without layers last.
        recompute: numbers of layers that are computed again in the backward part.
        tensors: name -> where an input, parameter or state lies.
        ops: per layer how its ops are computed.
        rest: the same for ops that belong to no layer.
        surface: shapes, and borders of modules, which `export` needs; None where nobody looked.
        forecast: of a step; None where there is no cluster.
        baselines: name -> seconds of a step of a plan to compare with, or why it has none.
        search: how the plan was found.
        decisions: what was decided -> the choice and its runner-up. A key is the name of a tensor, which may
            stand for several ("blocks.{0..3}.weight"), or a word such as "micro_batches" or "stage 0".

    Example:
        >>> from distgraph.mesh import ProcessMesh
        >>> from distgraph.spec import ShardSpec
        >>> mesh = ProcessMesh.grid(dp=2)
        >>> plan = Plan(
        ...     program=Program(name="Linear", fingerprint="0", parameters=3, inputs={"x": "f32[2, 3]"}),
        ...     batch=4, micro_batches=1, schedule="1f1b", layers=(Layer(first="1"),),
        ...     stages=(Stage(mesh=mesh, first=0, last=1),),
        ...     tensors={"x": Stored("input", 0, ShardSpec.of(["dp", None]))}, ops=(LayerOps((), ()),),
        ... )
        >>> print(plan.explain("x"))
        x (input): [dp, _] on stage 0, mesh(dp=2)
          no other choice is recorded: the plan was taken from annotations, not searched
    """

    program: Program
    cluster: str = ""
    batch: int
    micro_batches: int
    schedule: str
    layers: tuple[Layer, ...]
    stages: tuple[Stage, ...]
    recompute: tuple[int, ...] = ()
    tensors: Mapping[str, Stored]
    ops: tuple[LayerOps, ...]
    rest: Rest = field(default_factory=Rest)
    surface: Surface | None = None
    forecast: Estimate | None = None
    baselines: Mapping[str, float | str] = field(default_factory=dict)
    search: Found = field(default_factory=Found)
    decisions: Mapping[str, Decision] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of every stage, ascending."""
        return tuple(sorted({rank for stage in self.stages for rank in stage.mesh.members}))

    def stage_of(self, layer: int) -> int:
        """Number of the stage that computes a layer."""
        return next(i for i, stage in enumerate(self.stages) if stage.first <= layer < stage.last)

    # Files

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; readers see the old file or the new one, never a part.

        Raises:
            GraphError: it cannot be written there.
        """
        write_atomically(path, self.text(), GraphError)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """A plan from a file.

        Raises:
            GraphError: it cannot be read, is no plan, of another version, or malformed; names file and path.
        """
        return _read(Node.load(path, GraphError))

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Inverse of `text`. Raises GraphError: as `load`."""
        return _read(Node.parse(text, "plan", GraphError))

    def text(self) -> str:
        """The plan as JSON; equal plans have equal text."""
        groups: dict[LayerOps, list[int]] = {}
        for number, ops in enumerate(self.ops):
            groups.setdefault(ops, []).append(number)
        tensors = {
            kind: fold({name: str(at) for name, at in self.tensors.items() if at.kind == kind})
            for kind in KINDS
        }
        return dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "program": self.program.document(),
                "cluster": self.cluster,
                "batch": self.batch,
                "micro_batches": self.micro_batches,
                "schedule": self.schedule,
                "stages": [stage.document() for stage in self.stages],
                "recompute": spans(self.recompute),
                "forecast": None if self.forecast is None else self.forecast.document(),
                "baselines": dict(self.baselines),
                "search": self.search.document(),
                "decisions": {name: decision.document() for name, decision in self.decisions.items()},
                "layers": [str(layer) for layer in self.layers],
                "tensors": tensors,
                "ops": [ops.document(tuple(numbers)) for ops, numbers in groups.items()],
                "rest": self.rest.document(),
                "surface": None if self.surface is None else self.surface.document(),
            }
        )

    def export(self, framework: str) -> Export:
        """The plan in the terms of another framework: docs/export.md.

        Args:
            framework: "jax", "torch" or "megatron".

        Raises:
            GraphError: the framework is unknown, or the plan has no surface.
            ShardingError: the framework has no way to do what the plan says; the message lists why.
        """
        return export(self, framework)

    # Questions

    def explain(self, name: str) -> str:
        """What was chosen, what it costs, and what the runner-up would cost.

        Args:
            name: of an input, parameter or state; "stage 0", "layer 3"; or of a decision such as
                "micro_batches".

        Raises:
            GraphError: the plan has nothing of that name.
        """
        fact, decision = self._fact(name), self._decision(name)
        if fact is None and decision is None:
            known = ", ".join([*self.decisions, *fold(dict.fromkeys(self.tensors)), "stage N", "layer N"])
            raise GraphError(f"plan of {self.program.name} has nothing named {name!r}; it has {known}")
        if decision is None:
            return f"{fact}\n  no other choice is recorded: {self._unsearched()}"
        return "\n".join([fact or name, *self._told(decision)])

    def compare(self, other: Plan) -> Comparison:
        """What differs between this plan and another one."""
        rows = [
            (what, str(mine), str(theirs))
            for what, mine, theirs in _compared(self, other)
            if str(mine) != str(theirs)
        ]
        return Comparison(tuple(rows))

    def _fact(self, name: str) -> str | None:
        """What the plan says of a tensor, a stage or a layer."""
        stored = self.tensors.get(name)
        if stored is not None:
            mesh = self.stages[stored.stage].mesh
            return f"{name} ({stored.kind}): {stored.spec} on stage {stored.stage}, {mesh}"
        word, _, text = name.partition(" ")
        number = int(text) if text.isdecimal() else -1
        if word == "stage" and 0 <= number < len(self.stages):
            return f"{name}: {', '.join(filter(None, _stage(self, number)))}"
        if word != "layer" or not 0 <= number < len(self.layers):
            return None
        again = ", computed again in the backward part" if number in self.recompute else ""
        head = f"{name} (from {self.layers[number]}) on stage {self.stage_of(number)}{again}"
        return "\n".join([head, *(f"  {op}" for op in self.ops[number].ops)])

    def _decision(self, name: str) -> Decision | None:
        found = self.decisions.get(name)
        if found is not None:
            return found
        return next((d for key, d in self.decisions.items() if "{" in key and name in unfold(key)), None)

    def _unsearched(self) -> str:
        if self.search.mode == "annotations":
            return "the plan was taken from annotations, not searched"
        return f"the search ({self.search.mode}) weighed none"

    def _told(self, decision: Decision) -> list[str]:
        costs = ", ".join(f"{name} {_seconds(cost)}" for name, cost in decision.terms.items())
        lines = [f"  chosen: {decision.chosen}" + (f" ({costs})" if costs else "")]
        if decision.runner_up:
            lines.append(f"  runner-up: {decision.runner_up}{self._instead(decision.runner_up_seconds)}")
        return [*lines, f"  {decision.note}"] if decision.note else lines

    def _instead(self, seconds: float | None) -> str:
        if seconds is None:
            return ""
        if self.forecast is None:
            return f", a step of {_seconds(seconds)}"
        mine = self.forecast.seconds
        return f", a step of {_seconds(seconds)} in place of {_seconds(mine)} ({seconds / mine - 1:+.2%})"

    def __str__(self) -> str:
        micro = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"
        ranks = f"{len(self.ranks)} rank{'s' * (len(self.ranks) > 1)}"
        where = f" on {self.cluster}" if self.cluster else ""
        parts = [
            f"plan of {self.program.name}{where}: {ranks}, batch {self.batch} in {micro}, {self.schedule}"
        ]
        parts.append("stages\n" + _table([(str(i), *_stage(self, i)) for i in range(len(self.stages))]))
        if self.recompute:
            parts.append(f"layers computed again in the backward part: {spans(self.recompute)}")
        shown = {name: str(at) for name, at in self.tensors.items() if at.kind != "state"}
        parts.append("tensors (layout @ stage)\n" + _table(list(fold(shown).items())))
        if self.forecast is not None:
            parts.append("forecast of a step\n" + _table(_times(self)))
        if self.search.status:
            gap = "" if self.search.gap is None else f", at most {self.search.gap:.2%} above the bound"
            parts.append(f"search {self.search.mode}: {self.search.status}{gap}")
        return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of two plans; false where there are none. Print it.

    Attributes:
        rows: (what, in the first, in the second).
    """

    rows: tuple[tuple[str, str, str], ...]

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __str__(self) -> str:
        return _table([("", "this", "other"), *self.rows]) if self.rows else "no difference"


def _read(node: Node) -> Plan:
    found = node.get("format")
    if found is None or found.value != FORMAT:
        raise GraphError(
            f"{node.file}: expected a plan, {{'format': {FORMAT!r}, ...}}, found something else; write one "
            f"with distgraph plan"
        )
    version = node["version"].count()
    if version != VERSION:
        raise GraphError(
            f"{node.file}: plan has version {version} but this distgraph reads version {VERSION}; search "
            f"again, or use the distgraph that wrote it"
        )
    node.only(*_FIELDS)
    layers = tuple(Layer.parse(entry.text()) for entry in node["layers"].list())
    stages = _read_stages(node["stages"], len(layers))
    recompute = node["recompute"].read(parse_spans, 'numbers such as "0-3, 7"')
    if any(layer >= len(layers) for layer in recompute):
        node["recompute"].refuse(f"numbers below {len(layers)}, of layers")
    return Plan(
        program=Program.read(node["program"]),
        cluster=node["cluster"].text(),
        batch=node["batch"].count(1),
        micro_batches=node["micro_batches"].count(1),
        schedule=node["schedule"].text(),
        layers=layers,
        stages=stages,
        recompute=recompute,
        tensors=_read_tensors(node["tensors"], stages),
        ops=_read_ops(node["ops"], len(layers), len(stages)),
        rest=Rest.read(node["rest"], len(stages)),
        surface=None if node["surface"].value is None else Surface.read(node["surface"]),
        forecast=None if node["forecast"].value is None else Estimate.read(node["forecast"]),
        baselines={name: _seconds_or_reason(entry) for name, entry in node["baselines"].items()},
        search=Found.read(node["search"]),
        decisions={name: Decision.read(entry) for name, entry in node["decisions"].items()},
    )


def _read_stages(node: Node, layers: int) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    done = 0
    for entry in node.list():
        stages.append(Stage.read(entry, done))
        done = stages[-1].last
    if done != layers or not stages:
        node.refuse(f"stages that compute all {layers} layers")
    return tuple(stages)


def _read_tensors(node: Node, stages: Sequence[Stage]) -> dict[str, Stored]:
    node.only(*KINDS)
    tensors: dict[str, Stored] = {}
    for kind in KINDS:
        for pattern, entry in node[kind].items():
            stored = entry.read(partial(Stored.parse, kind), 'a layout such as "[_, tp] @0"')
            if stored.stage >= len(stages):
                entry.refuse(f"a stage below {len(stages)}")
            tensors |= dict.fromkeys(unfold(pattern), stored)
    return tensors


def _read_ops(node: Node, layers: int, stages: int) -> tuple[LayerOps, ...]:
    found: dict[int, LayerOps] = {}
    for entry in node.list():
        numbers, ops = LayerOps.read(entry, stages)
        found |= dict.fromkeys(numbers, ops)
    if sorted(found) != list(range(layers)):
        node.refuse(f"the ops of all {layers} layers")
    return tuple(found[number] for number in range(layers))


def _seconds_or_reason(node: Node) -> float | str:
    return node.text() if isinstance(node.value, str) else node.number()


def _compared(left: Plan, right: Plan) -> Iterable[tuple[str, Any, Any]]:
    """(what, in the one, in the other), equal or not."""
    for name in ("name", "fingerprint", "parameters"):
        yield f"program {name}", getattr(left.program, name), getattr(right.program, name)
    for name in ("cluster", "batch", "micro_batches", "schedule"):
        yield name, getattr(left, name) or "none", getattr(right, name) or "none"
    yield "layers", len(left.layers), len(right.layers)
    yield "recompute", spans(left.recompute) or "none", spans(right.recompute) or "none"
    for i in range(max(len(left.stages), len(right.stages))):
        yield f"stage {i}", _stage_text(left, i), _stage_text(right, i)
    names = dict.fromkeys([*left.tensors, *right.tensors])
    pairs = {name: (_tensor_text(left, name), _tensor_text(right, name)) for name in names}
    for name, (mine, theirs) in fold({n: pair for n, pair in pairs.items() if pair[0] != pair[1]}).items():
        yield name, mine, theirs
    yield from _compared_ops(left.ops, right.ops)
    yield "forecast", _forecast_text(left), _forecast_text(right)
    for i in range(max(len(left.stages), len(right.stages))):
        yield f"memory of stage {i}", _memory_text(left, i), _memory_text(right, i)


def _stage(plan: Plan, number: int) -> tuple[str, ...]:
    stage = plan.stages[number]
    memory = plan.forecast.memory[number:] if plan.forecast is not None else ()
    return (
        f"layers {spans(range(stage.first, stage.last))}" if stage.last > stage.first else "no whole layer",
        str(stage.mesh),
        f"devices {spans(stage.devices)}" if stage.devices else "",
        _bytes(memory[0]) if memory else "",
    )


def _stage_text(plan: Plan, number: int) -> str:
    if number >= len(plan.stages):
        return "none"
    stage = plan.stages[number]
    layers, ranks = spans(range(stage.first, stage.last)) or "none", spans(stage.mesh.members)
    return f"layers {layers} on ({mesh_text(stage.mesh)}) ranks {ranks}"


def _tensor_text(plan: Plan, name: str) -> str:
    return str(plan.tensors.get(name, "none"))


def _compared_ops(left: Sequence[LayerOps], right: Sequence[LayerOps]) -> Iterable[tuple[str, str, str]]:
    """The first op that differs, of layers that differ alike; nothing where the layers are others."""
    if len(left) != len(right):
        return
    groups: dict[tuple[LayerOps, LayerOps], list[int]] = {}
    for number, pair in enumerate(zip(left, right, strict=True)):
        if pair[0] != pair[1]:
            groups.setdefault(pair, []).append(number)
    for (mine, theirs), layers in groups.items():
        pairs = itertools.zip_longest(mine.ops, theirs.ops, fillvalue="none")
        differ = [(str(a), str(b)) for a, b in pairs if a != b]
        if differ:
            yield f"ops of layers {spans(layers)}, first of {len(differ)}", differ[0][0], differ[0][1]


def _forecast_text(plan: Plan) -> str:
    return "none" if plan.forecast is None else _seconds(plan.forecast.seconds)


def _memory_text(plan: Plan, stage: int) -> str:
    if plan.forecast is None or stage >= len(plan.forecast.memory):
        return "none"
    return _bytes(plan.forecast.memory[stage])


def _times(plan: Plan) -> list[tuple[str, str]]:
    assert plan.forecast is not None
    rows = [("this plan", _seconds(plan.forecast.seconds))]
    for name, found in plan.baselines.items():
        rows.append((name, found if isinstance(found, str) else _seconds(found)))
    return rows


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def _bytes(count: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.4g} {unit}"
    return f"{count} B"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns of equal width."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
