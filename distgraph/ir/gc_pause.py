"""Passes build many small objects that stay: searching them for cycles again and again doubles their time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 1 << 20
"""Number of new objects above which the collector does not search them as soon as it is switched on again."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Python's cyclic garbage collector is paused inside; also a decorator.

    What refers to nothing in a cycle is freed as always. Nests: only the outermost switches it on again. Many
    objects that are there by then count as old, as if they had survived: else the next allocation would
    search all of them.

    Example:
        >>> with collector_paused():
        ...     gc.isenabled()
        False
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # to the oldest generation
        gc.enable()
