"""Callbacks that cannot do their work are refused before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.programs.training import data, engine

from distgraph.engine.callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    TensorBoard,
    Timeline,
)
from distgraph.errors import RuntimeFault


class Counts(Callback):
    """Whether training has begun to take steps."""

    steps = 0

    def on_batch_end(self, engine: Any, step: int, logs: Any) -> None:
        self.steps += 1


@pytest.mark.parametrize("kind", [ModelCheckpoint, CSVLogger, Timeline, TensorBoard])
def test_places_that_cannot_be_written_are_told_before_training(kind: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RuntimeFault, match=r"file/below/x.* cannot be written: .*file is no folder; choose"):
        kind(file / "below" / "x")
    with pytest.raises(RuntimeFault, match=rf"{kind.__name__}: .*cannot be written"):
        kind("")
    late = kind(tmp_path / "later" / "x")
    (tmp_path / "later").write_text("")
    counts = Counts()
    with pytest.raises(RuntimeFault, match="cannot be written"):
        engine().fit(data(8), batch_size=8, callbacks=[counts, late], progress=False)
    assert counts.steps == 0


@pytest.mark.parametrize("watch", [EarlyStopping("acuracy"), ModelCheckpoint("x", best="valid_loss")])
def test_numbers_that_no_epoch_measures_are_told_before_training(watch: Callback) -> None:
    counts = Counts()
    with pytest.raises(
        RuntimeFault, match=r"watches '\w+' but an epoch measures epoch, loss; name one of these"
    ):
        engine().fit(data(8), batch_size=8, callbacks=[counts, watch], progress=False)
    assert counts.steps == 0


@pytest.mark.parametrize(
    ("name", "way"),
    [("on_batch_ends", "rename it to on_batch_end, or"), ("on_x", "rename it to one of these, or")],
)
def test_a_method_that_is_no_hook_is_refused_before_training(name: str, way: str) -> None:
    kind = type("Watch", (Counts,), {name: lambda self, *_: None, "_on_x": print, "on_disk": True})
    counts, hooks = Counts(), "on_batch_end, on_epoch_begin, on_epoch_end, on_train_begin, on_train_end"
    with pytest.raises(RuntimeFault, match=f"^callback Watch has a method {name} but .* {hooks}; {way}"):
        engine().fit(data(8), batch_size=8, callbacks=[counts, kind()], progress=False)
    assert counts.steps == 0


def test_a_file_where_a_folder_is(tmp_path: Path) -> None:
    for callback in (CSVLogger, Timeline):
        with pytest.raises(RuntimeFault, match=f"{callback.__name__}: .* cannot be written: it is a folder"):
            callback(tmp_path)


def test_hooks_with_other_arguments_are_refused_before_training() -> None:
    bad = type("Bad", (Counts,), {"on_epoch_end": lambda self, engine: None})()
    with pytest.raises(RuntimeFault, match=r"on_epoch_end of callback Bad takes \(engine\) but .*, logs\)"):
        engine().fit(data(8), batch_size=8, callbacks=[bad], progress=False)
    assert bad.steps == 0
