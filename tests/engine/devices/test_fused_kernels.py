"""Training with device="gpu" on a stand-in for CuPy that runs the CUDA sources of rows and of attention on
the host: the same losses as on the processor. What the sources compute is tested in `ops/kernels`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.devices import fake_cupy
from support.devices.cuda_emulator import COMPILER, emulator, on_stand_in
from support.programs.equivalence import GPT_LAYOUTS, Case, layouts, train

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler: install g++ or clang")

LAYOUTS = {x.name: x for x in (*layouts("gpt"), *GPT_LAYOUTS)}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return emulator(tmp_path_factory.mktemp("cuda"))


@pytest.mark.parametrize(("layout", "micro", "dtype"), [("sequence_tp", 2, "f32"), ("zero3", 1, "f64")])
def test_same_losses_as_on_the_processor(
    layout: str, micro: int, dtype: str, emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are threads that share one GPU; parameters and activations are views of packed memory."""
    hardware = fake_cupy.install(monkeypatch, devices=1)
    cupy = sys.modules["cupy"]
    monkeypatch.setattr(cupy, "RawKernel", on_stand_in(cupy, hardware, emulated), raising=False)
    emulated.launches.clear()
    case = Case("gpt", LAYOUTS[layout], micro, dtype=dtype)
    result = train(replace(case, device="gpu"), 2)
    assert {"attention", "attention_grad_kv", "layer_norm", "layer_norm_grad"} <= set(emulated.launches)
    assert {"cross_entropy", "cross_entropy_grad"} <= set(emulated.launches)
    np.testing.assert_allclose(result.losses, train(case, 2).losses, rtol=1e-5 if dtype == "f32" else 1e-12)


def test_attention_and_rows_are_in_cuda_graphs(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only products are outside: a warning that another op cannot be captured is an error here."""
    hardware = fake_cupy.install(monkeypatch, devices=1)
    cupy = sys.modules["cupy"]
    captured: set[str] = set()

    class RawKernel(on_stand_in(cupy, hardware, emulated)):  # type: ignore[misc]
        def __call__(self, *arguments: Any) -> None:
            if hardware.captures.current is not None:
                captured.add(self.run.name.removeprefix("distgraph_"))
            super().__call__(*arguments)

    monkeypatch.setattr(cupy, "RawKernel", RawKernel, raising=False)
    case = Case("gpt", LAYOUTS["sequence_tp"], dtype="f32", device="gpu")
    wanted = train(case, 4)
    found = train(replace(case, cuda_graphs=True), 4)
    np.testing.assert_array_equal(found.losses, wanted.losses)
    assert {"attention", "attention_grad_kv", "layer_norm"} <= captured
    assert max(graph.launches for graph in hardware.captures.graphs) == 3
