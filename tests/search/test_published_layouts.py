"""Layouts of a batched product and changes of layout as published: none is missing, each at its cost.

Source: Zheng et al., Alpa (OSDI 2022), section 4.1: table 2 (resharding of a matrix of M bytes) and table 3
(parallel algorithms of C_bij = sum_k A_bik B_bkj, whose result has M bytes) on a mesh of n0 x n1 devices. A
device sends 2 (n - 1) / n x bytes in an all-reduce of x, (n - 1) / n x in an all-gather to x and in an
all-to-all of x.
"""

from __future__ import annotations

from math import prod

import pytest

from distgraph import ops
from distgraph.ir.graph import Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.redistribution.planner import redistribute_cost
from distgraph.passes.search.intra_op.strategies import strategies_of
from distgraph.tracing.tracer import Trace

MESHES = [(2, 2), (4, 2), (2, 8), (3, 2)]
BATCH, ROWS, INNER, COLUMNS = 48, 96, 144, 192
AXES = {"0": "x", "1": "y"}


def spec(text: str) -> ShardSpec:
    """From the notation of the paper: R, S0, S1, S01 for every dim."""
    dims = text.replace("R", " R").replace("S", " S").split()
    return ShardSpec(tuple(tuple(AXES[number] for number in dim[1:]) for dim in dims))


def all_reduce(size: float, count: int) -> float:
    return 2 * (count - 1) / count * size


def once(size: float, count: int) -> float:
    """An all-gather to so many bytes, or an all-to-all of them."""
    return (count - 1) / count * size


@pytest.mark.parametrize(("n0", "n1"), MESHES)
def test_resharding(n0: int, n1: int) -> None:
    mesh, shape = ProcessMesh.grid(x=n0, y=n1), (ROWS, COLUMNS)
    size = 4 * prod(shape)
    published = {
        ("RR", "S0S1"): 0.0,
        ("S0R", "RR"): once(size, n0),
        ("S0S1", "S0R"): once(size / n0, n1),
        ("S0R", "RS0"): once(size / n0, n0),
        ("S0S1", "S01R"): once(size / (n0 * n1), n1),
    }
    for (source, target), expected in published.items():
        found = redistribute_cost(shape, 4, mesh, spec(source), spec(target))
        assert found == pytest.approx(expected), f"{source} -> {target}"


def product() -> Op:
    trace = Trace("product")
    with trace.activate():
        a = trace.source("input", "a", (BATCH, ROWS, INNER), "f32")
        b = trace.source("input", "b", (BATCH, INNER, COLUMNS), "f32")
        return trace.finish({"c": ops.matmul(a, b)}).ops[-1]


@pytest.mark.parametrize(("n0", "n1"), MESHES)
def test_algorithms_of_a_batched_product(n0: int, n1: int) -> None:
    """Result, operands, and the bytes of making the result whole."""
    mesh, op = ProcessMesh.grid(x=n0, y=n1), product()
    size = 4 * prod(op.result.shape)
    published = [
        ("RS0S1", "RS0R", "RRS1", (), 0.0),
        ("RS0R", "RS0S1", "RS1R", ("y",), all_reduce(size / n0, n1)),
        ("RRS0", "RRS1", "RS1S0", ("y",), all_reduce(size / n0, n1)),
        ("S0S1R", "S0S1R", "S0RR", (), 0.0),
        ("S0RR", "S0RS1", "S0S1R", ("y",), all_reduce(size / n0, n1)),
        ("RS01R", "RS01R", "RRR", (), 0.0),
        ("RRR", "RRS01", "RS01R", ("x", "y"), all_reduce(size, n0 * n1)),
    ]
    strategies = strategies_of(op, mesh)
    known = set(zip(strategies.result_specs[0], *strategies.operand_specs, strict=True))
    for result, left, right, summed, expected in published:
        made = ShardSpec(spec(result).dims, tuple((axis, "sum") for axis in summed))
        assert (made, spec(left), spec(right)) in known, f"{result} = {left} {right}"
        found = redistribute_cost(op.result.shape, 4, mesh, made, spec(result))
        assert found == pytest.approx(expected), f"{result} = {left} {right}"
