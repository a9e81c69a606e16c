"""Measured training steps from a CSV file, as programs that can be forecast.

*In:* a CSV file (docs/planning/calibration.md). *Out:* `MeasuredRun`s.
*Invariant:* a row is compiled as any program is: a model of `distgraph.models`, laid out by degrees (dp, tp,
pp) or by a plan file, with forward, backward and update.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, get_type_hints

from distgraph.engine.compile.compile import compile_program
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.train_graph import train_graph
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.engine.data import POSITION
from distgraph.errors import DistGraphError, ResourceError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr
from distgraph.models import GPT, GPTConfig, GShardMoE, Llama, LlamaConfig, MoEConfig, WideResNet, stages
from distgraph.models.megatron_layout import Stack
from distgraph.models.wide_resnet import WideResNetConfig
from distgraph.optim import SGD, Adafactor, Adam, AdamW, Optimizer, shard_states
from distgraph.passes.pass_pipeline import run_completion
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy
from distgraph.resources import Cluster
from distgraph.runtime.profile.calibration.step_responses import MeasuredRun
from distgraph.runtime.program.build import Build, build
from distgraph.serialization.csv_reader import read_csv

_MODELS: Final[Mapping[str, tuple[type[Stack], type]]] = {
    "gpt": (GPT, GPTConfig),
    "llama": (Llama, LlamaConfig),
    "gshard_moe": (GShardMoE, MoEConfig),
    "wide_resnet": (WideResNet, WideResNetConfig),
}
_OPTIMIZERS: Final = {"adamw": AdamW, "adam": Adam, "sgd": SGD, "adafactor": Adafactor}
_REQUIRED: Final = ("model", "batch", "seconds")
_DEGREES: Final = ("dp", "tp", "pp", "micro_batches")
_OPTIONAL: Final = ("plan", "optimizer", "recompute", "zero", "schedule", "memory", "group")
_WORDS: Final = {"yes": True, "no": False, "true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One row: a model, how it is distributed, and what is not in the model's configuration."""

    where: str
    family: str
    preset: str
    config: tuple[tuple[str, Any], ...]
    batch: int
    degrees: tuple[int, int, int]
    micro_batches: int
    schedule: str
    plan: Path | None
    optimizer: str
    recompute: bool
    zero: bool


def read_runs(path: str | os.PathLike[str], cluster: Cluster) -> list[MeasuredRun]:
    """The measured runs of a CSV file; their programs are compiled when they are needed.

    Args:
        path: of the file. Paths of plans in it are relative to its folder.
        cluster: on which the runs were measured.

    Raises:
        ResourceError: the file cannot be read, a column is missing or unknown, or a cell is not what its
            column needs; names the file and the line.
    """
    file = Path(path)
    if file.is_dir() or not file.is_file():
        raise ResourceError(
            f"{path}: no file of measured runs; give a CSV file, see docs/planning/calibration.md"
        )
    rows = read_csv(file, ResourceError)
    if len(rows) < 2:
        raise ResourceError(f"{path}: no measured run; write a line of column names and a line for each run")
    (_, names), *data = rows
    _check_columns(names, str(path))
    return [_run(file, f"{path}, line {line}", names, row, cluster) for line, row in data]


def _check_columns(names: Sequence[str], path: str) -> None:
    missing = [name for name in _REQUIRED if name not in names]
    if "plan" not in names:
        missing += [name for name in _DEGREES if name not in names]
    if missing:
        raise ResourceError(
            f"{path}: columns {', '.join(names)} lack {', '.join(missing)}; needed are "
            f"{', '.join(_REQUIRED)} and either plan or {', '.join(_DEGREES)}"
        )
    shapes = {field.name for _, config in _MODELS.values() for field in fields(config)}
    columns = {*_REQUIRED, *_DEGREES, *_OPTIONAL, *shapes}
    for name in names:
        if name not in columns or names.count(name) > 1:
            how = "is there twice" if name in columns else "is unknown"
            raise ResourceError(
                f"{path}: column {name!r} {how}; there are {', '.join((*_REQUIRED, *_DEGREES, *_OPTIONAL))} "
                "and the fields of the models' configurations"
            )


def _run(file: Path, where: str, names: Sequence[str], row: Sequence[str], cluster: Cluster) -> MeasuredRun:
    if len(row) != len(names):
        raise ResourceError(f"{where}: {len(row)} cells in {len(names)} columns; give one for each")
    cells = {name: cell for name, cell in zip(names, row, strict=True) if cell}
    for name in _REQUIRED:
        if name not in cells:
            raise ResourceError(f"{where}: column {name} is empty, but every run has one; fill it in")
    family, _, preset = cells["model"].partition(":")
    if family not in _MODELS:
        raise ResourceError(
            f"{where}: model {cells['model']!r} is none of {', '.join(_MODELS)}, each alone or with a preset "
            "such as gpt:2.6B"
        )
    parsed = _Row(
        where=where,
        family=family,
        preset=preset,
        config=_config(where, family, preset, cells),
        batch=_count(where, cells, "batch"),
        degrees=(_count(where, cells, "dp"), _count(where, cells, "tp"), _count(where, cells, "pp")),
        micro_batches=_count(where, cells, "micro_batches"),
        schedule=cells.get("schedule", "1f1b"),
        plan=file.parent / cells["plan"] if "plan" in cells else None,
        optimizer=_word(where, cells, "optimizer", _OPTIMIZERS, "adamw"),
        recompute=_WORDS[_word(where, cells, "recompute", _WORDS, "no")],
        zero=_WORDS[_word(where, cells, "zero", _WORDS, "no")],
    )
    devices = _check_devices(parsed, cluster)
    shape = ", ".join(f"{name}={value}" for name, value in parsed.config)
    return MeasuredRun(
        name=where,
        program=partial(_program, parsed, cluster),
        seconds=_positive(where, cells, "seconds"),
        group=cells.get("group", f"{cells['model']} {shape} on {devices}"),
        memory=_positive(where, cells, "memory") if "memory" in cells else None,
    )


def _check_devices(row: _Row, cluster: Cluster) -> int:
    """Number of devices of a run. Raises ResourceError: it does not fit the cluster or the batch."""
    if row.plan is not None:
        if not row.plan.is_file():
            raise ResourceError(
                f"{row.where}: plan {row.plan} does not exist; paths are relative to the file"
            )
        return 0
    dp, tp, pp = row.degrees
    if dp * tp * pp > len(cluster.devices):
        raise ResourceError(
            f"{row.where}: dp {dp} x tp {tp} x pp {pp} needs {dp * tp * pp} devices but cluster "
            f"{cluster.name} has {len(cluster.devices)}; correct the row or name another cluster"
        )
    if row.batch % (dp * row.micro_batches):
        raise ResourceError(
            f"{row.where}: batch {row.batch} over dp {dp} in {row.micro_batches} micro-batches: they do not "
            "divide; correct the row"
        )
    return dp * tp * pp


def _config(where: str, family: str, preset: str, cells: Mapping[str, str]) -> tuple[tuple[str, Any], ...]:
    """Fields of the model's configuration that the row states. Raises ResourceError: one is missing."""
    model, config = _MODELS[family]
    if preset and preset not in model.presets:
        raise ResourceError(
            f"{where}: preset {preset!r} of {family} does not exist; there are {', '.join(model.presets)}"
        )
    types, pairs = get_type_hints(config), []
    for field in fields(config):
        if field.name in cells:
            pairs.append((field.name, _field(where, field.name, cells[field.name], types[field.name])))
        elif not preset and field.default is MISSING:
            raise ResourceError(
                f"{where}: model {family} has no preset and column {field.name} is missing or empty; give one"
            )
    return tuple(pairs)


def _field(where: str, name: str, cell: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return _WORDS[cell.lower()]
        if kind in (str, Any):  # a dtype may be any, and is text in a file
            return cell
        if kind in (int, float):
            return kind(cell)
        return tuple(int(part) for part in cell.split("-"))
    except (ValueError, KeyError):
        expected = {int: "a whole number", float: "a number", bool: "yes or no"}.get(
            kind, "numbers such as 3-4-6-3"
        )
        raise ResourceError(f"{where}: column {name}: expected {expected}, got {cell!r}") from None


def _count(where: str, cells: Mapping[str, str], name: str) -> int:
    cell = cells.get(name, "1")
    if not cell.isdigit() or not int(cell):
        raise ResourceError(f"{where}: column {name}: expected a whole number from 1 on, got {cell!r}")
    return int(cell)


def _positive(where: str, cells: Mapping[str, str], name: str) -> float:
    try:
        number = float(cells[name])
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ResourceError(f"{where}: column {name}: expected a positive number, got {cells[name]!r}")
    return number


def _word(where: str, cells: Mapping[str, str], name: str, words: Mapping[str, Any], default: str) -> str:
    word = cells.get(name, default).lower()
    if word not in words:
        raise ResourceError(
            f"{where}: column {name}: expected one of {', '.join(words)}, got {cells[name]!r}"
        )
    return word


def _program(row: _Row, cluster: Cluster) -> Build:
    """The compiled step of a row. Raises ResourceError: the row describes no program that there is."""
    try:
        return _compiled(row, cluster)
    except DistGraphError as error:
        raise ResourceError(f"{row.where}: {error}") from error


def _compiled(row: _Row, cluster: Cluster) -> Build:
    kind, config = _MODELS[row.family]
    model = (
        kind.preset(row.preset, **dict(row.config)) if row.preset else kind(config(**dict(row.config)))  # type: ignore[call-arg]
    )
    model.recompute = row.recompute
    if row.plan is not None:
        return _planned(row, model, cluster)
    dp, tp, pp = row.degrees
    meshes = [ProcessMesh.grid(stage * dp * tp, dp=dp, tp=tp) for stage in range(pp)]
    stages(model, meshes, recompute=row.recompute)
    graph = train_graph(model, _batch(model, row.batch // row.micro_batches), None, _optimizer(row))
    return build(run_completion(graph, meshes[0]), micro_batches=row.micro_batches, policy=row.schedule)


def _planned(row: _Row, model: Stack, cluster: Cluster) -> Build:
    assert row.plan is not None
    plan = Plan.load(row.plan)
    fields = {f"{POSITION}{i}": (shape[1:], dtype) for i, (shape, dtype) in enumerate(_batch(model, 1))}
    loss = getattr(model, "loss", None)
    spec = TrainingSpec(model, loss, _optimizer(row), {}, Strategy())
    built, _ = compile_program(CompileRequest(spec, "train", row.batch, fields, {}, plan), cluster)
    return built


def _batch(model: Stack, size: int) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes of a batch of some samples."""
    config = model.config  # type: ignore[attr-defined]
    if isinstance(config, WideResNetConfig):
        return ((size, 3, config.image, config.image), "f32"), ((size,), "i32")
    return (((size, config.sequence), "i32"),) * 2


def _optimizer(row: _Row) -> Optimizer:
    def states(name: str, shape: tuple[int, ...], held: DistAttr | None) -> DistAttr | None:
        return None if held is None else shard_states(held.mesh, "dp")(name, shape, held)

    kind: Any = _OPTIMIZERS[row.optimizer]
    return kind(state_spec=states) if row.zero else kind()  # type: ignore[no-any-return]
