"""Heartbeats between the launcher of a job and the supervisors of its ranks; standard library only.

Each of them touches a file of its own in the directory of the job (`beat`) and looks at the file of the other
side (`Silence`). Neither runs any code of the user, so that a rank which computes for long, with or without
the interpreter lock, delays no heartbeat.

Silence counts only while the one who listens runs itself: on a machine that stood still, or that has no time
for anybody, nobody is declared lost before the others had their time, too.
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
    """Show whoever watches a file that this process is alive."""
    with contextlib.suppress(OSError):  # the job has ended and its directory is gone
        os.utime(path)


def last_beat(path: Path) -> int | None:
    """When a file was touched last, in nanoseconds; None if it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


class Silence:
    """For how long a sign of life has been missing.

    Args:
        sign: returns something else each time while there is life; None counts as no sign.
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
        """Seconds without a sign of life, as far as this process was awake; to be called regularly."""
        now, found = self._clock(), self._sign()
        self._elapsed += min(now - self._looked, 2 * self._interval)
        self._looked = now
        if found is not None and found != self._last:
            self._last, self._elapsed = found, 0.0
        return self._elapsed
