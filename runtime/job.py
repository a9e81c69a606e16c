"""What the processes of one launched job leave for each other in a directory; standard library only.

`rank.R`: process number and start time of rank R. `failed`: exit code and text of the first failure.
`left.R`: rank R has said its last words after a failure.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

JOB_DIRECTORY: Final = "DISTGRAPH_JOB_DIRECTORY"
"""Environment variable by which the launcher tells the directory."""
LAST_WORDS_SECONDS: Final = 5.0
"""How long a failing rank waits for the others to say why they stop."""
_SIZE_VARIABLES: Final = ("PMI_SIZE", "PMIX_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANK_VARIABLES: Final = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_KILLED: Final = " was killed by "


def ranks_of_job() -> int:
    """Number of MPI ranks that the launcher started; 1 without a launcher. Does not load MPI."""
    return _first_number(_SIZE_VARIABLES) or 1


def rank_in_job() -> int | None:
    """This process's rank as its launcher numbers it; None without a launcher."""
    return _first_number(_RANK_VARIABLES)


def job_directory() -> Path | None:
    """The job's directory; None where something else than `distgraph.runtime.launch` started this process."""
    given = os.environ.get(JOB_DIRECTORY)
    return Path(given) if given else None


def process_start(pid: int) -> str | None:
    """When a process was started, in clock ticks since boot; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def record_failure(code: int, text: str) -> None:
    """Write the first failure of the job where the launcher and the other ranks find it."""
    job = job_directory()
    if job is None:
        return
    draft = job / f"draft.{os.getpid()}"
    draft.write_text(f"{code}\n{text}")
    with contextlib.suppress(FileExistsError):
        os.link(draft, job / "failed")  # appears whole, and only if it is the first


def record_death(rank: int, signal_name: str, code: int) -> None:
    """Write that a rank was killed, if it is the first failure."""
    record_failure(code, f"rank {rank}{_KILLED}{signal_name}")


def recorded_failure(job: Path) -> tuple[int, str] | None:
    """Exit code and text of the first failure; None if there is none."""
    try:
        code, _, text = (job / "failed").read_text().partition("\n")
    except FileNotFoundError:
        return None
    return int(code), text


def recorded_death(job: Path) -> str | None:
    """Who was killed by what, if that was the first failure."""
    failure = recorded_failure(job)
    return failure[1] if failure is not None and _KILLED in failure[1] else None


def _first_number(variables: Sequence[str]) -> int | None:
    """The first of the environment variables that is a number."""
    return next((int(os.environ[name]) for name in variables if os.environ.get(name, "").isdigit()), None)
