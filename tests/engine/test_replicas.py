"""Comparison of replicated parameters and states, and of what processes give: ranks and tensors are named."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs.replicated import engine, flip
from support.programs.training import data

import distgraph as dg
from distgraph.engine.agreement import _checksum
from distgraph.engine.replicas import CAUSES
from distgraph.errors import RuntimeFault, ShardingError

GRID = np.arange(24, dtype="f4").reshape(4, 6)


@pytest.mark.parametrize("layout", ["serial", "dp3", "dp2tp2", "pp1_3", "dp2pp2"])
def test_sound_ranks_agree(layout: str) -> None:
    trained, other = engine(layout), engine(layout, None)
    x, y = data(24)
    trained.fit((x, y), epochs=2, batch_size=8, progress=False)
    other.fit((x, y), epochs=2, batch_size=8, progress=False)
    assert trained.history == other.history


@pytest.mark.parametrize(
    ("layout", "name", "rank", "bit", "message"),
    [
        ("dp3", "up.weight", 1, 0, "copies of param up.weight .*: rank 1 against ranks 0, 2, the majority"),
        ("dp3", "down.bias.adam_v", 2, 51, "copies of state down.bias.adam_v .*: rank 2 against ranks 0, 1,"),
        (
            "dp2tp2",
            "up.weight",
            3,
            0,
            "copies of param up.weight .*: rank 1 against rank 3, without a majority",
        ),
        (
            "dp2tp2",
            "down.bias",
            0,
            51,
            "copies of param down.bias .*: rank 0 against ranks 1, 2, 3, the major",
        ),
        (
            "pp1_3",
            "down.weight",
            3,
            0,
            "copies of param down.weight .*: rank 3 against ranks 1, 2, the major",
        ),
    ],
)
def test_a_flipped_bit_names_rank_and_tensor(
    layout: str, name: str, rank: int, bit: int, message: str
) -> None:
    trained = engine(layout, 2, lr=0.0)  # parameters keep the bits that they have
    for _ in range(3):
        trained.run(data(12))
    flip(trained, name, rank, bit)
    with pytest.raises(
        RuntimeFault, match=rf"^after step 4 {message}.*; all were equal after step 2; {CAUSES}$"
    ):
        trained.run(data(12))


def test_damaged_parameters_are_not_used_or_saved(tmp_path: Path) -> None:
    trained = engine("dp3", 100)
    trained.run(data(12))
    trained.save(tmp_path)
    flip(trained, "up.bias", 2)
    with pytest.raises(RuntimeFault, match=r"after step 1 copies of param up.bias .*: rank 2 against"):
        trained.save(tmp_path)
    for use in (lambda: trained.run(data(12)), lambda: trained.predict(data(6)[0])):
        with pytest.raises(
            RuntimeFault, match=r"are damaged: after step 1 copies of param up.bias .*; load a checkpoint"
        ):
            use()
    trained.load(tmp_path)
    assert trained.run(data(12))["loss"] > 0


def test_after_loading_nothing_counts_as_compared(tmp_path: Path) -> None:
    """The message does not say that copies which were replaced had been equal."""
    trained = engine("dp3", 1)
    trained.run(data(12))
    trained.save(tmp_path)
    trained.load(tmp_path)
    flip(trained, "up.bias", 2)
    with pytest.raises(
        RuntimeFault, match=r"^after step 2 copies of .*; nothing was compared since they .*; possible causes"
    ):
        trained.run(data(12))


def test_steps_between_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    trained = engine("dp3", 3)
    monkeypatch.setattr(
        trained._session.__class__, "verify_replicas", lambda self, step, *batch: compared.append(step)
    )
    for _ in range(7):
        trained.run(data(12))
    assert compared == [3, 6]


@pytest.mark.parametrize("every", [0, -1, 1.5, "2", True])
def test_option_is_checked(every: Any) -> None:
    with pytest.raises(
        ShardingError, match=r"verify_replicas of Strategy is .* but must be an integer of at least 1"
    ):
        dg.Strategy(verify_replicas=every)


@pytest.mark.parametrize(
    "other",
    [
        np.asfortranarray(GRID),
        np.ascontiguousarray(GRID.T).T,
        np.repeat(GRID, 2, axis=1)[:, ::2],
        np.ascontiguousarray(GRID[::-1])[::-1],
        [list(row) for row in GRID],
    ],
    ids=["columns", "transposed", "strided", "reversed", "rows"],
)
def test_equal_numbers_in_other_memory_layouts_have_equal_checksums(other: Any) -> None:
    assert _checksum(other) == _checksum(GRID)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (GRID, GRID.T),
        (GRID, GRID + np.float32(1e-6)),
        (np.zeros((0, 3)), np.zeros((3, 0))),
        (np.zeros(0, "f4"), np.zeros(0, "f8")),
        (np.float32(1), np.float32(2)),
    ],
    ids=["shape", "number", "empty", "empty of another type", "0-d"],
)
def test_other_numbers_shapes_or_types_have_other_checksums(one: Any, other: Any) -> None:
    assert _checksum(one) != _checksum(other)
    assert _checksum(one) == _checksum(np.array(one))


def test_a_contiguous_array_is_not_copied() -> None:
    large = np.ones((1024, 1024), "f4")
    tracemalloc.start()
    _checksum(large)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < large.nbytes / 10
