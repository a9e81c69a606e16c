"""Annotations that compete: reported by `engine.plan.conflicts()`, warned about once by `fit`."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, optim

MESH = dg.ProcessMesh.grid(dp=2, tp=2)
X = np.random.default_rng(0).normal(size=(24, 8)).astype("f4")
Y = X[:, :4] * 2


class TwoLayers(nn.Module):
    """Two products; `dims` are the layouts of their weights."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 4)
        dg.shard_tensor(self.first.weight, MESH, first)
        dg.shard_tensor(self.second.weight, MESH, second)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(dg.shard_tensor(x, MESH, ["dp", None])))


def engine(first: Any, second: Any, refine: str = "conflicts") -> dg.Engine:
    strategy = dg.Strategy(mesh=MESH, refine=refine)
    return dg.Engine(TwoLayers(first, second), nn.MeanSquaredError(), optim.SGD(lr=0.1), strategy=strategy)


def test_annotations_that_agree_train_without_a_warning() -> None:
    agreeing = engine([None, "tp"], ["tp", None])
    agreeing.fit((X, Y), batch_size=8, progress=False)
    assert agreeing.plan.conflicts() == ()
    agreeing.close()


def test_a_conflict_is_warned_about_once_and_reported_with_its_fix() -> None:
    """Rows over dp and columns over dp: one of the two has to give way in the first product."""
    competing = engine([None, "dp"], ["tp", None])
    with pytest.warns(
        UserWarning, match=r"compete for a mesh axis; (.|\n)*engine.plan.conflicts\(\)"
    ) as told:
        competing.fit((X, Y), batch_size=8, progress=False)
    assert len(told) == 1
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        competing.fit((X, Y), batch_size=8, progress=False)
    report = competing.plan.conflicts()
    assert report[0].lost.axis == "dp"
    assert report[0].nbytes > 0
    assert report[0].fix is not None
    assert report[0].fix.after < report[0].fix.before
    assert all(move.seconds is None for conflict in report for move in conflict.moves)
    competing.close()


def test_with_a_cluster_a_conflict_has_seconds() -> None:
    model = TwoLayers([None, "dp"], ["tp", None])
    strategy = dg.Strategy(mesh=MESH, refine="never")
    priced = dg.Engine(
        model, nn.MeanSquaredError(), optim.SGD(lr=0.1), strategy=strategy, cluster="p3_16xlarge_x8"
    )
    priced.prepare((X, Y))
    (move, *_) = priced.plan.conflicts()[0].moves
    assert move.seconds is not None
    assert move.seconds > 0


def test_no_mesh_changes_nothing() -> None:
    assert dg.pipeline_boundary(X, None) is X
