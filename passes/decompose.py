"""Replace fused ops by their decomposition in simpler ops.

In:   a graph and the names of ops whose declaration has a `decompose`.
Out:  the same program with those ops expanded; results keep their names, new values are named after the op.
Invariant: same numbers up to rounding; roles, scopes, sources and links stay. The parts of an op that has a
      mesh of its own are computed there, wherever its operands are stored.

    %y = softmax(%x) {axis=1}      ->      %y.0 = reduce_max(%x) {dims=(1,)} ...  %y = divide(%y.3, %y.5)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from distgraph.errors import GraphError
from distgraph.ir.graph import SOURCES, Graph, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import lookup
from distgraph.passes.pass_registry import PassContext, register_pass
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace


def decompose(graph: Graph, names: Iterable[str], meshes: Mapping[str, ProcessMesh] | None = None) -> Graph:
    """Expand the named ops, on `meshes`; for ops without an entry the placements of the graph count.

    Raises:
        GraphError: an op has no decomposition.
    """
    chosen, homes = set(names), {**graph.placements, **(meshes or {})}
    placements = dict(graph.placements)
    ops: list[Op] = []
    for op in graph.ops:
        if op.name not in chosen:
            ops.append(op)
            continue
        parts = expand(op)
        ops.extend(parts)
        if op.name in homes:
            placements |= {part.name: homes[op.name] for part in parts if part.kind not in SOURCES}
    return graph.with_ops(ops, placements=placements)


def expand(op: Op) -> list[Op]:
    """The simpler ops that one op is replaced by.

    Raises:
        GraphError: it has no decomposition.
    """
    function = lookup(op.kind).decompose
    if function is None:
        raise GraphError(f"{op} has no decomposition; declare one with define(..., decompose=...)")
    trace = Trace(op.name, prefix=f"{op.name}.")
    with (
        trace.activate(),
        trace.within(role=op.role),
        trace.on_behalf_of(op.link, op.scope, op.source, op.task),
    ):
        returned = function(op.attrs, *(Tensor(value, trace) for value in op.operands))
    tensors = returned if isinstance(returned, (tuple, list)) else (returned,)
    final = {t.value.name: result for t, result in zip(tensors, op.results, strict=True)}
    return [
        replace(
            made,
            operands=tuple(final.get(v.name, v) for v in made.operands),
            results=tuple(final.get(v.name, v) for v in made.results),
        )
        for made in trace.ops
    ]


@register_pass("decompose", stage="serial", after=("dead_code_elimination",))
def _run(graph: Graph, _context: PassContext) -> Graph:
    """Replace every fused op by simpler ops."""
    return decompose(graph, [op.name for op in graph.ops if lookup(op.kind).decompose is not None])
