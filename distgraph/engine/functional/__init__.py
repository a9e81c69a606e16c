"""Training steps as functions, and `eager`, which computes while it traces (docs/models/parallelize.md)."""

from distgraph.engine.functional.eager_trace import eager
from distgraph.engine.functional.gradients import grad, mark_pipeline_boundary, value_and_grad
from distgraph.engine.functional.parallelized_step import ParallelizedStep, parallelize
from distgraph.tracing.pytrees import tree_map

__all__ = [
    "ParallelizedStep", "eager", "grad", "mark_pipeline_boundary", "parallelize", "tree_map",
    "value_and_grad",
]  # fmt: skip
