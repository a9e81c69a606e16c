"""Layers whose split DTensor alone does not compute train under applied plans to the serial losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from support.plans.applied_layers import MODELS, plan_of  # noqa: E402
from support.plans.exported import finish, run  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def test_uneven_heads_and_split_channels(tmp_path: Path) -> None:
    for name in MODELS:
        plan_of(name).save(tmp_path / f"{name}.json")
    root = str(Path(__file__).parents[3])
    ranks = [{"RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": root} for rank in range(2)]
    finish([run("applied_layers.py", [str(tmp_path)], rank) for rank in ranks])
    for serial, applied in json.loads((tmp_path / "losses.json").read_text()).values():
        assert serial[-1] < serial[0]
        assert applied == pytest.approx(serial, abs=2e-6)
