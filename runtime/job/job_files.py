"""The files in the directory of a job, by which its processes inform each other; standard library only.

launcher       process number and start time of the launcher; touched as a heartbeat (see `heartbeat.py`)
supervisor.R   those of the supervisor of rank R and of the supervisor's parent; touched as a heartbeat
rank.R         process number and start time of rank R
shared.R       shared memory files that the MPI library of rank R has made
failed         the first failure
failure.R      the failure report of rank R (see `failure_report.py`)
reported.R     rank R makes no failure report any more: it has seen the failure of another rank, or was ended
follower.R     rank R is killed in a call of MPI that would wait for a rank that has failed
stopping       the launcher is ending the job
ended.R        rank R has ended since then
closed.R       the supervisor of rank R ended by itself; nothing killed it
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from distgraph.errors import RuntimeFault

JOB_DIRECTORY: Final = "DISTGRAPH_JOB_DIRECTORY"
"""Environment variable by which the launcher passes on the job's directory."""
JOB: Final = "DISTGRAPH_JOB"
"""Environment variable by which the launcher marks the processes of a start of a job on several hosts.

Values of later starts of one launcher sort behind those of earlier ones.
"""
FAILURE_REPORT_SECONDS: Final = 5.0
"""Seconds that a failing rank waits for the failure reports of the others."""
_SIZE_VARIABLES: Final = ("PMI_SIZE", "PMIX_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANK_VARIABLES: Final = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
LAUNCHER: Final = "launcher"
STOPPING: Final = "stopping"
CLOSED: Final = "closed"
FAILED: Final = "failed"
FOLLOWER: Final = "follower"
REPORTED: Final = "reported"
INTERRUPTED: Final = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
CLUSTER_VARIABLE: Final = "DISTGRAPH_CLUSTER"
"""Environment variable: resource file or shipped name for the engines of a process."""
PLAN_VARIABLE: Final = "DISTGRAPH_PLAN"
"""Environment variable: path of a plan file for the engine that trains in a process."""
STRATEGY_VARIABLE: Final = "DISTGRAPH_STRATEGY"
"""Environment variable: fields of the strategies of a process, as `--strategy` takes them."""
TIMEOUT: Final = "DISTGRAPH_TIMEOUT"
"""Environment variable: seconds that a rank waits without progress."""
DEFAULT_TIME_LIMIT: Final = 60.0


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a job.

    Attributes:
        code: exit code of the job.
        text: what happened.
        observed: the launcher or a supervisor saw it. Otherwise the rank that failed reports it itself.
    """

    code: int
    text: str
    observed: bool = False


def ranks_of_job() -> int:
    """Number of MPI ranks that the launcher started; 1 without a launcher. Does not load MPI."""
    return _first_number(_SIZE_VARIABLES) or 1


def rank_in_job() -> int | None:
    """This process's rank as its launcher numbers it; None without a launcher."""
    return _first_number(_RANK_VARIABLES)


def job_directory() -> Path | None:
    """The job's directory; None where no launcher of distgraph started this process."""
    given = os.environ.get(JOB_DIRECTORY)
    return Path(given) if given else None


def setting_in_seconds(name: str, default: float, environ: Mapping[str, str] | None = None) -> float:
    """Value of a variable of the environment, by default that of this process, that holds seconds.

    Raises:
        RuntimeFault: not a positive number.
    """
    given = (os.environ if environ is None else environ).get(name, str(default))
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise RuntimeFault(f"{name}: expected a positive number of seconds, got {given!r}")
    return seconds


def record_failure(code: int, text: str, *, observed: bool = False) -> bool:
    """Record the first failure of the job in its directory; later ones are ignored.

    Returns:
        Whether it is the first.
    """
    job = job_directory()
    if job is not None:
        with contextlib.suppress(OSError):  # a full disk, or the launcher has removed the directory
            return record_failure_in(job, Failure(code, text, observed))
    return False


def record_failure_in(job: Path, failure: Failure) -> bool:
    """Record a failure in the directory of a job, unless another one is recorded already.

    Returns:
        Whether it is the first.
    """
    draft = job / f"draft.{os.getpid()}"
    draft.write_text(json.dumps(asdict(failure)))
    try:
        os.link(draft, job / FAILED)  # appears whole, and only if it is the first
    except FileExistsError:
        return False
    return True


def record_follower(rank: int) -> None:
    """Record that a rank is killed because another one has failed: it is not lost itself."""
    job = job_directory()
    if job is not None:
        with contextlib.suppress(OSError):
            (job / f"{FOLLOWER}.{rank}").touch()


def reported_ranks(job: Path) -> set[int]:
    """Ranks that make no failure report any more."""
    return {int(path.suffix.removeprefix(".")) for path in job.glob(f"{REPORTED}.*")}


def exit_code(error: BaseException) -> int:
    """Exit code of a process that ends because of an exception."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def record_death(rank: int, signal_name: str, code: int) -> None:
    """Record that a rank was killed by a signal, if that is the first failure of the job."""
    record_failure(code, f"rank {rank} was killed by {signal_name}", observed=True)


def recorded_failure(job: Path) -> Failure | None:
    """The first failure; None if there is none."""
    try:
        return Failure(**json.loads((job / FAILED).read_text()))
    except FileNotFoundError:
        return None


def observed_failure(job: Path) -> str | None:
    """Text of the first failure if the launcher or a supervisor saw it, such as a rank that was killed."""
    failure = recorded_failure(job)
    return failure.text if failure is not None and failure.observed else None


def remove_shared_memory(job: Path) -> None:
    """Remove the shared memory files of ranks of a job that MPI has not removed because they were killed."""
    for listed in job.glob("shared.*"):
        for name in listed.read_text().splitlines():
            with contextlib.suppress(OSError):
                Path(name).unlink()


def _first_number(variables: Sequence[str]) -> int | None:
    """Value of the first of these environment variables that holds a number; None if there is none."""
    return next((int(os.environ[name]) for name in variables if os.environ.get(name, "").isdigit()), None)
