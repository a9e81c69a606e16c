"""Ctrl-C during a search: it ends what is under way, and is remembered where something in between swallows
it (solvers return their best so far)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether Ctrl-C was pressed."""

    asked = False


@contextmanager
def remembered() -> Iterator[Interrupt]:
    """Inside, Ctrl-C raises KeyboardInterrupt as ever and is noted too (where this is the main thread)."""
    found = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return

    def note(number: int, frame: FrameType | None) -> None:
        found.asked = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)
