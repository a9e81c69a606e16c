"""ZeRO: layouts of states and parameters that are split over the ranks which share the batch.

The first completion says where every tensor is stored and which axes split the batch. Where a state (and at
level 3 a parameter) is not split over these axes, they split one of its dims (see `shard_states`). Then the
program is completed again with these annotations, the layouts of states that are split already, and those of
all activations, so that it computes as before. What an earlier program of the engine has stored keeps its
layout.

Source: Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from distgraph.errors import ShardingError
from distgraph.ir.graph import SOURCES, Graph, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.optim import shard_states
from distgraph.passes.pass_pipeline import run_passes
from distgraph.plan.strategy import STORED_ORIGIN, ZERO_ORIGIN, Strategy

SPLIT_PARAMETERS = 3
_PLANNED = Origin("user", "the first completion")  # completion keeps what a user wrote


def complete_split(strategy: Strategy, serial: Graph, complete: Callable[[Graph], Graph]) -> Graph:
    """Complete a program with states and parameters split over the batch axes as `Strategy.zero` says.

    Args:
        strategy: its `split` is 1, 2 or 3.
        serial: the annotated program; some tensors may be stored as an earlier program has laid them out.
        complete: completes the annotations alone.

    Raises:
        ShardingError: no axis splits the batch of a training program, it has nothing that can be split, or an
            earlier program stores whole what could be split.
    """
    stored = {n: attr for n, attr in serial.attrs.items() if attr.origin.where.startswith(STORED_ORIGIN)}
    split_before = {name: attr for name, attr in stored.items() if ZERO_ORIGIN in attr.origin.where}
    open_attrs = {name: attr for name, attr in serial.attrs.items() if name not in split_before}
    completed = complete(replace(serial, attrs=open_attrs))
    axes, kinds = batch_axes(completed), ("state", "param")[: 1 + (strategy.split >= SPLIT_PARAMETERS)]
    origin = Origin("user", f"{ZERO_ORIGIN}{strategy.split})")
    kept, split = dict[str, DistAttr](), dict(split_before)
    for op in completed.sources(*kinds):
        attr = _split(completed, op, axes)
        if op.name in stored:
            if serial.updates and attr is not None and not set(axes) & set(stored[op.name].spec.axes):
                _refuse_whole(strategy.split, op)
        elif attr is not None:
            split[op.name] = replace(attr, origin=origin)
        elif op.name not in serial.attrs:
            kept[op.name] = replace(completed.attrs[op.name], origin=_PLANNED)
    if split:
        return _completed_again(serial, completed, kept | split)
    if serial.updates and not any(op.name in stored for op in completed.sources(*kinds)):
        _refuse(strategy.split, axes)
    return completed


def _refuse(zero: int, axes: tuple[str, ...]) -> NoReturn:
    """Raise the error for a training program of which nothing is split."""
    if not axes:
        raise ShardingError(
            f"zero of Strategy is {zero} but no axis splits the batch over several ranks; give Strategy a "
            "mesh and a batch_axis of more than one rank, annotate an input, or leave zero out"
        )
    splits_parameters = zero >= SPLIT_PARAMETERS
    what, way = ("parameter or state", "") if splits_parameters else ("state", ", or use 3 (parameters too)")
    raise ShardingError(
        f"zero of Strategy is {zero} but no {what} can be split over {', '.join(axes)}: there is none, or "
        f"each is split over it already or has dims shorter than it has ranks; gradients are split as states "
        f"or parameters are; leave zero out{way}"
    )


def _refuse_whole(zero: int, op: Op) -> NoReturn:
    """Raise the error for a tensor that was laid out by a program without a split batch."""
    raise ShardingError(
        f"zero of Strategy is {zero} but {op.attrs['name']} is stored whole by an earlier program, whose "
        "batch was not split; call fit, or prepare with a batch to train on, before evaluate and predict"
    )


def batch_axes(completed: Graph) -> tuple[str, ...]:
    """Axes of more than one rank that split the first dim of inputs."""
    axes: dict[str, None] = {}
    for op in completed.sources("input"):
        attr = completed.attrs[op.name]
        for axis in attr.spec.dims[0] if attr.spec.dims else ():
            if attr.mesh.axis_size(axis) > 1:
                axes[axis] = None
    return tuple(axes)


def _split(completed: Graph, op: Op, axes: tuple[str, ...]) -> DistAttr | None:
    """The layout of a tensor that is also split over the batch axes of its mesh; None if it stays."""
    stored = attr = completed.attrs[op.name]
    for axis in axes:
        if axis in attr.mesh.sizes:
            attr = shard_states(attr.mesh, axis)(op.name, op.result.shape, attr) or attr
    return None if attr.spec == stored.spec else attr


def _completed_again(serial: Graph, completed: Graph, pinned: dict[str, DistAttr]) -> Graph:
    """Complete with these layouts, and those of inputs, activations and other parameters as they were."""
    attrs = {**serial.attrs, **pinned}
    placements: dict[str, ProcessMesh] = dict(serial.placements)
    before = {op.name: op for op in completed.ops}
    changed = _changed_parameters(serial)
    for op in serial.ops:
        earlier = before.get(op.name)
        if earlier is None or earlier.layout is None or op.name in changed:
            continue
        if op.kind not in ("input", "param") and (op.role != "forward" or op.kind in SOURCES):
            continue
        if op.kind not in SOURCES:
            placements.setdefault(op.name, earlier.layout.mesh)
        for value in op.results:
            if value.shape:
                attr = completed.attrs[value.name]
                attrs.setdefault(value.name, DistAttr(attr.mesh, ShardSpec(attr.spec.dims), _PLANNED))
    again: Graph = run_passes(
        replace(serial, attrs=attrs, placements=placements), ("complete",), verified=False
    )
    return replace(again, lost=completed.lost)


def _changed_parameters(serial: Graph) -> set[str]:
    """Names of values that are made of one parameter alone, such as a cast; computed on its parts."""
    parameters = {op.name for op in serial.sources("param")}
    changed: set[str] = set()
    for op in serial.ops:
        if len(op.operands) == 1 and op.operands[0].name in parameters | changed:
            changed.update(value.name for value in op.results)
    return changed
