"""Replace fused ops by their decomposition in simpler ops.

In:   a graph and the names of ops whose declaration has a `decompose`.
Out:  the same program with those ops expanded; results keep their names, new values are named after the op.
Invariant: same numbers up to rounding; roles, scopes, sources and links stay.

    %y = softmax(%x) {axis=1}      ->      %y.0 = reduce_max(%x) {dims=(1,)} ...  %y = divide(%y.3, %y.5)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from distgraph.errors import GraphError
from distgraph.graph import Graph, Op
from distgraph.ops.registry import lookup
from distgraph.tensor import Tensor
from distgraph.tracing import Trace


def decompose(graph: Graph, names: Iterable[str]) -> Graph:
    """Expand the named ops. Raises GraphError for an op that has no decomposition."""
    wanted = set(names)
    ops: list[Op] = []
    for op in graph.ops:
        ops.extend(_expand(op) if op.name in wanted else [op])
    return graph.with_ops(ops)


def _expand(op: Op) -> list[Op]:
    function = lookup(op.kind).decompose
    if function is None:
        raise GraphError(f"{op} has no decomposition; declare one with define(..., decompose=...)")
    trace = Trace(op.name, prefix=f"{op.name}.")
    with trace.activate(), trace.within(role=op.role), trace.on_behalf_of(op.link, op.scope, op.source):
        returned = function(op.attrs, *(Tensor(value, trace) for value in op.operands))
    tensors = returned if isinstance(returned, (tuple, list)) else (returned,)
    final = {t.value.name: wanted for t, wanted in zip(tensors, op.results, strict=True)}
    return [
        replace(
            made,
            operands=tuple(final.get(v.name, v) for v in made.operands),
            results=tuple(final.get(v.name, v) for v in made.results),
        )
        for made in trace.ops
    ]
