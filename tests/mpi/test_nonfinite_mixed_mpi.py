"""Ranks with NumPy beside ranks on a stand-in for CuPy find every gradient that is not finite.

What the former examine in a reduction and what the latter read are together the whole gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.devices import fake_cupy, fake_device

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.runtime.execute import device

pytestmark = pytest.mark.mpi
CPU, GPU = "cpu", "gpu"
PART, PARTS = 20_001, 6


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_device.Hardware]:
    yield fake_cupy.install(monkeypatch, devices=1)
    device._NCCL.clear()  # it belongs to the stand-in


class Scale(nn.Module):
    """A vector of ones whose gradient is not finite exactly where all rows of the input are 0."""

    def __init__(self) -> None:
        self.scale = nn.Parameter((PART,), init=("ones",))

    def forward(self, x: Any) -> Any:
        return ops.mean(ops.sqrt(self.scale * x))


class Scales(nn.Module):
    def __init__(self, parts: int) -> None:
        self.scales = [Scale() for _ in range(parts)]

    def forward(self, x: Any) -> Any:
        parts = [scale(x[:, n * PART : (n + 1) * PART]) for n, scale in enumerate(self.scales)]
        return sum(parts, start=parts[0]) * 1e9


@pytest.mark.parametrize("parts", [1, PARTS])
@pytest.mark.parametrize("kinds", [(CPU, GPU), (GPU, CPU)])
def test_every_element_is_examined_or_read(kinds: tuple[str, str], parts: int) -> None:
    mesh = dg.ProcessMesh.grid(dp=2).requiring(kinds)
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp", nonfinite="skip")
    trained = dg.Engine(Scales(parts), optimizer=optim.SGD(lr=1e-12, momentum=0.9), strategy=strategy)
    good = np.full((2, PART * parts), 0.5, "f4")
    trained.run(good)
    size = PART * parts
    positions = [0, PART // 2 - 1, PART // 2, PART // 2 + 1, size // 2 - 1, size // 2, size // 2 + 1]
    positions += [PART - 1, size - PART, size - PART // 2 - 2, size - 1]
    with np.errstate(all="ignore"):
        for position in positions:
            bad = good.copy()
            bad[:, position] = 0.0
            trained.run(bad)
            trained.run(good)
    steps = [2 + 2 * number for number in range(len(positions))]
    missed = [positions[n] for n, step in enumerate(steps) if step not in trained.history.skipped]
    assert not missed, f"gradients that are not finite at {missed} were not noticed"
    trained.close()
