"""distgraph: a serial model, a few annotations and a cluster become a distributed training program.

The front door loads lazily (PEP 562), so that importing the graph never imports MPI, a solver or a GPU
library.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0.dev0"

_HOMES = {
    "DistGraphError": "distgraph.errors",
    "ProcessMesh": "distgraph.mesh",
    "ShardSpec": "distgraph.spec",
    "DistAttr": "distgraph.spec",
    "Graph": "distgraph.graph",
    "Tensor": "distgraph.tensor",
    "trace": "distgraph.tracing",
    "shard_tensor": "distgraph.annotate",
    "shard_op": "distgraph.annotate",
    "reshard": "distgraph.annotate",
    "on": "distgraph.annotate",
    "recompute": "distgraph.annotate",
    "pipeline_boundary": "distgraph.annotate",
    "complete": "distgraph.passes.complete",
    "Cluster": "distgraph.resources",
    "load_cluster": "distgraph.resources",
    "Plan": "distgraph.plan",
    "Engine": "distgraph.engine",
    "Strategy": "distgraph.strategy",
}
_MODULES = (
    "nn", "models", "ops", "optim", "resources", "passes", "runtime", "callbacks", "data", "errors", "numpy",
    "schedules",
)  # fmt: skip

__all__ = [*_HOMES, *_MODULES, "__version__"]  # noqa: PLE0604 (names of the two tables)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"distgraph.{name}")
    raise AttributeError(f"module 'distgraph' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
