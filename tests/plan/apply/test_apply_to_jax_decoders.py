"""GPT-2 in plain JAX and Llama in Flax train under applied plans on eight devices to the serial losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("flax")

pytestmark = [pytest.mark.jax, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"  # compiles sooner
    settings = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/plans/applied_decoders.py")],
        env={**os.environ, **settings, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("case", "parts"), [("dp_tp", 2), ("zero3", 8), ("searched", None)])
@pytest.mark.parametrize(("model", "size"), [("gpt2", 16 * 64), ("llama", 16 * 48)])
def test_losses_are_the_serial_ones(
    model: str, size: int, case: str, parts: int | None, results: dict[str, Any]
) -> None:
    found, serial = results[model][case], results[model]["serial"]
    assert serial[-1] != serial[0]
    assert found["losses"] == pytest.approx(serial, rel=1e-5)
    assert found["devices"] == 8
    if parts is not None:
        assert found["up"][0] * found["up"][1] * parts == size
