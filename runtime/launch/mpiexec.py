"""mpiexec as a process: finding it, starting it, passing its output on, and waiting for it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Final, TextIO

from distgraph.errors import RuntimeFault, installing
from distgraph.runtime.job.interrupts import signals_blocked
from distgraph.runtime.job.processes import die_with_parent
from distgraph.runtime.launch.monitor import Signals, ended

# What MPICH's mpiexec prints about a rank that was killed; the launcher prints its own message.
_MPIEXEC_REMARKS: Final = re.compile(
    rb"={60,}\s*$|=   |YOUR APPLICATION TERMINATED WITH THE EXIT STRING|"
    rb"This typically refers to a problem with your application|"
    rb"Please see the FAQ page for debugging suggestions"
)


def find_mpiexec() -> str:
    """Path of mpiexec: the one in the folder of this Python (the mpich wheel), else the one on PATH.

    Raises:
        RuntimeFault: there is none.
    """
    sibling = Path(sys.executable).parent / "mpiexec"
    path = str(sibling) if os.access(sibling, os.X_OK) else shutil.which("mpiexec")
    if path is None:
        raise RuntimeFault(
            "mpiexec is neither in the folder of this Python nor on PATH; "
            f"install it with: {installing('mpi')}"
        )
    return path


def start_mpiexec(
    command: Sequence[str],
    env: Mapping[str, str],
    out: TextIO,
    errors: TextIO,
    *,
    dies_with_launcher: bool = False,
    remarks: list[str] | None = None,
) -> tuple[subprocess.Popen[bytes], list[threading.Thread]]:
    """Start mpiexec in a session of its own.

    Args:
        command: mpiexec and its arguments.
        env: its environment, and that of the ranks.
        out: receives the output of the ranks line by line.
        errors: receives their error output.
        dies_with_launcher: mpiexec gets SIGTERM when this process ends, as there are no supervisors.
        remarks: receives what mpiexec says about a rank that was killed, which is not passed on.

    Returns:
        The process, and the threads that pass its output on until it ends.
    """
    launcher = os.getpid()
    with signals_blocked():
        process = subprocess.Popen(
            list(command),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the ranks in order
            # One system call in the child; the readers' threads have not started yet.
            preexec_fn=partial(die_with_parent, launcher, signal.SIGTERM) if dies_with_launcher else None,  # noqa: PLW1509
        )
    assert process.stdout is not None
    assert process.stderr is not None
    noted = [] if remarks is None else remarks
    pairs = ((process.stdout, out, noted), (process.stderr, errors, noted))
    readers = [threading.Thread(target=_forward, args=pair, daemon=True) for pair in pairs]
    for reader in readers:
        reader.start()
    return process, readers


def wait_for(pid: int, signals: Signals, seconds: float) -> None:
    """Wait until a child has ended, a second signal has come, or the time is over."""
    descriptor, deadline = os.pidfd_open(pid), time.monotonic() + seconds
    try:
        while len(signals.received) < 2 and (left := deadline - time.monotonic()) > 0:
            signals.sleep(left, descriptor)
            if ended(descriptor):
                return
    finally:
        os.close(descriptor)


def _forward(source: IO[bytes], target: TextIO, remarks: list[str]) -> None:
    """Copy lines as they come, those of mpiexec itself to `remarks`.

    A carriage return ends a line too, as progress bars need.
    """
    descriptor, rest = source.fileno(), b""
    while chunk := os.read(descriptor, 1 << 16):
        *lines, rest = re.split(rb"(?<=[\r\n])", rest + chunk)
        _write(target, lines, remarks)
    _write(target, [rest] if rest else [], remarks)
    source.close()


def _write(target: TextIO, lines: Sequence[bytes], remarks: list[str]) -> None:
    """Write lines to a stream, apart from those of mpiexec itself.

    They are dropped if its reader has gone (`distgraph run ... | head`).
    """
    remarks += [line.decode(errors="replace") for line in lines if _MPIEXEC_REMARKS.match(line)]
    try:
        target.writelines(line.decode(errors="replace") for line in lines if not _MPIEXEC_REMARKS.match(line))
        target.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
