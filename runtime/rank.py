"""Being one rank of an MPI job: `python -m distgraph.runtime.rank script.py args`, once a rank.

    mpiexec -> supervisor (does nothing but wait) -> rank (runs the script)

The two are one program forked before it has loaded anything. The supervisor learns how the rank ended, which
mpiexec does not tell reliably (of several dead ranks it may name one that it killed itself). It writes what
it saw into the job's directory, where the other ranks look while they wait: so each of them can say why it
stops.

Files of the job's directory: `rank.R` process number and start time of rank R; `failed` exit code and text
of the first failure; `left.R` rank R has said its last words after a failure.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from distgraph.errors import DistGraphError, RuntimeFault
from distgraph.runtime.mpi import LAST_WORDS_SECONDS, MpiTransport

JOB_DIRECTORY: Final = "DISTGRAPH_JOB_DIRECTORY"
_SIZE_VARIABLES: Final = ("PMI_SIZE", "PMIX_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANK_VARIABLES: Final = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_PR_SET_PDEATHSIG: Final = 1  # <sys/prctl.h>

_current: list[MpiTransport] = []


def ranks_of_job() -> int:
    """Number of MPI ranks that the launcher started; 1 without a launcher. Does not load MPI."""
    return _number(_SIZE_VARIABLES) or 1


def current_transport() -> MpiTransport | None:
    """This process's MPI transport where it is one of several ranks, None where it is alone.

    The first call is collective. It also makes an exception that nobody catches end all ranks.

    Raises:
        RuntimeFault: several ranks but no mpi4py, or an mpi4py built for another MPI than the launcher's.
    """
    if _current:
        return _current[0]
    expected = ranks_of_job()
    if expected == 1:
        return None
    transport = MpiTransport(job=_job_directory())
    if transport.size != expected:
        raise RuntimeFault(
            f"launcher started {expected} ranks but mpi4py sees {transport.size}; use the mpiexec of the MPI "
            "that mpi4py was built for (pip install mpich), or `distgraph run`"
        )
    _current.append(transport)
    sys.excepthook = lambda kind, error, trace: fail(error)
    atexit.register(_leave)
    return transport


def fail(error: BaseException) -> None:
    """Report an exception that nobody caught, and take the other ranks down.

    The rank where it began prints its traceback (none for a mistake that distgraph explains) and then the
    error in one line; the others only the line. Does not return where there are several ranks.
    """
    transport = _current[0] if _current else None
    followed = transport is not None and transport.failed_elsewhere
    if followed:
        time.sleep(0.05)  # the traceback of the rank that failed first comes through another pipe
    elif _deserves_traceback(error):
        traceback.print_exception(error)
    line = _one_line(error, transport)
    if line:
        sys.stderr.write(line)
    sys.stdout.flush()
    sys.stderr.flush()
    if not followed:
        _record_failure(_exit_code(error), line)
    if transport is not None:
        transport.abort(error)


def run_script(argv: Sequence[str]) -> None:
    """Run a script as `__main__` here; its uncaught exception, or exit with a code, ends all ranks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # whole lines in one write, so that those of ranks don't mix
            stream.reconfigure(line_buffering=True, write_through=False)
    sys.argv = list(argv)
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    try:
        current_transport()
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        if error.code not in {None, 0}:
            fail(error)
            raise
    except BaseException as error:  # noqa: BLE001 - reported with its traceback, and the exit code says so
        fail(error.with_traceback(_from_the_script(error)))
        sys.exit(1)


def supervise(argv: Sequence[str]) -> None:
    """Run a script in a child of this process and end as it does; tell the others of a death by signal."""
    job, rank = _job_directory(), _number(_RANK_VARIABLES)
    if job is None or rank is None:
        run_script(argv)
        return
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it went before the line above
            os._exit(1)
        (job / f"rank.{rank}").write_text(f"{os.getpid()} {process_start(os.getpid())}")
        run_script(argv)
        return
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    text = f"rank {rank} was killed by {signal.Signals(-code).name}"
    _record_failure(128 - code, text)
    deadline = time.monotonic() + LAST_WORDS_SECONDS
    others = ranks_of_job() - 1
    while len(list(job.glob("left.*"))) < others and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)  # their words are in pipes that mpiexec must read before it sees this rank go
    os._exit(128 - code)


def process_start(pid: int) -> str | None:
    """When a process was started, in clock ticks since boot; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _record_failure(code: int, text: str) -> None:
    """Write the first failure of the job where the launcher and the other ranks find it."""
    job = _job_directory()
    if job is None:
        return
    draft = job / f"draft.{os.getpid()}"
    draft.write_text(f"{code}\n{text}")
    with contextlib.suppress(FileExistsError):
        os.link(draft, job / "failed")  # appears whole, and only if it is the first


def _deserves_traceback(error: BaseException) -> bool:
    """Not a mistake that distgraph explains, but what a program raised on one of its in-process ranks."""
    if isinstance(error, RuntimeFault) and " failed: " in str(error):
        return error.__cause__ is not None and not isinstance(error.__cause__, DistGraphError)
    return not isinstance(error, SystemExit | DistGraphError)


def _one_line(error: BaseException, transport: MpiTransport | None) -> str:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return ""
    text = (
        str(error) if isinstance(error, DistGraphError | SystemExit) else f"{type(error).__name__}: {error}"
    )
    where = f"rank {transport.rank}: " if transport is not None and not text.startswith("rank ") else ""
    return f"error: {where}{text}\n"


def _exit_code(error: BaseException) -> int:
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1


def _from_the_script(error: BaseException) -> TracebackType | None:
    """Traceback without the frames that lead to the script."""
    trace = error.__traceback__
    ours = {__file__, run_script.__code__.co_filename, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _job_directory() -> Path | None:
    given = os.environ.get(JOB_DIRECTORY)
    return Path(given) if given else None


def _number(variables: Sequence[str]) -> int | None:
    """The first of the environment variables that is a number."""
    return next((int(os.environ[name]) for name in variables if os.environ.get(name, "").isdigit()), None)


def _leave() -> None:
    """At exit: wait for the others within reach of their failures, of which MPI_Finalize would not hear."""
    try:
        _current[0].barrier()
    except RuntimeFault as error:
        fail(error)


if __name__ == "__main__":
    # The module is imported once more under its own name, so that scripts share its state.
    from distgraph.runtime import rank as _module

    _module.supervise(sys.argv[1:])
