"""Callbacks around training: each is told of its begin, and whatever happens of its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from distgraph.engine.callbacks import Callback

if TYPE_CHECKING:
    from distgraph.engine.engine import Engine


@contextmanager
def watching(engine: Engine, callbacks: Sequence[Callback], last_epoch: int) -> Iterator[None]:
    """Training happens inside: each callback is told of its begin, and each that was told of its end.

    What ended training is raised, or else what the first callback raised at the end; errors of others are
    notes on it, so that none hides another.
    """
    told: list[Callback] = []
    failure: BaseException | None = None
    try:
        for callback in callbacks:
            told.append(callback)
            callback.on_train_begin(engine, last_epoch)
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        _end_training(engine, told, failure)


def _end_training(engine: Engine, callbacks: Sequence[Callback], failure: BaseException | None) -> None:
    errors: list[Exception] = []
    for callback in callbacks:
        try:
            callback.on_train_end(engine)
        except Exception as error:  # noqa: BLE001 - the others are told too
            told = f"{type(callback).__name__}.on_train_end failed too: {type(error).__name__}: {error}"
            first = failure or (errors[0] if errors else None)
            if first is not None:
                first.add_note(told)
            errors.append(error)
    if errors and failure is None:
        raise errors[0]
