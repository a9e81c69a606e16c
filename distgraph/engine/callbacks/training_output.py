"""Callbacks that write what training measures: files, TensorBoard, a bar. They do so on rank 0."""

from __future__ import annotations

import csv
import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distgraph.engine.callbacks.callback import Callback, Logs
from distgraph.engine.callbacks.callback_checks import check_place
from distgraph.errors import RuntimeFault
from distgraph.errors.arguments import Count, Size, checked_arguments
from distgraph.serialization.atomic_files import check_writable
from distgraph.serialization.documents import shown_path
from distgraph.tracing.tracer import user_stack_level

if TYPE_CHECKING:
    from rich.progress import Progress

    from distgraph.engine import Engine


@checked_arguments(RuntimeFault)
class CSVLogger(Callback):
    """Writes the numbers of every epoch to a CSV file after the epoch. Rows are written atomically.

    Args:
        path: of the file; replaced unless `append`.
        append: continue an existing file, which must have a column for every number.
    """

    def __init__(self, path: str | Path, append: bool = False) -> None:
        check_place("CSVLogger", path, file=True)
        self.path = self.writes = Path(path)
        self.append = append
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


@checked_arguments(RuntimeFault)
class Timeline(Callback):
    """Records when every task of some steps runs on every rank, and when ranks wait for each other.

    `distgraph forecast script.py --measured FILE` compares them with the forecast; `--html report.html` also
    shows them below it. Rank 0 writes the file. Steps that are not recorded are as fast as without this
    callback.

    Args:
        path: of the JSON file.
        after: steps of this training before the first that is recorded: the first ones compile and warm up.
        steps: how many are recorded; the report shows the median one.
    """

    def __init__(self, path: str | Path, after: Size = 10, steps: Count = 5) -> None:
        check_place("Timeline", path, file=True)
        self.path = self.writes = Path(path)
        self.after, self.steps = after, steps
        self._start, self._begin = -1, -1  # steps before training, and before it records
        self._records = False

    def on_train_begin(self, engine: Engine, last_epoch: int) -> None:
        if engine.is_chief:
            check_writable(self.path, RuntimeFault)
        self._start, self._begin = engine.step, engine.step + self.after
        self._look(engine)

    def on_batch_end(self, engine: Engine, step: int, logs: Logs) -> None:
        self._look(engine)

    def on_train_end(self, engine: Engine) -> None:
        """See `Callback`. Training that ends early leaves the steps so far; before the first, it warns."""
        self._write(engine)
        if engine.is_chief and self._start < engine.step <= self._begin:
            warnings.warn(
                f"Timeline: after is {self.after} but training ended after {engine.step - self._start} "
                f"steps, before the first that would be recorded, so {self.path} is not written; give less",
                UserWarning,
                stacklevel=user_stack_level(),
            )

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


@checked_arguments(RuntimeFault)
class TensorBoard(Callback):
    """Writes losses and metrics for TensorBoard; needs `tensorboardX` or PyTorch with tensorboard.

    Args:
        directory: of the event files.
    """

    def __init__(self, directory: str | Path) -> None:
        check_place("TensorBoard", directory)
        check_place("TensorBoard", f"{directory}/events")
        self.directory = self.writes = str(directory)
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
    forced = any(name in os.environ for name in ("FORCE_COLOR", "TTY_COMPATIBLE"))  # as rich reads them
    if not forced and not (sys.stderr and sys.stderr.isatty()):
        return None
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
