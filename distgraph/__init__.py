"""distgraph: a serial model, a few annotations and a cluster become a distributed training program.

The front door loads lazily (PEP 562), so that importing the graph never imports MPI, a solver or a GPU
library.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # that of `typing`: its import is most of the time until Ctrl-C is handled
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0.dev0"

_HOMES = {
    "DistGraphError": "distgraph.errors",
    "ProcessMesh": "distgraph.ir.mesh",
    "ShardSpec": "distgraph.ir.sharding_spec",
    "DistAttr": "distgraph.ir.sharding_spec",
    "Graph": "distgraph.ir.graph",
    "Tensor": "distgraph.tracing.tensor",
    "trace": "distgraph.array_api.trace",
    "shard_tensor": "distgraph.tracing.annotations",
    "shard_op": "distgraph.tracing.annotations",
    "reshard": "distgraph.tracing.annotations",
    "on": "distgraph.tracing.annotations",
    "recompute": "distgraph.tracing.annotations",
    "task": "distgraph.tracing.user_tasks",
    "pipeline_boundary": "distgraph.tracing.annotations",
    "complete": "distgraph.passes.complete",
    "tune_mesh2d": "distgraph.passes.matmul_algorithms.tune_mesh2d",
    "Cluster": "distgraph.resources",
    "load_cluster": "distgraph.resources",
    "Plan": "distgraph.plan.plan",
    "MixedPrecision": "distgraph.plan.precision",
    "Engine": "distgraph.engine",
    "Strategy": "distgraph.plan.strategy",
    "parallelize": "distgraph.engine.functional",
    "eager": "distgraph.engine.functional",
    "grad": "distgraph.engine.functional",
    "value_and_grad": "distgraph.engine.functional",
    "mark_pipeline_boundary": "distgraph.engine.functional",
    "tree_map": "distgraph.engine.functional",
}
_MODULES = {
    "errors": "distgraph.errors",
    "frontends": "distgraph.frontends",
    "models": "distgraph.models",
    "nn": "distgraph.nn",
    "ops": "distgraph.ops",
    "optim": "distgraph.optim",
    "passes": "distgraph.passes",
    "resources": "distgraph.resources",
    "runtime": "distgraph.runtime",
    "callbacks": "distgraph.engine.callbacks",
    "data": "distgraph.engine.data",
    "numpy": "distgraph.array_api.namespace",
    "schedules": "distgraph.optim.lr_schedules",
}
"""Public name of a module -> where it is."""

__all__ = [*_HOMES, *_MODULES, "__version__"]  # noqa: PLE0604 (names of the two tables)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(_MODULES[name])
    raise AttributeError(f"module 'distgraph' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
