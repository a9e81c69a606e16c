"""Starting ranks as processes, and ending all of them when one fails: `distgraph run -n 4 script.py args`.

When ranks fail, the launcher tells what they left to say (`last_words`): every traceback and every error
once, and on which ranks. Of a rank that was killed it names the signal. It passes the exit code on, and
leaves no process behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, TextIO

from distgraph.errors import RuntimeFault, installing
from distgraph.runtime.job import JOB_DIRECTORY, process_start, ranks_of_job, recorded_death, recorded_failure
from distgraph.runtime.last_words import left, told
from distgraph.runtime.rank import current_transport, fail

__all__ = ["launch", "current_transport", "ranks_of_job", "fail", "find_mpiexec"]

_THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_GRACE_SECONDS: Final = 5.0
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
    Ctrl-C.

    Raises:
        RuntimeFault: n < 1, no such script, or no mpiexec.
    """
    if n < 1:
        raise RuntimeFault(f"run: {n} ranks asked for; it takes at least 1")
    if not argv or not Path(argv[0]).is_file():
        name = argv[0] if argv else ""
        raise RuntimeFault(f"run: script {name!r} does not exist in {Path.cwd()}; give the path of a file")
    command = [find_mpiexec(), "-n", str(n), sys.executable, "-m", "distgraph.runtime.supervise", *argv]
    errors = stderr or sys.stderr
    with tempfile.TemporaryDirectory(prefix="distgraph-run-") as directory:
        job = Path(directory)
        settings = dict.fromkeys(_THREAD_VARIABLES, "1") | dict(os.environ if env is None else env)
        settings[JOB_DIRECTORY] = directory
        try:
            code = _run(command, settings, job, stdout or sys.stdout, errors)
        except KeyboardInterrupt:
            errors.write(told(left(job), n))
            errors.write("error: interrupted; all ranks are stopped\n")
            return 130
        return _verdict(n, code, job, errors)


def _run(command: list[str], env: Mapping[str, str], job: Path, out: TextIO, errors: TextIO) -> int:
    """Run mpiexec to its end, or ours, passing output on."""
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
    pairs = ((process.stdout, out), (process.stderr, errors))
    readers = [threading.Thread(target=_forward, args=pair, daemon=True) for pair in pairs]
    for reader in readers:
        reader.start()
    try:
        with _terminate_as_interrupt():
            return process.wait()
    finally:
        _end(process, job)
        for reader in readers:
            reader.join(_GRACE_SECONDS)


def _verdict(n: int, code: int, job: Path, errors: TextIO) -> int:
    """Exit code of the job; says who was killed, if one was, after what the ranks have said."""
    failure, death = recorded_failure(job), recorded_death(job)
    errors.write(told(left(job), n, died=death is not None))
    if failure is None:
        if code:
            errors.write(f"error: mpiexec ended with exit code {code} before the ranks could say why\n")
        return code if code >= 0 else 128 - code
    if death is not None:
        hint = "; the machine may be out of memory" if death.endswith("SIGKILL") else ""
        errors.write(f"error: {death}, all {n} ranks are stopped{hint}\n")
    return failure[0]


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


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end the job as Ctrl-C does (where this is the main thread)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes], job: Path) -> None:
    """Leave no process behind: ask mpiexec to stop its ranks, then stop it, and what is left of them."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for path in job.glob("rank.*"):
        pid, _, started = path.read_text().partition(" ")
        if started and process_start(int(pid)) == started:  # else the number may be another process's by now
            _kill(int(pid))


def _kill(pid: int) -> None:
    """Kill a process that is no child of ours, and wait until it has ended."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(watch, signal.SIGKILL)
        select.select([watch], [], [], _GRACE_SECONDS)
    except ProcessLookupError:
        pass
    finally:
        os.close(watch)
