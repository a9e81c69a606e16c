"""The solver of the intra-operator problem; `solve` is its one entry."""

from distgraph.passes.search.solver.solve import solve

__all__ = ["solve"]
