"""Distributed algorithms for matrix products on meshes of one and two axes, and for attention, as rewrites of
the graph."""

from distgraph.passes.matmul_algorithms import (
    cannon,
    distribute_attention,
    distribute_matmuls,
    meshslice,
    summa,
    wang,
)
from distgraph.passes.matmul_algorithms.registry import MATMUL_ALGORITHMS, register_matmul_algorithm

__all__ = [
    "MATMUL_ALGORITHMS",
    "cannon",
    "distribute_attention",
    "distribute_matmuls",
    "meshslice",
    "register_matmul_algorithm",
    "summa",
    "wang",
]
