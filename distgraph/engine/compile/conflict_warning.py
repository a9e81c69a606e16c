"""A warning for annotations of a training program that compete for a mesh axis."""

from __future__ import annotations

import warnings

from distgraph.ir.graph import Graph
from distgraph.passes.analysis.conflicts import conflicts
from distgraph.passes.propagate_shardings import Lost
from distgraph.runtime.execute.process_group import is_chief
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
