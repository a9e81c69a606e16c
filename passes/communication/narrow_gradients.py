"""Send gradients in 16 bits where they are reduced, and compute with them in f32.

In:   a lowered graph.
Out:  the same program, in which the messages of all_reduces and reduce_scatters of f32 gradients carry bf16
      (attribute `wire`); operands and results stay in f32.
Invariant: layouts, order and types do not change. On the way each term of a sum over ranks is rounded to bf16
    once, the terms are added in f32, and the sum is rounded once: with u = 2^-8, the rounding error of bf16,
    a sum of terms x differs from the exact one by at most u (2 + u) times the sum of the |x|, apart from the
    rounding of f32. It changes numbers, so it is only run by request.

    %g = comm.all_reduce(%x) {axes=("dp",)}   ->   %g = comm.all_reduce(%x) {axes=("dp",), wire="bf16"}

bf16 has the range of f32, so nothing overflows and no scale is needed (Kalamkar et al., "A Study of BFLOAT16
for Deep Learning Training", 2019).
"""

from __future__ import annotations

from dataclasses import replace

from distgraph.errors import ShardingError
from distgraph.ir.collective_registry import WIRE
from distgraph.ir.graph import Graph, Op
from distgraph.passes.communication.bucket_gradients import reduces_sum, scatters_part
from distgraph.passes.pass_registry import register_pass

_NARROW, _WIDE = "bf16", "f32"


@register_pass("narrow_gradients", stage="lowered", after=("shard_gradients",))
def narrow_gradients(graph: Graph) -> Graph:
    """Send gradients in 16 bits."""
    return graph.with_ops(_narrowed(op) if _sends_gradient(graph, op) else op for op in graph.ops)


def check_narrowed(graph: Graph) -> None:
    """Check that a training program has a gradient that is sent in 16 bits. Raises ShardingError."""
    if graph.updates and not any(WIRE in op.attrs for op in graph.ops):
        raise ShardingError(
            f"gradient_precision of Strategy is {_NARROW!r} but no rank of @{graph.name} sends a gradient in "
            f"{_WIDE} to be added up with those of others; split the batch over ranks, or leave it out"
        )


def _sends_gradient(graph: Graph, op: Op) -> bool:
    if not (reduces_sum(graph, op) or scatters_part(graph, op)) or op.attrs.get("reduction") != "sum":
        return False
    return op.operands[0].dtype == _WIDE


def _narrowed(op: Op) -> Op:
    return replace(op, attrs={**op.attrs, WIRE: _NARROW})
