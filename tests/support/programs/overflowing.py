"""An engine, and batches whose gradients are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.programs.training import INPUTS, OUTPUTS, Net

import distgraph as dg
from distgraph import nn, ops, optim


def loss(output: Any, target: Any) -> Any:
    """A row whose last target is 0 has a gradient of 0/0 at a finite loss."""
    error = ops.mean(ops.square(output - target[:, :OUTPUTS]))
    return error + ops.mean(ops.sqrt(target[:, OUTPUTS:] * ops.square(output)))


def batch(bad: str = "", rows: int = 12) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x, target = rng.normal(size=(rows, INPUTS)), rng.normal(size=(rows, OUTPUTS + 1))
    target[:, OUTPUTS] = 0.5
    if bad == "gradient":
        target[rows // 2, OUTPUTS] = 0.0
    elif bad == "loss":
        target[rows // 2, 0] = np.inf
    elif bad:
        x[rows // 2, 0] = np.nan
    return x, target


def engine(layout: str = "serial", policy: str = "raise", micro: int = 1, **given: Any) -> dg.Engine:
    given.setdefault("optimizer", optim.Adam(lr=0.01))
    strategy = dg.Strategy(nonfinite=policy, micro_batches=micro)
    return dg.Engine(Net(layout), loss, strategy=strategy, seed=5, **given)


class Scale(nn.Module):
    """A vector of ones whose gradient is not finite exactly where all rows of the input are 0."""

    def __init__(self, size: int) -> None:
        self.scale = nn.Parameter((size,), init=("ones",))

    def forward(self, x: Any) -> Any:
        return ops.mean(ops.sqrt(self.scale * x))


class Scales(nn.Module):
    """Such vectors side by side; the squares of their gradients overflow for large inputs."""

    def __init__(self, number: int, size: int) -> None:
        self.scales, self.size = [Scale(size) for _ in range(number)], size

    def forward(self, x: Any) -> Any:
        parts = [scale(x[:, n * self.size : (n + 1) * self.size]) for n, scale in enumerate(self.scales)]
        return sum(parts, start=parts[0]) * 1e9
