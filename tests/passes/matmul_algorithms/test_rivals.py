"""The algorithms that MeshSlice is compared with: values, bytes, `check` and the forecast of all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.programs.matrix_products import FLOWS, MESHES, NARROW, Product, product
from support.programs.partitioned import run_partitioned

from distgraph.engine.commands.check import check as compare
from distgraph.ir.graph import Op
from distgraph.ir.op_registry import REGISTRY, flops, matmul_dims
from distgraph.ir.parser import parse_graph as parse
from distgraph.ir.reference_interpreter import interpret
from distgraph.passes.pass_pipeline import run_passes
from distgraph.runtime.program.build import Build

RIVALS = ("wang", "summa", "cannon")
ON_MESHES = [
    *((name, mesh) for name in ("wang", "summa") for mesh in MESHES),
    *(("cannon", (side, side)) for side in (2, 3, 4)),
]


def check(case: Product) -> None:
    feeds, params = case.arrays()
    found, _, built = run_partitioned(case.completed(), [feeds], params)
    for name, expected in case.expected().items():
        (value,) = found[name]
        assert np.abs(value - expected).max() <= 1e-12 * max(1.0, np.abs(expected).max()), name
    sent = [built.program(rank).bytes_sent() for rank in built.ranks]
    assert sum(sent) == pytest.approx(case.moved_bytes() * len(sent))
    if case.algorithm.name != "cannon":  # of which some ranks have blocks that a skew leaves where they are
        assert sent == pytest.approx([case.moved_bytes()] * len(sent))
    counted = [sum(map(local_flops, program_ops(built, rank))) for rank in built.ranks]
    assert counted == [3 * 2 * case.m * case.k * case.n / len(counted)] * len(counted)


def program_ops(built: Build, rank: int) -> list[Op]:
    """The matrix products of a rank, with its shapes."""
    program, found = built.program(rank), []
    for local in (local for task in program.tasks for local in task.ops if local.mode == "compute"):
        if REGISTRY[local.op.kind].cost == "matmul":
            here = [
                tuple(replace(v, shape=program.types[v.name][0]) for v in values)
                for values in (local.op.operands, local.op.results)
            ]
            found.append(Op(local.op.kind, *here, local.attrs))
    return found


def local_flops(op: Op) -> int:
    batch, m, n, k = matmul_dims(op)
    assert flops(op) == 2 * batch * m * n * k
    return flops(op)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize(("name", "mesh"), ON_MESHES, ids=str)
def test_products_equal_the_serial_ones_and_send_what_the_formula_says(
    name: str, mesh: tuple[int, int], flow: str
) -> None:
    check(product(*mesh, flow, name))


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("mesh", NARROW, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("name", ["wang", "summa"])
def test_a_mesh_axis_may_have_one_rank(name: str, mesh: tuple[int, int], flow: str) -> None:
    check(product(*mesh, flow, name))


@pytest.mark.parametrize("name", RIVALS)
def test_every_stage_is_verified_and_means_the_same_on_whole_tensors(name: str) -> None:
    for flow in FLOWS:
        case = product(2, 2, flow, name)
        feeds, params = case.arrays()
        rewritten = run_passes(case.completed(pruned=False), ["distribute_matmuls"])
        assert parse(str(rewritten)) == rewritten
        run_passes(rewritten, ["reshard", "lower"])
        outputs, _ = interpret(rewritten, feeds, params)
        for label, expected in case.expected().items():
            np.testing.assert_allclose(outputs[label], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", RIVALS)
def test_check_compares_every_step(name: str, flow: str) -> None:
    case = product(2, 2, flow, name)
    graph, (feeds, params) = case.graph(), case.arrays()
    report = compare(case.completed(), feeds, params, graph)
    assert report.ok, str(report)
    assert report.ranks == 4
