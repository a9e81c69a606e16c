"""The algorithms that MeshSlice is compared with: values, bytes, `check` and the forecast of all of them."""

from __future__ import annotations

import numpy as np
import pytest
from support.programs.matrix_products import FLOWS, MESHES, NARROW, Product, product
from support.programs.partitioned import run_partitioned

from distgraph.engine.commands.check import check as compare
from distgraph.ir.parser import parse_graph as parse
from distgraph.ir.reference_interpreter import interpret
from distgraph.passes.pass_pipeline import run_passes

RIVALS = ("wang", "summa")


def check(case: Product) -> None:
    feeds, params = case.arrays()
    found, _, built = run_partitioned(case.completed(), [feeds], params)
    for name, expected in case.expected().items():
        (value,) = found[name]
        assert np.abs(value - expected).max() <= 1e-12 * max(1.0, np.abs(expected).max()), name
    for rank in built.ranks:
        assert built.program(rank).bytes_sent() == pytest.approx(case.moved_bytes())


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("mesh", MESHES, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("name", ["wang", "summa"])
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
