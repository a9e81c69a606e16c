"""SIGINT (Ctrl-C) and SIGHUP while the processes of a job start and end; standard library only.

Python raises KeyboardInterrupt wherever the main thread is. In an import, or between the last line of a
script and the end of its process, that prints a traceback which tells the user nothing. So the launcher
blocks these signals while it starts mpiexec, and all processes that mpiexec starts inherit that. A process
accepts them when it can handle them: a rank first by ending at once, then, while its script runs, by
KeyboardInterrupt.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_BLOCKED: Final = frozenset({signal.SIGINT, signal.SIGHUP})
_CALLBACK_SECONDS: Final = 0.01


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block SIGINT and SIGHUP in this thread, and in the processes that it starts in the `with` statement.

    A signal that comes inside takes effect at the end of the `with` statement.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def accept_signals() -> None:
    """Undo in this process what `signals_blocked` has done to the process that started it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)


def end_on_sigint() -> None:
    """Let SIGINT end this process at once, also inside of calls that do not return to Python."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_on_sigint() -> None:
    """Let SIGINT raise KeyboardInterrupt, as Python does by default.

    Where Python cannot pass an exception on, as in a callback of the garbage collector, it would print a
    traceback and continue. A KeyboardInterrupt is raised again a little later instead.
    """
    print_exception = sys.unraisablehook

    def repeat(error: sys.UnraisableHookArgs) -> None:
        if issubclass(error.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(_interrupt_later, ())
        else:
            print_exception(error)

    sys.unraisablehook = repeat
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt_later() -> None:
    time.sleep(_CALLBACK_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)


def ignore_sigint() -> None:
    """Let SIGINT have no effect on this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
