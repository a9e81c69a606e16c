"""Threads of in-process ranks on one core.

Tests compute little. On several cores the threads spend a third of the time on handing Python's interpreter
lock to each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def on_one_core(body: Callable[..., Any]) -> Callable[..., Any]:
    """The body of a rank's thread, whose first argument is its transport, on the core of its world."""

    def run(transport: Any, *arguments: Any) -> Any:
        cores = sorted(os.sched_getaffinity(0))
        world = getattr(transport, "_world", transport)
        os.sched_setaffinity(0, {cores[hash(world) % len(cores)]})
        return body(transport, *arguments)

    return run
