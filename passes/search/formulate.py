"""From a train graph and a mesh to the intra-operator problem, and back from a choice to layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distgraph.graph import Graph
from distgraph.mesh import ProcessMesh
from distgraph.passes.search.layers import Layering
from distgraph.passes.search.layouts import Layouts, Profile
from distgraph.passes.search.problem import Problem

__all__ = ["Formulation", "Layouts", "Profile", "formulate"]


@dataclass(frozen=True)
class Formulation:
    """The problem of one mesh, and what its choices mean.

    Attributes:
        problem: what `intra.solve` takes; costs in seconds of a step (and memory_price per byte).
        graph, mesh: what was formulated.
    """

    problem: Problem
    graph: Graph
    mesh: ProcessMesh

    def decode(self, choice: Sequence[int]) -> Layouts:
        """Layouts of every op and value."""
        raise NotImplementedError

    def profile(self, choice: Sequence[int]) -> Profile:
        """Costs by layer."""
        raise NotImplementedError


def formulate(
    graph: Graph,
    mesh: ProcessMesh,
    prices: object,
    layering: Layering | None = None,
    *,
    memory_limit: float | None = None,
    memory_price: float = 0.0,
    live_micro_batches: int = 1,
) -> Formulation:
    """Formulate the search for layouts on one mesh."""
    raise NotImplementedError


def terms(formulation: Formulation, choice: Sequence[int]) -> Mapping[str, float]:
    """Cost terms of a choice."""
    raise NotImplementedError
