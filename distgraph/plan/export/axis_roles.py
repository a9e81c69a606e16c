"""Roles of mesh axes, for frameworks in which each dim of a mesh has one role."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from distgraph.errors import ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.plan.export.result import data_axes, listed, owner, surface

if TYPE_CHECKING:
    from distgraph.plan.plan import Plan

MOST = 0.5  # share of the parameters from which on a plan is not what is left of it
_ALONE = ("reshape", "transpose", "cast")  # ops that read a parameter before any activation meets it


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles of the axes of one stage's mesh.

    Attributes:
        replicate, shard: data axes over which parameters are replicated, and split.
        model: the axis of `parallelize_module`, None where there is none.
        reshard: whether parameters are split between forward and backward too.
    """

    replicate: tuple[str, ...]
    shard: tuple[str, ...]
    model: str | None
    reshard: bool


@dataclass(frozen=True, slots=True)
class Strays:
    """Parameters of a stage that a plan computes split over axes that split the batch elsewhere.

    Attributes:
        names: names of the parameters.
        axes: data axes that split their computation.
        share: their fraction of the elements of all parameters of the stage.
    """

    names: tuple[str, ...]
    axes: tuple[str, ...]
    share: float

    def __str__(self) -> str:
        return (
            f"{listed(self.names)} ({self.share:.0%} of its parameters) are computed split over "
            f"{', '.join(self.axes)}, which splits the batch elsewhere"
        )


def strays_of(plan: Plan, number: int) -> Strays:
    """The strays of a stage, without parameters that are only reshaped or converted in such a layout."""
    interface, data = surface(plan).tensors, data_axes(plan, number)
    names_of_stage = [
        n for n, t in plan.tensors.items() if t.kind == "param" and t.stage == number and n in interface
    ]
    axes_of = {name: [axis for axis in interface[name].used.axes if axis in data] for name in names_of_stage}
    names = tuple(name for name in names_of_stage if axes_of[name] and interface[name].reader not in _ALONE)
    sizes = {name: math.prod(interface[name].shape) for name in names_of_stage}
    share = sum(sizes[name] for name in names) / max(1, sum(sizes.values()))
    return Strays(names, tuple(dict.fromkeys(axis for name in names for axis in axes_of[name])), share)


def roles_of(plan: Plan, number: int) -> Roles:
    """The roles of the axes of a stage.

    Raises:
        ShardingError: most of the parameters are computed split over axes that split the batch elsewhere, or
            two axes split other things.
    """
    mesh, data = plan.stages[number].mesh, data_axes(plan, number)
    strays = strays_of(plan, number)
    if strays.share > MOST:
        raise ShardingError(
            f"stage {number} on {mesh}: {strays}; PyTorch has one use for a mesh dim: split matrices and "
            f"experts over an axis of their own"
        )
    model = [axis for axis in mesh.axes if axis not in data and mesh.axis_size(axis) > 1]
    if len(model) > 1:
        raise ShardingError(
            f"stage {number}: axes {', '.join(model)} of {mesh} split other things than the batch but "
            f"parallelize_module takes a mesh of one dim; use one axis for them"
        )
    split = {kind: mostly_split(plan, number, kind) for kind in ("param", "state")}
    shard = tuple(axis for axis in data if axis in {*split["param"], *split["state"]})
    replicate = tuple(axis for axis in data if axis not in shard)
    return Roles(replicate, shard, model[0] if model else None, bool(split["param"]))


def ranks_by_role(mesh: ProcessMesh, roles: Roles) -> np.ndarray:
    """The ranks of a mesh as [dp_replicate, dp_shard, model]."""
    order = [mesh.axes.index(axis) for axis in (*roles.replicate, *roles.shard)]
    others = [i for i in range(len(mesh.axes)) if i not in order]
    ranks = mesh.ranks.transpose([*order, *others])
    return ranks.reshape(mesh.count(roles.replicate), mesh.count(roles.shard), -1)


def mostly_split(plan: Plan, number: int, kind: str, apart: Collection[str] = ()) -> tuple[str, ...]:
    """Data axes of a stage over which most of its parameters, or states, are stored split (ZeRO).

    Parameters that are kept `apart` are left out, with their states.
    """
    tensors, data = surface(plan).tensors, data_axes(plan, number)
    sizes: dict[str, int] = {}
    for name, tensor in plan.tensors.items():
        parameter = name if kind == "param" else owner(name)
        held = None if parameter in apart else tensors.get(parameter)
        if tensor.kind == kind and tensor.stage == number and held is not None:
            sizes[name] = math.prod(held.shape)
    total = sum(sizes.values())
    axes = {name: plan.tensors[name].spec.axes for name in sizes}
    over = {axis: sum(size for name, size in sizes.items() if axis in axes[name]) for axis in data}
    return tuple(axis for axis in data if over[axis] > MOST * total)
