"""A mesh over which nothing is split is named, once; others are not."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, optim
from distgraph.ir.mesh import ProcessMesh

BATCH = np.ones((4, 6), "f4"), np.zeros((4, 3), "f4")


def trained(mesh: ProcessMesh, batch_axis: str | None = None, *, annotated: bool = False) -> dg.Engine:
    model = nn.Linear(6, 3)
    if annotated:
        dg.shard_tensor(model.weight, mesh, ["tp", None])
    strategy = dg.Strategy(mesh=mesh, batch_axis=batch_axis)
    engine = dg.Engine(model, nn.MeanSquaredError(), optim.SGD(lr=0.1), strategy=strategy)
    engine.run(BATCH)
    return engine


def test_a_mesh_over_which_nothing_is_split() -> None:
    with pytest.warns(UserWarning, match=r"mesh of Strategy is mesh\(dp=2\) but no tensor is split over it"):
        engine = trained(ProcessMesh.grid(dp=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.run(BATCH)
        engine.predict(BATCH[0])


@pytest.mark.parametrize(
    ("sizes", "batch_axis", "annotated"),
    [({"dp": 2}, "dp", False), ({"tp": 2}, None, True), ({"dp": 1}, None, False)],
)
def test_a_mesh_that_is_used(sizes: dict[str, int], batch_axis: str | None, annotated: bool) -> None:
    trained(ProcessMesh.grid(**sizes), batch_axis, annotated=annotated)
