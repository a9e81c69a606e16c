"""Compute attention by the distributed algorithms that the graph names.

In:   a completed graph with `Graph.algorithms`.
Out:  a completed graph in which these attentions and their gradients are explicit ops.
Invariant: same values in the same layouts; attention without an algorithm, or on a mesh of one rank, stays as
      it is.

    algorithm %o "ring"    ->    see `ring_attention.py`
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.matmul_algorithm import ATTENTION
from distgraph.passes.matmul_algorithms.ring_attention import RingAttention, check_ring
from distgraph.passes.pass_registry import register_pass


@register_pass("distribute_attention", requires="completed", stage="completed")
def distribute_attention(graph: Graph) -> Graph:
    """Compute attention by annotated algorithms.

    Raises:
        ShardingError: an algorithm does not fit the layout or the sizes of its attention.
    """
    chosen = {name: each for name, each in graph.algorithms.items() if set(each.kinds) & set(ATTENTION)}
    if not chosen:
        return graph
    rewritten = [op for op in graph.ops if _is_chosen(graph, op, chosen)]
    steps = {op.name for op in (*rewritten, *_gradients(graph, rewritten))}
    ops: list[Op] = []
    attrs = dict(graph.attrs)
    wide: dict[str, Value] = {}  # the log-sum-exp of a rewritten attention -> that of its last step
    for op in graph.ops:
        if op.name not in steps:
            ops.append(op)
            continue
        ring = RingAttention(op, attrs)
        if op.kind in ATTENTION:
            check_ring(op, attrs)
            lse = op.results[1].name
            wide[lse] = ring.attend(leave_lse=any(user.name not in steps for user in graph.users[lse]))
        else:
            ring.differentiate(wide[op.operands[-1].name])
        ops += ring.ops
        attrs |= ring.attrs
    remaining = {name: each for name, each in graph.algorithms.items() if name not in chosen}
    return graph.with_ops(ops, attrs=attrs, algorithms=remaining)


def _is_chosen(graph: Graph, op: Op, chosen: Collection[str]) -> bool:
    """Whether an algorithm computes an attention: one of its own, or that of the op that it recomputes."""
    return (
        op.kind in ATTENTION
        and (op.name in chosen or op.link in chosen)
        and graph.attrs[op.name].mesh.size > 1
    )


def _gradients(graph: Graph, attentions: Sequence[Op]) -> list[Op]:
    """The gradients of some attentions that are computed with their queries split, too."""
    readers = (user for op in attentions for user in graph.users[op.results[1].name])
    return [
        op
        for op in readers
        if op.kind == "attention_grad" and op.layout is not None and op.layout.parts("s") > 1
    ]
