"""Tensor parallelism and FSDP of the benchmark of distributed products: numbers, messages and overlap."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from support.programs.partitioned import joined, run_rank
from support.programs.rank_threads import run_ranks

from benchmarks.support.mesh2d.mesh2d_assumptions import layers_of
from benchmarks.support.mesh2d.one_axis_programs import one_axis, program
from benchmarks.support.mesh2d.torus_prices import TPU_V4
from distgraph.passes.matmul_algorithms.layer_products import Layer
from distgraph.passes.matmul_algorithms.tuner import tune

SMALL = tuple(Layer(name, 8, *sizes) for name, sizes in {"a": (8, 24), "b": (8, 12), "c": (12, 8)}.items())
LAYOUTS = [("tensor_parallel", "columns"), ("tensor_parallel", "rows"), ("fsdp", "samples")]


@pytest.mark.parametrize(("algorithm", "first"), LAYOUTS)
def test_products_and_gradients_are_those_of_numpy(algorithm: str, first: str) -> None:
    rng, feeds, params, expected = np.random.default_rng(2), {}, {}, {}
    for layer in SMALL:
        x, dy = (rng.normal(size=(layer.samples, width)) for width in (layer.inputs, layer.outputs))
        w = rng.normal(size=(layer.inputs, layer.outputs))
        feeds |= {f"x.{layer.name}": x, f"dy.{layer.name}": dy}
        params[layer.name] = w
        made = {"y": x @ w, "dx": dy @ w.T, "dw": x.T @ dy}
        expected |= {f"{name}.{layer.name}": value for name, value in made.items()}
    built = program(algorithm, SMALL, 4, first, "f64")
    found, _ = joined(built, run_ranks(4, lambda t: run_rank(built, t, [feeds], params)))
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name][0], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("algorithm", "first"), LAYOUTS)
def test_every_product_has_one_collective(algorithm: str, first: str) -> None:
    kinds = Counter(op.kind for op in program(algorithm, SMALL, 4, first).lowered.ops)
    assert (kinds["comm.all_gather"], kinds["comm.reduce_scatter"]) == (2 * len(SMALL), len(SMALL))
    assert {kind for kind in kinds if kind.startswith("comm.")} == {"comm.all_gather", "comm.reduce_scatter"}


@pytest.mark.parametrize("algorithm", ["tensor_parallel", "fsdp"])
def test_messages_are_those_of_the_closed_form(algorithm: str) -> None:
    """Their seconds; those of a step differ by what the program hides and what it reads and writes."""
    layers = tuple(layers_of(12288, 32))
    found = one_axis(algorithm, layers, 64)
    tuning = tune(layers, 64, TPU_V4, 266e12, algorithm=algorithm)
    parts = [each.seconds for layer in tuning.layers for each in layer.products]
    messages, compute = sum(part.communication.total for part in parts), sum(part.compute for part in parts)
    assert found.mesh == tuning.mesh
    assert found.communication == pytest.approx(messages, rel=0.01)
    assert max(messages, compute) * (1 - 1e-6) < found.seconds < (messages + compute) * 1.02


def test_weights_are_gathered_a_layer_ahead_and_gradients_scattered_under_the_next() -> None:
    """With long products FSDP hides all messages of a block among many; tensor parallelism does not."""
    layers = tuple(Layer(name, 2**22, 4096, 4096) for name in "abcd")
    sharded, split = (one_axis(name, layers, 16) for name in ("fsdp", "tensor_parallel"))
    assert sharded.seconds == pytest.approx(sharded.compute, rel=1e-6)
    assert split.seconds - split.compute > split.communication / 3
