"""Passes on serial graphs: gradients, ops that nothing needs, 16-bit types."""

from distgraph.passes.serial import dead_code_elimination, mixed_precision

__all__ = ["dead_code_elimination", "mixed_precision"]
