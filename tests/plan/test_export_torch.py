"""Plans exported to PyTorch train a GPT written in torch to the serial losses, on gloo processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.plans.exported import (
    CASES,
    HEADS,
    LENGTH,
    RATE,
    VOCABULARY,
    WIDTH,
    finish,
    run,
    serial,
    write_inputs,
)

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

ON_TWO = ["dp", "dp_micro", "tp", "sequence", "zero1", "zero3", "recompute", "pp", "gpipe"]
ON_FOUR = ["dp_tp", "dp_tp_zero1_sequence", "dp_pp"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("torch")
    folder: Path = tmp_path_factory.mktemp("torch")
    write_inputs(folder, [*ON_TWO, *ON_FOUR], "torch")
    for size, names in ((2, ON_TWO), (4, ON_FOUR)):
        arguments = [str(folder), str(HEADS), str(RATE), *names]
        ranks = [{"RANK": str(rank), "WORLD_SIZE": str(size)} for rank in range(size)]
        finish([run("export_torch_program.py", arguments, rank) for rank in ranks])
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in [*ON_TWO, *ON_FOUR]}


@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR])
def test_an_exported_plan_gives_the_serial_losses(name: str, results: dict[str, Any]) -> None:
    _, losses = serial()
    assert losses[-1] < losses[0] - 0.05
    np.testing.assert_allclose(results[name]["losses"], losses, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["dp", "tp", "sequence", "zero1", "zero3", "dp_tp", "dp_tp_zero1_sequence"])
def test_every_parameter_is_split_as_planned(name: str, results: dict[str, Any]) -> None:
    """Torch holds matrices as [outputs, inputs]; `fully_shard` splits the first dim."""
    case, blocks = CASES[name], results[name]["blocks"]
    tp = case.meshes[0].sizes.get("tp", 1)
    shard = 2 if case.zero3 or case.states else 1
    assert blocks["blocks.0.attn.q.weight"] == [WIDTH // tp // shard, WIDTH]
    assert blocks["blocks.0.attn.q.bias"] == [WIDTH // tp // shard]
    assert blocks["blocks.1.attn.out.weight"] == [WIDTH // shard, WIDTH // tp]
    assert blocks["blocks.1.mlp.up.weight"] == [4 * WIDTH // tp // shard, WIDTH]
    assert blocks["blocks.1.mlp.down.weight"] == [WIDTH // shard, 4 * WIDTH // tp]
    assert blocks["tokens.weight"] == [VOCABULARY // tp // shard, WIDTH]
    assert blocks["head.weight"] == [VOCABULARY // tp // shard, WIDTH]
    assert blocks["positions"] == [LENGTH // shard, WIDTH]
    assert blocks["norm.weight"] == [WIDTH // shard]
