"""Threads of in-process ranks on one core.

Tests compute little. On several cores the threads spend a third of the time on handing Python's interpreter
lock to each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_WORKER = "PYTEST_XDIST_WORKER"


def core() -> int:
    """The core for the rank threads of this process; the workers of pytest-xdist take turns."""
    cores, worker = sorted(os.sched_getaffinity(0)), os.environ.get(_WORKER, "gw0")
    return cores[int(worker.removeprefix("gw")) % len(cores)]


def on_one_core(body: Callable[..., Any]) -> Callable[..., Any]:
    """The body of a thread, which runs on that core from now on."""
    chosen = core()

    def run(*args: Any) -> Any:
        os.sched_setaffinity(0, {chosen})
        return body(*args)

    return run
