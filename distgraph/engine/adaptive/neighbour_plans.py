"""Plans that differ from a given one in who does how much: uneven shares, and ranks that change places.

*In:* a plan, the slowdown of the device of every rank.
*Out:* plans with the same stages, layouts and decisions.
*Invariant:* every rank keeps its number, its device and so its process: where a stage is to run on other
devices, its mesh names other ranks.

    stage 0 mesh(dp=2) on ranks 0-1       shares: mesh(dp=2:1) on ranks 0-1
    stage 0 on ranks 0-1, stage 1 on 2    places: stage 0 on ranks 0,2, stage 1 on rank 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from distgraph.engine.search_driver.load_balancing import Member, divide_batch, rebalanced
from distgraph.engine.search_driver.search_space import Shape
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.range_notation import spans
from distgraph.plan.plan import Plan, SearchRecord

_UNITS = (2, 4, 8)
"""Units for each position into which a dim is cut, where an axis does not split samples alone."""
_MOST_TOTALS = 6
"""Numbers of units that are tried for one axis."""


def with_meshes(plan: Plan, meshes: Mapping[ProcessMesh, ProcessMesh], what: str) -> Plan:
    """The plan on other meshes, with the devices of its ranks.

    Args:
        plan: with a device for every rank.
        meshes: mesh -> the one that replaces it.
        what: what is changed, for the record of the plan.
    """
    device_of = devices_by_rank(plan)
    stages = []
    for stage in plan.stages:
        mesh = meshes.get(stage.mesh, stage.mesh)
        stages.append(replace(stage, mesh=mesh, devices=tuple(device_of[rank] for rank in mesh.members)))
    record = SearchRecord(mode=plan.search.mode, status="adapted", settings={"adapted": what})
    return replace(
        plan, stages=tuple(stages), surface=None, forecast=None, baselines={}, search=record, decisions={}
    )


def devices_by_rank(plan: Plan) -> dict[int, int]:
    """Rank -> its device, of the ranks of all stages."""
    pairs = (zip(stage.mesh.members, stage.devices, strict=True) for stage in plan.stages)
    return {rank: device for stage in pairs for rank, device in stage}


# Shares
# ------------------------------------------------------------------------------------------------------


def share_plans(plan: Plan, slowdowns: Mapping[int, float]) -> Iterator[Plan]:
    """Plans in which slower ranks have smaller blocks: weights of axes of the meshes.

    Args:
        plan: to change.
        slowdowns: rank -> slowdown of its device.
    """
    samples, data_axes = plan.batch // plan.micro_batches, _data_axes(plan)
    choices: dict[ProcessMesh, list[ProcessMesh]] = {}
    for mesh in dict.fromkeys(stage.mesh for stage in plan.stages):
        variants = [
            variant
            for axis in mesh.axes
            for variant in _weighted(mesh, axis, slowdowns, samples if axis in data_axes else 0)
        ]
        if variants:
            choices[mesh] = list(dict.fromkeys(variants))
    count = max(map(len, choices.values()), default=0)
    for number in range(count if len(choices) > 1 else 0):
        chosen = {mesh: variants[min(number, len(variants) - 1)] for mesh, variants in choices.items()}
        yield with_meshes(plan, chosen, _shares_text(chosen))
    for mesh, variants in choices.items():
        for variant in variants:
            yield with_meshes(plan, {mesh: variant}, _shares_text({mesh: variant}))


def refined_shares(plan: Plan, slowdowns: Mapping[int, float]) -> Iterator[Plan]:
    """Plans in which one kind of ranks has one sample less at most, and another kind more.

    Shares by speed alone leave out what does not depend on samples, such as the update of parameters.

    Args:
        plan: to change, with weights of an axis that splits samples.
        slowdowns: rank -> slowdown of its device.
    """
    samples, data_axes = plan.batch // plan.micro_batches, _data_axes(plan)
    for mesh in dict.fromkeys(stage.mesh for stage in plan.stages):
        for axis, weights in mesh.weights.items():
            if axis not in data_axes or samples % sum(weights):
                continue
            shape = Shape(
                ((axis, len(weights)),), tuple(samples // sum(weights) * weight for weight in weights)
            )
            slowest = _slowest(mesh, axis, slowdowns)
            levels = sorted(set(slowest))
            for other in rebalanced(shape, [levels.index(each) for each in slowest]):
                if min(other.samples) and len(set(other.samples)) > 1:
                    variant = mesh.weighted(**{**mesh.weights, axis: other.samples})
                    yield with_meshes(plan, {mesh: variant}, _shares_text({mesh: variant}))


def _data_axes(plan: Plan) -> set[str]:
    """Axes that split the samples of an input."""
    inputs = (stored.spec for stored in plan.tensors.values() if stored.kind == "input")
    return {axis for spec in inputs for axis in spec.dims[0]}


def _slowest(mesh: ProcessMesh, axis: str, slowdowns: Mapping[int, float]) -> list[float]:
    """The largest slowdown at every position of an axis."""
    position, count = mesh.axes.index(axis), mesh.axis_size(axis)
    slices = np.moveaxis(mesh.ranks, position, 0).reshape(count, -1)
    return [max(slowdowns.get(int(rank), 1.0) for rank in part) for part in slices]


def _shares_text(meshes: Mapping[ProcessMesh, ProcessMesh]) -> str:
    return "shares " + "; ".join(
        f"{m.described} on ranks {spans(sorted(m.members))}" for m in meshes.values()
    )


def _weighted(
    mesh: ProcessMesh, axis: str, slowdowns: Mapping[int, float], samples: int
) -> Iterator[ProcessMesh]:
    """The mesh with weights of one axis; with even shares too if it has others now."""
    count = mesh.axis_size(axis)
    if count == 1:
        return
    slowest = _slowest(mesh, axis, slowdowns)
    other = {name: weights for name, weights in mesh.weights.items() if name != axis}
    if axis in mesh.weights:
        yield mesh.weighted(**other)
    totals = _divisors(samples, count) if samples else [count * unit for unit in _UNITS]
    for total in totals if len(set(slowest)) > 1 else ():
        members = [Member(str(number), seconds) for number, seconds in enumerate(slowest)]
        shares = divide_batch(total, members).samples
        variant = mesh.weighted(**other, **{axis: shares}) if min(shares) else mesh
        if variant != mesh:
            yield variant


def _divisors(samples: int, count: int) -> list[int]:
    """Numbers of units that cut samples evenly, from two a position up; samples themselves first."""
    every = [total for total in range(2 * count, samples + 1) if samples % total == 0]
    spread = (
        {round(i * (len(every) - 1) / (_MOST_TOTALS - 1)) for i in range(_MOST_TOTALS)} if every else set()
    )
    return [every[i] for i in sorted(spread, reverse=True)]


# Places
# ------------------------------------------------------------------------------------------------------


def exchange_plans(plan: Plan, slowdowns: Mapping[int, float]) -> Iterator[Plan]:
    """Plans in which two ranks on devices of unequal speed have changed places; equal changes once.

    Args:
        plan: to change.
        slowdowns: rank -> slowdown of its device.
    """
    roles = {rank: _role(plan, rank) for rank in plan.ranks}
    seen: set[object] = set()
    for one in plan.ranks:
        for other in plan.ranks:
            speeds = slowdowns.get(one, 1.0), slowdowns.get(other, 1.0)
            key = roles[one], roles[other], speeds
            if speeds[0] > speeds[1] and roles[one] != roles[other] and key not in seen:
                seen.add(key)
                exchange = {one: other, other: one}
                yield renumbered(plan, exchange, f"rank {one} in the place of rank {other}")


def _role(plan: Plan, rank: int) -> tuple[object, ...]:
    """What a rank does: its stages, and its share along the axes that have weights."""
    role: list[object] = []
    for number, stage in enumerate(plan.stages):
        if rank in stage.mesh:
            mesh = stage.mesh
            position = [int(c[0]) for c in np.where(mesh.ranks == rank)]
            at = dict(zip(mesh.axes, position, strict=True))
            role.append((number, tuple(weights[at[axis]] for axis, weights in mesh.weights.items())))
    return tuple(role)


def renumbered(plan: Plan, ranks: Mapping[int, int], what: str) -> Plan:
    """The plan whose meshes name other ranks, which keep their devices.

    Args:
        plan: to change.
        ranks: rank -> the rank that takes its place; a permutation.
        what: what is changed, for the record of the plan.
    """
    change = partial(_renumbered, ranks=ranks)
    return with_meshes(plan, {stage.mesh: change(stage.mesh) for stage in plan.stages}, what)


def _renumbered(mesh: ProcessMesh, ranks: Mapping[int, int]) -> ProcessMesh:
    members = [ranks.get(int(rank), int(rank)) for rank in mesh.ranks.ravel()]
    return mesh.renumbered(np.array(members).reshape(mesh.shape))


def on_present_devices(plan: Plan, devices: tuple[int, ...]) -> Plan:
    """A plan of a search with the ranks that are on its devices now.

    Args:
        plan: with a device for every rank.
        devices: the present device of every rank.
    """
    rank_on = {device: rank for rank, device in enumerate(devices)}
    moved = {rank: rank_on[device] for rank, device in devices_by_rank(plan).items()}
    if all(rank == other for rank, other in moved.items()):
        return plan
    stages = tuple(replace(stage, mesh=_renumbered(stage.mesh, moved)) for stage in plan.stages)
    return replace(plan, stages=stages, surface=None)
