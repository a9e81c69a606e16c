"""Data parallelism beside the two axes of a distributed product: values, bytes, and wrong input."""

from __future__ import annotations

import numpy as np
import pytest
from support.programs.matrix_products import FLOWS, product
from support.programs.partitioned import run_partitioned

import distgraph as dg
from distgraph import ops
from distgraph.engine.commands.check import check as compare
from distgraph.errors import ShardingError
from distgraph.passes.complete import complete
from distgraph.passes.matmul_algorithms.distribute_matmuls import distribute_matmuls

ALGORITHMS = ("collective", "meshslice", "wang", "summa", "cannon")


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("mesh", [(2, 2, 2), (3, 2, 3), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_products_equal_the_serial_ones_and_send_what_the_formula_says(
    name: str, mesh: tuple[int, int, int], flow: str
) -> None:
    data, rows, cols = mesh
    if name == "cannon" and rows != cols:
        return
    case = product(rows, cols, flow, name, 2 if name == "meshslice" else 1, data=data)
    feeds, params = case.arrays()
    found, _, built = run_partitioned(case.completed(), [feeds], params)
    for label, expected in case.expected().items():
        np.testing.assert_allclose(found[label][0], expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    sent = [built.program(rank).bytes_sent() for rank in built.ranks]
    assert sum(sent) == pytest.approx(case.moved_bytes() * len(sent))
    if name != "cannon":
        assert sent == pytest.approx([case.moved_bytes()] * len(sent))


@pytest.mark.parametrize("flow", FLOWS)
def test_gradients_are_summed_over_data_once_a_step(flow: str) -> None:
    """Not in every one of three micro-batches; the other messages are those of each."""
    case = product(2, 2, flow, "meshslice", 2, data=2)
    (feeds, params), batches = case.arrays(), 3
    micro = [{label: (1 + i) * array for label, array in feeds.items()} for i in range(batches)]
    found, _, built = run_partitioned(case.completed(accumulated=True), micro, params)
    expected = sum((1 + i) ** 2 for i in range(batches)) / batches * case.expected()["dw"]
    np.testing.assert_allclose(found["dw"][0], expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    sent = [built.program(rank).bytes_sent() for rank in built.ranks]
    moved = batches * case.moved_bytes(reduced=False) + case.reduced_bytes()
    assert sent == pytest.approx([moved] * len(sent))


def test_check_compares_every_step() -> None:
    case = product(2, 2, "OS", "meshslice", 2, data=2)
    graph, (feeds, params) = case.graph(), case.arrays()
    report = compare(case.completed(), feeds, params, graph)
    assert report.ok, str(report)
    assert report.ranks == 8


def multiplied(left: list[object], right: list[object], made: list[object], m: int = 24) -> None:
    mesh = dg.ProcessMesh.grid(dp=2, rows=2, cols=2)

    def multiply(x: dg.Tensor, w: dg.Tensor) -> dg.Tensor:
        return dg.shard_op(ops.matmul, mesh, [left, right], made, algorithm="meshslice", slices=2)(x, w)

    graph = dg.trace(multiply, ((m, 24), "f64"), ((24, 24), "f64"), names=("x", "w"))
    distribute_matmuls(complete(graph, mesh))


def test_the_axes_of_data_come_first_and_divide() -> None:
    weight = ["rows", "cols"]
    multiplied([("dp", "rows"), "cols"], weight, [("dp", "rows"), "cols"])
    message = r"axes of data parallelism before the others .* m is split by rows, dp; .* \(dp, rows\)"
    with pytest.raises(ShardingError, match=message):
        multiplied([("rows", "dp"), "cols"], weight, [("rows", "dp"), "cols"])
    with pytest.raises(
        ShardingError, match=r"needs equal shards of m on 2 ranks along dp but its length is 25"
    ):
        multiplied([("dp", "rows"), "cols"], weight, [("dp", "rows"), "cols"], m=25)
    with pytest.raises(ShardingError, match="one split dim in each of m, k and n, by one axis"):
        multiplied([("dp", "rows"), "cols"], weight, ["rows", "cols"])
