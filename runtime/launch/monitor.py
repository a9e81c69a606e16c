"""What the launcher of a job watches: signals to the launcher, mpiexec, and the supervisors of the ranks.

A supervisor that stops sending heartbeats is reported. mpiexec and its proxies send no heartbeats, so their
process state is watched instead.

When a rank ends after a failure, mpiexec ends all others at once. MPICH's sometimes misses the end of a rank
(5.0.2 does, about once in 100 ranks that are killed), and then waits for the others.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final

from distgraph.runtime.job.heartbeat import Silence, beat, heartbeat_limit, interval, last_beat
from distgraph.runtime.job.job_files import CLOSED, DEFAULT_TIME_LIMIT, LAUNCHER, TIMEOUT, setting_in_seconds
from distgraph.runtime.job.processes import Process, descendants, is_stopped, read_processes

_OVERDUE: Final = 2.0  # seconds after the failed end of a rank in which mpiexec ends the others
_STARTING: Final = 0.05  # seconds between two looks for supervisors, until all of them have started
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Context in which SIGINT, SIGTERM and SIGHUP are recorded and have no other effect.

    Signals can be handled in the main thread only; in another thread the context does nothing.

    Attributes:
        received: the signals that came, in order.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._wake, self._note = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup
                    continue
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *details: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned
        os.close(self._wake)
        os.close(self._note)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        with suppress(BlockingIOError):
            os.write(self._note, b".")

    def sleep(self, seconds: float, *watched: int) -> None:
        """Sleep until one of the descriptors is readable, a signal comes, or the time is over."""
        poll = select.poll()  # select() takes no descriptors above 1023
        for descriptor in (self._wake, *watched):
            poll.register(descriptor, select.POLLIN)
        if self._wake in dict(poll.poll(seconds * 1000)):
            os.read(self._wake, 1 << 10)


class Monitor:
    """Watches the processes of a job for its launcher.

    Attributes:
        lost: the rank whose supervisor was killed or does not answer. mpiexec kills the other supervisors
            soon after, so these are several ranks where several had ended when the launcher looked.
        overdue: whether `watch` has returned because mpiexec did not end after a rank had failed.
    """

    def __init__(self, mpiexec: int, job: Path, ranks: int, environ: Mapping[str, str]) -> None:
        self.mpiexec, self.job, self.ranks = mpiexec, job, ranks
        self.limit = heartbeat_limit(environ)
        self.interval = interval(self.limit)
        self.start_limit = max(self.limit, setting_in_seconds(TIMEOUT, DEFAULT_TIME_LIMIT, environ))
        self.started = Silence(lambda: None, self.interval)
        self.supervisors: dict[int, Process] = {}
        self.silences: dict[int, Silence] = {}
        self.watched: dict[int, int] = {}  # rank -> descriptor of its supervisor, until that ends
        self.lost: list[int] = []
        self.overdue = False
        self._failed_end = 0.0  # when the first rank ended that was killed or has failed
        self.others: dict[int, Silence] = {mpiexec: self._running(mpiexec)}

    def watch(self, signals: Signals) -> str | None:
        """Wait until mpiexec has ended or should have, a signal comes, or a process is lost.

        Returns:
            The error text of a process that is lost, or None.
        """
        mpiexec_descriptor = os.pidfd_open(self.mpiexec)
        last_beat_at = 0.0
        try:
            while not signals.received:
                complete = len(self.silences) == self.ranks
                signals.sleep(
                    self.interval if complete else min(self.interval, _STARTING),
                    mpiexec_descriptor,
                    *self.watched.values(),
                )
                self._note_lost()
                self._find_supervisors()
                if ended(mpiexec_descriptor):
                    return None
                if self._failed_end and time.monotonic() - self._failed_end > _OVERDUE:
                    self.overdue = True
                    return None
                if time.monotonic() - last_beat_at < self.interval:
                    continue
                last_beat_at = time.monotonic()
                beat(self.job / LAUNCHER)
                problem = self._problem()
                if problem is not None:
                    return problem
        finally:
            for descriptor in (mpiexec_descriptor, *self.watched.values()):
                os.close(descriptor)
            self.watched.clear()
        return None

    def _note_lost(self) -> None:
        killed: list[int] = []
        for rank, descriptor in list(self.watched.items()):
            if ended(descriptor):
                os.close(self.watched.pop(rank))
                code = self._exit_code(rank)
                if code is None:
                    killed.append(rank)
                if code != 0:
                    self._failed_end = self._failed_end or time.monotonic()
        if killed and not self.lost:
            ending = [rank for rank in self.watched if self.supervisors[rank].ending]
            self.lost = sorted(killed + [rank for rank in ending if self._exit_code(rank) is None])

    def _exit_code(self, rank: int) -> int | None:
        """The exit code that a supervisor has recorded at its end; None where it was killed."""
        try:
            return int((self.job / f"{CLOSED}.{rank}").read_text() or 1)
        except FileNotFoundError:
            return None

    def _problem(self) -> str | None:
        for pid, silence in self.others.items():
            if silence.seconds() > self.limit:
                return f"{_name(pid)} (process {pid}) is stopped since {silence.seconds():.0f} s"
        for rank, silence in self.silences.items():
            if silence.seconds() > self.limit:
                supervisor = self.supervisors[rank]
                if not supervisor.state:
                    continue  # it has ended, and mpiexec is about to end because of that
                how = "is stopped" if supervisor.stopped else "does not answer"
                process = f"supervisor of rank {rank} (process {supervisor.pid})"
                self.lost = [rank]
                return f"{process} {how} since {silence.seconds():.0f} s"
        if len(self.silences) < self.ranks and self.started.seconds() > self.start_limit:
            return self._not_started()
        return None

    def _find_supervisors(self) -> None:
        """Start to watch the supervisors that have started since, and the proxies that started them."""
        for rank in range(self.ranks):
            path = self.job / f"supervisor.{rank}"
            if rank in self.silences or not (processes := read_processes(path)):
                continue
            self.supervisors[rank] = processes[0]
            self.silences[rank] = Silence(lambda path=path: last_beat(path), self.interval)  # type: ignore[misc]
            with suppress(OSError):
                self.watched[rank] = os.pidfd_open(processes[0].pid)
            for proxy in processes[1:]:
                self.others.setdefault(proxy.pid, self._running(proxy.pid))

    def _not_started(self) -> str:
        absent = ", ".join(str(rank) for rank in range(self.ranks) if rank not in self.silences)
        stopped = [process.pid for process in descendants(self.mpiexec) if process.stopped]
        because = f"; {_name(stopped[0])} (process {stopped[0]}) is stopped" if stopped else ""
        return f"rank {absent} has not started in {self.start_limit:.0f} s{because}"

    def _running(self, pid: int) -> Silence:
        """Silence of a process without heartbeats: the time for which it is stopped."""
        return Silence(lambda: None if is_stopped(pid) else time.monotonic(), self.interval)


def ended(descriptor: int) -> bool:
    """Whether the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _name(pid: int) -> str:
    """Name of the program that a process runs."""
    process = Process.of(pid)
    return (process and process.name) or "a process"
