"""Compute contractions by the distributed algorithms that the graph names.

In:   a completed graph with `Graph.algorithms`.
Out:  a completed graph in which these contractions, and the backward ones that belong to them, are explicit
      ops: slices, changes of layout, partial products, sums.
Invariant: same values in the same layouts; contractions without an algorithm, or on a mesh of one rank, stay
      as they are. A gradient that is only accumulated over micro-batches is summed over the axes of data
      parallelism behind the accumulation, once a step.

    algorithm %c "meshslice(slices=2, block=1)"    ->    see `meshslice.py`
"""

from __future__ import annotations

from dataclasses import replace

from distgraph.errors import ShardingError
from distgraph.ir.graph import Graph, Op
from distgraph.ir.matmul_algorithm import CONTRACTIONS, MatmulAlgorithm
from distgraph.ir.op_registry import WIDE, operand_layout
from distgraph.passes.matmul_algorithms.product import Partial, Product, product_of
from distgraph.passes.matmul_algorithms.registry import find_matmul_algorithm
from distgraph.passes.pass_registry import register_pass


@register_pass("distribute_matmuls", requires="completed", stage="completed")
def distribute_matmuls(graph: Graph) -> Graph:
    """Compute matrix products by annotated algorithms.

    Raises:
        ShardingError: an algorithm does not exist, has an option of another one, or does not fit the layouts,
            sizes or precision of its contraction.
    """
    chosen = {name for name, each in graph.algorithms.items() if set(each.kinds) & set(CONTRACTIONS)}
    if not chosen:
        return graph
    ops: list[Op] = []
    attrs = dict(graph.attrs)
    partial: dict[str, Partial] = {}
    for op in graph.ops:
        if op.kind == "accumulate" and op.operands[0].name in partial:
            ops.append(_accumulated(op, partial[op.operands[0].name]))
            continue
        algorithm = algorithm_of(graph, op)
        rewrite = None if algorithm is None else find_matmul_algorithm(algorithm)
        if algorithm is None or rewrite is None or graph.attrs[op.name].mesh.size == 1:
            ops.append(op)
            continue
        if op.attrs.get(WIDE):
            raise ShardingError(
                f"{op} adds 16-bit products in f32 but is computed by {algorithm.name}, which adds partial "
                "products in their type; leave precision of Strategy or the algorithm out"
            )
        product = product_of(graph, op, algorithm)
        rewrite(product, algorithm)
        reduced = not _is_only_accumulated(graph, product)
        product.join(reduced=reduced)
        if not reduced:
            partial[op.name] = product.partial()
        ops += product.ops
        attrs |= {name: attr for name, attr in product.attrs.items() if name != op.name or not reduced}
    others = {name: each for name, each in graph.algorithms.items() if name not in chosen}
    return graph.with_ops(ops, attrs=attrs, algorithms=others)


def algorithm_of(graph: Graph, op: Op) -> MatmulAlgorithm | None:
    """The algorithm of a contraction: its own, or that of the forward op it belongs to; None without one."""
    if op.kind not in CONTRACTIONS:
        return None
    return graph.algorithms.get(op.name) or graph.algorithms.get(op.link)


def _is_only_accumulated(graph: Graph, product: Product) -> bool:
    """Whether only accumulations read a product that is to be summed over data axes, where it is stored."""
    stored, readers = product.stored, graph.users[product.whole.name]
    return bool(product.partial() and readers) and all(
        reader.kind == "accumulate"
        and reader.layout is not None
        and reader.layout.mesh == stored.mesh
        and operand_layout(reader, 0, reader.layout) == stored.spec
        for reader in readers
    )


def _accumulated(op: Op, partial: Partial) -> Op:
    """An accumulation of partial sums."""
    assert op.layout is not None
    added = tuple((axis, 0) for axis, _ in partial)
    return replace(op, layout=replace(op.layout, partial=tuple(sorted((*op.layout.partial, *added)))))
