"""Sizes that a mesh does not divide: computed in unequal blocks, or refused with the nearest sizes."""

from __future__ import annotations

import numpy as np
import pytest
from support.programs.matrix_products import Product
from support.programs.partitioned import run_partitioned

import distgraph as dg
from distgraph import ops
from distgraph.errors import ShardingError
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.passes.complete import complete

ONE_AXIS = {
    "gathered": (["tp", None], [None, "tp"], [None, "tp"]),
    "scattered": ([None, "tp"], ["tp", None], ["tp", None]),
}
UNEVEN = {"m": (7, 8, 8), "k": (8, 7, 8), "n": (8, 8, 7)}
COMPUTED = {(name, index) for name in ("meshslice", "collective", "summa") for index in "mn"}
"""On two axes in OS: only k, the dim that is sliced, has to divide."""


def multiply(sizes: tuple[int, int, int], mesh: dg.ProcessMesh, **options: object) -> None:
    """Compare a product on in-process ranks with NumPy."""
    m, k, n = sizes
    rng = np.random.default_rng(5)
    x, w = rng.normal(size=(m, k)), rng.normal(size=(k, n))

    def product(x: dg.Tensor, w: dg.Tensor) -> dg.Tensor:
        return dg.shard_op(ops.matmul, mesh, **options)(x, w)

    graph = dg.trace(product, ((m, k), "f64"), ((k, n), "f64"), names=("x", "w"))
    found, _, _ = run_partitioned(complete(graph, mesh), [{"x": x, "w": w}], {})
    ((value,),) = found.values()
    np.testing.assert_allclose(value, x @ w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("index", UNEVEN)
@pytest.mark.parametrize("algorithm", ["meshslice", "collective", "summa", "wang", "cannon"])
def test_on_two_axes(algorithm: str, index: str) -> None:
    options = {"algorithm": algorithm, "dataflow": "OS"}
    mesh = dg.ProcessMesh.grid(rows=2, cols=2)
    if (algorithm, index) in COMPUTED:
        multiply(UNEVEN[index], mesh, **options)
        return
    with pytest.raises(ShardingError, match=rf"2 in dim {index} but|dim {index} of .* 7; use .*6 or 8"):
        multiply(UNEVEN[index], mesh, **options)


@pytest.mark.parametrize("layout", ONE_AXIS)
@pytest.mark.parametrize("algorithm", ["meshslice", "collective", "summa", "wang"])
def test_on_one_axis(algorithm: str, layout: str) -> None:
    """The dim that is split along the ring is sliced."""
    first, weight, last = ONE_AXIS[layout]
    options = {"in_specs": [first, weight], "out_specs": last, "algorithm": algorithm}
    mesh = dg.ProcessMesh.grid(tp=4)
    multiply((8, 12, 8), mesh, **options)
    with pytest.raises(ShardingError, match=r"dim m .*length (is )?9; use .*8 or 12"):
        multiply((9, 12, 8), mesh, **options)


@pytest.mark.parametrize(("flow", "sizes"), [("OS", (7, 8, 9)), ("LS", (7, 9, 8)), ("RS", (8, 9, 7))])
@pytest.mark.parametrize("algorithm", ["meshslice", "collective", "summa"])
def test_gradients_slice_the_same_dim(algorithm: str, flow: str, sizes: tuple[int, int, int]) -> None:
    """So the two others may be of any length in all three products."""
    slices = 2 if algorithm == "meshslice" else 1
    case = Product(2, 2, flow, MatmulAlgorithm(algorithm, slices), *sizes)
    feeds, params = case.arrays()
    found, _, _ = run_partitioned(case.completed(), [feeds], params)
    for name, expected in case.expected().items():
        np.testing.assert_allclose(found[name][0], expected, rtol=0, atol=1e-12)
