"""Ranks with NumPy beside ranks on a stand-in for CuPy, on every rank of `mpiexec -n 2 python -m pytest
tests/mpi`, or of -n 4: the job trains as one rank does.

Every process has a stand-in of its own with one GPU, so that ranks with GPUs share it and send through the
host.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.devices import fake_cupy, fake_device
from support.devices.mixed_devices import Meshes, engine, on, samples, trained

from distgraph import optim
from distgraph.errors import NonFiniteError, ResourceError
from distgraph.runtime.execute import device
from distgraph.runtime.launch.mpi_rank import current_transport

pytestmark = pytest.mark.mpi
CPU, GPU = "cpu", "gpu"
CASES: dict[int, dict[str, Meshes]] = {
    2: {
        "cpu-gpu": on(CPU, GPU),
        "gpu-cpu": on(GPU, CPU),
        "dp": on((CPU, GPU)),
        "dp-uneven": on((GPU, CPU), weights=(3, 1)),
    },
    4: {
        "cpu-gpu-cpu-gpu": on(CPU, GPU, CPU, GPU),
        "gpu2-cpu2": on((GPU, GPU), (CPU, CPU)),
        "dp-uneven-both": on((CPU, GPU), (GPU, CPU), weights=(1, 3)),
        "dp4": on((CPU, GPU, GPU, CPU)),
    },
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_device.Hardware]:
    yield fake_cupy.install(monkeypatch, devices=1)
    device._NCCL.clear()  # it belongs to the stand-in


def ranks() -> int:
    transport = current_transport()
    assert transport is not None
    return transport.size


@pytest.mark.parametrize("options", [{}, {"executor": "actors"}], ids=["static", "actors"])
@pytest.mark.parametrize("number", range(4))
def test_as_one_rank(number: int, options: dict[str, Any]) -> None:
    name, meshes = list(CASES[4 if ranks() >= 4 else 2].items())[number]
    optimizer = optim.AdamW(lr=0.01, eps=1e-3, clip_norm=0.05)
    given: dict[str, Any] = {"optimizer": optimizer, "micro_batches": 4}
    wanted, found = trained([None] * len(meshes), **given), trained(meshes, **given, **options)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-10, err_msg=name)
    for parameter, array in wanted[1].items():
        np.testing.assert_allclose(found[1][parameter], array, rtol=1e-9, atol=1e-12, err_msg=parameter)
    assert found[0] == current_transport().broadcast_object(found[0])  # type: ignore[union-attr]


def test_checked_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTGRAPH_CHECK", "1")
    meshes = on(CPU, GPU)
    wanted, found = trained([None] * 2, micro_batches=4), trained(meshes, micro_batches=4)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)


def test_a_checkpoint_of_a_mixed_job(tmp_path: Path) -> None:
    transport = current_transport()
    assert transport is not None
    folder = Path(transport.broadcast_object(str(tmp_path)))
    mixed = engine(on((CPU, GPU)))
    mixed.fit(samples(), batch_size=16, progress=False)
    mixed.save(folder / "a")
    wanted, losses = mixed.predict(samples()[0]), mixed.evaluate(samples())
    mixed.close()
    for meshes in (on((CPU, CPU)), [None], on((GPU, CPU))):
        other = engine(meshes)
        other.load(folder / "a")
        np.testing.assert_allclose(other.predict(samples()[0]), wanted, rtol=1e-12)
        assert other.evaluate(samples()) == pytest.approx(losses, rel=1e-12)
        other.close()


def test_all_ranks_agree_on_numbers_that_are_not_finite() -> None:
    mixed = engine(on((CPU, GPU)))
    x, y = samples(16)
    mixed.run((x, y))
    x[-1, 0] = np.inf
    with np.errstate(all="ignore"), pytest.raises(NonFiniteError, match=r"gradient of layers\.0\.weight"):
        mixed.run((x, y))
    mixed.close()


def test_every_rank_says_which_one_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if ranks() and current_transport().rank == 1:  # type: ignore[union-attr]
        fake_cupy.install(monkeypatch, devices=0)
    with pytest.raises(ResourceError, match=r'rank 1 on .* is to run on a gpu: device "gpu" needs a CUDA'):
        engine(on(CPU, GPU)).run(samples(16))
