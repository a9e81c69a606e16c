"""Checkpoints of what the ranks that are left had in memory: complete, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs.training import data, engine

import distgraph as dg
from distgraph.engine.checkpoints.elastic_fit import ElasticFit
from distgraph.errors import RuntimeFault
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.runtime.execute.checkpoint import Checkpoint, SavedTensor
from distgraph.runtime.execute.checkpoint.survivors import assemble, write_survivor
from distgraph.runtime.job.losses import ELASTIC, Loss, record_loss

MESH = dg.ProcessMesh.grid(dp=2, tp=2)
VALUES = {"w": np.arange(12.0).reshape(4, 3), "b": np.arange(5.0), "s": np.array(7, "i8")}
SPECS = {"w": ["tp", None], "b": [None], "s": []}


def write(folder: Path, rank: int, step: int = 3, specs: dict[str, Any] = SPECS) -> None:
    """What one rank of four writes; the values are those of VALUES plus its step."""
    layouts = {name: ShardSpec.of(spec) for name, spec in specs.items()}
    dtypes = {"w": "f64", "b": "f64", "s": "i64"}
    tensors = {
        name: SavedTensor("param", VALUES[name].shape, dtypes[name], DistAttr(MESH, spec))
        for name, spec in layouts.items()
    }

    def block(name: str, rank: int) -> np.ndarray:
        array = VALUES[name] + np.array(step, VALUES[name].dtype)
        return np.asarray(array[layouts[name].slices(array.shape, MESH, rank)])

    write_survivor(folder, rank, tensors, block, {"step": step, "losses": [0.5, float("nan")], "run": "a"})


@pytest.mark.parametrize("lost", [(0,), (3,), (0, 3), (2, 3)])
def test_replicas_cover_what_was_lost(lost: tuple[int, ...], tmp_path: Path) -> None:
    left = [rank for rank in range(4) if rank not in lost]
    for rank in left:
        write(tmp_path, rank)
    made = assemble(tmp_path)
    assert made is not None
    assert made[0] == 3
    assert set(made[1]) <= set(left)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.verify() == []
    for name, array in VALUES.items():
        np.testing.assert_array_equal(checkpoint.read(name), array + 3)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"index.json", *checkpoint.contents.files}  # no replica, no list


def test_blocks_that_only_lost_ranks_had(tmp_path: Path) -> None:
    for rank in (0, 2):  # both have the first half of w
        write(tmp_path, rank)
    assert assemble(tmp_path) is None
    assert not (tmp_path / "index.json").exists()
    assert assemble(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{}", '{"blocks": [{"name": "w"}]}', "\0" * 64],
    ids=["empty", "list", "no blocks", "no file", "zeros"],
)
def test_a_rank_whose_list_is_damaged_counts_as_lost(text: str, tmp_path: Path) -> None:
    """The others have all blocks, or the job goes on from a checkpoint; none of it ends the next start."""
    for rank in (0, 1, 2):
        write(tmp_path, rank)
    (tmp_path / "blocks.rank-00002").write_text(text)
    assert assemble(tmp_path) == (3, (0, 1))
    np.testing.assert_array_equal(Checkpoint.open(tmp_path).read("w"), VALUES["w"] + 3)


def test_the_last_step_that_is_complete_is_taken(tmp_path: Path) -> None:
    write(tmp_path, 0, step=4)
    for rank in (1, 2):
        write(tmp_path, rank, step=3)
    assert assemble(tmp_path) == (3, (1, 2))
    np.testing.assert_array_equal(Checkpoint.open(tmp_path).read("w"), VALUES["w"] + 3)


def test_blocks_that_were_not_listed_do_not_count(tmp_path: Path) -> None:
    """A rank that is lost while it writes."""
    for rank in (0, 1):
        write(tmp_path, rank)
    (tmp_path / "blocks.rank-00001").unlink()
    assert assemble(tmp_path) is None


# In fit
# ------------------------------------------------------------------------------------------------------


class Lost(dg.callbacks.Callback):
    """A rank is lost behind a step, or in the evaluation at the end of an epoch."""

    def __init__(self, step: int, at: str) -> None:
        self.step, self.at = step, at

    def on_batch_end(self, engine: dg.Engine, step: int, logs: dict[str, float]) -> None:
        if step == self.step and self.at == "step":
            self._lose()
        if step == self.step and self.at == "evaluate":
            engine.evaluate = self._lose  # type: ignore[method-assign,assignment]

    @staticmethod
    def _lose(*args: Any) -> dict[str, float]:
        record_loss(Loss("rank 1 was killed by SIGKILL", 1))
        raise RuntimeFault("rank 1 was killed by SIGKILL; rank 0 stops too")


@pytest.mark.parametrize("at", ["step", "evaluate"])
@pytest.mark.parametrize("layout", ["serial", "dp2tp2", "pp1_3"])
def test_fit_goes_on_from_memory(
    layout: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = data(22)

    def fit(trained: dg.Engine, *callbacks: dg.callbacks.Callback) -> dg.History:
        return trained.fit((x, y), 3, 8, (x, y), callbacks, progress=False)

    through = fit(engine("tp2", dropout=0.3))
    monkeypatch.setenv(ELASTIC, str(tmp_path))
    monkeypatch.setattr("distgraph.engine.checkpoints.elastic_fit._calls", iter([0, 0]))
    with pytest.raises(RuntimeFault, match="stops too"):
        fit(engine(layout, dropout=0.3), Lost(6, at))
    resumed = fit(engine("tp2", dropout=0.3))
    assert "fit goes on after step 6 (epoch " in capsys.readouterr().err
    np.testing.assert_allclose(resumed.losses, through.losses, rtol=1e-10)
    assert len(resumed.losses) == 9
    for one, other in zip(resumed.epochs, through.epochs, strict=True):
        assert one == pytest.approx(other, rel=1e-10)


def test_a_rank_in_the_middle_of_a_step_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ELASTIC, str(tmp_path))
    trained = engine()
    elastic = ElasticFit(trained)
    elastic.begin([], 8)
    trained.fit(data(8), batch_size=8, progress=False)  # another call: this one has not seen the step
    record_loss(Loss("rank 1 was killed by SIGKILL", 1))
    with pytest.raises(RuntimeFault, match="lost"), elastic:
        raise RuntimeFault("lost")
    assert not list(tmp_path.glob("*/memory-*"))
