"""Callbacks: what happens between the steps of training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distgraph.engine import Engine


class Callback:
    """What an engine calls while it trains, on every process; does nothing by itself."""

    def on_train_begin(self, engine: Engine, last_epoch: int) -> None:
        """Before the first epoch; training ends before epoch `last_epoch`."""

    def on_epoch_begin(self, engine: Engine, epoch: int, batches: int) -> None:
        """Before an epoch of so many batches."""

    def on_batch_end(self, engine: Engine, step: int, logs: dict[str, float]) -> None:
        """After a step."""

    def on_epoch_end(self, engine: Engine, epoch: int, logs: dict[str, Any]) -> None:
        """After an epoch and its validation."""

    def on_train_end(self, engine: Engine) -> None:
        """After the last epoch, or the error that ended training."""


class ProgressBar(Callback):
    pass
