"""Begin and end of training for callbacks: each gets both events, also when training fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from distgraph.engine.callbacks.callback import Callback
from distgraph.engine.callbacks.callback_checks import check_files, check_hooks

if TYPE_CHECKING:
    from distgraph.engine.engine import Engine


@contextmanager
def watching(engine: Engine, callbacks: Sequence[Callback], last_epoch: int) -> Iterator[None]:
    """Context of training: calls `on_train_begin` of each callback, and `on_train_end` of those that began.

    Raises the error that ended training, or else the first error of a callback at the end. Errors of other
    callbacks are added to it as notes, so that none is hidden.
    """
    check_hooks(callbacks, Callback)
    check_files(callbacks)
    begun: list[Callback] = []
    failure: BaseException | None = None
    try:
        for callback in callbacks:
            begun.append(callback)
            callback.on_train_begin(engine, last_epoch)
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        _end_training(engine, begun, failure)


def _end_training(engine: Engine, callbacks: Sequence[Callback], failure: BaseException | None) -> None:
    errors: list[Exception] = []
    for callback in callbacks:
        try:
            callback.on_train_end(engine)
        except Exception as error:  # noqa: BLE001 - the other callbacks get the event too
            note = f"{type(callback).__name__}.on_train_end failed too: {type(error).__name__}: {error}"
            first = failure or (errors[0] if errors else None)
            if first is not None:
                first.add_note(note)
            errors.append(error)
    if errors and failure is None:
        raise errors[0]
