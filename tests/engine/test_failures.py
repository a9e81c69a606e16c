"""What is left of an engine after something failed: it lives on, or says that it must load a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs.training import data, engine

from distgraph.engine.callbacks import Callback
from distgraph.errors import RuntimeFault
from distgraph.runtime.execute.checkpoint import Checkpoint


class Torn:
    """A data set whose last row cannot be read."""

    def __init__(self, count: int = 30) -> None:
        self.x, self.y = data(count)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        if row == len(self) - 1:
            raise ValueError("page 25 is torn")
        return self.x[row], self.y[row]


def steps(trained: Any, count: int) -> list[float]:
    return [trained.run(data(12))["loss"] for _ in range(count)]


@pytest.mark.parametrize(("layout", "micro"), [("serial", 1), ("dp3", 1), ("pp1_3", 2), ("dp2tp2", 2)])
def test_engine_lives_on_after_a_loader_error(layout: str, micro: int, tmp_path: Path) -> None:
    trained, other = engine(layout, micro=micro), engine(layout, micro=micro)
    assert steps(trained, 2) == steps(other, 2)
    with pytest.raises((RuntimeFault, ValueError), match="page 25 is torn"):
        trained.fit(Torn(), batch_size=30, shuffle=False, progress=False)
    trained.save(tmp_path)
    assert Checkpoint.open(tmp_path).index["step"] == 2
    assert steps(trained, 2) == steps(other, 2)
    again = engine(layout, micro=micro)
    again.load(tmp_path)
    assert again.run(data(12))["loss"] == trained.history.losses[2]


@pytest.mark.parametrize("failure", [OSError("no space left"), ValueError("not to be expected")])
def test_engine_lives_on_after_a_failed_save(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, other = engine("dp3"), engine("dp3")
    assert steps(trained, 1) == steps(other, 1)
    trained.save(tmp_path)
    memory = trained.memory.block

    def fails(name: str, rank: int) -> np.ndarray:
        if rank == 1:
            raise failure
        return memory(name, rank)

    with monkeypatch.context() as patch:
        patch.setattr(trained.memory, "block", fails)
        with pytest.raises(RuntimeFault, match=str(failure)):
            trained.save(tmp_path)
    assert steps(trained, 1) == steps(other, 1)
    trained.save(tmp_path)
    assert Checkpoint.open(tmp_path).index["step"] == 2


def test_engine_lives_on_after_a_failed_load(tmp_path: Path) -> None:
    trained, other = engine("dp3"), engine("dp3")
    assert steps(trained, 1) == steps(other, 1)
    with pytest.raises(RuntimeFault, match=r"has no index.json"):
        trained.load(tmp_path / "none")
    trained.save(tmp_path / "good")
    assert steps(trained, 1) == steps(other, 1)


def test_load_that_stops_half_way_asks_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = engine("dp3")
    steps(trained, 1)
    trained.save(tmp_path)
    reload = trained.memory.reload

    def fails(rank: int, reader: Any) -> None:
        if rank == 1:
            raise OSError("the disk is gone")
        reload(rank, reader)

    with monkeypatch.context() as patch:
        patch.setattr(trained.memory, "reload", fails)
        with pytest.raises(RuntimeFault, match="the disk is gone"):
            trained.load(tmp_path)
    for use in (lambda: steps(trained, 1), lambda: trained.save(tmp_path), lambda: trained.evaluate(data(6))):
        with pytest.raises(RuntimeFault, match=r"are damaged: loading .* did not end; load a checkpoint"):
            use()
    trained.load(tmp_path)
    assert len(steps(trained, 1)) == 1


def test_load_after_close_replaces_what_is_there(tmp_path: Path) -> None:
    trained = engine("dp3")
    steps(trained, 1)
    trained.save(tmp_path)
    after = steps(trained, 1)
    trained.close()
    trained.load(tmp_path)
    assert steps(trained, 1) == after


@pytest.mark.parametrize("layout", ["serial", "dp2tp2"])
def test_step_that_stops_in_its_update_asks_for_a_checkpoint(layout: str, tmp_path: Path) -> None:
    trained = engine(layout)
    steps(trained, 1)
    trained.save(tmp_path)
    (compiled,) = trained._session.programs.values()
    worker = compiled.workers[max(compiled.workers)]

    def fails() -> None:
        raise MemoryError("no room")

    worker._commit = fails  # type: ignore[method-assign]
    with pytest.raises((RuntimeFault, MemoryError), match="no room"):
        steps(trained, 1)
    del worker._commit
    with pytest.raises(RuntimeFault, match=r"are damaged: a step stopped in the middle of its update"):
        trained.save(tmp_path)
    trained.load(tmp_path)
    again = engine(layout)
    again.load(tmp_path)
    assert steps(trained, 2) == steps(again, 2)


class Ends(Callback):
    """Notes that training ended, and fails then where that is asked for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.ended = error, 0

    def on_train_end(self, engine: Any) -> None:
        self.ended += 1
        if self.error is not None:
            raise self.error


class Stumbles(Ends):
    def on_batch_end(self, engine: Any, step: int, logs: Any) -> None:
        raise ValueError("the first of all")


def test_an_error_at_the_end_does_not_hide_the_first() -> None:
    watchers = [Ends(OSError("disk is full")), Stumbles(KeyError("late")), Ends()]
    with pytest.raises(ValueError, match="the first of all") as caught:
        engine().fit(data(12), callbacks=watchers, progress=False)
    assert caught.value.__notes__ == [
        "Ends.on_train_end failed too: OSError: disk is full",
        "Stumbles.on_train_end failed too: KeyError: 'late'",
    ]
    assert [each.ended for each in watchers] == [1, 1, 1]


def test_all_callbacks_are_told_of_the_end() -> None:
    watchers = [Ends(OSError("disk is full")), Ends(ValueError("too")), Ends()]
    with pytest.raises(OSError, match="disk is full") as caught:
        engine().fit(data(12), callbacks=watchers, progress=False)
    assert caught.value.__notes__ == ["Ends.on_train_end failed too: ValueError: too"]
    assert [each.ended for each in watchers] == [1, 1, 1]


def test_callbacks_before_one_that_fails_to_begin_are_told_of_the_end() -> None:
    class Refuses(Ends):
        def on_train_begin(self, engine: Any, last_epoch: int) -> None:
            raise ValueError("not like this")

    watchers = [Ends(), Refuses(), Ends()]
    with pytest.raises(ValueError, match="not like this"):
        engine().fit(data(12), callbacks=watchers, progress=False)
    assert [each.ended for each in watchers] == [1, 1, 0]
