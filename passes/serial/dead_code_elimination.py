"""Remove what nothing needs.

In:   a serial graph.
Out:  the ops that outputs and updates depend on; inputs stay, so that a program takes the same batch.
Invariant: outputs, updates and annotations of what is left do not change.

    %a = exp(%x)
    %b = add(%x, %x)      ->      %b = add(%x, %x)
    return y=%b                   return y=%b
"""

from __future__ import annotations

from dataclasses import replace

from distgraph.ir.graph import Graph, Op
from distgraph.ir.loops import STACKED, SUMMED, Loop, with_bodies
from distgraph.ir.op_registry import lookup
from distgraph.passes.pass_registry import register_pass


@register_pass("dead_code_elimination", stage="serial")
def prune(graph: Graph) -> Graph:
    """Remove ops that neither an output nor an update needs."""
    needed = set(graph.live_out) | {old for old, _ in graph.updates}
    left: list[Op] = []
    for op in reversed(graph.ops):
        if op.kind == "input" or any(value.name in needed for value in op.results):
            needed.update(value.name for value in op.operands)
            left.append(_pruned_loop(op, needed) if lookup(op.kind).bodies else op)
    left.reverse()
    alive = {value.name for op in left for value in op.results}
    attrs = {name: attr for name, attr in graph.attrs.items() if name in alive}
    placements = {name: mesh for name, mesh in graph.placements.items() if name in alive}
    algorithms = {name: algorithm for name, algorithm in graph.algorithms.items() if name in alive}
    return graph.with_ops(left, attrs=attrs, placements=placements, algorithms=algorithms)


def _pruned_loop(op: Op, needed: set[str]) -> Op:
    """A loop that stacks only what is read of its turns, without needless ops in its bodies.

    Its first result stays, because the op is named after it.
    """
    loop = Loop(op)
    count = loop.carried + loop.sums
    used = [n for n, value in enumerate(op.results) if n < max(1, count) or value.name in needed]
    if len(used) < len(op.results):
        stacked = [loop.stacked[n - count] for n in used if n >= count]
        outputs = [(f"{STACKED}{n}", value) for n, value in enumerate(stacked)]
        sums = [(label, value) for label, value in loop.body.outputs if label.startswith(SUMMED)]
        body = replace(loop.body, outputs=(*outputs, *sums))
        op = replace(op, attrs={**op.attrs, "body": body}, results=tuple(op.results[n] for n in used))
    return with_bodies(op, prune)
