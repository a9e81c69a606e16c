"""Warnings for training programs: of annotations that compete for an axis, and of ranks that add nothing."""

from __future__ import annotations

import warnings

from distgraph.ir.graph import Graph
from distgraph.passes.analysis.conflicts import conflicts
from distgraph.passes.propagate_shardings import Lost
from distgraph.plan.strategy import Strategy
from distgraph.runtime.execute.process_group import World, is_chief
from distgraph.runtime.program.build import Build
from distgraph.tracing.tracer import user_stack_level


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


def warn_redundant_ranks(build: Build, world: World, strategy: Strategy) -> None:
    """Warn, on the process that prints, of ranks of an MPI job without a part in a training program, and of a
    strategy's mesh over which nothing is split, so that its ranks compute the same.

    Args:
        build: the program.
        world: the ranks of the job.
        strategy: of the engine; one with a plan has no mesh.
    """
    without = [rank for rank in range(world.size) if rank not in build.ranks]
    message = ""
    if without and len(world.local) < world.size:
        shown = ", ".join(map(str, without[:4])) + (", ..." if len(without) > 4 else "")
        message = (
            f"MPI job has {world.size} ranks but training uses {len(build.ranks)} of them and rank {shown} "
            f"computes nothing; start fewer ranks, or train on a mesh of {world.size}"
        )
    elif _repeats(build, strategy):
        message = (
            f"mesh of Strategy is {strategy.mesh} but no tensor is split over it, so that every rank "
            "computes the whole step; give batch_axis to split the batch, annotate tensors, or leave mesh out"
        )
    if message and world.is_chief:
        warnings.warn(message, UserWarning, stacklevel=user_stack_level())


def _repeats(build: Build, strategy: Strategy) -> bool:
    """Whether a program on the mesh of its strategy, of two ranks or more, has no tensor that is split."""
    mesh, attrs = strategy.mesh, build.completed.attrs.values()
    if mesh is None or mesh.size == 1:
        return False
    return all(attr.mesh == mesh and not attr.spec.axes for attr in attrs)
