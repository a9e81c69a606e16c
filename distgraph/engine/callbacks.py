"""Callbacks: objects that an engine calls between the steps of training.

Under MPI every process calls them with the same numbers; those that print or write a file do so on rank 0.
"""

from __future__ import annotations

import csv
import errno
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distgraph.engine.callback_checks import check_monitor, check_place
from distgraph.errors import NonFiniteError, RuntimeFault
from distgraph.ir.dtypes import check_count
from distgraph.serialization.atomic_files import check_writable
from distgraph.serialization.documents import shown_path
from distgraph.serialization.path_template import PathTemplate

if TYPE_CHECKING:
    from rich.progress import Progress

    from distgraph.engine import Engine

Logs = dict[str, float]


class Callback:
    """Base of callbacks: methods that an engine calls while it trains. They do nothing by default.

    Set `engine.should_stop = True` to end training after the present step. If that is in the middle of an
    epoch, the epoch stays unfinished, and `fit(..., resume=True)` continues it.
    """

    def on_train_begin(self, engine: Engine, last_epoch: int) -> None:
        """Before the first epoch; training ends before epoch `last_epoch`."""

    def on_epoch_begin(self, engine: Engine, epoch: int, batches: int) -> None:
        """Before an epoch of `batches` batches."""

    def on_batch_end(self, engine: Engine, step: int, logs: Logs) -> None:
        """After step number `step` (from 1), with its loss and metrics."""

    def on_epoch_end(self, engine: Engine, epoch: int, logs: Logs) -> None:
        """After an epoch and its validation, with the means over its samples."""

    def on_train_end(self, engine: Engine) -> None:
        """After the last epoch, or the error that ended training."""


def _monitored(logs: Logs, name: str) -> float:
    if name not in logs:
        raise RuntimeFault(
            f"callback watches {name!r} but an epoch measures {', '.join(logs)}; name one of these"
        )
    return logs[name]


class _Best:
    """The best value so far of a number that is minimised or maximised."""

    def __init__(self, who: str, mode: str, min_delta: Any = 0.0) -> None:
        if mode not in ("min", "max"):
            raise RuntimeFault(f'{who}: mode is {mode!r} but must be "min" or "max"')
        if not isinstance(min_delta, (int, float)) or not 0 <= min_delta < math.inf:
            raise RuntimeFault(f"{who}: min_delta is {min_delta!r} but must be a number from 0 up")
        self.sign = 1.0 if mode == "min" else -1.0
        self.min_delta = min_delta
        self.value = math.inf

    def improves(self, number: float) -> bool:
        """Record a number; True when it is better than all before by more than `min_delta`."""
        if self.sign * number < self.value - self.min_delta:
            self.value = self.sign * number
            return True
        return False


class ModelCheckpoint(Callback):
    """Saves the engine.

    Parameters and states that are nan or infinite are never saved: that ends training with a NonFiniteError,
    or is warned of under Strategy(nonfinite="warn").

    Obstacles that can be detected early are reported before training starts: a path that cannot be written,
    or another job that writes there.

    Args:
        path: of the checkpoint's directory; `{epoch}` and `{step}` in it are replaced, also with a width as
            in `{step:06d}`, so that several are kept.
        every: epochs between two checkpoints.
        every_steps: steps between two checkpoints, instead of epochs.
        best: name of a number of an epoch, such as "valid_loss": save only when it is better than in any
            checkpoint of this training before. With `keep` all are saved, and that of the best epoch stays.
        mode: "min" or "max", what better means.
        keep: how many of the last checkpoints stay; older ones that this training wrote to `path`, also
            before it was resumed, are deleted. All stay by default.
        asynchronous: training goes on while a checkpoint is written; see `Engine.save`.

    Raises:
        RuntimeFault: an argument makes no sense, or two do not go together.
    """

    def __init__(
        self,
        path: str | Path,
        every: int = 1,
        every_steps: int | None = None,
        best: str | None = None,
        mode: str = "min",
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        self.path = PathTemplate(path, "ModelCheckpoint")
        check_place("ModelCheckpoint", self.path.at(0, 0))
        for name, number in (("every", every), ("every_steps", every_steps), ("keep", keep)):
            if number is not None:
                check_count(f"ModelCheckpoint: {name}", number, RuntimeFault)
        if best is not None and not isinstance(best, str):
            raise RuntimeFault(f'ModelCheckpoint: best is {best!r} but must be a name such as "valid_loss"')
        if best is not None and every_steps is not None:
            raise RuntimeFault(
                f"ModelCheckpoint: best={best!r} is measured once an epoch but every_steps is {every_steps}; "
                f"leave out one of them"
            )
        if keep is not None and not self.path.fields:
            raise RuntimeFault(
                f"ModelCheckpoint: keep is {keep} but path {self.path.text!r} is one directory; write "
                f"{{epoch}} or {{step}} in it"
            )
        self.every, self.every_steps, self.best, self.mode, self.keep = every, every_steps, best, mode, keep
        self.asynchronous = asynchronous
        self._best = _Best("ModelCheckpoint", mode)

    def on_train_begin(self, engine: Engine, last_epoch: int) -> None:
        """See `Callback`. Raises RuntimeFault where nothing can be written, or nothing measures `best`."""
        if self.best is not None:
            check_monitor("ModelCheckpoint", self.best, engine)
        engine.checkpoints.reserve(self.path.at(engine.epoch, engine.step), lock=not self.path.fields)
        if self.best is not None and self.keep is None:
            self._best = _Best("ModelCheckpoint", self.mode)
            number = engine.checkpoints.best(self.path, self.best, self.mode)
            if number is not None:
                self._best.improves(number)

    def on_batch_end(self, engine: Engine, step: int, logs: Logs) -> None:
        if self.every_steps is not None and step % self.every_steps == 0:
            self._save(engine)

    def on_epoch_end(self, engine: Engine, epoch: int, logs: Logs) -> None:
        if self.every_steps is not None:
            return
        number = _monitored(logs, self.best) if self.best is not None else None
        if number is not None and self.keep is None:
            if self._best.improves(number):
                self._save(engine)
        elif (epoch + 1) % self.every == 0:
            self._save(engine)

    def _save(self, engine: Engine) -> None:
        path = self.path.at(engine.epoch, engine.step)
        try:
            engine.save(str(path), asynchronous=self.asynchronous)
        except NonFiniteError as error:
            if engine.training_spec.strategy.nonfinite != "warn":
                raise
            if engine.is_chief:
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)
            return
        if self.keep is not None:
            engine.checkpoints.retain(self.path, path, self.keep, self.best, self.mode)


class EarlyStopping(Callback):
    """Ends training when a number has not improved for some epochs.

    Args:
        monitor: "loss", "valid_loss", or a metric.
        patience: epochs without improvement that are tolerated.
        min_delta: what counts as improvement.
        mode: "min" or "max".
    """

    def __init__(
        self, monitor: str = "valid_loss", patience: int = 3, min_delta: float = 0.0, mode: str = "min"
    ) -> None:
        check_count("EarlyStopping: patience", patience, RuntimeFault, 0)
        self.monitor, self.patience = monitor, patience
        self._best = _Best("EarlyStopping", mode, min_delta)
        self.waited = 0

    def on_train_begin(self, engine: Engine, last_epoch: int) -> None:
        """See `Callback`. Raises RuntimeFault where no epoch measures what is watched."""
        check_monitor("EarlyStopping", self.monitor, engine)

    def on_epoch_end(self, engine: Engine, epoch: int, logs: Logs) -> None:
        self.waited = 0 if self._best.improves(_monitored(logs, self.monitor)) else self.waited + 1
        if self.waited > self.patience:
            engine.should_stop = True


class CSVLogger(Callback):
    """Writes the numbers of every epoch to a CSV file after the epoch. Rows are written atomically.

    Args:
        path: of the file; replaced unless `append`.
        append: continue an existing file, which must have a column for every number.
    """

    def __init__(self, path: str | Path, append: bool = False) -> None:
        check_place("CSVLogger", path)
        self.path, self.append = Path(path), append
        self._names: list[str] = []

    def on_train_begin(self, engine: Engine, last_epoch: int) -> None:
        """See `Callback`. Raises RuntimeFault where the file cannot be written, or read to go on with it."""
        self._names = []
        if not engine.is_chief:
            return
        with self._writing():
            if self.append and self.path.exists():
                with self.path.open(newline="") as file:
                    self._names = next(csv.reader(file), [])
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text("")

    def on_epoch_end(self, engine: Engine, epoch: int, logs: Logs) -> None:
        """See `Callback`. Raises RuntimeFault when the row cannot be written, or a number has no column."""
        if not engine.is_chief:
            return
        rows = [] if self._names else [list(logs)]
        self._names = self._names or list(logs)
        missing = [name for name in logs if name not in self._names]
        if missing:
            raise RuntimeFault(
                f"CSVLogger: {shown_path(self.path)} has the columns {', '.join(self._names)} but none for "
                f"{', '.join(missing)}; write to another file, or without append"
            )
        rows.append([repr(logs[name]) if name in logs else "" for name in self._names])
        text = StringIO(newline="")
        csv.writer(text).writerows(rows)
        with self._writing(), self.path.open("ab", buffering=0) as file:
            before, content = file.tell(), text.getvalue().encode()
            try:
                if file.write(content) != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(before)
                raise

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, csv.Error) as error:
            message = getattr(error, "strerror", None) or error
            raise RuntimeFault(
                f"CSVLogger: {shown_path(self.path)} cannot be written: {message}; free some space, or "
                f"choose another file"
            ) from None


class Timeline(Callback):
    """Records when every task of some steps runs on every rank, and when ranks wait for each other.

    `distgraph forecast script.py --measured FILE --html report.html` shows them below the forecast. Rank 0
    writes the file. Steps that are not recorded are as fast as without this callback.

    Args:
        path: of the JSON file.
        after: steps of this training before the first that is recorded: the first ones compile and warm up.
        steps: how many are recorded; the report shows the median one.
    """

    def __init__(self, path: str | Path, after: int = 10, steps: int = 5) -> None:
        check_count("Timeline: after", after, RuntimeFault, 0)
        check_count("Timeline: steps", steps, RuntimeFault)
        check_place("Timeline", path)
        self.path, self.after, self.steps = Path(path), after, steps
        self._begin = -1  # step after which it begins
        self._records = False

    def on_train_begin(self, engine: Engine, last_epoch: int) -> None:
        if engine.is_chief:
            check_writable(self.path, RuntimeFault)
        self._begin = engine.step + self.after
        self._look(engine)

    def on_batch_end(self, engine: Engine, step: int, logs: Logs) -> None:
        self._look(engine)

    def on_train_end(self, engine: Engine) -> None:
        """See `Callback`. Training that ends early leaves the steps so far."""
        self._write(engine)

    def _look(self, engine: Engine) -> None:
        if engine.step == self._begin:
            engine.start_recording()
            self._records = True
        elif engine.step == self._begin + self.steps:
            self._write(engine)

    def _write(self, engine: Engine) -> None:
        if not self._records:
            return
        self._records = False
        timeline = engine.stop_recording()
        if engine.is_chief and timeline.steps:
            timeline.write(self.path)


class TensorBoard(Callback):
    """Writes losses and metrics for TensorBoard; needs `tensorboardX` or PyTorch with tensorboard.

    Args:
        directory: of the event files.
    """

    def __init__(self, directory: str | Path) -> None:
        check_place("TensorBoard", f"{directory}/events" if str(directory) else "")
        self.directory = str(directory)
        self._writer: Any = None

    def on_train_begin(self, engine: Engine, last_epoch: int) -> None:
        """See `Callback`. Raises RuntimeFault when neither package is there, or nothing can be written."""
        if not engine.is_chief:
            return
        check_place("TensorBoard", f"{self.directory}/events")
        for module in ("tensorboardX", "torch.utils.tensorboard"):
            try:
                self._writer = import_module(module).SummaryWriter(self.directory)
                return
            except ImportError:
                continue
            except OSError as error:
                raise RuntimeFault(
                    f"TensorBoard: {shown_path(self.directory)} cannot be written: {error}; choose another"
                ) from None
        raise RuntimeFault(
            "TensorBoard callback needs tensorboardX or torch with tensorboard; pip install tensorboardX"
        )

    def on_batch_end(self, engine: Engine, step: int, logs: Logs) -> None:
        self._add("step", step, logs)

    def on_epoch_end(self, engine: Engine, epoch: int, logs: Logs) -> None:
        self._add("epoch", epoch, logs)

    def _add(self, group: str, number: int, logs: Logs) -> None:
        if self._writer is not None:
            for name, value in logs.items():
                self._writer.add_scalar(f"{group}/{name}", value, number)

    def on_train_end(self, engine: Engine) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _started_bar() -> Progress | None:
    """A progress bar on standard error, or None where that is no terminal."""
    from rich.console import Console  # noqa: PLC0415 (only the rank that shows it loads it)
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, TextColumn("{task.fields[numbers]}"), console=console)
    bar.start()
    return bar


class ProgressBar(Callback):
    """A bar on rank 0, where standard error is a terminal; quiet elsewhere."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: Any = None
        self._last_epoch = 0

    def on_train_begin(self, engine: Engine, last_epoch: int) -> None:
        self._last_epoch = last_epoch
        if engine.is_chief:
            self._progress = _started_bar()

    def on_epoch_begin(self, engine: Engine, epoch: int, batches: int) -> None:
        if self._progress is not None:
            title = f"epoch {epoch + 1}/{self._last_epoch}"
            self._task = self._progress.add_task(title, total=batches, numbers="")

    def on_batch_end(self, engine: Engine, step: int, logs: Logs) -> None:
        if self._progress is not None:
            self._progress.update(self._task, advance=1, numbers=_show(logs))

    def on_epoch_end(self, engine: Engine, epoch: int, logs: Logs) -> None:
        if self._progress is not None:
            self._progress.update(self._task, numbers=_show(logs))

    def on_train_end(self, engine: Engine) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _show(logs: Logs) -> str:
    return "  ".join(f"{name} {number:.4g}" for name, number in logs.items() if name != "epoch")
