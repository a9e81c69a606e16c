"""Ranks that an elastic job has lost: what its processes write and its launcher reads; standard library.

An elastic job (`distgraph run --elastic`) has a folder that all of its starts share. Whoever sees that a rank
is lost, and not that a program ended it, adds a line to the file `losses` there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from distgraph.runtime.job.heartbeat import heartbeat_limit
from distgraph.runtime.job.job_files import (
    DEFAULT_TIME_LIMIT,
    FAILURE_REPORT_SECONDS,
    TIMEOUT,
    setting_in_seconds,
)

ELASTIC: Final = "DISTGRAPH_ELASTIC"
"""Environment variable: the folder of an elastic job; only the launcher sets it."""
_LOSSES: Final = "losses"


@dataclass(frozen=True, slots=True)
class Loss:
    """What a job has lost.

    Attributes:
        text: what happened, such as "rank 2 was killed by SIGKILL".
        rank: the rank; None where none in particular, as when mpiexec was killed.
        host: its host, where the launcher started ranks on several.
        whole_host: the host itself is lost, with all of its ranks.
    """

    text: str
    rank: int | None = None
    host: str = ""
    whole_host: bool = False


def elastic_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder of the elastic job of this process, or of an environment; None in other jobs."""
    given = (os.environ if environ is None else environ).get(ELASTIC)
    return Path(given) if given else None


def record_loss(loss: Loss, environ: Mapping[str, str] | None = None) -> None:
    """Add a loss to those of the job; nothing happens where the job is not elastic."""
    folder = elastic_folder(environ)
    if folder is None:
        return
    with suppress(OSError):  # the launcher has removed the folder
        descriptor = os.open(folder / _LOSSES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, (json.dumps(asdict(loss)) + "\n").encode())
        finally:
            os.close(descriptor)


def read_losses(folder: Path) -> list[Loss]:
    """What was lost since `forget_losses`, each rank once."""
    try:
        lines = (folder / _LOSSES).read_text().splitlines()
    except OSError:
        return []
    losses = []
    for line in lines:
        with suppress(ValueError):  # half of a line, which another host is writing
            losses.append(Loss(**json.loads(line)))
    by_rank = {loss.rank: loss for loss in reversed(losses) if loss.rank is not None}
    return [*by_rank.values(), *(loss for loss in losses if loss.rank is None)]


def forget_losses(folder: Path) -> None:
    """Begin a new list, for the next start of the job."""
    (folder / _LOSSES).unlink(missing_ok=True)


def report_seconds() -> float:
    """Seconds in which the ranks of a job that has failed say why they stop; no more than their time limit.

    The ranks of an elastic job also write what they have in memory, and have as long as that takes.
    """
    limit = setting_in_seconds(TIMEOUT, DEFAULT_TIME_LIMIT)
    within = min if elastic_folder() is None else max
    return within(FAILURE_REPORT_SECONDS, limit)


def stopped_seconds() -> float:
    """Seconds after which the supervisor of a stopped rank ends it.

    In an elastic job that is before other ranks, which wait for it, reach their time limit.
    """
    limit = setting_in_seconds(TIMEOUT, DEFAULT_TIME_LIMIT)
    if elastic_folder() is None:
        return limit + report_seconds()
    return min(heartbeat_limit(), limit / 2)
