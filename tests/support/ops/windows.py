"""Ops that read neighbouring positions of a split dim."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.tracing.tracer import Trace


def windows(draw: Any, size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """A window for every part of a dim, which may wrap around and may be empty."""
    found = []
    for _ in range(parts):
        start = draw(st.integers(-size, size))
        found.append((start, start + draw(st.integers(0, size))))
    return tuple(found)


def pinned(trace: Trace, kind: str, name: str, array: Any, mesh: ProcessMesh, spec: str) -> Any:
    tensor = trace.source(kind, name, array.shape, "f64")
    trace.annotate(tensor.value, DistAttr(mesh, ShardSpec.parse(spec), Origin("user", name)))
    return tensor
