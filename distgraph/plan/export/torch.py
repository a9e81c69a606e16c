"""Export to PyTorch: `parallelize_module` styles, `fully_shard`, pipeline split points, checkpointed modules.

In PyTorch each dim of a device mesh has one role. The axes of a plan's mesh are sorted by role:

    data axes     split the batch; gradients are summed over them. Those that parameters or states are split
                  over as well become `dp_shard` of `fully_shard` (ZeRO: Rajbhandari et al., 2020, section 5),
                  with `reshard_after_forward` where parameters themselves are; the others `dp_replicate`.
    model axis    splits matrices; a plan may have one, it becomes the mesh of `parallelize_module`.

Layouts of weights and of activations between modules determine the styles: a matrix split by its outputs
is ColwiseParallel, by its inputs RowwiseParallel (Shoeybi et al., 2019, section 3), a norm of a split
sequence SequenceParallel (Korthikanti et al., 2022, section 4.2.2). Modules are named as in the plan; a
matrix that is the right operand of a matmul is taken for an nn.Linear, which holds it transposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distgraph.errors import ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.plan.export.axis_roles import Roles, ranks_by_role, roles_of, strays_of
from distgraph.plan.export.module_interface import MATRICES, Part, Read, in_order, prefixes
from distgraph.plan.export.result import Export, dims, listed, mesh_data, owner, surface
from distgraph.plan.export.torch_source import torch_schedules, torch_source

if TYPE_CHECKING:
    from distgraph.plan.plan import Plan

REPLICATE = "Replicate()"
NORMS = ("layer_norm", "rms_norm")


@dataclass(slots=True)
class _Stage:
    """State of the translation of one stage.

    Attributes:
        whole: whether activations [batch, sequence, width] stay whole along the sequence against the plan.
        styles: path -> style.
        left: parameters that no style splits.
    """

    plan: Plan
    number: int
    mesh: ProcessMesh
    roles: Roles
    whole: bool = False
    styles: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def export_torch(plan: Plan) -> Export:
    """Settings for PyTorch.

    Returns:
        the data {"stages": [{"mesh", "ranks", "parallelize", "fully_shard", "checkpoint", "parameters",
        "placements", "inputs"}], "split_points", "schedule", "micro_batches", "loss_parallel"}, and the
        source of a module with `parallelize(model, stage=0, device_type="cuda")`, which applies all of it,
        `SPLIT_POINTS`, `SCHEDULE`, `MICRO_BATCHES` and `LOSS_PARALLEL`.

    Raises:
        GraphError: the plan has no surface.
        ShardingError: most of a stage's parameters are computed split over axes that split the batch
            elsewhere, several axes split other things than the batch, the code of a module would have to move
            activations, or the schedule is unknown.
    """
    stages = [_translate(plan, number) for number in range(len(plan.stages))]
    notes = [note for stage in stages for note in stage.notes]
    notes += _pipeline_notes(plan, stages)
    paths = list(surface(plan).modules)
    data = {
        "program": plan.program.name,
        "stages": [_stage_data(stage) for stage in stages],
        "split_points": split_points(plan),
        "schedule": schedule_class(plan),
        "micro_batches": plan.micro_batches,
        "loss_parallel": bool(paths) and any("use_local_output=False" in s for s in _last_style(stages)),
    }
    notes = list(dict.fromkeys(notes))
    return Export("torch", data, torch_source(plan, data, notes), tuple(notes))


def schedule_class(plan: Plan) -> str:
    """Name of the schedule's class in torch.distributed.pipelining. Raises ShardingError if it has none."""
    names = torch_schedules()
    if plan.schedule not in names:
        raise ShardingError(
            f"plan of {plan.program.name} has the schedule {plan.schedule!r} but PyTorch those of "
            f"{', '.join(names)}; search again with one of them"
        )
    return names[plan.schedule]


def _translate(plan: Plan, number: int) -> _Stage:
    """Translates one stage; without splits of the sequence if module code would have to move activations."""
    mesh, roles = plan.stages[number].mesh, roles_of(plan, number)
    first_move = ""
    for whole in (False, True):
        stage = _Stage(plan, number, mesh, roles, whole)
        parts = [(path, part) for path, part in surface(plan).modules.items() if part.stage == number]
        for path, part in parts:
            _style(stage, path, part)
        move = next((text for path, part in parts if (text := _moved(stage, path, part))), "")
        if not move:
            break
        first_move = first_move or move
    else:
        raise ShardingError(f"{first_move}; PyTorch moves activations at the borders of modules only")
    if first_move:
        stage.notes.append(f"activations are kept whole along the sequence, for {first_move}")
    strays = strays_of(plan, number)
    if strays.names:
        stage.notes.append(
            f"stage {number}: {strays}; here fully_shard gathers them and every rank computes its rows"
        )
    _check_left(stage)
    return stage


# Styles


def _style(stage: _Stage, path: str, part: Part) -> None:
    """Sets the style of one module, if the model axis concerns it."""
    if stage.roles.model is None or not part.enters:
        return
    parameters = _held(stage, path)
    weight = parameters.get("weight")
    if weight is not None and weight.reader in MATRICES:
        style = _linear(stage, path, part, weight)
    elif parameters and any(read.reader in NORMS for read in parameters.values()):
        style = _norm(stage, path, part)
    else:
        style = None if parameters else _gather(stage, path, part)
        stage.left += [f"{path}.{name}" for name in parameters if _split(stage, f"{path}.{name}")]
    if style is not None:
        stage.styles[path] = style


def _moved(stage: _Stage, path: str, part: Part) -> str:
    """Text of the first activation that module code would have to move over the model axis; or empty."""
    if stage.roles.model is None or (path in stage.styles and _held(stage, path)):
        return ""
    for flow in part.moved:
        if _placement(stage, flow.spec) != _placement(stage, flow.used):
            return (
                f"{path}: its own code has {list(flow.shape)} in {flow.spec} but is to have it in {flow.used}"
            )
    return ""


def _held(stage: _Stage, path: str) -> dict[str, Read]:
    """Parameters of a module itself, without those of modules inside it."""
    interface = surface(stage.plan).tensors
    return {
        name.rpartition(".")[2]: read
        for name, read in interface.items()
        if owner(name) == path and stage.plan.tensors[name].kind == "param"
    }


def _split(stage: _Stage, name: str) -> tuple[int, ...]:
    """Dims of a parameter that the model axis splits."""
    spec = stage.plan.tensors[name].spec
    return tuple(d for d, axes in enumerate(spec.dims) if stage.roles.model in axes)


def _linear(stage: _Stage, path: str, part: Part, weight: Read) -> str | None:
    """Style of nn.Linear or nn.Embedding."""
    split = _split(stage, f"{path}.weight")
    arrives, leaves = _arrives(stage, path, part), _leaves(stage, part)
    if not split:
        return None
    if len(weight.shape) != 2:
        stage.left.append(f"{path}.weight")
        return None
    table = weight.reader == "embedding"
    by_columns = split == (1,)
    if stage.roles.model not in weight.used.axes:
        stage.notes.append(
            f"{path}.weight is stored split over {stage.roles.model} but computed whole by the plan; "
            f"PyTorch computes it split, as it is stored"
        )
    if by_columns and not table:
        last = _ends(stage, path) and leaves == "Shard(-1)"
        defaults = (REPLICATE, "Shard(-1)")
        return _call(
            "ColwiseParallel", (arrives, leaves), defaults, " use_local_output=False" if last else ""
        )
    name = "ColwiseParallel" if by_columns else "RowwiseParallel"
    # every rank has all the ids that are looked up in a table
    defaults = (REPLICATE if by_columns else "Shard(-1)", "Shard(-1)" if by_columns else REPLICATE)
    return _call(name, (REPLICATE if table else arrives, leaves), defaults)


def _norm(stage: _Stage, path: str, part: Part) -> str | None:
    """Style of a norm: SequenceParallel where the sequence is split, else None."""
    dim = next(
        (d for d in range(1, len(part.enters[0].shape) - 1) if _on(stage, part.enters[0].used) == d), None
    )
    if dim is None:
        return None
    leaves = _leaves(stage, part)
    if leaves not in (f"Shard({dim})", REPLICATE):
        stage.left.append(path)
    return f"SequenceParallel(sequence_dim={dim}, use_local_output=True)"


def _gather(stage: _Stage, path: str, part: Part) -> str | None:
    """Style of a module without own parameters that reshards its input once for all modules inside it."""
    before, after = _arrives(stage, path, part), _placement(stage, part.enters[0].used)
    if before == after or after is None or part.enters[0].inherited or len(part.enters) > 1:
        return None
    local = ", use_local_output=True" if after != REPLICATE else ""
    return f"PrepareModuleInput(input_layouts={before}, desired_input_layouts={after}{local})"


def _arrives(stage: _Stage, path: str, part: Part) -> str:
    """Placement over the model axis of the first input of a module in PyTorch."""
    flow, modules = part.enters[0], surface(stage.plan).modules
    around = next((p for p in reversed(prefixes(path)[:-1]) if p in modules), None)
    if flow.inherited and around is not None:
        if around in stage.styles:
            return _placement(stage, modules[around].enters[0].used) or REPLICATE
        return _arrives(stage, around, modules[around])
    if flow.joined:
        return REPLICATE
    made = None if flow.made is None else _placement(stage, flow.made)
    return made or _placement(stage, flow.spec) or REPLICATE


def _leaves(stage: _Stage, part: Part) -> str:
    """Placement over the model axis that the result of a module must have."""
    if not part.leaves or part.leaves[0].joined:
        return REPLICATE
    flow = part.leaves[0]
    stored = None if flow.loose else _placement(stage, flow.spec)
    return stored or _placement(stage, flow.used) or REPLICATE


def _placement(stage: _Stage, spec: ShardSpec) -> str | None:
    """Placement of a layout over the model axis; None for a partial sum."""
    axis = stage.roles.model
    if axis is not None and spec.reduction(axis):
        return None
    dim = _on(stage, spec)
    if dim is None:
        return REPLICATE
    return "Shard(-1)" if dim == len(spec.dims) - 1 else f"Shard({dim})"


def _on(stage: _Stage, spec: ShardSpec) -> int | None:
    """The dim of an activation that the model axis splits."""
    dim = next((d for d, axes in enumerate(spec.dims) if stage.roles.model in axes), None)
    return None if stage.whole and dim == 1 and len(spec.dims) == 3 else dim


def _ends(stage: _Stage, path: str) -> bool:
    """Whether a module is the last one of the program, whose result is read by the loss."""
    return path == list(surface(stage.plan).modules)[-1]


def _last_style(stages: list[_Stage]) -> Iterator[str]:
    for stage in stages:
        yield from (style for path, style in stage.styles.items() if _ends(stage, path))


def _call(name: str, layouts: tuple[str, str], defaults: tuple[str, str], options: str = "") -> str:
    words = ("input_layouts", "output_layouts")
    parts = [f"{w}={g}" for w, g, d in zip(words, layouts, defaults, strict=True) if g != d]
    return f"{name}({', '.join([*parts, *options.split()])})"


def _check_left(stage: _Stage) -> None:
    """Add notes on parameters without a style and on parameters that several modules read."""
    if stage.roles.model is None:
        return
    for name, tensor in stage.plan.tensors.items():
        split_here = tensor.kind == "param" and tensor.stage == stage.number and _split(stage, name)
        if split_here and owner(name) not in stage.styles:
            stage.left.append(name)
    interface = surface(stage.plan).tensors
    shared = [
        name for name in _parameters(stage.plan, stage.number) if name in interface and interface[name].shared
    ]
    if shared:
        stage.notes.append(
            f"{listed(shared)} is read by code of several modules: a style lays out its own module only; let "
            f"an nn.Linear share the parameter and give it the matching style"
        )
    if stage.left:
        stage.notes.append(
            f"no style of parallelize_module lays out {listed(list(dict.fromkeys(stage.left)))}: kept whole; "
            f"`placements` has the DTensor placements for a model that is written for them"
        )


# Pipeline


def _pipeline_notes(plan: Plan, stages: list[_Stage]) -> Iterator[str]:
    sizes = {stage.mesh.size for stage in stages}
    shapes = {_sizes(stage.roles, stage.mesh) for stage in stages}
    if len(sizes) > 1 or len(shapes) > 1:
        yield (
            f"stages have meshes of different shape ({', '.join(str(s.mesh) for s in stages)}): "
            f"PipelineStage sends from a rank to one rank, so what passes between such stages is for the "
            f"training loop to move"
        )
    seen: set[int] = set()
    for stage in stages:
        if seen & set(stage.mesh.members):
            yield f"stage {stage.number} shares ranks with one before it; PyTorch has a rank per stage"
        seen |= set(stage.mesh.members)
    rows = next((r.shape[0] for n, r in surface(plan).tensors.items() if plan.tensors[n].kind == "input"), 0)
    for stage in stages:
        parts = stage.mesh.count((*stage.roles.replicate, *stage.roles.shard))
        if rows % parts or stage.mesh.weights:
            yield (
                f"stage {stage.number}: {rows} samples of a micro-batch over {parts} ranks are uneven "
                f"(mesh {stage.mesh.described}); "
                f"fully_shard averages gradients as if every rank had as many: weight the loss by them"
            )
    if any(stage.roles.shard and not stage.roles.reshard for stage in stages):
        yield (
            "optimiser states are split but parameters whole in the plan (ZeRO-1, 2); fully_shard stores "
            "both split and, with reshard_after_forward=False, gathers parameters once a step: the bytes "
            "sent are the same"
        )


def _sizes(roles: Roles, mesh: ProcessMesh) -> tuple[int, int]:
    return mesh.count((*roles.replicate, *roles.shard)), mesh.axis_size(roles.model) if roles.model else 1


def split_points(plan: Plan) -> list[str]:
    """The first module of every stage but the first: the outermost that belongs to that stage alone."""
    modules = surface(plan).modules
    points = []
    for number in range(1, len(plan.stages)):
        first = next((path for path, part in modules.items() if part.stage == number), None)
        if first is not None:
            points.append(first)
    return points


# Data


def _stage_data(stage: _Stage) -> dict[str, Any]:
    roles = stage.roles
    parameters = _parameters(stage.plan, stage.number)
    paths = [path for path, part in surface(stage.plan).modules.items() if part.stage == stage.number]
    recomputed = [path for path in paths if surface(stage.plan).modules[path].again]
    return {
        "mesh": mesh_data(stage.mesh),
        "ranks": ranks_by_role(stage.mesh, roles).tolist(),
        "parallelize": dict(stage.styles),
        "fully_shard": {
            "modules": sharded_units(stage.plan, stage.number),
            "reshard_after_forward": roles.reshard,
        }
        if roles.replicate or roles.shard
        else None,
        "checkpoint": recomputed,
        "parameters": parameters,
        "placements": {name: _placements(stage, name) for name in parameters},
        "inputs": {
            name: dims(tensor.spec)
            for name, tensor in stage.plan.tensors.items()
            if tensor.kind == "input" and tensor.stage == stage.number and tensor.spec.dims
        },
    }


def _parameters(plan: Plan, number: int) -> list[str]:
    """Names of the parameters of a stage."""
    return in_order(n for n, t in plan.tensors.items() if t.kind == "param" and t.stage == number)


def _placements(stage: _Stage, name: str) -> list[str]:
    """DTensor placements of a parameter over the axes of the plan's mesh, for its layout in the plan."""
    spec, read = stage.plan.tensors[name].spec, surface(stage.plan).tensors.get(name)
    transposed = read is not None and read.reader == "matmul" and read.operand == 1 and len(read.shape) == 2
    placements = []
    for axis in stage.mesh.axes:
        dim = next((d for d, axes in enumerate(spec.dims) if axis in axes), None)
        position = None if dim is None else 1 - dim if transposed else dim
        placements.append(REPLICATE if position is None else f"Shard({position})")
    return placements


def sharded_units(plan: Plan, number: int) -> list[str]:
    """Units of `fully_shard` in a stage: outermost modules that are items of a list and have parameters."""
    names = _parameters(plan, number)
    units = [next((p for p in prefixes(owner(n)) if p.rpartition(".")[2].isdigit()), None) for n in names]
    return list(dict.fromkeys(unit for unit in units if unit is not None))
