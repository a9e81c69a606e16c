"""A table of tokens that the first and the last stage share: its gradients are added across stages, also
before the norm is clipped, and with its states split over the batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph.models import GPT, GPTConfig, stages

GRID = dg.ProcessMesh.grid
PIPELINES = {
    "two ranks": (GRID(0, dp=1), GRID(1, dp=1)),
    "dp2": (GRID(0, dp=2), GRID(2, dp=2)),
    "tp2": (GRID(0, tp=2), GRID(2, tp=2)),
    "one and three": (GRID(0, dp=1), GRID(1, dp=3)),
    "three stages": tuple(GRID(rank, dp=1) for rank in range(3)),
}


def losses(meshes: tuple[dg.ProcessMesh, ...], clip: float | None, **options: Any) -> list[float]:
    """Of four steps; options of the strategy."""
    shape = {"layers": 2, "hidden": 16, "heads": 4, "vocabulary": 42, "sequence": 8, "dtype": "f64"}
    model = GPT(GPTConfig(tied=True, dropout=0.1, packed=True, **shape))
    if meshes:
        stages(model, meshes)
    assert not [name for name, _ in model.named_parameters() if name.startswith("head")]
    optimizer = dg.optim.AdamW(lr=1e-2, clip_norm=clip, eps=1e-3)
    strategy = dg.Strategy(refine="never", **options)
    engine = dg.Engine(model, model.loss, optimizer, strategy=strategy, seed=3)
    text = np.random.default_rng(5).integers(0, 42, (8, 9)).astype("i4")
    try:
        return [engine.run((text[:, :-1], text[:, 1:]))["loss"] for _ in range(4)]
    finally:
        engine.close()


@cache
def serial(clip: float | None) -> list[float]:
    """What one rank gives."""
    return losses((), clip)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_training_is_that_of_one_rank(name: str, clip: float | None) -> None:
    found = losses(PIPELINES[name], clip, micro_batches=2)
    np.testing.assert_allclose(found, serial(clip), rtol=0, atol=1e-12)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_states_split_over_the_batch(zero: int) -> None:
    found = losses(PIPELINES["dp2"], 0.05, micro_batches=2, zero=zero)
    np.testing.assert_allclose(found, serial(0.05), rtol=0, atol=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_other_schedules(schedule: str) -> None:
    found = losses(PIPELINES["two ranks"], 0.05, micro_batches=4, schedule=schedule)
    np.testing.assert_allclose(found, serial(0.05), rtol=0, atol=1e-12)


def test_the_norm_is_clipped_in_these_cases() -> None:
    assert abs(serial(None)[-1] - serial(0.05)[-1]) > 1e-5
