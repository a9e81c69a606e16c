"""A time limit for calls that cannot be interrupted, such as the start and the end of MPI."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from distgraph.runtime.job.job_files import (
    FAILED,
    job_directory,
    rank_in_job,
    record_failure,
    record_follower,
)
from distgraph.runtime.job.processes import Process, descendants

RANKS_END_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.2
_OWN_ERROR_SECONDS: Final = 1.0
"""Seconds in which a rank may report an error of its own once another rank has failed."""


@contextmanager
def deadline(seconds: float, message: str) -> Iterator[None]:
    """Kill this process with an error message if the body of the `with` statement takes longer than a limit.

    A call that holds the interpreter lock lets no thread and no signal handler run. So a forked copy of this
    process measures the time. In a job with a launcher it also ends this process, without a message, soon
    after another rank has failed: MPI would wait for that rank.

    Args:
        seconds: the limit.
        message: text of the error. It goes to the launcher, or to standard error where there is no launcher.
    """
    done, alive = os.pipe()
    guarded = os.getpid()
    with warnings.catch_warnings():  # no other thread holds a lock that the copy needs
        warnings.simplefilter("ignore", DeprecationWarning)
        keeper = os.fork()
    if keeper == 0:
        os.close(alive)
        _keep_time(guarded, done, seconds, message)
    os.close(done)
    try:
        yield
    finally:
        os.close(alive)
        os.waitpid(keeper, 0)


def end_mpiexec(seconds: float) -> None:
    """Start a process that lets mpiexec see the end of this rank late, and ends mpiexec if it does not end.

    mpiexec's proxy kills all ranks of its machine as soon as one of them closes its connection to the proxy
    (the socket PMI_FD), and sometimes gives the signal as the exit code of the job. So the new process keeps
    the connection open until all ranks of this machine have ended, or for `RANKS_END_SECONDS`: ranks that end
    by themselves keep their exit codes. mpiexec waits for every machine of the job, also for machines that it
    cannot reach any more, so the new process ends mpiexec. Nothing happens where mpiexec runs on another
    machine, or where another program started this process.

    Args:
        seconds: time in which mpiexec may end by itself.
    """
    proxy = Process.of(os.getppid())
    starter = None if proxy is None else Process.of(proxy.parent)
    if proxy is None or starter is None or not starter.name.startswith(("mpiexec", "mpirun")):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if os.fork():
            return
    try:
        os.setsid()
        connection = int(os.environ.get("PMI_FD", "3"))
        os.closerange(3, connection)  # the proxy reads sockets and pipes to their end
        os.closerange(connection + 1, os.sysconf("SC_OPEN_MAX"))
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        _await_children(proxy.pid, RANKS_END_SECONDS)
        os.close(connection)
        watch = os.pidfd_open(starter.pid)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not select.select([watch], [], [], seconds)[0]:
                starter.kill(number)
    finally:
        os._exit(0)


def _await_children(parent: int, seconds: float) -> None:
    """Wait until all children that a process has now have ended, or until the time has passed."""
    deadline = time.monotonic() + seconds
    for child in descendants(parent):
        if child.parent == parent:
            with contextlib.suppress(OSError):
                watch = os.pidfd_open(child.pid)
                select.select([watch], [], [], max(deadline - time.monotonic(), 0))
                os.close(watch)


def _keep_time(guarded: int, done: int, seconds: float, message: str) -> None:
    """Body of the process that measures the time; it ends when the other end of `done` is closed."""
    job, end, failed = job_directory(), time.monotonic() + seconds, False
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while not select.select([done], [], [], min(_LOOK_SECONDS, max(0.0, end - time.monotonic())))[0]:
            if job is not None and not failed and (job / FAILED).exists():
                failed, end = True, min(end, time.monotonic() + _OWN_ERROR_SECONDS)
            if time.monotonic() >= end:
                _end(guarded, done, message, failed)
                return
    finally:
        os._exit(0)


def _end(guarded: int, done: int, message: str, failed: bool) -> None:
    """Kill the process whose call has not ended in time; `failed` tells that another rank has failed."""
    if job_directory() is None:
        sys.stderr.write(f"error: {message}\n")
        sys.stderr.flush()
    elif failed or not record_failure(1, message, observed=True):
        record_follower(rank_in_job() or 0)
    if not select.select([done], [], [], 0)[0]:
        os.kill(guarded, signal.SIGKILL)
