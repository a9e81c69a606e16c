"""Ranks with NumPy beside ranks on a stand-in for CuPy find every gradient that is not finite.

What they read is together the whole gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.devices import fake_cupy, fake_device
from support.programs.overflowing import Scales

import distgraph as dg
from distgraph import optim
from distgraph.runtime.execute import device

pytestmark = pytest.mark.mpi
CPU, GPU = "cpu", "gpu"
PART, PARTS = 20_001, 6


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_device.Hardware]:
    yield fake_cupy.install(monkeypatch, devices=1)
    device._NCCL.clear()  # it belongs to the stand-in


@pytest.mark.parametrize("parts", [1, PARTS])
@pytest.mark.parametrize("kinds", [(CPU, GPU), (GPU, CPU)])
def test_every_element_is_read(kinds: tuple[str, str], parts: int) -> None:
    mesh = dg.ProcessMesh.grid(dp=2).requiring(kinds)
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp", nonfinite="skip")
    trained = dg.Engine(Scales(parts, PART), optimizer=optim.SGD(lr=1e-12, momentum=0.9), strategy=strategy)
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
