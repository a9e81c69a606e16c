"""Checkpoints that are written while training goes on: the same bits as of a save at that step."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs.training import data, engine, whole

import distgraph as dg
from distgraph.engine.callbacks import Callback, ModelCheckpoint
from distgraph.errors import NonFiniteError, RuntimeFault
from distgraph.runtime.execute.checkpoint import Checkpoint, background

LAYOUTS = ["serial", "dp2tp2", "pp1_3"]


class Gate:
    """Holds back the thread that writes blocks until it is opened, or the thread that writes the index."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "write_rank") -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        original = getattr(background, name)

        def held(*args: Any) -> Any:
            self.reached.set()
            assert self.open.wait(60)
            return original(*args)

        monkeypatch.setattr(background, name, held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def step(trained: dg.Engine, arrays: Any, times: int = 1) -> None:
    """Train one step, or several on the same batch."""
    for _ in range(times):
        trained.run(next(iter(trained.dataloader(arrays, 8))))


def assert_equal(first: Path, second: Path) -> None:
    """Two checkpoints have the same tensors, bit for bit, and the same place in training."""
    one, other = Checkpoint.open(first), Checkpoint.open(second)
    assert one.verify() == other.verify() == []
    assert list(one.tensors) == list(other.tensors)
    for name in one.tensors:
        assert one.read(name).tobytes() == other.read(name).tobytes()
    state = [name for name in one.index if name not in ("written", "files", "tensors", "checksum")]
    assert {name: one.index[name] for name in state} == {name: other.index[name] for name in state}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("held", ["write_rank", "commit"])
def test_training_goes_on_and_the_bits_are_those_of_the_save(
    layout: str, held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, held)
    trained, batches = engine(layout, dropout=0.2), data(16)
    trained.fit(batches, batch_size=8, progress=False)
    trained.save(tmp_path / "now")
    trained.save(tmp_path / "later", asynchronous=True)
    before = whole(trained, "up.weight").copy()
    while not gate.reached.wait(0.01):
        step(trained, batches)
    step(trained, batches)
    assert not np.array_equal(whole(trained, "up.weight"), before)
    assert not (tmp_path / "later" / "index.json").exists()
    gate.open.set()
    trained.close()
    assert_equal(tmp_path / "now", tmp_path / "later")


def test_steps_complete_the_save(tmp_path: Path) -> None:
    trained, batches = engine("tp2"), data(8)
    trained.fit(batches, batch_size=8, progress=False)
    trained.save(tmp_path, asynchronous=True)
    while not (tmp_path / "index.json").exists():
        step(trained, batches)
    assert Checkpoint.open(tmp_path).index["step"] == 1


def test_the_next_save_waits_for_the_one_in_progress(gate: Gate, tmp_path: Path) -> None:
    trained = engine("tp2")
    trained.fit(data(8), batch_size=8, progress=False)
    trained.save(tmp_path / "a", asynchronous=True)
    threading.Timer(0.2, gate.open.set).start()
    trained.save(tmp_path / "b")
    assert Checkpoint.open(tmp_path / "a").verify() == []
    assert Checkpoint.open(tmp_path / "b").verify() == []


def test_a_folder_whose_first_save_is_in_progress(gate: Gate, tmp_path: Path) -> None:
    """Another engine gets an error that names the files and the process, and can load it afterwards."""
    trained = engine("tp2")
    trained.fit(data(8), batch_size=8, progress=False)
    trained.save(tmp_path / "a", asynchronous=True)
    assert gate.reached.wait(60)
    holder = rf"its .lock is held by process {os.getpid()} on"
    message = rf"/a has no index.json and so no complete checkpoint yet: it has .*, and {holder}"
    with pytest.raises(RuntimeFault, match=rf"{message} .*; load it when that save has ended"):
        engine("dp2tp2").load(tmp_path / "a")
    gate.open.set()
    trained.close()
    engine("dp2tp2").load(tmp_path / "a")


def test_a_folder_whose_first_save_was_interrupted(tmp_path: Path) -> None:
    trained = engine("tp2")
    trained.fit(data(8), batch_size=8, progress=False)
    trained.save(tmp_path / "a")
    (tmp_path / "a" / "index.json").rename(tmp_path / "a" / ".index.json.0.tmp")
    (tmp_path / "a" / ".lock").write_bytes(b"")
    parts = r"3 of the files of a save \(.index.json.0.tmp, step-00000001-.*, \.\.\.\), and no living process"
    message = rf"/a has no index.json and so no complete checkpoint: it has {parts} .* was interrupted"
    with pytest.raises(RuntimeFault, match=message):
        engine("tp2").load(tmp_path / "a")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_of_fit(layout: str, tmp_path: Path) -> None:
    """The same folders are kept, with the same content, and the last one is complete at the end of fit."""
    for name, asynchronous in (("sync", False), ("async", True)):
        saver = ModelCheckpoint(
            tmp_path / name / "{step:03d}", every_steps=2, keep=2, asynchronous=asynchronous
        )
        trained = engine(layout, dropout=0.2)
        trained._run = "0" * 16
        trained.fit(data(24), epochs=3, batch_size=8, callbacks=[saver], progress=False)
    for step in ("006", "008"):
        assert_equal(tmp_path / "sync" / step, tmp_path / "async" / step)
    assert sorted(path.name for path in (tmp_path / "async").iterdir()) == ["006", "008"]


class Full:
    """A disk that is full while `full`."""

    full = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._write = background.write_rank
        monkeypatch.setattr("distgraph.runtime.execute.checkpoint.writing.files.write", self.write)

    def write(self, descriptor: int, content: bytes) -> None:
        import os

        if self.full:
            raise OSError(28, "No space left on device")
        os.write(descriptor, content)


def test_an_error_comes_at_the_next_step_and_the_previous_checkpoint_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, batches = engine("dp2tp2"), data(16)
    trained.fit(batches, batch_size=8, progress=False)
    trained.save(tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    disk = Full(monkeypatch)
    trained.save(tmp_path, asynchronous=True)
    with pytest.raises(RuntimeFault, match=r"could not be written: rank 0: step-.*the previous one.*whole"):
        step(trained, batches, times=100_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert Checkpoint.open(tmp_path).verify() == []
    disk.full = False
    step(trained, batches)  # the engine goes on
    trained.save(tmp_path, asynchronous=True)
    trained.close()
    assert Checkpoint.open(tmp_path).index["step"] == trained.step


def test_an_error_ends_fit_with_the_events_of_callbacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Listener(Callback):
        def on_train_end(self, engine: dg.Engine) -> None:
            events.append("end")

    Full(monkeypatch)
    saver = ModelCheckpoint(tmp_path / "x", asynchronous=True)
    with pytest.raises(RuntimeFault, match="could not be written: rank 0"):
        engine("tp2").fit(data(8), batch_size=8, callbacks=[saver, Listener()], progress=False)
    assert events == ["end"]


def test_values_that_are_not_finite_are_refused_at_once(tmp_path: Path) -> None:
    trained = engine("tp2")
    trained.fit(data(8), batch_size=8, progress=False)
    trained.assign({"up.weight": np.full((6, 10), np.nan)})
    with pytest.raises(NonFiniteError, match=r"param up.weight is not finite in .* on rank 0"):
        trained.save(tmp_path / "x", asynchronous=True)
    assert not (tmp_path / "x").exists()
    trained.assign({"up.weight": np.ones((6, 10))})
    trained.save(tmp_path / "x")


def test_another_engine_may_not_write_the_folder_meanwhile(gate: Gate, tmp_path: Path) -> None:
    first, second = engine(), engine()
    for each in (first, second):
        each.fit(data(8), batch_size=8, progress=False)
    first.save(tmp_path, asynchronous=True)
    with pytest.raises(RuntimeFault, match="is being written by another thread of this process"):
        second.save(tmp_path)
    gate.open.set()
    first.close()
    second.save(tmp_path)


@pytest.mark.parametrize("width", [3, 600])  # pages without and with another thread that sums them
def test_the_end_of_the_process_waits(width: int, tmp_path: Path) -> None:
    import subprocess
    import sys

    code = f"""
import numpy as np, distgraph as dg, time
from distgraph.runtime.execute.checkpoint import background
original = background.write_rank
background.write_rank = lambda *args: (time.sleep(0.3), original(*args))[1]
engine = dg.Engine(dg.nn.Linear({width}, {width}), dg.nn.MeanSquaredError(), dg.optim.Adam())
engine.fit((np.ones((4, {width}), "f4"), np.ones((4, {width}), "f4")), progress=False)
engine.save({str(tmp_path)!r}, asynchronous=True)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Checkpoint.open(tmp_path).verify() == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saving_over_the_checkpoint_that_is_read(layout: str, tmp_path: Path, gate: Gate) -> None:
    """Parameters that no program has used yet are read from the new checkpoint, not from deleted files."""
    trained = engine(layout)
    trained.fit(data(16), batch_size=8, progress=False)
    trained.save(tmp_path)
    loaded = engine(layout)
    loaded.load(tmp_path)
    loaded.evaluate(data(16))
    loaded.save(tmp_path, asynchronous=True)
    gate.open.set()
    loaded.fit(data(16), epochs=2, batch_size=8, resume=True, progress=False)
    through = engine(layout)
    through.fit(data(16), epochs=2, batch_size=8, progress=False)
    assert loaded.history.losses == through.history.losses
