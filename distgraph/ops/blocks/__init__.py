"""Ops that see a dim as blocks: the passes of `distgraph/passes/matmul_algorithms/` make them."""

from distgraph.ops.blocks import ring, skewed, slices

__all__ = ["ring", "skewed", "slices"]
