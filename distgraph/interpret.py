"""The serial interpreter under its short name; it lives with the ops, for a loop runs graphs of its own."""

from __future__ import annotations

from distgraph.ops.interpret import interpret

__all__ = ["interpret"]
