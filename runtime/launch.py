"""Starting ranks as processes, and ending all of them when one fails: `distgraph run -n 4 script.py args`.

    launch()                         mpiexec -n 4                       this module as `python -m`, once a rank
    one house error, exit code  <--  output, exit code, signals   <--   script; on an exception: traceback, tell, leave

A rank that raises prints its traceback, then the others print one line each and leave (`MpiTransport.abort`). A rank that
is killed takes the others with it, for mpiexec ends them; `launch` then says which rank died of which signal.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, TextIO

from distgraph.errors import DistGraphError, RuntimeFault
from distgraph.runtime.mpi import MpiTransport

_SIZE_VARIABLES: Final = ("PMI_SIZE", "PMIX_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANK_VARIABLES: Final = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_RUN_DIRECTORY: Final = "DISTGRAPH_RUN_DIRECTORY"
_GRACE_SECONDS: Final = 5.0
_BANNER: Final = re.compile(
    rb"^(=+\r?\n$|=   |YOUR APPLICATION TERMINATED WITH|This typically refers to a problem with your appl|"
    rb"Please see the FAQ page for debugging|Abort\(\d+\) on node)"
)
_DEAD: Final = re.compile(rb"=   PID (\d+) RUNNING AT (\S+)")
_CODE: Final = re.compile(rb"=   EXIT CODE: (\d+)")

_current: list[MpiTransport] = []


def ranks_of_job() -> int:
    """Number of MPI ranks that the launcher of this process started; 1 without a launcher. Does not load MPI."""
    for name in _SIZE_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 1


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
    transport = MpiTransport()
    if transport.size != expected:
        raise RuntimeFault(
            f"launcher started {expected} ranks but mpi4py sees {transport.size}; use the mpiexec of the MPI that "
            "mpi4py was built for (pip install mpich), or `distgraph run`"
        )
    _current.append(transport)
    sys.excepthook = lambda kind, error, trace: fail(error)
    atexit.register(_leave)
    return transport


def fail(error: BaseException) -> None:
    """Report an exception that nobody caught, and take the other ranks down.

    The rank where it began prints its traceback and then the error in one line; the others only the line. Does not
    return where there are several ranks.
    """
    transport = _current[0] if _current else None
    if transport is not None and transport.failed_elsewhere:
        time.sleep(0.05)  # the traceback of the rank that failed first comes through another pipe
    elif not isinstance(error, SystemExit | DistGraphError) or error.__cause__ is not None:
        traceback.print_exception(error)
    if not isinstance(error, SystemExit) or not isinstance(error.code, int):
        where = f"rank {transport.rank}: " if transport is not None else ""
        text = (
            str(error)
            if isinstance(error, DistGraphError | SystemExit)
            else f"{type(error).__name__}: {error}"
        )
        sys.stderr.write(f"error: {text if text.startswith('rank ') else where + text}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    if transport is not None:
        transport.abort(error)


def find_mpiexec() -> str:
    """Path of mpiexec: the one beside this Python (the mpich wheel), else the one on PATH.

    Raises:
        RuntimeFault: there is none.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise RuntimeFault(
            "mpiexec is neither beside this Python nor on PATH; install it with: pip install distgraph[mpi]"
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
        env: environment of the ranks; default this one. BLAS gets one thread per rank where it says nothing else.
        stdout, stderr: where output goes line by line; default this process's.

    Returns: exit code, 0 only if every rank succeeded; 128 + signal where a rank was killed, 130 after Ctrl-C.

    Raises:
        RuntimeFault: n < 1, no such script, or no mpiexec.
    """
    if n < 1:
        raise RuntimeFault(f"run: {n} ranks asked for; it takes at least 1")
    if not argv or not Path(argv[0]).is_file():
        raise RuntimeFault(
            f"run: script {argv[0] if argv else ''!r} does not exist in {Path.cwd()}; give the path of a file"
        )
    errors = stderr or sys.stderr
    with tempfile.TemporaryDirectory(prefix="distgraph-run-") as directory:
        settings = {**(os.environ if env is None else env), _RUN_DIRECTORY: directory}
        for name in _THREAD_VARIABLES:
            settings.setdefault(name, "1")
        command = [find_mpiexec(), "-n", str(n), sys.executable, "-m", "distgraph.runtime.launch", *argv]
        process = subprocess.Popen(
            command,
            env=settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        notes: list[bytes] = []
        readers = [
            threading.Thread(
                target=_forward, args=(process.stdout, stdout or sys.stdout, notes), daemon=True
            ),
            threading.Thread(target=_forward, args=(process.stderr, errors, notes), daemon=True),
        ]
        for reader in readers:
            reader.start()
        try:
            with _terminate_as_interrupt():
                code = process.wait()
        except KeyboardInterrupt:
            errors.write("error: interrupted; all ranks are stopped\n")
            return 130
        finally:
            _end(process, Path(directory))
            for reader in readers:
                reader.join(_GRACE_SECONDS)
        return _verdict(n, code, notes, Path(directory), errors)


def _verdict(n: int, code: int, notes: list[bytes], directory: Path, errors: TextIO) -> int:
    """Exit code of the job; a death that the ranks could not report themselves is reported here."""
    ranks = {int(path.read_text()): int(path.suffix[1:]) for path in directory.glob("rank.*")}
    text = b"".join(notes)
    dead, status = _DEAD.search(text), _CODE.search(text)
    if dead is None or status is None:
        return code if code >= 0 else 128 - code
    number = int(status[1]) & 0x7F
    pid = int(dead[1])
    who = f"rank {ranks[pid]}" if pid in ranks else f"process {pid} on {dead[2].decode()}"
    with contextlib.suppress(ValueError):
        errors.write(
            f"error: {who} of {n} was killed by {signal.Signals(number).name}; all ranks are stopped"
            f"{', the machine may be out of memory' if number == signal.SIGKILL else ''}\n"
        )
        return 128 + number
    errors.write(f"error: {who} of {n} ended with status {int(status[1])}; all ranks are stopped\n")
    return code or 1


def _forward(source: IO[bytes], target: TextIO, notes: list[bytes]) -> None:
    """Copy lines as they come ('\\r' ends one too: progress bars); mpiexec's own remarks go to `notes`."""
    descriptor, rest = source.fileno(), b""
    while chunk := os.read(descriptor, 1 << 16):
        *lines, rest = re.split(rb"(?<=[\r\n])", rest + chunk)
        for line in lines:
            _write(line, target, notes)
        target.flush()
    if rest:
        _write(rest, target, notes)
        target.flush()
    source.close()


def _write(line: bytes, target: TextIO, notes: list[bytes]) -> None:
    if _BANNER.match(line):
        notes.append(line)
    else:
        target.write(line.decode(errors="replace"))


@contextlib.contextmanager
def _terminate_as_interrupt() -> Any:
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


def _end(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Leave no process behind: ask mpiexec to stop its ranks, then stop it and what is left of them."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for path in directory.glob("rank.*"):
        pid = int(path.read_text())
        if _is_ours(pid, directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_ours(pid: int, directory: Path) -> bool:
    """Whether the process exists and was started by this launch: its number may have been given to another."""
    try:
        return str(directory).encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _leave() -> None:
    """At exit: wait for the others within reach of their failures; MPI's own finalisation would wait for ever."""
    if _current:
        transport = _current.pop()
        _current.append(transport)
        try:
            transport.barrier()
        except RuntimeFault as error:
            fail(error)


def run_script(argv: Sequence[str]) -> None:
    """Run a script as `__main__` in this rank; its uncaught exception, or exit with a code, ends all ranks."""
    directory = os.environ.get(_RUN_DIRECTORY)
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), None)
    if directory is not None and rank is not None:
        Path(directory, f"rank.{rank}").write_text(str(os.getpid()))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
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
        fail(error)
        sys.exit(1)


if __name__ == "__main__":
    # The module is imported once more under its own name, so that scripts share its state.
    from distgraph.runtime import launch as _module

    _module.run_script(sys.argv[1:])
