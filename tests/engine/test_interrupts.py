"""Ctrl-C: in a command that is still loading, in a search, and while a checkpoint is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph.cli import entry
from distgraph.engine.checkpoints import saving
from distgraph.engine.commands.interrupt import deferred, remembered
from distgraph.runtime.execute.process_group import InProcessWorld


def press() -> None:
    """Ctrl-C, which Python notices before the next statement."""
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def sigint_restored() -> Iterator[None]:
    """Undo what a command does to SIGINT for the rest of its process."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_that_ignores_ctrl_c_as_its_shell_told_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "load_application", lambda: Cli(press))
    with sigint_restored():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        entry.main()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_little_is_imported_before_ctrl_c_is_handled() -> None:
    code = "import sys; m = set(sys.modules); import distgraph.cli.entry; print(*(set(sys.modules) - m))"
    done = subprocess.run([sys.executable, "-Sc", code], capture_output=True, text=True, check=True)
    assert not {"typing", "re", "contextlib"} & set(done.stdout.split())


def interrupted_while_loading(name: str) -> Any:
    raise KeyboardInterrupt


class Cli:
    """A command line whose commands end in some way."""

    def __init__(self, main: Callable[[], None]) -> None:
        self.main = main


def as_typer_does() -> None:
    try:
        press()
    except KeyboardInterrupt as error:
        raise SystemExit(130) from error


def already_said() -> None:
    raise SystemExit(130)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (interrupted_while_loading, "error: interrupted\n"),
        (lambda name: Cli(as_typer_does), "error: interrupted\n"),
        (lambda name: Cli(already_said), ""),
    ],
    ids=["loading", "command", "launcher"],
)
def test_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], load: Any, said: str
) -> None:
    monkeypatch.setattr(entry, "load_application", lambda: load("distgraph.cli.application"))
    with pytest.raises(SystemExit) as ended, sigint_restored():
        entry.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == said


def test_a_search_notes_the_second_one() -> None:
    with remembered() as interrupt:
        with pytest.raises(KeyboardInterrupt):
            press()
        assert (interrupt.requested, interrupt.again) == (True, False)
        with pytest.raises(KeyboardInterrupt):
            press()
        assert (interrupt.requested, interrupt.again) == (True, True)


def trained(ranks: int) -> dg.Engine:
    strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=ranks), batch_axis="dp") if ranks > 1 else None
    model, loss = dg.nn.Linear(3, 1), dg.nn.MeanSquaredError()
    engine = dg.Engine(model, loss, dg.optim.SGD(0.1), strategy=strategy)
    data = np.ones((4, 3), "f4"), np.zeros((4, 1), "f4")
    engine.fit(data, batch_size=4, progress=False)
    return engine


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_that_is_being_written_is_completed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int
) -> None:
    engine, write = trained(ranks), saving.write_checkpoint

    def pressed(*given: Any) -> None:
        press()
        write(*given)

    monkeypatch.setattr(saving, "write_checkpoint", pressed)
    with pytest.raises(KeyboardInterrupt):
        engine.save(tmp_path)
    again = trained(ranks)
    again.load(tmp_path)
    assert again.step == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine.fit((np.ones((4, 3), "f4"), np.zeros((4, 1), "f4")), batch_size=4, progress=False)  # still works


def test_a_second_one_counts_at_once() -> None:
    reached: list[str] = []

    def work() -> None:
        with deferred():
            press()
            reached.append("first")
            press()
            reached.append("second")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_in_between_comes_first() -> None:
    def work() -> None:
        with deferred():
            press()
            raise ValueError("disk is full")

    with pytest.raises(ValueError, match="disk"):
        work()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("moment", ["behind a report", "before the work is handed out"])
def test_ranks_in_this_process_are_not_waited_for_twice(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Ctrl-C where it is open which ranks have work, or have reported."""
    monkeypatch.setenv("DISTGRAPH_TIMEOUT", "5")
    world = InProcessWorld(2)
    place = world._done if moment == "behind a report" else world._tasks[1]

    class Pressed:
        """A queue at which Ctrl-C is pressed at the first use."""

        def __init__(self) -> None:
            self.put = self.first if place is not world._done else place.put

        def get(self) -> None:
            place.get()
            raise KeyboardInterrupt

        def first(self, work: Any) -> None:
            self.put = place.put
            raise KeyboardInterrupt

    if place is world._done:
        world._done = Pressed()  # type: ignore[assignment]
    else:
        world._tasks[1] = Pressed()  # type: ignore[call-overload]
    with pytest.raises(KeyboardInterrupt):
        world.run(lambda rank: rank)
    assert world.ended
    world.close()
