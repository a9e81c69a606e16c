"""Ops that see a dim as blocks: the passes of `distgraph/passes/matmul_algorithms/` make them."""

from distgraph.ops.blocks import attention_blocks, ring, skewed, slices

__all__ = ["attention_blocks", "ring", "skewed", "slices"]
