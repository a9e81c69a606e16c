"""Plans exported to JAX train a GPT written in JAX to the serial losses, on four CPU devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.plans.exported import CASES, HEADS, RATE, finish, plan_of, run, serial, write_inputs

pytestmark = [pytest.mark.jax, pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = ["dp", "dp_micro", "tp", "sequence", "zero1", "zero3", "dp_tp", "dp_tp_zero1_sequence"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("jax")
    folder: Path = tmp_path_factory.mktemp("jax")
    write_inputs(folder, NAMES, "jax")
    options = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    flags = {"XLA_FLAGS": options, "JAX_PLATFORMS": "cpu"}
    finish([run("export_jax_program.py", [str(folder), str(HEADS), str(RATE), *NAMES], flags)])
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_plan_gives_the_serial_losses(name: str, results: dict[str, Any]) -> None:
    _, losses = serial()
    assert losses[-1] < losses[0] - 0.05
    np.testing.assert_allclose(results[name]["losses"], losses, rtol=0, atol=1e-4)
    assert not results[name]["unused"]


@pytest.mark.parametrize("name", NAMES)
def test_every_array_lies_as_planned(name: str, results: dict[str, Any]) -> None:
    """The block of the first device is the block of rank 0."""
    plan, (start, _) = plan_of(name), serial()
    for tensor, at in plan.tensors.items():
        if at.kind == "input":
            continue
        shape = start[tensor if at.kind == "param" else tensor.rpartition(".")[0]].shape
        expected = at.spec.local_shape(shape, plan.stages[0].mesh, 0)
        assert tuple(results[name]["blocks"][tensor]) == expected, tensor


@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_step_communicates(name: str, results: dict[str, Any]) -> None:
    found = set(results[name]["collectives"])
    assert found, "a plan over several devices that nothing crosses was not applied"
    if CASES[name].zero3:
        assert "all-gather" in found
