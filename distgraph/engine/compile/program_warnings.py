"""Warnings for programs: of losses that micro-batches change, of pipeline boundaries that divide nothing, of
annotations that compete for an axis or that ZeRO adds to, of ranks that add nothing, and of a BLAS library
other than the measured one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.errors import first_of
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import AxisAttr, DistAttr
from distgraph.passes.analysis.accumulation import OTHER, Growth, growths
from distgraph.passes.analysis.conflicts import conflicts
from distgraph.passes.propagate_shardings import Lost
from distgraph.passes.serial.dead_code_elimination import prune
from distgraph.plan.strategy import ZERO_ORIGIN
from distgraph.resources import Cluster
from distgraph.runtime.execute.process_group import World, is_chief
from distgraph.runtime.program.build import Build
from distgraph.tracing.tracer import user_stack_level


def warn_unaveraged_loss(request: CompileRequest) -> None:
    """Warn where loss or metrics of a program in micro-batches are not recognised as means over the samples.

    The losses of micro-batches are averaged, which gives that of the batch only for a mean of numbers each
    of which depends on one sample. Model, loss function and metrics are examined, see `growths`, as they are
    in evaluation, so that there is no warning for a batch norm, whose statistics are those of a micro-batch.
    """
    spec, parts = request.training_spec, request.micro_batches
    if request.mode != "train" or parts == 1 or type(spec) is not TrainingSpec:
        return
    factor = next(n for n in range(2, parts + 1) if parts % n == 0)
    try:
        small, count = spec.trace_loss(request.blocks(parts))
        large, _ = spec.trace_loss(request.blocks(parts // factor))
    except Exception:  # noqa: BLE001 - the model may not evaluate, or not other sizes, which proves nothing
        return
    growth_of = growths(small, large, factor)
    messages = (_unaveraged(label, small, count, growth_of, parts) for label, _ in small.outputs)
    message = next(filter(None, messages), "")
    if message and is_chief():
        warnings.warn(message, UserWarning, stacklevel=user_stack_level())


def _unaveraged(label: str, small: Graph, count: int, growth_of: Mapping[str, Growth], parts: int) -> str:
    """What makes the loss or a metric another number in micro-batches, and the way out; empty where nothing
    does.

    Args:
        label: of the output.
        small: loss and metrics of a micro-batch.
        count: ops of the model, which come first.
        growth_of: how each value depends on the samples.
        parts: number of micro-batches.
    """
    value = dict(small.outputs)[label]
    growth, subject = growth_of[value.name], "loss" if label == "loss" else f"metric {label}"
    if growth.kind in ("fixed", "linear") and growth.power == 0:
        return ""
    values = "losses" if label == "loss" else "values"
    averaged = f"but micro_batches is {parts}, whose {values} are averaged"
    if growth.kind == "linear" and growth.power == 1:
        return (
            f"{subject} is a sum over the samples {averaged}; divide it by the number of samples, or use "
            "micro_batches=1"
        )
    models = {op.name for op in small.ops[:count]}
    needed = prune(replace(small, outputs=((label, value),), updates=())).ops
    first = next((op for op in needed if any(growth_of[r.name] == OTHER for r in op.results)), None)
    if first is not None and first.name in models and first.operands:  # not where the ops are others
        return (
            f"{subject} depends on {first.kind} ({first.source}) in the model, which is not recognised as "
            f"computed from one sample alone, but micro_batches is {parts}, which divides the samples that "
            "it combines; unless it combines none, use micro_batches=1"
        )
    return (
        f"{subject} is not recognised as a mean over the samples {averaged}; unless it is one after all, "
        "take the mean of a number for each sample, or use micro_batches=1"
    )


def warn_unplaced_boundary(request: CompileRequest, serial: Graph) -> None:
    """Warn, on the process that prints, of a pipeline boundary that divides nothing.

    What has no mesh runs on the mesh of its neighbours. Where the mesh of the boundary is the only one of the
    program, this is what comes before the boundary too. Later programs of an engine have the layouts of the
    first one, for which the warning was given.
    """
    meshes = {attr.mesh for attr in serial.attrs.values()} | set(serial.placements.values())
    if not serial.unplaced_boundary or len(meshes) > 1 or request.layouts or not is_chief():
        return
    mesh = next(iter(meshes), "its mesh")
    warnings.warn(
        f"pipeline_boundary ({serial.unplaced_boundary}) begins a stage on {mesh} but nothing before it has "
        f"a mesh, so that all runs on {mesh} as one stage; place what comes before it with "
        f"dg.on(first_mesh), an annotation that names a mesh, or Strategy(mesh=first_mesh, batch_axis=...)",
        UserWarning,
        stacklevel=user_stack_level(),
    )


def warn_split_annotations(request: CompileRequest, serial: Graph, completed: Graph) -> None:
    """Warn, on the process that prints, of parameters that are annotated as whole but that ZeRO splits.

    ZeRO splits a tensor in addition to the axes of its annotation, which of a whole tensor are none. Where
    all parameters are annotated, as `dg.models.annotate` does, this is what they are annotated for; where
    others are not, the annotation may be meant as an exception. Later programs of an engine have the layouts
    of the first one, for which the warning was given.
    """
    annotations: dict[str, DistAttr | AxisAttr] = {**serial.attrs, **serial.axis_attrs}
    parameters = completed.sources("param")
    if request.layouts or all(op.name in annotations for op in parameters) or not is_chief():
        return
    whole = [op for op in parameters if op.name in annotations and not annotations[op.name].spec.axes]
    split = [
        (op, annotations[op.name].origin)
        for op in whole
        if completed.attrs[op.name].origin.where.startswith(ZERO_ORIGIN)
    ]
    if split:
        op, origin = split[0]
        others = f" and {len(split) - 1} more" if len(split) > 1 else ""
        warnings.warn(
            f"zero of Strategy is {request.training_spec.strategy.split} but {op.attrs['name']}{others} "
            f"({origin.where}) is annotated as whole: a rank stores a part of it, and gathers the rest for "
            f"each use; leave the annotation out, or use zero=2, which keeps parameters whole",
            UserWarning,
            stacklevel=user_stack_level(),
        )


def warn_conflicts(completed: Graph) -> None:
    """Warn, on the process that prints, where two annotations compete for an axis so that data is resharded.

    A single annotation whose layout reaches an op on two paths cannot be resolved by another annotation;
    `conflicts` reports it, but there is no warning.
    """
    if not completed.lost or not is_chief():
        return
    report = conflicts(completed, plan=None)
    costly = [conflict for conflict in report if conflict.nbytes and _between_annotations(conflict.lost)]
    if costly:
        count = f"{len(costly)} times annotations compete" if len(costly) > 1 else "annotations compete"
        warnings.warn(
            f"{count} for a mesh axis; most bytes move at {costly[0]}\n"
            f"engine.plan.conflicts() reports every conflict with the cheapest change of annotation",
            UserWarning,
            stacklevel=user_stack_level(),
        )


def _between_annotations(lost: Lost) -> bool:
    """Whether a layout preference lost its axis to another annotation."""
    return lost.reason == "taken" and lost.claimed != lost.held


def warn_redundant_ranks(build: Build, world: World, *, planned: bool) -> None:
    """Warn, on the process that prints, of ranks of an MPI job without a part in a training program, and of
    meshes over which nothing is split, so that their ranks compute the same.

    Args:
        build: the program.
        world: the ranks of the job.
        planned: whether a plan decides the meshes, which then have their reasons.
    """
    without = [rank for rank in range(world.size) if rank not in build.ranks]
    message = ""
    if without and len(world.local) < world.size:
        message = (
            f"MPI job has {world.size} ranks but training uses {len(build.ranks)} of them, without rank "
            f"{first_of(without)}; start fewer ranks, or train on a mesh of {world.size}"
        )
    elif not planned and (meshes := _unsplit_meshes(build.completed)):
        message = (
            f"no tensor is split over {meshes[0]}, so that each of its ranks computes the same; split the "
            "batch with batch_axis, annotate tensors, or take a mesh of one rank"
        )
    if message and world.is_chief:
        warnings.warn(message, UserWarning, stacklevel=user_stack_level())


def warn_other_blas(cluster: Cluster | None, world: World) -> None:
    """Warn, on the process that prints, if it multiplies matrices by other kernels than those with which the
    CPUs of the cluster were measured: forecasts are for the measured ones.

    Args:
        cluster: of the engine; None without one.
        world: the ranks of the job.
    """
    if cluster is None or not world.is_chief:
        return
    measured = {device.compute.blas for device in cluster.devices if device.type == "cpu"} - {""}
    if not measured:
        return
    from distgraph.runtime.execute.blas_kernels import blas_kernels  # noqa: PLC0415 - few programs need it

    here = blas_kernels()
    if here and here not in measured:
        names = " or ".join(sorted(measured))
        message = (
            f"matrix products are computed by {here}, but cluster {cluster.name} ({cluster.source}) was "
            f"measured with {names}, and forecasts are for that; start the program in the environment of "
            "the profile (variables such as OPENBLAS_CORETYPE choose kernels), or run distgraph profile again"
        )
        warnings.warn(message, UserWarning, stacklevel=user_stack_level())


def _unsplit_meshes(graph: Graph) -> list[ProcessMesh]:
    """Meshes of two ranks or more whose ranks are in no mesh over which something is split."""
    layouts = [(attr.mesh, attr.spec.axes) for attr in graph.attrs.values()]
    meshes = dict.fromkeys(mesh for mesh, _ in layouts)
    split = {rank for mesh in {mesh for mesh, axes in layouts if axes} for rank in mesh.members}
    split |= {rank for op in graph.ops if op.layout and op.layout.axes for rank in op.layout.mesh.members}
    return [mesh for mesh in meshes if mesh.size > 1 and split.isdisjoint(mesh.members)]
