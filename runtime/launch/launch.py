"""Starting ranks as processes, and ending all of them when one fails: `distgraph run -n 4 script.py args`.

When ranks fail, the launcher prints their failure reports: every traceback and every error once, with the
ranks that had it. For a rank that was killed it names the signal. It passes the exit code on and leaves no
process behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TextIO

from distgraph.errors import RuntimeFault
from distgraph.runtime.job.failure_report import read_reports, summary
from distgraph.runtime.job.heartbeat import heartbeat_limit
from distgraph.runtime.job.job_files import (
    CLOSED,
    DEFAULT_TIME_LIMIT,
    JOB_DIRECTORY,
    LAUNCHER,
    STOPPING,
    TIMEOUT,
    Failure,
    record_failure_in,
    recorded_failure,
    remove_shared_memory,
    setting_in_seconds,
)
from distgraph.runtime.job.losses import Loss, elastic_folder, read_losses, record_loss
from distgraph.runtime.job.processes import Process, descendants, read_processes, write_processes
from distgraph.runtime.launch.monitor import Monitor, Signals
from distgraph.runtime.launch.mpiexec import find_mpiexec, start_mpiexec, wait_for

_THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_END_SECONDS: Final = 5.0
_SIGNAL_TEXTS: Final = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated (SIGTERM)"}
# Signals that end a supervisor while it starts. mpiexec gives their number as its exit code.
_KILLING: Final = frozenset(signal.valid_signals()) - {signal.SIGHUP, signal.SIGINT}

_MOST_PER_CORE: Final = 64
"""Ranks that share a core at most: more only fill the memory."""


def launch(
    n: int,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    signals: Signals | None = None,
) -> int:
    """Run a script on `n` MPI ranks of this machine and wait for it.

    Args:
        n: number of ranks.
        argv: path of the script, then its arguments.
        env: environment of the ranks; default this process's. BLAS gets one thread per rank unless the
            environment sets another number.
        stdout: receives the output of the ranks line by line; default this process's.
        stderr: receives their error output; default this process's.
        signals: those that end the job, where the caller records them already.

    Returns:
        The exit code: 0 only if every rank succeeded; 128 + signal where a rank was killed; 130 after Ctrl-C,
        143 after SIGTERM, 129 after SIGHUP. A second signal kills all ranks at once.

    Raises:
        RuntimeFault: n < 1 or far more ranks than cores, no such script, no mpiexec, or DISTGRAPH_TIMEOUT or
            DISTGRAPH_HEARTBEAT is no positive number.
    """
    settings = script_environment(n, argv, env)
    most = _MOST_PER_CORE * (os.cpu_count() or 1)
    if n > most:
        raise RuntimeFault(
            f"run: got {n} ranks but this machine takes {most} at most; give -n {most} or less"
        )
    command = [
        find_mpiexec(),
        "-n",
        str(n),
        sys.executable,
        "-m",
        "distgraph.runtime.launch.supervisor",
        *argv,
    ]
    heartbeat_limit(settings)
    setting_in_seconds(TIMEOUT, DEFAULT_TIME_LIMIT, settings)
    recording = Signals() if signals is None else contextlib.nullcontext(signals)
    with recording as received, tempfile.TemporaryDirectory(prefix="distgraph-run-") as directory:
        settings[JOB_DIRECTORY] = directory
        job = _Job(n, Path(directory), received, stdout or sys.stdout, stderr or sys.stderr)
        return job.run(command, settings)


def script_environment(n: int, argv: Sequence[str], env: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of the ranks of a job; see `launch` for arguments and errors."""
    if n < 1:
        raise RuntimeFault(f"run: got {n} ranks, expected at least 1; give -n 1 or more")
    if not argv or not Path(argv[0]).is_file():
        name = argv[0] if argv else ""
        raise RuntimeFault(f"run: script {name!r} does not exist in {Path.cwd()}; give the path of a file")
    return dict.fromkeys(_THREAD_VARIABLES, "1") | dict(os.environ if env is None else env)


class _Job:
    """A job while it runs: its directory, the signals that end it, and the streams for its output."""

    def __init__(self, n: int, path: Path, signals: Signals, out: TextIO, errors: TextIO) -> None:
        self.n, self.path, self.signals, self.out, self.errors = n, path, signals, out, errors
        write_processes(path / LAUNCHER, [os.getpid()])

    def run(self, command: list[str], env: Mapping[str, str]) -> int:
        """Run mpiexec until it ends or a signal comes, and pass on its output. Returns the exit code."""
        process, readers = start_mpiexec(command, env, self.out, self.errors)
        monitor = Monitor(process.pid, self.path, self.n, env)
        try:
            problem = monitor.watch(self.signals)
            if problem is not None:
                record_failure_in(self.path, Failure(1, problem, observed=True))
            elif self.signals.received:
                self._interrupt(process.pid)
        finally:
            self._end(process)
            for reader in readers:
                reader.join(_END_SECONDS)
        code = 1 if monitor.overdue else process.returncode  # mpiexec was killed because it did not end
        if not self.signals.received and next(self.path.glob(f"{CLOSED}.*"), None) is None:
            _record_losses(code, problem, monitor.lost, env)
        return self._verdict(code, monitor.lost)

    def _interrupt(self, mpiexec: int) -> None:
        """Pass a signal on to the ranks as Ctrl-C and give them time to end, unless a second signal comes."""
        (self.path / STOPPING).touch()
        for path in self.path.glob("rank.*"):
            for rank in read_processes(path):
                rank.kill(signal.SIGINT)
        wait_for(mpiexec, self.signals, _END_SECONDS)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Leave no process behind: ask mpiexec to end its ranks, then kill it and the ranks that are left."""
        processes = [*descendants(process.pid), *self._recorded()]
        if process.poll() is None and recorded_failure(self.path) is None:
            process.send_signal(signal.SIGTERM)
            wait_for(process.pid, self.signals, _END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for process_left in dict.fromkeys([*processes, *self._recorded()]):
            process_left.kill()
        remove_shared_memory(self.path)

    def _recorded(self) -> list[Process]:
        """The ranks, supervisors and proxies that have written their process numbers."""
        paths = [*self.path.glob("rank.*"), *self.path.glob("supervisor.*")]
        return [process for path in paths for process in read_processes(path)]

    def _verdict(self, code: int, lost_supervisors: Sequence[int]) -> int:
        """Exit code of the job. Prints the failure reports of the ranks, then the rank that was killed."""
        failure, received = recorded_failure(self.path), next(iter(self.signals.received), None)
        observed = failure is not None and failure.observed
        self.errors.write(summary(read_reports(self.path), self.n, died=observed))
        if received is not None:
            what = _SIGNAL_TEXTS.get(received, f"ended by {received.name}")
            self.errors.write(f"error: {what}; all ranks are stopped\n")
            return 128 + received
        if failure is None:
            problem = self._early_end()
            if problem or (not code and not lost_supervisors):
                self.errors.write(f"error: {problem}\n" if problem else "")
                return int(bool(problem))
            text, code = self._killed(code, lost_supervisors)
            self.errors.write(f"error: {text}\n")
            return code
        if observed:
            hint = "; the machine may be out of memory" if failure.text.endswith("SIGKILL") else ""
            self.errors.write(f"error: {failure.text}, all {self.n} ranks are stopped{hint}\n")
        return failure.code

    def _killed(self, code: int, lost_supervisors: Sequence[int]) -> tuple[str, int]:
        """Error text and exit code where mpiexec, or a supervisor that could not record it, was killed.

        Args:
            code: exit code of mpiexec; the number of the signal where a process that it watches was killed.
            lost_supervisors: ranks among which is the one whose supervisor was killed. The launcher does not
                know one that was killed while it was starting, after which mpiexec kills the others.
        """
        if code < 0:
            return f"mpiexec was killed by {signal.Signals(-code).name}, all ranks are stopped", 128 - code
        closed = next(self.path.glob(f"{CLOSED}.*"), None)
        if closed is not None or (not lost_supervisors and code not in _KILLING):
            return f"mpiexec ended with exit code {code} before the ranks could say why", code
        number = signal.Signals(code if code in _KILLING else signal.SIGKILL)
        all_started = lost_supervisors and len([*self.path.glob("supervisor.*")]) == self.n
        which = _supervisor_of(lost_supervisors) if all_started else "mpiexec or a supervisor"
        return f"{which} was killed by {number.name}, all {self.n} ranks are stopped", 128 + number

    def _early_end(self) -> str:
        """Error text where some ranks ended without ending MPI, so that mpiexec killed the others; else "".

        The exit code of mpiexec may be 0 then.
        """
        closed = sorted(int(path.suffix[1:]) for path in self.path.glob(f"{CLOSED}.*"))
        if not closed or len(closed) == self.n:
            return ""
        names = ", ".join(map(str, closed))
        return f"rank {names} has ended without ending MPI (os._exit?), so mpiexec has stopped the others"


def _supervisor_of(ranks: Sequence[int]) -> str:
    """Words for the supervisor of one of some ranks."""
    *others, last = map(str, ranks)
    return f"supervisor of rank {', '.join(others)} or {last}" if others else f"supervisor of rank {last}"


def _record_losses(code: int, problem: str | None, lost: Sequence[int], env: Mapping[str, str]) -> None:
    """Record what the launcher of an elastic job has seen, where no process of the job has recorded a loss.

    Args:
        code: exit code of mpiexec.
        problem: error text of the monitor.
        lost: ranks among which is the one whose supervisor was lost.
        env: environment of the ranks.
    """
    folder = elastic_folder(env)
    if folder is None or read_losses(folder):
        return
    if lost:
        record_loss(Loss(problem or f"{_supervisor_of(lost)} was killed", lost[0]), env)
    elif problem is not None or code < 0:
        record_loss(Loss(problem or f"mpiexec was killed by {signal.Signals(-code).name}"), env)
