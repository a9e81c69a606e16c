"""Equality of graphs."""

from __future__ import annotations

from distgraph.ir.graph import Graph
from distgraph.ir.printer import print_graph


def same_graph(left: Graph, right: Graph) -> bool:
    """True when two graphs print alike, origins included: equality that works for arrays and NaN too."""
    return print_graph(left) == print_graph(right)
