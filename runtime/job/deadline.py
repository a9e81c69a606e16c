"""A time limit for calls that cannot be interrupted, such as the start and the end of MPI."""

from __future__ import annotations

import os
import select
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from distgraph.runtime.job.job_files import job_directory, record_failure
from distgraph.runtime.job.processes import Process


@contextmanager
def deadline(seconds: float, message: str) -> Iterator[None]:
    """Kill this process with an error message if the body of the `with` statement takes longer than a limit.

    A call that holds the interpreter lock lets no thread and no signal handler run. So a forked copy of this
    process measures the time.

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
    """Start a process that ends mpiexec if mpiexec does not end by itself.

    mpiexec waits for every machine of the job, also for machines that it cannot reach any more. Nothing
    happens where mpiexec runs on another machine, or where another program started this process.

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
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the proxy reads sockets and pipes to their end
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        watch = os.pidfd_open(starter.pid)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not select.select([watch], [], [], seconds)[0]:
                starter.kill(number)
    finally:
        os._exit(0)


def _keep_time(guarded: int, done: int, seconds: float, message: str) -> None:
    """Body of the process that measures the time; it ends when the other end of `done` is closed."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not select.select([done], [], [], seconds)[0]:
            if job_directory() is None:
                sys.stderr.write(f"error: {message}\n")
                sys.stderr.flush()
            else:
                record_failure(1, message, observed=True)
            os.kill(guarded, signal.SIGKILL)
    finally:
        os._exit(0)
