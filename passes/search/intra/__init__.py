"""The solver of the intra-operator problem; `solve` is its one entry."""

from distgraph.passes.search.intra.solve import solve

__all__ = ["solve"]
