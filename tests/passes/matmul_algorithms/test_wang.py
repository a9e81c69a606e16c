"""Wang's algorithm: order of the ops, meshes of one axis, and wrong input."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.programs.matrix_products import FLOWS, Product, product
from support.programs.partitioned import run_partitioned

import distgraph as dg
from distgraph import ops
from distgraph.errors import ShardingError
from distgraph.ir.graph import Op
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.parser import parse_graph
from distgraph.passes.analysis.op_work import work_of
from distgraph.passes.complete import complete
from distgraph.passes.matmul_algorithms.distribute_matmuls import distribute_matmuls
from distgraph.runtime.program.build import build


def test_a_block_leaves_for_the_neighbour_before_it_is_multiplied() -> None:
    """No product reads a copy: it reads what arrived, on the ranks in another order."""
    built = build(product(2, 4, "OS", "wang").completed())
    lowered = built.lowered
    name = next(op.name for op in lowered.ops if op.kind == "ring_einsum").removesuffix(".product0")
    order = [op.name.removeprefix(f"{name}.") for op in lowered.ops if op.name.startswith(name)]
    assert order == ["b.gathered", "a1", "product0", "a2", "product1", "a3", "product2", name]
    tasks = {task.name: [op.op.name for op in task.ops] for task in built.program(0).tasks}
    forward = [each.removeprefix(f"{name}.") for each in tasks["forward.s0"] if each.startswith(name)]
    assert forward == [each for each in order if each != "b.gathered"]  # which is gathered once a step
    kinds = [op.kind for op in lowered.ops]
    assert kinds.count("comm.transfer") == 3 * (4 - 1)
    assert "comm.halo" not in kinds


def test_blocks_of_a_parameter_move_under_the_products_too() -> None:
    """Not all of them before the step, as a parameter that is gathered once."""
    case = replace(product(2, 4, "OS", "wang"), algorithm=MatmulAlgorithm("wang", ring="rows"))
    program = build(case.completed()).program(0)
    moved = {task.name for task in program.tasks for local in task.ops if local.op.kind == "comm.transfer"}
    assert moved == {"forward.s0", "backward.s0"}


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("ring", ["rows", "cols"])
def test_a_partial_product_reads_one_block_of_what_was_gathered(ring: str, flow: str) -> None:
    """Bytes that the forecast counts: all steps read both operands once, but one that stays in every step."""
    case = replace(product(2, 4, flow, "wang"), algorithm=MatmulAlgorithm("wang", ring=ring))
    parts, program = {"rows": 2, "cols": 4}[ring], build(case.completed()).program(0)
    forward = next(task for task in program.tasks if task.name == "forward.s0")
    moved = 0
    for local in (local for local in forward.ops if local.op.kind.startswith("ring_einsum")):
        operands, results = (
            tuple(replace(v, shape=program.types[v.name][0]) for v in values)
            for values in (local.op.operands, local.op.results)
        )
        op = Op(local.op.kind, operands, results, local.attrs)
        moved += int(work_of(op, [v.nbytes for v in operands]).nbytes)
    split = {"OS": (2, 1, 4), "LS": (2, 4, 1), "RS": (1, 2, 4)}[flow]  # that which is cut is whole
    m, k, n = (length // count for length, count in zip((case.m, case.k, case.n), split, strict=True))
    a, b, c = 8 * m * k, 8 * k * n, 8 * m * n
    assert moved == {
        "OS": a + b + (2 * parts - 1) * c, "LS": parts * a + b + c, "RS": a + parts * b + c
    }[flow]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "weight", "last"),
    [
        (["tp", None], [None, "tp"], [None, "tp"]),
        ([None, "tp"], ["tp", None], ["tp", None]),
        ([None, "tp"], ["tp", None], [None, "tp"]),
    ],
)
def test_one_axis(first: list[str | None], weight: list[str | None], last: list[str | None]) -> None:
    mesh = dg.ProcessMesh.grid(tp=3)
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(9, 12)), rng.normal(size=(12, 6))

    def multiply(x: dg.Tensor, w: dg.Tensor) -> dg.Tensor:
        function = dg.shard_op(ops.matmul, mesh, in_specs=[first, weight], out_specs=last, algorithm="wang")
        return function(x, w)

    graph = dg.trace(multiply, ((9, 12), "f64"), ((12, 6), "f64"), names=("x", "w"))
    found, _, _ = run_partitioned(complete(graph, mesh), [{"x": x, "w": w}], {})
    ((value,),) = found.values()
    np.testing.assert_allclose(value, x @ w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("ring", ["rows", "cols"])
def test_either_axis_may_be_the_ring(ring: str, flow: str) -> None:
    """Named in shard_op, it is that of the product and of both gradients."""
    case = replace(product(2, 4, flow, "wang"), algorithm=MatmulAlgorithm("wang", ring=ring))
    feeds, params = case.arrays()
    graph = case.completed()
    assert parse_graph(str(graph)) == graph
    found, _, built = run_partitioned(graph, [feeds], params)
    for name, expected in case.expected().items():
        np.testing.assert_allclose(found[name][0], expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    steps = {"rows": 2, "cols": 4}[ring] - 1
    assert [op.kind for op in built.lowered.ops].count("comm.transfer") == 3 * steps


def test_a_ring_along_an_axis_without_movement_is_refused() -> None:
    case = product(2, 4, "OS", "wang")
    graph = case.completed()
    graph = replace(graph, algorithms=dict.fromkeys(graph.algorithms, MatmulAlgorithm("wang", ring="tp")))
    with pytest.raises(ShardingError, match=r"a ring along tp but matrices move along cols, rows; use one"):
        distribute_matmuls(graph)


def test_options_of_another_algorithm_are_refused() -> None:
    mesh = dg.ProcessMesh.grid(rows=2, cols=4)
    with pytest.raises(ShardingError, match=r"ring is 'cols' but there is no algorithm; name one, .*wang"):
        dg.shard_op(ops.matmul, mesh, ring="cols")
    with pytest.raises(ShardingError, match=r"slices is 4 but there is no algorithm; name one, .*meshslice"):
        dg.shard_op(ops.matmul, mesh, slices=4)
    with pytest.raises(ShardingError, match=r"ring is 'tp' but mesh.* has rows, cols; name one of these"):
        dg.shard_op(ops.matmul, mesh, algorithm="wang", ring="tp")
    with pytest.raises(ShardingError, match=r"has counts and ring; leave one of them out"):
        dg.shard_op(ops.matmul, mesh, ring="rows", counts=((2, 1), (1, 4)))
    for algorithm, message in (
        (
            MatmulAlgorithm("summa", ring="rows"),
            r"summa\(ring=rows\): ring is rows but summa has .*wang",
        ),
        (
            MatmulAlgorithm("wang", slices=2),
            r"wang\(slices=2\): slices is 2 but wang has .*meshslice",
        ),
        (
            MatmulAlgorithm("meshslice", 2, 1, "rows"),
            r"\(slices=2, block=1, ring=rows\): ring is rows",
        ),
    ):
        assert MatmulAlgorithm.parse(str(algorithm)) == algorithm
        with pytest.raises(ShardingError, match=message):
            distribute_matmuls(replace(product(2, 4, "OS", algorithm.name), algorithm=algorithm).completed())


def test_dims_that_the_ring_does_not_divide_are_refused() -> None:
    case = Product(2, 4, "OS", MatmulAlgorithm("wang"), 8, 10, 48)
    message = r"multiple of 4 but dim k of mk,kn->mn has length 10; use 8 or 12"
    with pytest.raises(ShardingError, match=message):
        distribute_matmuls(case.completed())
