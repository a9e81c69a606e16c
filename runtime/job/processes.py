"""Processes of this machine as /proc shows them; standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FLAGS: Final = 6  # of the fields behind the command in /proc/PID/stat
_START: Final = 19
_PF_EXITING: Final = 0x4  # <linux/sched.h>
_PR_SET_PDEATHSIG: Final = 1  # <sys/prctl.h>
_STOPPED_STATES: Final = frozenset("Tt")
_END_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine, identified by its number and its start time: numbers are reused."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process that has a number now; None if there is none."""
        started = process_start(pid)
        return None if started is None else cls(pid, started)

    @property
    def state(self) -> str:
        """Letter of its state as in /proc/PID/stat; empty when it has ended."""
        fields = _stat(self.pid)
        return fields[0] if fields is not None and fields[_START] == self.started else ""

    @property
    def ending(self) -> bool:
        """Whether it has ended, or has begun to: it closes its files before its pidfd becomes readable."""
        fields = _stat(self.pid)
        if fields is None or fields[_START] != self.started:
            return True
        return fields[0] in "ZX" or bool(int(fields[_FLAGS]) & _PF_EXITING)

    @property
    def parent(self) -> int:
        """Number of its parent process, or of the process that has adopted it; 0 when it has ended."""
        fields = _stat(self.pid)
        return int(fields[1]) if fields is not None else 0

    @property
    def name(self) -> str:
        """Name of the program that it runs, cut to 15 characters; empty when it has ended."""
        try:
            return Path(f"/proc/{self.pid}/comm").read_text().strip()
        except OSError:
            return ""

    @property
    def stopped(self) -> bool:
        """Whether it is stopped by a signal such as SIGSTOP or by a debugger."""
        return self.state in _STOPPED_STATES

    def kill(self, number: signal.Signals = signal.SIGKILL, wait: float = _END_SECONDS) -> None:
        """Send a signal; after SIGKILL return when the process has ended, or after `wait` seconds."""
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(self.pid)
            try:
                if self.state not in {"", "Z"}:
                    signal.pidfd_send_signal(descriptor, number)
                    select.select([descriptor], [], [], wait if number == signal.SIGKILL else 0)
            finally:
                os.close(descriptor)


def process_start(pid: int) -> str | None:
    """When a process was started, in clock ticks since boot; None if there is no such process."""
    fields = _stat(pid)
    return None if fields is None else fields[_START]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal such as SIGSTOP or by a debugger."""
    fields = _stat(pid)
    return fields is not None and fields[0] in _STOPPED_STATES


def descendants(pid: int) -> list[Process]:
    """All processes that descend from a process of this machine."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            parents[int(entry.name)] = int(fields[1])
    family, growing = {pid}, True
    while growing:
        children = {child for child, parent in parents.items() if parent in family} - family
        family |= children
        growing = bool(children)
    processes = (Process.of(child) for child in sorted(family - {pid}))
    return [process for process in processes if process is not None]


def processes_with(variable: str, value: str) -> list[Process]:
    """Processes of this user and host, except this one, whose environment had a value when they started.

    Hosts may be containers that share a process table. A process that has another network than this one is
    on another host.
    """
    entry, network = f"{variable}={value}".encode(), _network("self")
    processes: list[Process | None] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if entry in (folder / "environ").read_bytes().split(b"\0") and _network(folder.name) == network:
                processes.append(Process.of(int(folder.name)))
    return [process for process in processes if process is not None]


def _network(pid: str) -> str:
    """Name of the network namespace of a process."""
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def write_processes(path: Path, pids: Iterable[int]) -> None:
    """Write number and start time of processes to a file, which appears whole or not at all."""
    draft = path.with_name(f"draft.{path.name}")
    draft.write_text("\n".join(f"{pid} {process_start(pid)}" for pid in pids))
    draft.replace(path)


def read_processes(path: Path) -> list[Process]:
    """The processes in a file of `write_processes`; empty where there is no such file."""
    with contextlib.suppress(OSError):
        words = [line.split() for line in path.read_text().splitlines()]
        return [Process(int(pid), started) for pid, started in words]
    return []


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat behind the command: state, parent, ...; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent, which is process `parent`, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)


def shared_memory(pid: int | str = "self") -> list[str]:
    """Shared memory files of a process's MPI library; they outlive a process that is killed.

    Args:
        pid: number of the process; by default this one.
    """
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/mpich" in line)
    return sorted({path for path in paths if path.startswith("/dev/shm/")})
