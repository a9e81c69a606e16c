"""An engine with replicated parameters, and a bit of one of them flipped."""

from __future__ import annotations

import numpy as np
from support.programs.training import Net

import distgraph as dg
from distgraph import nn, optim


def engine(layout: str, every: int | None = 1, lr: float = 0.01) -> dg.Engine:
    strategy = dg.Strategy(verify_replicas=every, micro_batches=2)
    return dg.Engine(Net(layout), nn.CrossEntropy(), optim.Adam(lr=lr), strategy=strategy, seed=5)


def flip(trained: dg.Engine, name: str, rank: int, bit: int = 0) -> None:
    """Flip a bit of the last element that a rank holds of a tensor."""
    block = trained.memory.block(name, rank).reshape(-1)
    block[-1:].view(np.uint8)[bit // 8] ^= 1 << bit % 8
