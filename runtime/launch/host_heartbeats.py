"""Heartbeats between the launcher and the hosts of a job: a host that does not answer any more is lost.

The other side is `host_supervisor.py`. A host whose link is cut closes no connection, so neither mpiexec nor
the ranks of other hosts learn of it: without heartbeats they wait until a time limit.

Only a host that has answered before can be lost. Where its supervisor cannot be started, ranks are watched
by each other alone. A supervisor that ends is started again, and the time in which it does not answer counts.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from distgraph.runtime.job.heartbeat import Silence, heartbeat_limit, interval
from distgraph.runtime.job.job_files import JOB, setting_in_seconds
from distgraph.runtime.job.losses import elastic_folder
from distgraph.runtime.launch.host_check import RemoteShell
from distgraph.runtime.launch.host_supervisor import read_heartbeats, send_heartbeat, supervisor_command

VARIABLE: Final = "DISTGRAPH_HOST_HEARTBEAT"
"""Environment variable: seconds without a heartbeat of a host after which it counts as lost."""
ELASTIC_LIMIT: Final = 3.0
_TOGETHER: Final = 0.75  # of the limit: hosts that are lost at once are not noticed one by one
_AGAIN_SECONDS: Final = 1.0
_END_SECONDS: Final = 5.0


def host_limit(environ: Mapping[str, str]) -> float:
    """Seconds without a heartbeat after which a host counts as lost.

    DISTGRAPH_HOST_HEARTBEAT; by default 3 in an elastic job, which goes on without the host, and
    DISTGRAPH_HEARTBEAT in others, which end.

    Raises:
        RuntimeFault: not a positive number.
    """
    default = heartbeat_limit(environ) if elastic_folder(environ) is None else ELASTIC_LIMIT
    return setting_in_seconds(VARIABLE, default, environ)


class Connection(Protocol):
    """A supervisor of a host as its launcher sees it.

    Attributes:
        source: descriptor from which its heartbeats are read.
        target: descriptor, which does not block, to which those of the launcher are written.
    """

    source: int
    target: int

    def close(self) -> None:
        """Tell the supervisor to end what is left of the job on its host."""

    def wait(self, seconds: float) -> int | None:
        """Wait until it has ended, cut the connection after some seconds. Returns an exit code if it has."""


class ShellConnection:
    """A supervisor that was started by a remote shell.

    Args:
        command: of the remote shell.
        env: its environment.

    Raises:
        OSError: the remote shell cannot be started.
    """

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the launcher alone
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.source, self.target = self._output.fileno(), self._input.fileno()
        os.set_blocking(self.target, False)

    def close(self) -> None:
        """See `Connection`."""
        with suppress(OSError):
            self._input.close()

    def wait(self, seconds: float) -> int | None:
        """See `Connection`."""
        self.close()
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(seconds)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()
        return code


@dataclass(slots=True)
class _WatchedHost:
    """A host, its connection if it has one, and the number of heartbeats that have come."""

    connection: Connection | None = None
    received: int = 0
    started: float = 0.0
    silence: Silence = field(init=False)


class HostHeartbeats:
    """Watches the hosts of a job for its launcher. `look` is to be called every `interval` seconds.

    Args:
        hosts: names of the hosts.
        connect: starts the supervisor of a host; raises OSError where it cannot.
        limit: seconds without a heartbeat after which a host counts as lost.
        note: receives a line about a host that cannot be watched.
        clock: seconds that never go back.

    Attributes:
        interval: seconds between two heartbeats.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        connect: Callable[[str], Connection],
        limit: float,
        note: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval = interval(limit)
        self._connect, self._limit, self._note, self._clock = connect, limit, note, clock
        self._hosts = {name: _WatchedHost() for name in hosts}
        for name, host in self._hosts.items():
            host.silence = Silence(lambda host=host: host.received or None, self.interval, clock)  # type: ignore[misc]
            self._start(name, host)

    def look(self) -> dict[str, str]:
        """Exchange heartbeats with all hosts. Returns the hosts that are lost -> what is said about each."""
        silent: dict[str, float] = {}
        for name, host in self._hosts.items():
            if host.connection is not None:
                self._exchange(name, host, host.connection)
            elif host.received and self._clock() >= host.started + _AGAIN_SECONDS:
                self._start(name, host)
            seconds = host.silence.seconds()
            if host.received:
                silent[name] = seconds
        if max(silent.values(), default=0.0) <= self._limit:
            return {}
        return {
            name: f"host {name} has not answered for {seconds:.0f} s"
            for name, seconds in silent.items()
            if seconds > _TOGETHER * self._limit
        }

    def close(self, lost: Iterable[str] = ()) -> None:
        """End what is left of the job on the hosts, and wait for it except on those that are lost."""
        connections = {
            name: host.connection for name, host in self._hosts.items() if host.connection is not None
        }
        for connection in connections.values():
            connection.close()
        deadline = time.monotonic() + _END_SECONDS
        for name, connection in connections.items():
            connection.wait(0.0 if name in lost else max(deadline - time.monotonic(), 0.0))
            self._hosts[name].connection = None

    def _start(self, name: str, host: _WatchedHost) -> None:
        host.started = self._clock()
        try:
            host.connection = self._connect(name)
        except OSError as error:
            if not host.received:
                self._note_unwatched(name, str(error))
            return
        send_heartbeat(host.connection.target)

    def _exchange(self, name: str, host: _WatchedHost, connection: Connection) -> None:
        """Read what has come from a host, and send a heartbeat."""
        poll = select.poll()
        poll.register(connection.source, select.POLLIN)
        if poll.poll(0):
            received = read_heartbeats(connection.source)
            host.received += received or 0
            if received is None:
                host.connection, code = None, connection.wait(0.1)
                if not host.received:
                    self._note_unwatched(name, f"its supervisor ended with exit code {code}")
                return
        send_heartbeat(connection.target)

    def _note_unwatched(self, name: str, reason: str) -> None:
        self._note(
            f"note: host {name} sends no heartbeats ({reason}); its loss is noticed after DISTGRAPH_TIMEOUT\n"
        )


def watch_hosts(
    hosts: Iterable[str],
    job: str,
    shell: RemoteShell,
    env: Mapping[str, str],
    note: Callable[[str], object],
) -> HostHeartbeats:
    """Start the supervisors of the hosts of a job.

    Args:
        hosts: names of the hosts.
        job: value of DISTGRAPH_JOB of its processes.
        shell: how the hosts are reached.
        env: environment of the job.
        note: as of `HostHeartbeats`.

    Raises:
        RuntimeFault: as `host_limit`.
    """
    limit = host_limit(env)
    command = supervisor_command(job, max(limit, heartbeat_limit(env)), interval(limit))
    own = {name: value for name, value in env.items() if name != JOB}

    def connect(host: str) -> Connection:
        return ShellConnection(shell.command(host, command, own), own)

    return HostHeartbeats(hosts, connect, limit, note)
