"""SUMMA: order of the ops, collectives with a root, and wrong input."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.programs.matrix_products import Product, product

from distgraph.errors import GraphError, ShardingError
from distgraph.ir.graph import Graph, Op
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.verifier import verify
from distgraph.passes.matmul_algorithms.distribute_matmuls import distribute_matmuls
from distgraph.runtime.program.build import build


def lowered(flow: str) -> Graph:
    return build(product(2, 3, flow, "summa").completed(pruned=False)).lowered


def test_panels_are_broadcast_before_the_product_that_hides_it() -> None:
    graph = lowered("OS")
    name = next(op.name for op in graph.ops if op.kind == "einsum").removesuffix(".sum0")
    order = [op.name.removeprefix(f"{name}.") for op in graph.ops if op.name.startswith(f"{name}.")]
    assert order[:9] == [
        *("a0", "a0.everywhere", "b0", "b0.everywhere"),
        *("a1", "a1.everywhere", "b1", "b1.everywhere", "sum0"),
    ]
    roots = {op.name: (op.attrs["axes"], op.attrs["root"]) for op in graph.ops if op.kind == "comm.broadcast"}
    for index in range(6):  # lcm(2, 3) panels
        assert roots[f"{name}.a{index}.everywhere"] == (("cols",), index // 2)
        assert roots[f"{name}.b{index}.everywhere"] == (("rows",), index // 3)


@pytest.mark.parametrize(("flow", "axis"), [("LS", "cols"), ("RS", "rows")])
def test_panels_of_the_result_are_reduced_to_the_ranks_that_store_them(flow: str, axis: str) -> None:
    graph = lowered(flow)
    reduces = [op for op in graph.ops if op.kind == "comm.reduce" and op.attrs["axes"] == (axis,)]
    assert len(reduces) >= 6
    for op in reduces:
        (reader,) = graph.users[op.name]
        assert reader.kind in ("block_insert", "block_expand")
        parts = graph.attrs[op.name].mesh.axis_size(axis)
        assert op.attrs["root"] == reader.attrs["index"] * parts // 6


def test_another_root_is_refused() -> None:
    graph = lowered("LS")
    for kind in ("comm.broadcast", "comm.reduce"):
        op = next(op for op in graph.ops if op.kind == kind)
        parts = graph.attrs[op.name].mesh.axis_size(op.attrs["axes"][0])
        attrs = {**op.attrs, "root": (op.attrs["root"] + 1) % parts}
        with pytest.raises(GraphError, match=rf"root of %{op.name} is .* but that of %"):
            verify(swapped(graph, replace(op, attrs=attrs)), "lowered")


def test_what_one_rank_has_is_no_output() -> None:
    graph = lowered("LS")
    op = next(op for op in graph.ops if op.kind == "comm.reduce")
    with pytest.raises(GraphError, match="is the result of a reduce, on one rank"):
        verify(replace(graph, outputs=(("y", op.result),)), "lowered")


def swapped(graph: Graph, op: Op) -> Graph:
    return graph.with_ops([op if other.name == op.name else other for other in graph.ops], attrs=graph.attrs)


def test_sizes_that_the_panels_do_not_divide_are_refused() -> None:
    case = Product(2, 3, "OS", MatmulAlgorithm("summa"), 12, 30, 12)
    distribute_matmuls(case.completed())
    case = Product(2, 4, "OS", MatmulAlgorithm("summa"), 8, 10, 8)
    message = r"summa on mesh.* has 4 panels but dim k .* length 10; use a multiple of 4 such as 8 or 12"
    with pytest.raises(ShardingError, match=message):
        distribute_matmuls(case.completed())
