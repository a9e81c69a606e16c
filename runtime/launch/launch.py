"""Starting ranks as processes, and ending all of them when one fails: `distgraph run -n 4 script.py args`.

When ranks fail, the launcher tells what they left to say (`last_words`): every traceback and every error
once, and on which ranks. Of a rank that was killed it names the signal. It passes the exit code on, and
leaves no process behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, TextIO

from distgraph.errors import RuntimeFault, installing
from distgraph.runtime.job.failure_report import left, told
from distgraph.runtime.job.heartbeat import heartbeat_limit
from distgraph.runtime.job.job_files import (
    CLOSED,
    DEFAULT_TIME_LIMIT,
    JOB_DIRECTORY,
    LAUNCHER,
    STOPPING,
    TIMEOUT,
    Failure,
    ranks_of_job,
    record_failure_in,
    recorded_failure,
    remove_shared_memory,
    setting_in_seconds,
)
from distgraph.runtime.job.processes import Process, descendants, read_processes, write_processes
from distgraph.runtime.launch.monitor import Monitor, Signals, ended
from distgraph.runtime.launch.mpi_rank import current_transport, fail

__all__ = ["launch", "current_transport", "ranks_of_job", "fail", "find_mpiexec"]

_THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_GRACE_SECONDS: Final = 5.0
_HOW: Final = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated (SIGTERM)"}
# What MPICH's mpiexec prints about a death; we say it ourselves.
_REMARKS: Final = re.compile(
    rb"={60,}\s*$|=   |YOUR APPLICATION TERMINATED WITH THE EXIT STRING|"
    rb"This typically refers to a problem with your application|"
    rb"Please see the FAQ page for debugging suggestions"
)


def find_mpiexec() -> str:
    """Path of mpiexec: the one beside this Python (the mpich wheel), else the one on PATH.

    Raises:
        RuntimeFault: there is none.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise RuntimeFault(
            f"mpiexec is neither beside this Python nor on PATH; install it with: {installing('mpi')}"
        )
    return found


def launch(
    n: int,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """Run a script on `n` MPI ranks of this machine and wait for it.

    Args:
        n: number of ranks.
        argv: path of the script, then its arguments.
        env: environment of the ranks; default this one. BLAS gets one thread per rank where it says nothing
        else.
        stdout: where the ranks' output goes, line by line; default this process's.
        stderr: likewise for errors.

    Returns: exit code: 0 only if every rank succeeded; 128 + signal where a rank was killed; 130 after
    Ctrl-C, 143 after SIGTERM, 129 after SIGHUP. A second signal ends all at once.

    Raises:
        RuntimeFault: n < 1, no such script, no mpiexec, or DISTGRAPH_TIMEOUT or DISTGRAPH_HEARTBEAT is no
            positive number.
    """
    if n < 1:
        raise RuntimeFault(f"run: {n} ranks asked for; it takes at least 1")
    if not argv or not Path(argv[0]).is_file():
        name = argv[0] if argv else ""
        raise RuntimeFault(f"run: script {name!r} does not exist in {Path.cwd()}; give the path of a file")
    command = [
        find_mpiexec(),
        "-n",
        str(n),
        sys.executable,
        "-m",
        "distgraph.runtime.launch.supervisor",
        *argv,
    ]
    settings = dict.fromkeys(_THREAD_VARIABLES, "1") | dict(os.environ if env is None else env)
    heartbeat_limit(settings)
    setting_in_seconds(TIMEOUT, DEFAULT_TIME_LIMIT, settings)
    with Signals() as signals, tempfile.TemporaryDirectory(prefix="distgraph-run-") as directory:
        settings[JOB_DIRECTORY] = directory
        return _Job(n, Path(directory), signals, stdout or sys.stdout, stderr or sys.stderr).run(
            command, settings
        )


class _Job:
    """A job that is being run: its directory, the signals that end it, and where output goes."""

    def __init__(self, n: int, path: Path, signals: Signals, out: TextIO, errors: TextIO) -> None:
        self.n, self.path, self.signals, self.out, self.errors = n, path, signals, out, errors
        write_processes(path / LAUNCHER, [os.getpid()])

    def run(self, command: list[str], env: Mapping[str, str]) -> int:
        """Run mpiexec to its end, or ours, passing output on. Returns the exit code of the job."""
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the ranks in order
        )
        assert process.stdout is not None
        assert process.stderr is not None
        pairs = ((process.stdout, self.out), (process.stderr, self.errors))
        readers = [threading.Thread(target=_forward, args=pair, daemon=True) for pair in pairs]
        for reader in readers:
            reader.start()
        monitor = Monitor(process.pid, self.path, self.n, env)
        try:
            wrong = monitor.watch(self.signals)
            if wrong is not None:
                record_failure_in(self.path, Failure(1, wrong, observed=True))
            elif self.signals.received:
                self._interrupt(process.pid)
        finally:
            self._end(process)
            for reader in readers:
                reader.join(_GRACE_SECONDS)
        return self._verdict(process.returncode, monitor.lost)

    def _interrupt(self, mpiexec: int) -> None:
        """Pass a signal on as Ctrl-C and give the ranks time to end, unless there is a second one."""
        (self.path / STOPPING).touch()
        for path in self.path.glob("rank.*"):
            for rank in read_processes(path):
                rank.kill(signal.SIGINT)
        _wait(mpiexec, self.signals, _GRACE_SECONDS)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Leave no process behind: ask mpiexec to stop its ranks, then stop it, and what is left of them."""
        below = [*descendants(process.pid), *self._recorded()]
        if process.poll() is None and recorded_failure(self.path) is None:
            process.send_signal(signal.SIGTERM)
            _wait(process.pid, self.signals, _GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for process_left in dict.fromkeys([*below, *self._recorded()]):
            process_left.kill()
        remove_shared_memory(self.path)

    def _recorded(self) -> list[Process]:
        """Ranks, supervisors and proxies that have left their numbers."""
        paths = [*self.path.glob("rank.*"), *self.path.glob("supervisor.*")]
        return [process for path in paths for process in read_processes(path)]

    def _verdict(self, code: int, lost: Sequence[int]) -> int:
        """Exit code of the job; says who was killed, if one was, after what the ranks have said."""
        failure, number = recorded_failure(self.path), next(iter(self.signals.received), None)
        observed = failure is not None and failure.observed
        self.errors.write(told(left(self.path), self.n, died=observed))
        if number is not None:
            how = _HOW.get(number, f"ended by {number.name}")
            self.errors.write(f"error: {how}; all ranks are stopped\n")
            return 128 + number
        if failure is None:
            wrong = self._early() or _lost(lost)
            if code and not wrong:
                self.errors.write(f"error: {_ended(code)} before the ranks could say why\n")
                return code if code >= 0 else 128 - code
            self.errors.write(f"error: {wrong}\n" if wrong else "")
            return int(bool(wrong))
        if observed:
            hint = "; the machine may be out of memory" if failure.text.endswith("SIGKILL") else ""
            self.errors.write(f"error: {failure.text}, all {self.n} ranks are stopped{hint}\n")
        return failure.code

    def _early(self) -> str:
        """Says that some ranks have ended and mpiexec has killed the others; its exit code may be 0."""
        orderly = sorted(int(path.suffix[1:]) for path in self.path.glob(f"{CLOSED}.*"))
        if not orderly or len(orderly) == self.n:
            return ""
        who = ", ".join(map(str, orderly))
        return f"rank {who} has ended without ending MPI (os._exit?), so mpiexec has stopped the others"


def _lost(ranks: Sequence[int]) -> str:
    return f"supervisor of rank {ranks[0]} was killed, all ranks are stopped" if ranks else ""


def _ended(code: int) -> str:
    return f"mpiexec ended with {f'exit code {code}' if code >= 0 else signal.Signals(-code).name}"


def _wait(pid: int, signals: Signals, seconds: float) -> None:
    """Until a child has ended, another signal than the first comes, or the seconds are over."""
    watch, deadline = os.pidfd_open(pid), time.monotonic() + seconds
    try:
        while len(signals.received) < 2 and (rest := deadline - time.monotonic()) > 0:
            signals.sleep(rest, watch)
            if ended(watch):
                return
    finally:
        os.close(watch)


def _forward(source: IO[bytes], target: TextIO) -> None:
    """Copy lines as they come; a carriage return ends one too, for the sake of progress bars."""
    descriptor, rest = source.fileno(), b""
    while chunk := os.read(descriptor, 1 << 16):
        *lines, rest = re.split(rb"(?<=[\r\n])", rest + chunk)
        _write(target, lines)
    _write(target, [rest] if rest else [])
    source.close()


def _write(target: TextIO, lines: Sequence[bytes]) -> None:
    """Pass lines on; where nobody reads any more (`distgraph run ... | head`) the ranks go on unheard."""
    try:
        target.writelines(line.decode(errors="replace") for line in lines if not _REMARKS.match(line))
        target.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
