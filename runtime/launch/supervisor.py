"""The supervisor of a rank: `python -m distgraph.runtime.launch.supervisor script.py args`.

    launcher -> mpiexec -> proxy -> supervisor (only waits) -> rank (runs the script)

The supervisor runs the script in a child process and records how it ends. mpiexec does not name reliably the
rank that died first: of several dead ranks it may name one that it killed itself. The supervisor writes what
it saw into the job's directory, where the other ranks look while they wait, so that each of them can report
why it stops. The rank is forked before other modules are loaded, so the supervisor needs little memory.

The supervisor also ends its rank when the launcher has gone or sends no heartbeats, when the process that
started the supervisor has gone, when another rank has failed, or when the rank is stopped for too long. The
launcher watches the heartbeats of the supervisors in turn.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from distgraph.runtime.job.heartbeat import Silence, beat, heartbeat_limit, interval, last_beat
from distgraph.runtime.job.interrupts import accept_signals, end_on_sigint, ignore_sigint
from distgraph.runtime.job.job_files import (
    CLOSED,
    FAILED,
    FOLLOWER,
    INTERRUPTED,
    LAUNCHER,
    REPORTED,
    STOPPING,
    job_directory,
    rank_in_job,
    ranks_of_job,
    record_death,
    record_failure,
    remove_shared_memory,
)
from distgraph.runtime.job.losses import Loss, elastic_folder, record_loss, report_seconds, stopped_seconds
from distgraph.runtime.job.processes import die_with_parent, is_stopped, read_processes, write_processes


def supervise(argv: Sequence[str]) -> None:
    """Run a script in a child process and end with its exit code. A death by signal is recorded for all."""
    job, rank = job_directory(), rank_in_job()
    if job is None or rank is None:
        _run(argv)
        return
    ignore_sigint()  # the launcher passes Ctrl-C to the rank
    supervisor = os.getpid()
    try:
        write_processes(job / f"supervisor.{rank}", [supervisor, os.getppid()])
    except FileNotFoundError:  # the launcher has ended already
        os._exit(1)
    child = os.fork()
    if child == 0:
        _run_as_rank(job, rank, supervisor, argv)
        return
    code = _Supervisor(job, rank, child).watch()
    if code < 0:
        name = signal.Signals(-code).name
        if not _is_ending(job) and not (job / f"{FOLLOWER}.{rank}").exists():
            record_loss(Loss(f"rank {rank} was killed by {name}", rank))
        record_death(rank, name, 128 - code)
        code = 128 - code
        if not (job / STOPPING).exists():
            _wait_for_reports(job, rank)
    if (job / STOPPING).exists():
        with suppress(OSError):
            (job / f"ended.{rank}").touch()
        _wait_for(job, "ended", ranks_of_job())  # mpiexec kills all others when it sees one rank go
    _close(job, rank, code)


def _is_ending(job: Path) -> bool:
    """Whether the job is being ended, so that a rank that dies now is not what it has lost."""
    return (job / STOPPING).exists() or next(job.glob(f"{CLOSED}.*"), None) is not None


def _wait_for_reports(job: Path, rank: int) -> None:
    """Wait for the failure reports of the other ranks. Ranks that were killed as well have none to make."""
    _note_reported(job, rank)
    _wait_for(job, REPORTED, ranks_of_job())


def _note_reported(job: Path, rank: int) -> None:
    """Tell the supervisors of other ranks that this rank makes no failure report any more."""
    with suppress(OSError):
        (job / f"{REPORTED}.{rank}").touch()


def _run_as_rank(job: Path, rank: int, supervisor: int, argv: Sequence[str]) -> None:
    """Run the script in the child process."""
    end_on_sigint()
    accept_signals()
    die_with_parent(supervisor)
    write_processes(job / f"rank.{rank}", [os.getpid()])
    if (job / STOPPING).exists():  # the launcher did not see this process when it ended all ranks
        os._exit(INTERRUPTED)
    _run(argv)


def _close(job: Path, rank: int, code: int) -> NoReturn:
    """End this process, and record that it was not killed, with its exit code."""
    with suppress(OSError):
        (job / f"{CLOSED}.{rank}").write_text(str(code))
    os._exit(code)


class _Supervisor:
    """Watches one rank, its parent process, the launcher, and the failures of other ranks."""

    def __init__(self, job: Path, rank: int, child: int) -> None:
        self.job, self.rank, self.child = job, rank, child
        self.parent = os.getppid()
        self.limit = heartbeat_limit()
        self.interval = interval(self.limit)
        self.launcher = next(iter(read_processes(job / LAUNCHER)), None)
        self.launcher_silence = Silence(lambda: last_beat(job / LAUNCHER), self.interval)
        self.stopped_limit, self.report_limit = stopped_seconds(), report_seconds()
        self.rank_stopped = Silence(lambda: None if is_stopped(child) else time.monotonic(), self.interval)
        self.failed_at = 0.0
        self.descriptor = os.pidfd_open(child)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._terminated)
        accept_signals()

    def watch(self) -> int:
        """Wait for the rank. Returns its exit code, or minus the number of the signal that killed it."""
        watched = [self.descriptor]
        with suppress(OSError):
            if self.launcher is not None:
                watched.append(os.pidfd_open(self.launcher.pid))
        while True:
            ready, _, _ = select.select(watched, [], [], self.interval)
            if watched[0] in ready:
                return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
            beat(self.job / f"supervisor.{self.rank}")
            self._check()

    def _check(self) -> None:
        """End the rank and this process if one of the reasons in the module's text holds."""
        if self.launcher is None or not self.launcher.state:
            self._abandon()
        silence = self.launcher_silence.seconds()
        if silence > self.limit:
            how = "is stopped" if self.launcher.stopped else "does not answer"
            self._end(f"launcher (process {self.launcher.pid}) {how} since {silence:.0f} s")
        if os.getppid() != self.parent:
            if not _is_ending(self.job):
                record_loss(Loss(f"process {self.parent} of mpiexec has ended"))
            self._end(f"process {self.parent}, which started rank {self.rank} for mpiexec, has ended")
        stopped = self.rank_stopped.seconds()
        if stopped > self.stopped_limit:
            self._lose(f"rank {self.rank} (process {self.child}) is stopped since {stopped:.0f} s")
        if (self.job / FAILED).exists():
            self.failed_at = self.failed_at or time.monotonic()
            if time.monotonic() > self.failed_at + 2 * self.report_limit:
                self._kill(1)

    def _end(self, why: str) -> NoReturn:
        """Record a failure that no other process has seen, and kill the rank."""
        record_failure(1, why, observed=True)
        self._kill(1)

    def _lose(self, why: str) -> NoReturn:
        """End a rank that does not answer, after the others have had time to report."""
        record_loss(Loss(why, self.rank))
        record_failure(1, why, observed=True)
        self._kill_rank()
        _wait_for_reports(self.job, self.rank)
        _close(self.job, self.rank, 1)

    def _terminated(self, number: int, frame: FrameType | None) -> NoReturn:
        """Handle a signal: this process ends as if it had no handler, but the launcher learns why."""
        name = signal.Signals(number).name
        record_loss(Loss(f"supervisor of rank {self.rank} was killed by {name}", self.rank))
        record_failure(128 + number, f"supervisor of rank {self.rank} was killed by {name}", observed=True)
        self._kill(128 + number)

    def _abandon(self) -> NoReturn:
        """End everything of this rank after the launcher has gone, which would have removed the directory."""
        self._kill_rank()
        remove_shared_memory(self.job)
        deadline = time.monotonic() + 1.0  # other ranks may still write their files there
        folders = [folder for folder in (self.job, elastic_folder()) if folder is not None]
        while any(folder.exists() for folder in folders) and time.monotonic() < deadline:
            for folder in folders:
                importlib.import_module("shutil").rmtree(folder, ignore_errors=True)
            time.sleep(0.05)
        os._exit(1)

    def _kill_rank(self) -> None:
        with suppress(ProcessLookupError, ChildProcessError):  # it has ended
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            os.waitpid(self.child, 0)

    def _kill(self, code: int) -> NoReturn:
        self._kill_rank()
        _note_reported(self.job, self.rank)
        _close(self.job, self.rank, code)


def _wait_for(job: Path, marks: str, count: int) -> None:
    """Wait until `count` ranks have made their file `marks`.R, or the time for it is over."""
    deadline = time.monotonic() + report_seconds()
    while len(list(job.glob(f"{marks}.*"))) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)  # their output is in pipes that mpiexec must read before it sees this rank end


def _run(argv: Sequence[str]) -> None:
    """Run the script in this process; NumPy and MPI are loaded only now."""
    importlib.import_module("distgraph.runtime.launch.mpi_rank").run_script(argv)


if __name__ == "__main__":
    supervise(sys.argv[1:])
