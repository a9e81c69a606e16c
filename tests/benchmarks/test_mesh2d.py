"""The benchmark of distributed products: its copy of the tuner's model, and the products that it averages."""

from __future__ import annotations

import math
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
from benchmarks.support.mesh2d.mesh2d_combinations import OPEN, combinations
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


def test_rivals_that_keep_what_they_gathered_send_less_backward() -> None:
    kept = Assumptions(kept=("collective", "wang"))
    for algorithm, faster in (("meshslice", False), ("collective", True), ("wang", True)):
        before, after = (best(each, algorithm, 12288, 128, 256, (32, 8)) for each in (Assumptions(), kept))
        for (product, slow), (_, fast) in zip(before.products, after.products, strict=True):
            assert fast == slow if product.role == "forward" or not faster else fast <= slow
        assert (after.seconds < before.seconds) == faster
    (forward, _), (data, seconds), (weight, _) = best(kept, "collective", 12288, 128, 256, (32, 8)).products[
        :3
    ]
    assert (str(forward), str(data), str(weight)) == ("Y = OS(X, W)", "dX = LS(dY, W)", "dW = RS(X, dY)")
    scatter = data.flows[1]
    assert seconds == kept.message("reduce_scatter", scatter, (32, 8)) + kept.compute(data, (32, 8))


def test_messages_under_a_product_take_their_share_of_the_memory() -> None:
    slow = Assumptions(memory=4e11)
    shared = replace(slow, shared_memory=True)
    alone, together = (best(each, "meshslice", 12288, 128, 256).seconds for each in (slow, shared))
    assert together > alone


def test_each_of_the_products_on_its_own_mesh_changes_the_means_alone() -> None:
    names = ["none: prices of the paper", "each of the 16 products on its own mesh"]
    common, own = (run(names)[name] for name in names)
    assert [key for key in common if common[key] != own[key]] == [
        "mean16_over_collective",
        "mean16_over_wang",
    ]


def test_combinations_answer_every_open_question_in_every_way() -> None:
    every = list(combinations())
    assert every[0] == ("none", Assumptions())
    assert len(every) == 4 * 4 * 2 * 2 * 3 * 2 == math.prod(map(len, OPEN))
    assert len(dict(every)) == len({assumed for _, assumed in every}) == len(every)


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
