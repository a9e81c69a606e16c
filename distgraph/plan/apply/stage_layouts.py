"""What a plan says to a rank that computes a stage with DTensors: layouts of parameters and of results.

The axes of a stage's mesh are sorted by role, as for an export (`export/axis_roles.py`): data axes, over
which parameters are replicated or split by `fully_shard`, and one model axis, over which tensors are
DTensors. A layout over the model axis is a number: the dim that the axis splits, or None for a whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from distgraph.errors import ShardingError
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.plan.export.axis_roles import ranks_by_role, roles_of, strays_of
from distgraph.plan.export.module_interface import Part
from distgraph.plan.export.result import listed, surface
from distgraph.plan.export.torch import sharded_units, split_points

if TYPE_CHECKING:
    from distgraph.plan.plan import Plan

Layout = int | None


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a module.

    Attributes:
        shape: of one micro-batch over all ranks.
        dim: the dim that the model axis splits; None where the result is whole.
    """

    shape: tuple[int, ...]
    dim: Layout


@dataclass(frozen=True, slots=True)
class StageLayout:
    """How the ranks of one stage store and compute their part of a model.

    Attributes:
        number: of the stage.
        ranks: [dp_replicate, dp_shard, tp], ranks of the plan.
        parameters: name -> layout of each parameter over the model axis.
        outputs: path of a module -> the layout that its result gets.
        units: paths of the modules that `fully_shard` gathers one by one; None if no axis splits the batch.
        reshard: whether parameters are released between forward and backward (ZeRO-3).
        recomputed: paths of modules whose activations are recomputed in the backward part.
    """

    number: int
    ranks: np.ndarray
    parameters: Mapping[str, Layout]
    outputs: Mapping[str, Output]
    units: tuple[str, ...] | None
    reshard: bool
    recomputed: tuple[str, ...]

    @property
    def parts(self) -> int:
        """Parts into which the ranks of the stage divide a batch."""
        return int(self.ranks.shape[0] * self.ranks.shape[1])


@dataclass(frozen=True, slots=True)
class Layouts:
    """A plan in the terms of DTensor, `fully_shard` and pipeline stages.

    Attributes:
        stages: in order.
        first_modules: path of the first module of every stage but the first.
        notes: what runs in another way than planned, one line each.
    """

    stages: tuple[StageLayout, ...]
    first_modules: tuple[str, ...]
    notes: tuple[str, ...]


def layouts_of(plan: Plan) -> Layouts:
    """The layouts of a plan.

    Raises:
        GraphError: the plan has no surface.
        ShardingError: ranks would compute unequal shares of a batch, stages have meshes of different shapes
            or common ranks, or the axes of a mesh have no role in PyTorch (`roles_of`).
    """
    stages = tuple(_stage(plan, number) for number in range(len(plan.stages)))
    _check_stages(plan, stages)
    _check_rows(plan, stages)
    points = tuple(split_points(plan))
    if len(points) < len(stages) - 1:
        raise ShardingError(
            f"plan of {plan.program.name} has {len(stages)} stages but only {len(points)} of them "
            "begin with a "
            "module of their own, at which PyTorch can split the model; search again with other borders"
        )
    return Layouts(stages, points, tuple(_notes(plan)))


def _stage(plan: Plan, number: int) -> StageLayout:
    mesh, roles = plan.stages[number].mesh, roles_of(plan, number)
    modules = {path: part for path, part in surface(plan).modules.items() if part.stage == number}
    outputs = {path: out for path, part in modules.items() if (out := _output(part, roles.model)) is not None}
    data = bool(roles.replicate or roles.shard)
    return StageLayout(
        number,
        ranks_by_role(mesh, roles),
        {
            name: _split_dim(tensor.spec, roles.model)
            for name, tensor in plan.tensors.items()
            if tensor.kind == "param" and tensor.stage == number
        },
        outputs if roles.model is not None else {},
        tuple(sharded_units(plan, number)) if data else None,
        roles.reshard,
        tuple(path for path, part in modules.items() if part.again),
    )


def _output(part: Part, axis: str | None) -> Output | None:
    """The result of a module; None where the plan keeps it as partial sums, or it has several."""
    if axis is None or len(part.leaves) != 1 or part.leaves[0].spec.reduction(axis):
        return None
    flow = part.leaves[0]
    return Output(flow.shape, _split_dim(flow.spec, axis))


def _split_dim(spec: ShardSpec, axis: str | None) -> Layout:
    return next((d for d, axes in enumerate(spec.dims) if axis in axes), None)


def _check_stages(plan: Plan, stages: tuple[StageLayout, ...]) -> None:
    """Raises ShardingError where `PipelineStage` cannot send between the stages, rank to rank."""
    shapes = [stage.ranks.shape for stage in stages]
    if len(set(shapes)) > 1:
        raise ShardingError(
            f"stages of the plan have meshes {', '.join(str(s.mesh) for s in plan.stages)}, which are "
            f"{', '.join(f'{r} x {s} x {t}' for r, s, t in shapes)} ranks of dp_replicate x dp_shard "
            "x tp, but PyTorch sends between stages of one shape only; search again with uniform=True"
        )
    seen: dict[int, int] = {}
    for stage in stages:
        for rank in stage.ranks.ravel().tolist():
            if seen.setdefault(rank, stage.number) != stage.number:
                raise ShardingError(
                    f"rank {rank} computes stages {seen[rank]} and {stage.number} of the plan but "
                    "PyTorch gives a rank one stage; search again with fewer stages"
                )


def _check_rows(plan: Plan, stages: tuple[StageLayout, ...]) -> None:
    rows = plan.batch // max(1, plan.micro_batches)
    for stage in stages:
        mesh = plan.stages[stage.number].mesh
        if mesh.weights or rows % stage.parts:
            raise ShardingError(
                f"stage {stage.number}: {rows} samples of a micro-batch over {stage.parts} ranks of mesh "
                f"{mesh.described} are uneven but fully_shard averages gradients as if every rank had "
                "as many; use a batch that divides, and no weights of ranks"
            )


def _notes(plan: Plan) -> list[str]:
    notes = []
    for number in range(len(plan.stages)):
        strays, roles = strays_of(plan, number), roles_of(plan, number)
        if strays.names:
            notes.append(f"stage {number}: {strays}; here they are gathered and every rank computes its rows")
        if roles.shard and not roles.reshard:
            notes.append(
                f"stage {number}: states are split but parameters whole in the plan (ZeRO-1, 2); fully_shard "
                "stores both split, and gathers parameters once a step"
            )
    return notes


def check_parameters(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the parameters of a plan with those of the model that it is applied to.

    Args:
        plan: with a surface.
        shapes: name -> shape of every parameter of the model; a tied one under each of its names.

    Raises:
        ShardingError: the model has no parameter of a name of the plan, or one of another shape, or one that
            the plan does not know.
    """
    tensors = surface(plan).tensors
    planned = [name for name, tensor in plan.tensors.items() if tensor.kind == "param"]
    missing = [name for name in planned if name not in shapes]
    if missing:
        raise ShardingError(
            f"plan of {plan.program.name} has the parameters {listed(missing)} but the model does "
            "not; apply it to the model that it was made for"
        )
    for name in planned:
        if name in tensors and tensors[name].shape != shapes[name]:
            raise ShardingError(
                f"parameter {name} is {list(shapes[name])} in the model but {list(tensors[name].shape)} in "
                "the plan; make the plan from the model, with dg.frontends.torch.import_module"
            )
