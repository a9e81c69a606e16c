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
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Kill this process if what is inside takes longer, and say so.

    A call that holds the interpreter lock lets no thread and no signal handler run; so a small process, a
    copy of this one, keeps the time.

    Args:
        seconds: the limit.
        what: the message of the error, which goes to the launcher, or to standard error where there is none.
    """
    done, alive = os.pipe()
    guarded = os.getpid()
    with warnings.catch_warnings():  # other threads hold no lock that the copy needs
        warnings.simplefilter("ignore", DeprecationWarning)
        keeper = os.fork()
    if keeper == 0:
        os.close(alive)
        _keep(guarded, done, seconds, what)
    os.close(done)
    try:
        yield
    finally:
        os.close(alive)
        os.waitpid(keeper, 0)


def end_mpiexec(seconds: float) -> None:
    """Leave a small process behind that ends mpiexec if it has not ended by itself.

    mpiexec waits for every machine of the job, also for those that it can not reach any more. Nothing happens
    where it runs on another machine, or where something else has started this process.

    Args:
        seconds: that mpiexec has to end by itself.
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


def _keep(guarded: int, done: int, seconds: float, what: str) -> None:
    """Life of the process that keeps the time; it ends when the other end of `done` is closed."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not select.select([done], [], [], seconds)[0]:
            if job_directory() is None:
                sys.stderr.write(f"error: {what}\n")
                sys.stderr.flush()
            else:
                record_failure(1, what, observed=True)
            os.kill(guarded, signal.SIGKILL)
    finally:
        os._exit(0)
