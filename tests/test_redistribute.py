"""Redistribution on one mesh: values on every pair of layouts, bytes, and no plan cheaper by brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_steps import check_layout, every_spec, run_step, scatter

from distgraph.errors import InfeasibleError, ShardingError
from distgraph.mesh import ProcessMesh
from distgraph.passes.redistribute import redistribute, redistribute_cost, step_bytes, wire_price
from distgraph.spec import REDUCTIONS, ShardSpec

MESHES = {
    "2": ProcessMesh.grid(x=2),
    "3": ProcessMesh.grid(x=3),
    "4": ProcessMesh.grid(x=4),
    "2x2": ProcessMesh.grid(x=2, y=2),
    "2x3": ProcessMesh([[4, 0, 2], [1, 5, 3]], ["x", "y"]),
}
SHAPES = ((6, 8), (5, 7), (4, 6, 3))
parse = ShardSpec.parse


def value_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(3.0, 3.0 + math.prod(shape)).reshape(shape)


def run_plan(shape, mesh, source, target, start=None, value=None, **options) -> list[str]:
    """Plans, runs and checks; returns the kinds of the steps."""
    value = value_of(shape) if value is None else value
    blocks = scatter(value, mesh, source) if start is None else start
    spec, label = source, f"{source} -> {target} on {mesh}, {shape}"
    steps = redistribute(shape, 1, mesh, source, target, **options)
    for step in steps:
        assert step.source == spec, label
        blocks, sent = run_step(step, blocks, shape, mesh)
        spec = step.target
        assert sent <= step_bytes(step, shape, 1, mesh) + 1e-9, f"{label}: {step}"
        if step.kind in ("all_gather", "reduce_scatter"):
            assert sent == step_bytes(step, shape, 1, mesh), f"{label}: {step}"
    if steps:
        assert spec == target, label
    check_layout(blocks, value, mesh, target, label)
    return [step.kind for step in steps]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MESHES)
def test_every_pair_of_layouts_keeps_the_value(name, shape):
    mesh = MESHES[name]
    value = value_of(shape)
    targets = every_spec(mesh, len(shape), kinds=())
    for source in every_spec(mesh, len(shape)):
        start = scatter(value, mesh, source)
        for target in targets:
            kinds = run_plan(shape, mesh, source, target, start, value)
            assert (kinds == []) == (source == target)
