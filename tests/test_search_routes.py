"""Changes of layout priced on a small model of the mesh: as `redistribute` finds them on the mesh itself."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from distgraph.mesh import ProcessMesh
from distgraph.passes.redistribute import redistribute_cost, wire_price
from distgraph.passes.search.routes import Floats, _found, routes

MESHES = [ProcessMesh.grid(a=a, b=b) for a, b in ((2, 3), (3, 2), (2, 8), (8, 2), (4, 4), (1, 6), (4, 6))]
ITEM = 4


def of_step(kind: str, axes: tuple[str, ...], sent: Floats) -> Floats:
    """Bytes, and the trace for a step of `wire_price`; what sends nothing is free."""
    return sent + wire_price(kind, 0.0, 1, MESHES[0], axes) if axes else np.zeros_like(sent)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_routes_are_those_of_redistribute(mesh: ProcessMesh) -> None:
    """Where every dim takes all axes."""
    rng = random.Random(0)
    for ndim in (1, 2, 3):
        shape = (mesh.size,) * ndim
        found = routes(shape, mesh)
        least = found.seconds(np.array([ITEM * math.prod(shape)], dtype=np.float64), of_step)[0]
        for _ in range(60):
            i, j = rng.randrange(len(found.states)), rng.randrange(len(found.states))
            source, target = found.states[i], found.states[j]
            wanted = redistribute_cost(shape, ITEM, mesh, source, target)
            assert least[i, j] == pytest.approx(wanted, rel=1e-9), f"{shape}: {source} to {target}"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_model_of_a_mesh_has_its_routes(mesh: ProcessMesh) -> None:
    """Dims that take no axis, one of them, either, both; what each step sends is summed up anew."""
    lengths = sorted({1, *mesh.shape, math.lcm(*mesh.shape), mesh.size})
    for shape in itertools.combinations_with_replacement(lengths, 2):
        model, own = routes(shape, mesh), _found(shape, mesh)
        assert (model.states, model.kinds, model.copies) == (own.states, own.kinds, own.copies)
        for name in ("start", "stop", "kind", "first", "busy", "goals", "where"):
            assert np.array_equal(getattr(model, name), getattr(own, name)), f"{name} of {shape}"
        assert model.fraction == pytest.approx(own.fraction, rel=1e-12)
