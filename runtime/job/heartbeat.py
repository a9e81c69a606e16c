"""Heartbeats between the launcher of a job and the supervisors of its ranks; standard library only.

The launcher and every supervisor touch a file of their own in the directory of the job (`beat`) and look at
the file of the other side (`Silence`). Neither runs code of the user, so a rank that computes for a long
time, with or without the interpreter lock, delays no heartbeat.

Only time in which the listening process ran itself counts as silence. On a machine that was suspended or is
overloaded, no process is declared lost before it had time to run as well.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from distgraph.runtime.job.job_files import setting_in_seconds

VARIABLE: Final = "DISTGRAPH_HEARTBEAT"
"""Environment variable: seconds without a heartbeat after which a process of the job counts as lost."""
DEFAULT_LIMIT: Final = 30.0
_BEATS: Final = 10  # within the limit


def heartbeat_limit(environ: Mapping[str, str] | None = None) -> float:
    """Seconds without a heartbeat after which a process counts as lost: DISTGRAPH_HEARTBEAT, or 30.

    Args:
        environ: by default that of this process.

    Raises:
        RuntimeFault: not a positive number.
    """
    return setting_in_seconds(VARIABLE, DEFAULT_LIMIT, environ)


def interval(limit: float) -> float:
    """Seconds between two heartbeats, at most 1."""
    return min(limit / _BEATS, 1.0)


def beat(path: Path) -> None:
    """Touch a file, as the heartbeat of this process."""
    with contextlib.suppress(OSError):  # the job has ended and its directory is gone
        os.utime(path)


def last_beat(path: Path) -> int | None:
    """Time of the last heartbeat of a file in nanoseconds; None where there is no such file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


class Silence:
    """Measures for how long a process has given no sign of life.

    Args:
        sign: returns a new value at each call while the process is alive; None counts as no sign.
        interval: seconds between two calls of `seconds`; a longer gap counts as two intervals.
        clock: seconds that never go back.
    """

    def __init__(
        self, sign: Callable[[], object], interval: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sign, self._interval, self._clock = sign, interval, clock
        self._last: object = None
        self._looked = clock()
        self._elapsed = 0.0

    def seconds(self) -> float:
        """Seconds without a sign of life while this process ran; to be called regularly."""
        now, sign = self._clock(), self._sign()
        self._elapsed += min(now - self._looked, 2 * self._interval)
        self._looked = now
        if sign is not None and sign != self._last:
            self._last, self._elapsed = sign, 0.0
        return self._elapsed
