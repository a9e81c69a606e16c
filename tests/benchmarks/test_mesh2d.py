"""The benchmark of distributed products: its copy of the tuner's model, and the products that it averages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.support.mesh2d.mesh2d_assumptions import (
    ASSUMPTIONS,
    BLOCK,
    PAPER,
    WIDTHS,
    Assumptions,
    best,
    explained,
    layers_of,
    mean_gain,
    run,
    table,
)
from benchmarks.support.mesh2d.torus_prices import TPU_V4
from distgraph.passes.matmul_algorithms.layer_products import dataflow, products
from distgraph.passes.matmul_algorithms.tuner import tune


@pytest.mark.parametrize("algorithm", ["meshslice", "collective", "wang"])
@pytest.mark.parametrize("model", WIDTHS)
@pytest.mark.parametrize("forward", [None, "OS", "RS"])
def test_without_another_assumption_the_figures_are_those_of_the_tuner(
    forward: str | None, model: str, algorithm: str
) -> None:
    assumed = Assumptions(forward=forward)
    for sequences, chips, mesh in ((8, 16, (4, 4)), (8, 16, None), (128, 256, None), (32, 256, (32, 8))):
        found = best(assumed, algorithm, WIDTHS[model], sequences, chips, mesh)
        tuning = tune(
            layers_of(WIDTHS[model], sequences), chips, TPU_V4, assumed.flops, block=BLOCK,
            algorithm=algorithm, forward=forward, meshes=None if mesh is None else [mesh],
        )  # fmt: skip
        assert found.mesh == tuning.mesh
        assert found.seconds == pytest.approx(tuning.seconds, rel=1e-9)


def test_a_message_that_is_not_hidden_adds_to_the_product() -> None:
    assumed = Assumptions()
    assert assumed.together(2.0, 3.0) == 3.0
    assert replace(assumed, hidden=0.0).together(2.0, 3.0) == 5.0
    assert replace(assumed, hidden=0.5).together(2.0, 3.0) == 4.0
    slow, fast = (
        best(replace(assumed, hidden=share), "meshslice", 12288, 128, 256).seconds for share in (0.5, 1.0)
    )
    assert slow > fast


def test_the_products_of_a_block_have_eight_sizes() -> None:
    """Their gains are averaged by size: those of `up` and `down` are the same products."""
    every = [each for layer in layers_of(12288, 128) for each in products(layer, dataflow(layer))]
    assert len(every) == 12
    gains = [(each, float(number == 0)) for number, each in enumerate(every)]
    assert mean_gain(gains) == pytest.approx(100 / 8)
    twice = [(each, float(each.layer.name in ("up", "down"))) for each in every]
    assert mean_gain(twice) == pytest.approx(100 * 3 / 8)


def test_a_table_has_a_row_for_every_assumption() -> None:
    names = list(ASSUMPTIONS)[:2]
    lines = table(run(names)).splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("the paper")
    assert all(name in lines[0] for name in PAPER)


def test_the_share_of_a_difference_that_an_assumption_explains() -> None:
    names = list(ASSUMPTIONS)[:2]
    found = run(names)
    shares = explained(found)
    assert set(shares[names[0]].values()) == {0.0}
    ours, other, paper = (row["mean16_over_collective"] for row in (found[names[0]], found[names[1]], PAPER))
    assert shares[names[1]]["mean16_over_collective"] == pytest.approx(100 * (ours - other) / (ours - paper))
    assert "mean16_over_wang" not in shares[names[0]]  # within 5 points
