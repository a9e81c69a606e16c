"""Being one rank of an MPI job: its transport, its script, and its end."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn

from distgraph.errors import DistGraphError, RuntimeFault
from distgraph.runtime.job.deadline import deadline
from distgraph.runtime.job.failure_report import LastWords, leave
from distgraph.runtime.job.job_files import (
    INTERRUPTED,
    LAST_WORDS_SECONDS,
    STOPPING,
    exit_code,
    job_directory,
    rank_in_job,
    ranks_of_job,
    record_failure,
)
from distgraph.runtime.job.processes import die_with_parent, shared_memory
from distgraph.runtime.transport.mpi import MpiTransport
from distgraph.runtime.transport.transport import time_limit

__all__ = ["current_transport", "fail", "ranks_of_job", "run_script"]

_current: list[MpiTransport] = []
_statuses: list[Any] = []  # given to sys.exit, where there is no launcher
_ABSENT: Final = "look for a rank that has ended before, or raise DISTGRAPH_TIMEOUT"


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
    launched, own = job_directory(), "mpi4py.MPI" not in sys.modules
    limit = time_limit(None)
    what = f"rank {rank_in_job()}: MPI has not started on all ranks in {limit:g} s; {_ABSENT}"
    sys.excepthook = lambda kind, error, trace: fail(error)
    with deadline(limit + LAST_WORDS_SECONDS, what):
        transport = MpiTransport(job=launched)
    if transport.size != expected:
        raise RuntimeFault(
            f"launcher started {expected} ranks but mpi4py sees {transport.size}; use the mpiexec of the MPI "
            "that mpi4py was built for (pip install mpich), or `distgraph run`"
        )
    transport.bind()
    _current.append(transport)
    if launched is None:
        die_with_parent(os.getppid(), signal.SIGTERM)  # mpiexec's proxy; else the supervisor sees to it
        _note_exits()
    else:
        (launched / f"shared.{transport.rank}").write_text("\n".join(shared_memory()))
    atexit.register(_leave, own)
    return transport


def _note_exits() -> None:
    """Remember what is given to sys.exit: when a rank leaves too early, it is the exit code of the job."""
    before = sys.exit

    def leave(status: Any = None, /) -> NoReturn:
        _statuses.append(status)
        before(status)

    sys.exit = leave


def fail(error: BaseException) -> None:
    """Report an exception that nobody caught, and take the other ranks down.

    The rank where it began says its traceback (none for a mistake that distgraph explains) and then the error
    in one line; the others only the line. A launched rank leaves it to the launcher, which tells equal words
    once. Does not return where there are several ranks.
    """
    transport = _current[0] if _current else None
    followed = transport is not None and transport.failed_elsewhere
    if isinstance(error, KeyboardInterrupt) and _job_is_stopping():  # the launcher has told all ranks
        sys.stdout.flush()
        os._exit(INTERRUPTED)
    text = _one_line(error)
    trace = "".join(traceback.format_exception(error)) if _deserves_traceback(error) and not followed else ""
    if not _left_to_the_launcher(text, trace, followed):
        _say(f"{trace}error: {_named(text, transport)}\n" if text else trace, late=followed)
    sys.stdout.flush()
    if not followed:
        record_failure(exit_code(error), text)
    if transport is not None:
        transport.abort(error)


def _job_is_stopping() -> bool:
    job = job_directory()
    return job is not None and (job / STOPPING).exists()


def _say(text: str, *, late: bool) -> None:
    if late:
        time.sleep(0.05)  # the traceback of the rank that failed first comes through another pipe
    sys.stderr.write(text)
    sys.stderr.flush()


def _left_to_the_launcher(text: str, trace: str, followed: bool) -> bool:
    """Leave what this rank says, without its name, so that equal words are equal; false where it cannot."""
    job, rank = job_directory(), rank_in_job() or 0
    if job is None:
        return False
    cause = text.removesuffix(f"; rank {rank} stops too") if followed else text
    said = cause.removeprefix(f"rank {rank}: ")
    try:
        leave(job, LastWords(rank, time.monotonic(), said, trace, follows=cause != text))
    except OSError:  # such as a full disk
        return False
    return True


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
        sys.exit(exit_code(error))


def _deserves_traceback(error: BaseException) -> bool:
    """Not a mistake that distgraph explains, but what a program raised on one of its in-process ranks."""
    if isinstance(error, RuntimeFault) and " failed: " in str(error):
        return error.__cause__ is not None and not isinstance(error.__cause__, DistGraphError)
    return not isinstance(error, SystemExit | KeyboardInterrupt | DistGraphError)


def _one_line(error: BaseException) -> str:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return ""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (SIGINT)"
    if isinstance(error, DistGraphError | SystemExit):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _named(text: str, transport: MpiTransport | None) -> str:
    """With the rank that says so, where there are several and it does not begin with one."""
    return (
        f"rank {transport.rank}: {text}" if transport is not None and not text.startswith("rank ") else text
    )


def _from_the_script(error: BaseException) -> TracebackType | None:
    """Traceback without the frames that lead to the script."""
    trace = error.__traceback__
    ours = {__file__, run_script.__code__.co_filename, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _leave(own: bool) -> None:
    """At exit: wait for the others within reach of their failures, of which MPI_Finalize would not hear.

    Args:
        own: MPI was loaded here and nobody else needs it later.
    """
    transport = _current[0]
    try:
        transport.leave()
    except KeyboardInterrupt as error:
        fail(error)
    except RuntimeFault as error:
        code = exit_code(SystemExit(_statuses[-1])) if _statuses else 0
        if not code or not transport.failed_elsewhere:
            fail(error)
        _say(f"error: {_named(_one_line(error), transport)}\n", late=True)
        transport.follow(code, 0.5)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the script is done, on all ranks
    if own:
        limit = time_limit(None)
        with deadline(limit, f"rank {transport.rank}: MPI has not ended in {limit:g} s; {_ABSENT}"):
            transport.finalize()
