"""Loops as ops: what programs call, and the ops at the boundary of a body that completion lays out."""

from distgraph.ops.control import loop_boundary
from distgraph.ops.control.structured_loops import scan, while_loop

__all__ = ["loop_boundary", "scan", "while_loop"]
