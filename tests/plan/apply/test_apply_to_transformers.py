"""Llama and GPT-2 of transformers train under applied plans on four gloo processes to the serial losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

from support.plans.applied_models import plan_of  # noqa: E402
from support.plans.exported import finish, run  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]
CASES = ["llama:dp_tp", "llama:zero3", "llama:pp_dp", "gpt2:dp_tp", "gpt2:zero3", "gpt2:pp_tp"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("applied")
    for case in CASES:
        plan_of(case).save(folder / f"{case}.plan.json")
    root = str(Path(__file__).parents[3])
    ranks = [{"RANK": str(rank), "WORLD_SIZE": "4", "PYTHONPATH": root} for rank in range(4)]
    finish([run("applied_models.py", [str(folder), *CASES], rank) for rank in ranks])
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_parameters_are_the_serial_ones(case: str, results: dict[str, Any]) -> None:
    found = results[case]
    assert found["losses"] == pytest.approx(found["serial"], abs=1e-5)
    assert found["apart"] < 1e-5
