"""The base of callbacks: objects that an engine calls between the steps of training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distgraph.engine import Engine

Logs = dict[str, float]


class Callback:
    """Base of callbacks: methods that an engine calls while it trains. They do nothing by default.

    Set `engine.should_stop = True` to end training after the present step. If that is in the middle of an
    epoch, the epoch stays unfinished, and `fit(..., resume=True)` continues it.

    Attributes:
        writes: path of the file or folder that it writes, which no other callback may write unless
            `may_share`; empty for none.
    """

    writes: str | Path = ""

    def may_share(self, other: Callback) -> bool:
        """Whether another callback may write to the same path, because neither replaces what has to stay."""
        return False

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
