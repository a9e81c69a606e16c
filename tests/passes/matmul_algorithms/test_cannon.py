"""Cannon's algorithm: order of the ops, and wrong input."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.programs.matrix_products import Product, product

import distgraph as dg
from distgraph import ops
from distgraph.errors import GraphError, ShardingError
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.verifier import verify
from distgraph.passes.complete import complete
from distgraph.passes.matmul_algorithms.distribute_matmuls import distribute_matmuls
from distgraph.runtime.program.build import build


def test_blocks_leave_for_the_neighbours_before_they_are_multiplied() -> None:
    lowered = build(product(3, 3, "OS", "cannon").completed()).lowered
    name = next(op.name for op in lowered.ops if op.kind == "skewed_einsum").removesuffix(".sum0")
    order = [op.name.removeprefix(f"{name}.") for op in lowered.ops if op.name.startswith(name)]
    assert order == ["a0", "b0", "a1", "b1", "sum0", "a2", "b2", "sum1", name]
    assert {op.kind for op in lowered.ops if op.kind.startswith("comm.")} == {"comm.transfer"}
    first, second = (lowered.attrs[f"{name}.{value}"].mesh.ranks.tolist() for value in ("a0", "b0"))
    assert first == [[0, 1, 2], [5, 3, 4], [7, 8, 6]]  # rank 4 = (1, 1) has block (1, 2)
    assert second == [[0, 7, 5], [3, 1, 8], [6, 4, 2]]  # rank 4 has block (2, 1)


def test_the_result_moves_while_a_block_is_multiplied() -> None:
    lowered = build(product(3, 3, "LS", "cannon").completed()).lowered
    name = next(op.name for op in lowered.ops if op.kind == "skewed_einsum").removesuffix(".product2")
    order = [op.name.removeprefix(f"{name}.") for op in lowered.ops if op.name.startswith(name)]
    assert order == [
        *("b2", "b1", "product2"),
        *("b0", "arriving1", "product1", "sum1"),
        *("arriving0", "product0", "sum0", name),
    ]


def test_blocks_that_do_not_belong_together_are_refused() -> None:
    lowered = build(product(3, 3, "OS", "cannon").completed(pruned=False)).lowered
    verify(lowered, "lowered")
    op = next(op for op in lowered.ops if op.kind == "skewed_einsum_add")
    shifted = replace(op, attrs={**op.attrs, "shift": 0})
    ops = [shifted if each is op else each for each in lowered.ops]
    with pytest.raises(
        GraphError, match=r"operand %.*\.a1 is stored as .* but read as .*; run the pass reshard"
    ):
        verify(lowered.with_ops(ops, attrs=lowered.attrs), "lowered")


@pytest.mark.parametrize(("rows", "cols"), [(2, 4), (4, 2), (1, 4), (4, 1)])
def test_a_mesh_that_is_not_square_is_refused(rows: int, cols: int) -> None:
    case = product(rows, cols, "OS", "cannon")
    message = rf"cannon needs a square mesh of two axes but mesh.* is {rows} x {cols}; use 2 x 2"
    with pytest.raises(ShardingError, match=message):
        distribute_matmuls(case.completed())


def test_one_axis_is_refused() -> None:
    mesh = dg.ProcessMesh.grid(tp=4)

    def multiply(x: dg.Tensor, w: dg.Tensor) -> dg.Tensor:
        specs = [["tp", None], [None, "tp"]]
        return dg.shard_op(ops.matmul, mesh, in_specs=specs, out_specs=[None, "tp"], algorithm="cannon")(x, w)

    graph = dg.trace(multiply, ((8, 8), "f64"), ((8, 8), "f64"), names=("x", "w"))
    with pytest.raises(
        ShardingError, match=r"cannon needs a square mesh of two axes but mesh\(tp=4\) is 4; use"
    ):
        distribute_matmuls(complete(graph, mesh))


def test_sizes_that_the_mesh_does_not_divide_are_refused() -> None:
    case = Product(3, 3, "OS", MatmulAlgorithm("cannon"), 9, 10, 12)
    message = r"needs dims that are multiples of 3 but dim k of mk,kn->mn has length 10; use 9 or 12"
    with pytest.raises(ShardingError, match=message):
        distribute_matmuls(case.completed())
