"""Callbacks: what they write, when they stop, and what they refuse."""

from __future__ import annotations

import csv
import io
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.programs.training import data, engine

import distgraph as dg
from distgraph.engine.callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    TensorBoard,
    Timeline,
)
from distgraph.engine.callbacks.callback_checks import check_files
from distgraph.engine.history import History
from distgraph.errors import RuntimeFault
from distgraph.runtime.execute.checkpoint import Checkpoint


class Stub:
    """An engine that counts and saves nothing."""

    def __init__(self) -> None:
        self.should_stop = False
        self.is_chief = True
        self.step = self.epoch = 0
        self.saved: list[str] = []
        self.history = History()

    def save(self, path: str, *, asynchronous: bool = False) -> None:
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


def test_epochs_whose_steps_were_all_left_out_do_not_count() -> None:
    stub: Any = Stub()
    stopping = EarlyStopping(patience=0)
    for epoch, left_out in enumerate((2, 0, 2, 1)):
        stopping.on_epoch_begin(stub, epoch, 2)
        stub.step += 2
        stub.history.skipped += list(range(stub.step - left_out + 1, stub.step + 1))
        stopping.on_epoch_end(stub, epoch, {"epoch": epoch, "valid_loss": 1.0})
        assert stub.should_stop == (epoch == 3)


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [
        (ModelCheckpoint("a", every=2), ModelCheckpoint("./a", every_steps=3), True),
        (ModelCheckpoint("a", best="loss"), ModelCheckpoint("a"), False),
        (ModelCheckpoint("a", best="loss"), ModelCheckpoint("a", best="loss", mode="max"), False),
        (ModelCheckpoint("a-{epoch}", best="loss"), ModelCheckpoint("a-{epoch}"), True),
        (ModelCheckpoint("a-{step}", keep=2), ModelCheckpoint("a-{step}"), False),
        (ModelCheckpoint("a"), CSVLogger("a"), False),
    ],
)
def test_a_checkpoint_that_stays_is_not_replaced(first: Callback, second: Callback, share: bool) -> None:
    for callbacks in ([first, second], [second, first]):
        if share:
            check_files(callbacks)
            continue
        with pytest.raises(RuntimeFault, match=r"both write .*a[^;]*; give each a path of its own"):
            check_files(callbacks)


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


def trained(folder: Path, epochs: int, resume: bool = False, **options: Any) -> dg.Engine:
    """One epoch is one step; the engine goes on from the newest checkpoint if it is to resume."""
    found = engine()
    if resume:
        found.load(max(folder.iterdir(), key=lambda path: int(path.name)))
    saver = ModelCheckpoint(folder / "{step:03d}", **options)
    found.fit(data(8), epochs, 8, callbacks=[saver], resume=resume, progress=False)
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_checkpoints_stay(tmp_path: Path) -> None:
    """Also those of before it was resumed; never those of another training, or what is no checkpoint."""
    (tmp_path / "a" / "notes").mkdir(parents=True)
    trained(tmp_path / "b", 3)
    (tmp_path / "b" / "002").rename(tmp_path / "a" / "002")
    trained(tmp_path / "a", 1)
    (tmp_path / "a" / "002").rename(tmp_path / "a" / "777")
    trained(tmp_path / "c", 4, keep=2)
    assert names(tmp_path / "c") == ["003", "004"]
    trained(tmp_path / "c", 7, resume=True, keep=3)
    assert names(tmp_path / "c") == ["005", "006", "007"]
    trained(tmp_path / "a", 4, keep=1)
    assert names(tmp_path / "a") == ["004", "777", "notes"]
    assert all(Checkpoint.open(tmp_path / "c" / name).verify() == [] for name in names(tmp_path / "c"))


def test_checkpoints_below_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found to be deleted, and to know the best after a restart."""
    numbers = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(dg.Engine, "evaluate", lambda *args: {"loss": next(numbers)})
    folder = tmp_path / "n"
    first = engine()
    first.fit(data(8), 1, 8, callbacks=[ModelCheckpoint(folder)], progress=False)
    path, best = folder / "{epoch}", "valid_loss"
    first.fit(data(8), 2, 8, data(8), [ModelCheckpoint(path, keep=1)], progress=False)
    assert [name for name in names(folder) if name.isdigit()] == ["3"]
    again = engine()
    again.load(folder / "3")
    again.fit(data(8), 4, 8, data(8), [ModelCheckpoint(path, best=best)], resume=True, progress=False)
    assert [name for name in names(folder) if name.isdigit()] == ["3"]


def test_no_empty_folders_of_deleted_checkpoints_stay(tmp_path: Path) -> None:
    """Neither one with something else in it nor the fixed part of the path is removed."""
    saver = ModelCheckpoint(tmp_path / "mc" / "{epoch}" / "x" / "y", keep=1)
    found = engine()
    found.fit(data(8), 1, 8, callbacks=[saver], progress=False)
    (tmp_path / "mc" / "1" / "notes").touch()
    found.fit(data(8), 2, 8, callbacks=[saver], progress=False)
    assert names(tmp_path / "mc") == ["1", "3"]
    assert names(tmp_path / "mc" / "1") == ["notes"]
    assert names(tmp_path / "mc" / "3" / "x") == ["y"]


def test_the_best_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([3.0, 1.0, 2.0, 4.0, 0.5, 9.0])

    def evaluate(self: dg.Engine, data: Any, batch_size: int) -> dict[str, float]:
        return {"loss": next(numbers)}

    monkeypatch.setattr(dg.Engine, "evaluate", evaluate)
    saver = {"best": "valid_loss", "keep": 2}
    found = engine()
    callbacks = [ModelCheckpoint(tmp_path / "{epoch}", **saver)]
    found.fit(data(8), 4, 8, data(8), callbacks, progress=False)
    assert names(tmp_path) == ["2", "3", "4"]
    found.fit(data(8), 2, 8, data(8), callbacks, progress=False)
    assert names(tmp_path) == ["5", "6"]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_is_known_after_a_restart(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worse epoch after a restart does not replace the best checkpoint; another training does."""
    sign = 1 if mode == "min" else -1
    numbers = iter([sign * each for each in (3.0, 1.0, 2.0, 0.5, 7.0)])
    monkeypatch.setattr(dg.Engine, "evaluate", lambda *args: {"loss": next(numbers)})
    saver = ModelCheckpoint(tmp_path, best="valid_loss", mode=mode)
    engine().fit(data(8), 2, 8, data(8), [saver], progress=False)
    for epochs, wanted in ((3, 2), (4, 3)):  # load goes back to epoch 2: the third is worse, then better
        again = engine()
        again.load(tmp_path)
        assert again.epoch == 2
        fresh = ModelCheckpoint(tmp_path, best="valid_loss", mode=mode)
        again.fit(data(8), 3, 8, data(8), [fresh], resume=True, progress=False)
        assert Checkpoint.open(tmp_path).index["epoch"] == wanted, epochs
    engine().fit(
        data(8), 1, 8, data(8), [ModelCheckpoint(tmp_path, best="valid_loss", mode=mode)], progress=False
    )
    assert Checkpoint.open(tmp_path).index["epoch"] == 1


def test_a_damaged_checkpoint_does_not_count(tmp_path: Path) -> None:
    """The one whole checkpoint before it stays, though it is older than the last."""
    found = engine()

    class Break(Callback):
        def on_epoch_end(self, engine: Any, epoch: int, logs: Any) -> None:
            if epoch in (1, 2):
                (shard,) = (tmp_path / str(epoch + 1)).glob("*.safetensors")
                shard.write_bytes(shard.read_bytes()[:-1])

    saver = ModelCheckpoint(tmp_path / "{epoch}", keep=2)
    found.fit(data(8), 4, 8, callbacks=[saver, Break()], progress=False)
    assert names(tmp_path) == ["1", "2", "3", "4"]
    found.fit(data(8), 1, 8, callbacks=[saver], progress=False)
    assert names(tmp_path) == ["4", "5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": ""}, 'path "" cannot be written: it is no path'),
        ({"path": None}, "path of ModelCheckpoint is None but must be text or a path"),
        ({"path": "a-{epoch"}, "path 'a-{epoch' cannot be filled in: expected '}' before end of string"),
        ({"path": "a}b"}, "Single '}' encountered in format string; {epoch}"),
        ({"path": "{loss}"}, "it has {loss}; {epoch} and {step} are replaced"),
        ({"path": "{}"}, "it has {}"),
        ({"path": "{0}"}, "it has {0}"),
        ({"path": "{step.real}"}, "it has {step.real}"),
        ({"path": "{step!r}"}, "{step} takes a width such as 06d and nothing else"),
        ({"path": "{step:999999999d}"}, "{step} takes a width such as 06d and nothing else"),
        ({"path": "{step:{epoch}}"}, "{step} takes a width such as 06d and nothing else"),
        ({"path": "{step:s}"}, "{step} takes a width such as 06d and nothing else"),
        ({"every": 1.5}, "every of ModelCheckpoint is 1.5 but must be an integer of at least 1"),
        ({"every_steps": 0}, "every_steps of ModelCheckpoint is 0 but must be an integer"),
        ({"keep": 0, "path": "{step}"}, "keep of ModelCheckpoint is 0 but must be an integer"),
        ({"keep": 2}, "keep is 2 but path 'x' is one directory; write {epoch} or {step} in it"),
        ({"mode": "max"}, "mode is 'max' but best is not given, so nothing is compared; give both"),
        ({"best": 3}, "best of ModelCheckpoint is 3 but must be text"),
        ({"best": "loss", "every_steps": 3}, "measured once an epoch but every_steps is 3; leave out one"),
    ],
)
def test_checkpoint_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeFault, match=re.escape(message)):
        ModelCheckpoint(**{"path": "x", **arguments})


@pytest.mark.parametrize("name", ["file", "file/deeper", "file/{step}", "x" * 300])
def test_a_checkpoint_that_cannot_be_written_shows_before_training(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = engine()
    with pytest.raises(RuntimeFault, match=r"cannot be written: .*; choose another"):
        found.fit(data(8), callbacks=[ModelCheckpoint(tmp_path / name)], progress=False)
    assert found.step == 0


def test_braces_in_a_name_are_doubled(tmp_path: Path) -> None:
    found = engine()
    found.fit(data(8), 1, 8, callbacks=[ModelCheckpoint(tmp_path / "{{a}}-{step}")], progress=False)
    assert names(tmp_path) == ["{a}-1"]


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


def test_progress_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    for terminal, of_rich in ((True, True), (True, False), (False, True)):
        console = Console(file=io.StringIO(), force_terminal=of_rich, width=120)
        monkeypatch.setattr("rich.console.Console", lambda stderr, console=console: console)
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        engine().fit(data(16), epochs=2, batch_size=8, progress=True)
        shown[terminal, of_rich] = console.file.getvalue()  # type: ignore[attr-defined]
    assert "epoch 2/2" in shown[True, True]
    assert "loss" in shown[True, True]
    assert shown[True, False] == ""
    assert shown[False, True] == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    engine().fit(data(16), epochs=2, batch_size=8, progress=True)
    assert "epoch 2/2" in console.file.getvalue()  # type: ignore[attr-defined]


def test_tensorboard_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("distgraph.engine.callbacks.training_output.import_module", absent)
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
    monkeypatch.setattr("distgraph.engine.callbacks.training_output.import_module", lambda name: module)
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
    with pytest.raises(RuntimeFault, match="must be 'min' or 'max'"):
        EarlyStopping(mode="least")
    with pytest.raises(RuntimeFault, match="every of ModelCheckpoint is 0 but must be an integer"):
        ModelCheckpoint("x", every=0)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("run/{epch}", r"it has {epch}; {epoch} and {step} are replaced, other braces are written {{ and }}"),
        ("run/{epoch", "expected '}' before end of string"),
        ("run/{}", "it has {}"),
        ("run/{0}", "it has {0}"),
        ("run/{epoch.__class__}", "it has {epoch.__class__}"),
        ("run/{epoch:s}", "{epoch} takes a width such as 06d and nothing else"),
        ("run/}", "Single '}'"),
    ],
)
def test_braces_of_a_checkpoint_path(path: str, why: str) -> None:
    with pytest.raises(RuntimeFault) as caught:
        ModelCheckpoint(path)
    assert f"ModelCheckpoint: path {path!r} cannot be filled in: " in str(caught.value)
    assert why in str(caught.value)


def test_braces_of_a_checkpoint_path_that_make_sense(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path / "a-{{b}}-{epoch:03d}-{step}")
    engine().fit(data(8), batch_size=8, callbacks=[saving], progress=False)
    assert [each.name for each in tmp_path.iterdir()] == ["a-{b}-001-1"]


def test_full_disk_leaves_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.csv"
    log, stub = CSVLogger(path), Stub()
    log.on_train_begin(stub, 3)  # type: ignore[arg-type]
    log.on_epoch_end(stub, 0, {"epoch": 0, "loss": 1.0})  # type: ignore[arg-type]
    before = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 2, limit[1]))  # the disk has two bytes left
        with pytest.raises(
            RuntimeFault, match=r"CSVLogger: .*log.csv cannot be written: .*; free some space"
        ):
            log.on_epoch_end(stub, 1, {"epoch": 1, "loss": 0.5})  # type: ignore[arg-type]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before


def test_csv_with_other_columns_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("epoch,accuracy\n")
    with pytest.raises(
        RuntimeFault, match=r"has the columns epoch, accuracy but none for loss; write to another"
    ):
        engine().fit(data(8), batch_size=8, callbacks=[CSVLogger(path, append=True)], progress=False)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RuntimeFault, match=r"CSVLogger: .*log.csv cannot be"):
        engine().fit(data(8), batch_size=8, callbacks=[CSVLogger(path, append=True)], progress=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ModelCheckpoint("x", every="2"),
            "every of ModelCheckpoint is '2' but must be an integer",
        ),
        (lambda: ModelCheckpoint("x", every_steps=0), "every_steps of ModelCheckpoint is 0 but must be"),
        (lambda: EarlyStopping(patience=-1), "patience of EarlyStopping is -1 but must be an integer"),
        (lambda: EarlyStopping(min_delta=float("nan")), "min_delta of EarlyStopping is nan but must be"),
        (lambda: Timeline("x", steps=0), "steps of Timeline is 0 but must be an integer"),
        (lambda: Timeline("x", after=1.5), "after of Timeline is 1.5 but must be an integer"),
    ],
)
def test_options_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(RuntimeFault) as caught:
        make()
    assert message in str(caught.value)
