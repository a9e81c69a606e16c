"""Callbacks: what they write, when they stop, and what they refuse."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from training import data, engine

from distgraph.callbacks import Callback, CSVLogger, EarlyStopping, ModelCheckpoint, ProgressBar, TensorBoard
from distgraph.errors import RuntimeFault
from distgraph.runtime.checkpoint import Checkpoint


class Stub:
    """An engine that counts and saves nothing."""

    def __init__(self) -> None:
        self.should_stop = False
        self.is_chief = True
        self.step = self.epoch = 0
        self.saved: list[str] = []

    def save(self, path: str) -> None:
        self.saved.append(path)


def epochs(callback: Callback, numbers: list[float], name: str = "valid_loss") -> tuple[Stub, int]:
    """Feed one number an epoch; returns the engine, and how many epochs ran."""
    stub: Any = Stub()
    for epoch, number in enumerate(numbers):
        stub.epoch = epoch + 1
        callback.on_epoch_end(stub, epoch, {"epoch": epoch, "loss": 0.0, name: number})
        if stub.should_stop:
            return stub, epoch + 1
    return stub, len(numbers)


@pytest.mark.parametrize(
    ("options", "numbers", "ran"),
    [
        ({"patience": 1}, [3, 2, 2, 2, 1], 4),
        ({"patience": 2}, [3, 2, 2, 2, 1, 1], 6),
        ({"patience": 0}, [1, 2, 0], 2),
        ({"patience": 0, "mode": "max"}, [1, 2, 3, 3, 4], 4),
        ({"patience": 0, "min_delta": 0.5}, [3, 2, 1.6, 1], 3),
        ({"patience": 0}, [1, float("nan"), 0], 2),
    ],
)
def test_early_stopping(options: dict[str, Any], numbers: list[float], ran: int) -> None:
    assert epochs(EarlyStopping(**options), numbers)[1] == ran


def test_early_stopping_ends_training() -> None:
    trained = engine()
    x, y = data(16)
    trained.fit(
        (x, y),
        epochs=50,
        batch_size=8,
        valid_data=(x, (y + 1) % 3),
        callbacks=[EarlyStopping(patience=1)],
        progress=False,
    )
    assert 3 <= len(trained.history) < 50
    assert trained.epoch == len(trained.history)


def test_checkpoints_of_the_best_epochs() -> None:
    best = ModelCheckpoint("at-{epoch}", best="valid_loss")
    assert epochs(best, [3, 4, 2, 2, 1])[0].saved == ["at-1", "at-3", "at-5"]
    assert epochs(ModelCheckpoint("every", every=2), [0] * 5)[0].saved == ["every"] * 2


def test_checkpoints_every_few_steps(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "{step}", every_steps=3)
    engine("tp2").fit(data(20), epochs=2, batch_size=5, callbacks=[saver], progress=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "6"]
    assert Checkpoint.open(tmp_path / "6").index["position"] == 10


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.csv"
    trained = engine()
    trained.fit(
        data(16), epochs=2, batch_size=8, valid_data=data(8), callbacks=[CSVLogger(path)], progress=False
    )
    trained.fit(
        data(16),
        epochs=1,
        batch_size=8,
        valid_data=data(8),
        callbacks=[CSVLogger(path, append=True)],
        progress=False,
    )
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [{name: float(text) for name, text in row.items()} for row in rows] == trained.history.epochs
    assert list(rows[0]) == ["epoch", "loss", "valid_loss"]


def test_progress_bar_on_a_terminal_only() -> None:
    shown = {}
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
        engine().fit(data(16), epochs=2, batch_size=8, callbacks=[ProgressBar(console)], progress=False)
        shown[terminal] = console.file.getvalue()  # type: ignore[attr-defined]
    assert "epoch 2/2" in shown[True]
    assert "loss" in shown[True]
    assert shown[False] == ""


def test_tensorboard_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("distgraph.callbacks.import_module", absent)
    with pytest.raises(RuntimeFault, match="needs tensorboardX or torch"):
        engine().fit(data(8), batch_size=8, callbacks=[TensorBoard(tmp_path)], progress=False)


def test_tensorboard_writes_every_step_and_epoch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, directory: str) -> None:
            assert directory == str(tmp_path)

        def add_scalar(self, name: str, number: float, step: int) -> None:
            written.append((name, number, step))

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    module = type("Module", (), {"SummaryWriter": Writer})
    monkeypatch.setattr("distgraph.callbacks.import_module", lambda name: module)
    trained = engine()
    trained.fit(data(16), epochs=1, batch_size=8, callbacks=[TensorBoard(tmp_path)], progress=False)
    assert [w[1:] for w in written if w[0] == "step/loss"] == [
        (loss, i + 1) for i, loss in enumerate(trained.history.losses)
    ]
    assert ("epoch/loss", trained.history["loss"][0], 0) in written
    assert written[-1][0] == "closed"


def test_watching_what_is_not_measured() -> None:
    with pytest.raises(RuntimeFault, match="watches 'valid_loss' but an epoch measures epoch, loss"):
        engine().fit(data(8), batch_size=8, callbacks=[EarlyStopping()], progress=False)
    with pytest.raises(RuntimeFault, match='must be "min" or "max"'):
        EarlyStopping(mode="least")
    with pytest.raises(RuntimeFault, match="every is 0"):
        ModelCheckpoint("x", every=0)
