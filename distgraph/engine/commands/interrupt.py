"""Ctrl-C: what it means during a search, and while something is written that is to be whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """How often Ctrl-C was pressed: whether at all, and whether again."""

    requested = False
    again = False


@contextmanager
def remembered() -> Iterator[Interrupt]:
    """Inside, Ctrl-C raises KeyboardInterrupt as ever and is noted too (where this is the main thread).

    A search ends with its best plan at the first one, even where a solver in between swallows the exception,
    and without any at the second.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def note(number: int, frame: FrameType | None) -> None:
        interrupt.again = interrupt.requested
        interrupt.requested = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def deferred() -> Iterator[None]:
    """Inside, the first Ctrl-C waits until the end; the second one counts at once.

    Nothing changes outside of the main thread, or where Ctrl-C does something else than calling a function.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    frames: list[FrameType | None] = []

    def wait(number: int, frame: FrameType | None) -> None:
        frames.append(frame)
        if len(frames) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if frames:
        before(signal.SIGINT, frames[0])
