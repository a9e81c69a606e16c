"""What the axes of a mesh are for, as frameworks see them that give a mesh dim one use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distgraph.errors import ShardingError
from distgraph.export.result import data_axes, surface

if TYPE_CHECKING:
    from distgraph.plan import Plan

_ALONE = ("reshape", "transpose", "cast")  # ops that read a parameter before any activation meets it


@dataclass(frozen=True, slots=True)
class Roles:
    """What the axes of one stage's mesh are for.

    Attributes:
        replicate, shard: data axes over which parameters are copied, and split.
        model: the axis of `parallelize_module`, None where there is none.
        reshard: whether parameters are split between forward and backward too.
    """

    replicate: tuple[str, ...]
    shard: tuple[str, ...]
    model: str | None
    reshard: bool


def roles_of(plan: Plan, number: int) -> Roles:
    """Sort the axes of a stage.

    Raises:
        ShardingError: an axis splits the batch and the computation of weights, or two axes split matrices.
    """
    mesh, known = plan.stages[number].mesh, surface(plan).tensors
    data = data_axes(plan, number)
    stored: dict[str, set[str]] = {"param": set(), "state": set()}
    computed: dict[str, str] = {}
    for name, tensor in plan.tensors.items():
        if tensor.stage != number or tensor.kind == "input":
            continue
        stored[tensor.kind] |= {axis for axis in tensor.spec.axes if axis in data}
        if tensor.kind == "param" and name in known and known[name].reader not in _ALONE:
            for axis in known[name].used.axes:
                computed.setdefault(axis, name)
    mixed = [axis for axis in data if axis in computed]
    if mixed:
        raise ShardingError(
            f"stage {number}: axis {mixed[0]} of {mesh} splits the batch, and {computed[mixed[0]]} is "
            f"computed split over it; PyTorch has one use for a mesh dim: split experts or matrices over an "
            f"axis of their own"
        )
    model = [axis for axis in mesh.axes if axis not in data and mesh.axis_size(axis) > 1]
    if len(model) > 1:
        raise ShardingError(
            f"stage {number}: axes {', '.join(model)} of {mesh} split other things than the batch but "
            f"parallelize_module takes a mesh of one dim; use one axis for them"
        )
    shard = tuple(axis for axis in data if axis in stored["param"] | stored["state"])
    return Roles(
        tuple(axis for axis in data if axis not in shard),
        shard,
        model[0] if model else None,
        bool(stored["param"]),
    )
