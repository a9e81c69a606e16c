"""Remove what nothing needs.

In:   a serial graph.
Out:  the ops that outputs and updates depend on; inputs stay, so that a program takes the same batch.
Invariant: outputs, updates and annotations of what is left do not change.

    %a = exp(%x)
    %b = add(%x, %x)      ->      %b = add(%x, %x)
    return y=%b                   return y=%b
"""

from __future__ import annotations

from distgraph.ir.graph import Graph, Op
from distgraph.passes.pass_registry import register_pass


@register_pass("dead_code_elimination", stage="serial")
def prune(graph: Graph) -> Graph:
    """Remove ops that neither an output nor an update needs."""
    needed = set(graph.live_out) | {old for old, _ in graph.updates}
    left: list[Op] = []
    for op in reversed(graph.ops):
        if op.kind == "input" or any(value.name in needed for value in op.results):
            needed.update(value.name for value in op.operands)
            left.append(op)
    left.reverse()
    alive = {value.name for op in left for value in op.results}
    attrs = {name: attr for name, attr in graph.attrs.items() if name in alive}
    placements = {name: mesh for name, mesh in graph.placements.items() if name in alive}
    algorithms = {name: algorithm for name, algorithm in graph.algorithms.items() if name in alive}
    return graph.with_ops(left, attrs=attrs, placements=placements, algorithms=algorithms)
