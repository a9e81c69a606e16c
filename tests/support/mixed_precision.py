"""A small GPT that is trained in mixed precision on the layouts of one and several meshes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

import distgraph as dg
from distgraph import optim
from distgraph.models import GPT, GPTConfig
from distgraph.models.megatron_layout import stages

grid = dg.ProcessMesh.grid
LAYOUTS: dict[str, tuple[dg.ProcessMesh, ...]] = {
    "serial": (),
    "dp2": (grid(dp=2),),
    "tp2": (grid(tp=2),),
    "pp2": (grid(dp=1), grid(1, dp=1)),
    "dp2pp2": (grid(dp=2), grid(2, dp=2)),
    "dp2tp2": (grid(dp=2, tp=2),),
    "dp2tp2pp2": (grid(dp=2, tp=2), grid(4, dp=2, tp=2)),
}
STEPS = 5
EPS = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Half the distance from 1 to the next number."""


@cache
def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 40, (8, 9)).astype("i4")
    return tokens[:, :-1], tokens[:, 1:]


def engine(layout: str, precision: Any, micro: int = 2, **given: Any) -> dg.Engine:
    """An engine for one of the layouts; `given` are further fields of the strategy."""
    model = GPT(GPTConfig(hidden=16, layers=2, heads=2, vocabulary=40, sequence=8))
    if LAYOUTS[layout]:
        stages(model, LAYOUTS[layout])
    strategy = dg.Strategy(precision=precision, micro_batches=micro, **given)
    return dg.Engine(model, model.loss, optim.AdamW(3e-2, clip_norm=1.0, eps=1e-3), strategy=strategy, seed=3)


def losses(trained: dg.Engine, steps: int = STEPS) -> list[float]:
    return [trained.run(batch())["loss"] for _ in range(steps)]


@cache
def serial_losses(precision: Any) -> list[float]:
    return losses(engine("serial", precision))
