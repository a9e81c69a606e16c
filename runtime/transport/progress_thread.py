"""A thread that lets the messages of a rank go on while the rank computes.

MPI moves a long message only inside its own calls: the bytes that a rank sends to another machine, or
receives from one, wait in a buffer of the kernel until the rank calls MPI again. A rank inside one long
product makes no such call. NumPy and compiled kernels release Python's lock while they compute, so that
another thread of the rank can make the calls.

Messages inside a machine gain nothing from that: there the copying takes the time, not the way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from distgraph.runtime.transport.subnormal_numbers import FlushedToZero

_PERIOD: Final = 0.002
"""Seconds between two looks at the messages. A look every 1, 2, 4, 8, 12 ms hid 171, 170, 161, 140, 128 of
the 177 ms of a sum at 400 Mbit/s, and takes some tens of microseconds from the rank."""
_IDLE_LOOKS: Final = 5
"""Looks without messages before the thread waits to be woken; waking it for every message costs more."""


class ProgressThread:
    """Calls a function every two milliseconds while there are messages under way.

    The thread takes the lock of the transport only if it is free: a rank that waits holds it, and moves its
    messages itself.

    Args:
        advance: lets the messages go on; returns whether any is still under way. It must not raise.
        lock: held while `advance` runs, and by the rank in every call of the transport.
    """

    def __init__(self, advance: Callable[[], bool], lock: Any) -> None:
        self._advance, self._lock = advance, lock
        self._woken, self._stopped = threading.Event(), False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Let the thread look at the messages; called by the rank, with the lock, when it has started one."""
        if self._woken.is_set() or self._stopped:
            return
        self._woken.set()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="distgraph-progress", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads are allowed here; messages move in calls of the rank
                self._stopped = True
            else:
                self._thread = thread

    def stop(self) -> None:
        """End the thread and wait for its end. The caller must not hold the lock."""
        self._stopped = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with FlushedToZero():  # as in the steps of the rank: it adds up the same numbers
            self._look()

    def _look(self) -> None:
        while not self._stopped:
            self._woken.wait()
            idle = 0
            while idle < _IDLE_LOOKS and not self._stopped:
                time.sleep(_PERIOD)
                if self._lock.acquire(blocking=False):
                    try:
                        idle = 0 if self._advance() else idle + 1
                        if idle == _IDLE_LOOKS:
                            self._woken.clear()
                    finally:
                        self._lock.release()
