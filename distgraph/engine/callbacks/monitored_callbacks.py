"""Callbacks that act on what an epoch measures: checkpoints, and an early end of training."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from distgraph.engine.callbacks.callback import Callback, Logs
from distgraph.engine.callbacks.callback_checks import check_monitor, check_place
from distgraph.errors import NonFiniteError, RuntimeFault
from distgraph.errors.arguments import Count, NonNegative, Size, checked_arguments
from distgraph.serialization.path_template import PathTemplate

if TYPE_CHECKING:
    from distgraph.engine import Engine

Mode = Literal["min", "max"]
"""What better means of a number."""


def _monitored(logs: Logs, name: str) -> float:
    if name not in logs:
        raise RuntimeFault(
            f"callback watches {name!r} but an epoch measures {', '.join(logs)}; name one of these"
        )
    return logs[name]


class _Best:
    """The best value so far of a number that is minimised or maximised."""

    def __init__(self, mode: str, min_delta: float = 0.0) -> None:
        self.sign = 1.0 if mode == "min" else -1.0
        self.min_delta = min_delta
        self.value = math.inf

    def improves(self, number: float) -> bool:
        """Record a number; True when it is better than all before by more than `min_delta`."""
        if self.sign * number < self.value - self.min_delta:
            self.value = self.sign * number
            return True
        return False


@checked_arguments(RuntimeFault)
class ModelCheckpoint(Callback):
    """Saves the engine.

    Parameters and states that are nan or infinite are never saved: that ends training with a NonFiniteError,
    or is warned of under Strategy(nonfinite="warn").

    Obstacles that can be detected early are reported before training starts: a path that cannot be written,
    or another job that writes there.

    Args:
        path: of the checkpoint's directory; `{epoch}` and `{step}` in it are replaced, also with a width as
            in `{step:06d}`, so that several are kept.
        every: epochs between two checkpoints; 1 by default.
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
        every: Count | None = None,
        every_steps: Count | None = None,
        best: str | None = None,
        mode: Mode = "min",
        keep: Count | None = None,
        asynchronous: bool = False,
    ) -> None:
        self.path = PathTemplate(path, "ModelCheckpoint")
        check_place("ModelCheckpoint", self.path.at(0, 0))
        if every is not None and every_steps is not None:
            raise RuntimeFault(
                f"ModelCheckpoint: every is {every} epochs but every_steps is {every_steps}; leave one out"
            )
        if best is not None and every_steps is not None:
            raise RuntimeFault(
                f"ModelCheckpoint: best={best!r} is measured once an epoch but every_steps is {every_steps}; "
                f"leave out one of them"
            )
        if best is None and mode != "min":
            raise RuntimeFault(
                f"ModelCheckpoint: mode is {mode!r} but best is not given, so nothing is compared; give both"
            )
        if keep is not None and not self.path.fields:
            raise RuntimeFault(
                f"ModelCheckpoint: keep is {keep} but path {self.path.text!r} is one directory; write "
                f"{{epoch}} or {{step}} in it"
            )
        self.every, self.every_steps, self.best, self.mode = every or 1, every_steps, best, mode
        self.keep, self.writes = keep, self.path.text
        self.asynchronous = asynchronous
        self._best = _Best(mode)

    def may_share(self, other: Callback) -> bool:
        """See `Callback`. The best checkpoint, and those that are kept, must not be replaced by another's."""
        if not isinstance(other, ModelCheckpoint) or self.keep != other.keep:
            return False
        every_one_stays = bool(self.path.fields) and self.keep is None
        return every_one_stays or (self.best, self.mode) == (other.best, other.mode)

    def on_train_begin(self, engine: Engine, last_epoch: int) -> None:
        """See `Callback`. Raises RuntimeFault where nothing can be written, or nothing measures `best`."""
        if self.best is not None:
            check_monitor("ModelCheckpoint", self.best, engine)
        engine.checkpoints.reserve(self.path.at(engine.epoch, engine.step), lock=not self.path.fields)
        if self.best is not None and self.keep is None:
            self._best = _Best(self.mode)
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


@checked_arguments(RuntimeFault)
class EarlyStopping(Callback):
    """Ends training when a number has not improved for some epochs.

    An epoch whose steps were all left out, as the first ones under precision fp16 may be, does not count.

    Args:
        monitor: "loss", "valid_loss", or a metric.
        patience: epochs without improvement that are tolerated.
        min_delta: what counts as improvement.
        mode: "min" or "max".
    """

    def __init__(
        self,
        monitor: str = "valid_loss",
        patience: Size = 3,
        min_delta: NonNegative = 0.0,
        mode: Mode = "min",
    ) -> None:
        self.monitor, self.patience = monitor, patience
        self._best = _Best(mode, min_delta)
        self.waited = 0
        self._first_step = 0

    def on_train_begin(self, engine: Engine, last_epoch: int) -> None:
        """See `Callback`. Raises RuntimeFault where no epoch measures what is watched."""
        check_monitor("EarlyStopping", self.monitor, engine)

    def on_epoch_begin(self, engine: Engine, epoch: int, batches: int) -> None:
        self._first_step = engine.step

    def on_epoch_end(self, engine: Engine, epoch: int, logs: Logs) -> None:
        number = _monitored(logs, self.monitor)
        left_out = sum(step > self._first_step for step in engine.history.skipped)
        if left_out and left_out == engine.step - self._first_step:
            return
        self.waited = 0 if self._best.improves(number) else self.waited + 1
        if self.waited > self.patience:
            engine.should_stop = True
