"""One rank of an MPI job: its transport, its script, and how it ends."""

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
from distgraph.runtime.job.failure_report import FailureReport, write_report
from distgraph.runtime.job.interrupts import end_on_sigint, ignore_sigint, raise_on_sigint
from distgraph.runtime.job.job_files import (
    FAILURE_REPORT_SECONDS,
    INTERRUPTED,
    STOPPING,
    exit_code,
    job_directory,
    rank_in_job,
    ranks_of_job,
    record_failure,
)
from distgraph.runtime.job.processes import die_with_parent, shared_memory
from distgraph.runtime.launch.process_placement import arrange
from distgraph.runtime.transport.mpi import MpiTransport
from distgraph.runtime.transport.transport import time_limit

__all__ = ["current_transport", "fail", "ranks_of_job", "run_script"]

_current: list[MpiTransport] = []
_statuses: list[Any] = []  # given to sys.exit, where there is no launcher
_ABSENT: Final = "look for a rank that has ended before, or raise DISTGRAPH_TIMEOUT"


def current_transport() -> MpiTransport | None:
    """The MPI transport of this process where it is one of several ranks, otherwise None.

    The first call is collective. After it, an uncaught exception on one rank ends all ranks.

    Raises:
        RuntimeFault: several ranks but no mpi4py, or an mpi4py built for another MPI than the launcher's.
    """
    if _current:
        return _current[0]
    expected = ranks_of_job()
    if expected == 1:
        return None
    job, loaded_here = job_directory(), "mpi4py.MPI" not in sys.modules
    limit = time_limit(None)
    what = f"rank {rank_in_job()}: MPI has not started on all ranks in {limit:g} s; {_ABSENT}"
    sys.excepthook = lambda kind, error, trace: fail(error)
    with deadline(limit + FAILURE_REPORT_SECONDS, what):
        transport = MpiTransport(job=job, arrange=arrange)
    if transport.size != expected:
        raise RuntimeFault(
            f"launcher started {expected} ranks but mpi4py sees {transport.size}; use the mpiexec of the MPI "
            "that mpi4py was built for (pip install mpich), or `distgraph run`"
        )
    transport.bind()
    _current.append(transport)
    if transport.rank == 0 and transport.arrangement.notes:
        _print_error("".join(f"{note}\n" for note in transport.arrangement.notes), late=False)
    if job is None:
        die_with_parent(os.getppid(), signal.SIGTERM)  # mpiexec's proxy; else the supervisor sees to it
        _note_exits()
    else:
        (job / f"shared.{transport.rank}").write_text("\n".join(shared_memory()))
    atexit.register(_finish, loaded_here)
    return transport


def _note_exits() -> None:
    """Record the argument of sys.exit: if this rank ends too early, it is the exit code of the job."""
    original_exit = sys.exit

    def recording_exit(status: Any = None, /) -> NoReturn:
        _statuses.append(status)
        original_exit(status)

    sys.exit = recording_exit


def fail(error: BaseException) -> None:
    """Report an uncaught exception, and end the other ranks.

    The rank that failed first reports its traceback (none for a mistake that distgraph explains) and the
    error in one line; the others report only the line. A launched rank writes a failure report for the
    launcher, which prints equal reports once. Does not return where there are several ranks.
    """
    end_on_sigint()  # a second Ctrl-C counts at once
    transport = _current[0] if _current else None
    follows = transport is not None and transport.failed_elsewhere
    if isinstance(error, KeyboardInterrupt) and _job_is_stopping():  # the launcher ends all ranks
        sys.stdout.flush()
        os._exit(INTERRUPTED)
    text = _one_line(error)
    trace = "".join(traceback.format_exception(error)) if _deserves_traceback(error) and not follows else ""
    if not _report_to_launcher(text, trace, follows):
        _print_error(f"{trace}error: {_named(text, transport)}\n" if text else trace, late=follows)
    sys.stdout.flush()
    if not follows:
        record_failure(exit_code(error), text)
    if transport is not None:
        transport.abort(error)


def _job_is_stopping() -> bool:
    job = job_directory()
    return job is not None and (job / STOPPING).exists()


def _print_error(text: str, *, late: bool) -> None:
    if late:
        time.sleep(0.05)  # the traceback of the rank that failed first comes through another pipe
    sys.stderr.write(text)
    sys.stderr.flush()


def _report_to_launcher(text: str, trace: str, follows: bool) -> bool:
    """Write the failure report of this rank, without its number, so that equal errors have equal texts.

    Returns:
        Whether the report was written; False without a launcher.
    """
    job, rank = job_directory(), rank_in_job() or 0
    if job is None:
        return False
    cause = text.removesuffix(f"; rank {rank} stops too") if follows else text
    error = cause.removeprefix(f"rank {rank}: ")
    try:
        write_report(job, FailureReport(rank, time.monotonic(), error, trace, follows=cause != text))
    except OSError:  # for example a full disk
        return False
    return True


def run_script(argv: Sequence[str]) -> None:
    """Run a script as `__main__` in this process. An uncaught exception or an exit code ends all ranks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # whole lines in one write, so that lines of ranks do not mix
            stream.reconfigure(line_buffering=True, write_through=False)
    sys.argv = list(argv)
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    sys.excepthook = lambda kind, error, trace: fail(error)
    atexit.register(ignore_sigint)  # called last: the functions that the script registers can be interrupted
    try:
        current_transport()
        raise_on_sigint()
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        if error.code not in {None, 0}:
            fail(error)
            raise
    except BaseException as error:  # noqa: BLE001 - reported with its traceback, and the exit code says so
        fail(error.with_traceback(_from_the_script(error)))
        sys.exit(exit_code(error))


def _deserves_traceback(error: BaseException) -> bool:
    """Whether an error needs a traceback: it is no mistake that distgraph explains, but one of the program.

    An error that the program raised on one of several in-process ranks comes wrapped in a RuntimeFault.
    """
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
    """The text with this rank in front, unless the job has one rank or the text begins with a rank."""
    return (
        f"rank {transport.rank}: {text}" if transport is not None and not text.startswith("rank ") else text
    )


def _from_the_script(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of distgraph that lead to the script."""
    trace = error.__traceback__
    ours = {__file__, run_script.__code__.co_filename, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _finish(loaded_here: bool) -> None:
    """At exit: wait for the other ranks while their failures can still be received, then end MPI.

    MPI_Finalize would wait for them without noticing a failure.

    Args:
        loaded_here: MPI was loaded by this module, so that no other code needs it later.
    """
    transport = _current[0]
    try:
        _leave(transport)
        ignore_sigint()  # the script is done, on all ranks
    except KeyboardInterrupt as error:
        fail(error)
    if loaded_here:
        limit = time_limit(None)
        with deadline(limit, f"rank {transport.rank}: MPI has not ended in {limit:g} s; {_ABSENT}"):
            transport.finalize()


def _leave(transport: MpiTransport) -> None:
    """Wait for the other ranks; if one has failed, end as it did."""
    try:
        transport.leave()
    except RuntimeFault as error:
        code = exit_code(SystemExit(_statuses[-1])) if _statuses else 0
        if not code or not transport.failed_elsewhere:
            fail(error)
        _print_error(f"error: {_named(_one_line(error), transport)}\n", late=True)
        transport.follow(code, 0.5)
