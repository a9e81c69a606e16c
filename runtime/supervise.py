"""Run a script in a child and see how it ends: `python -m distgraph.runtime.supervise script.py args`.

    mpiexec -> supervisor (does nothing but wait) -> rank (runs the script)

mpiexec does not tell reliably who died first: of several dead ranks it may name one that it killed itself.
The supervisor knows. It writes what it saw into the job's directory, where the other ranks look while they
wait: so each of them can say why it stops. It is forked from before anything is loaded, so it costs next to
no memory.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Final

from distgraph.runtime.job import (
    LAST_WORDS_SECONDS,
    job_directory,
    process_start,
    rank_in_job,
    ranks_of_job,
    record_death,
)

_PR_SET_PDEATHSIG: Final = 1  # <sys/prctl.h>


def supervise(argv: Sequence[str]) -> None:
    """Run a script in a child of this process and end as it does; tell the others of a death by signal."""
    job, rank = job_directory(), rank_in_job()
    if job is None or rank is None:
        _run(argv)
        return
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it went before the line above
            os._exit(1)
        (job / f"rank.{rank}").write_text(f"{os.getpid()} {process_start(os.getpid())}")
        _run(argv)
        return
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    record_death(rank, signal.Signals(-code).name, 128 - code)
    deadline = time.monotonic() + LAST_WORDS_SECONDS
    others = ranks_of_job() - 1
    while len(list(job.glob("left.*"))) < others and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)  # their words are in pipes that mpiexec must read before it sees this rank go
    os._exit(128 - code)


def _run(argv: Sequence[str]) -> None:
    """Run the script here; NumPy and MPI are loaded only now."""
    importlib.import_module("distgraph.runtime.rank").run_script(argv)


if __name__ == "__main__":
    supervise(sys.argv[1:])
