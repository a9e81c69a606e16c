"""Heartbeats between the launcher and the hosts of a job: which host is lost and when, and what ends then.

Connections are pairs of sockets, and time is a number that the test sets. The last tests start processes.
"""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from distgraph.errors import RuntimeFault
from distgraph.runtime.job.job_files import JOB
from distgraph.runtime.job.losses import ELASTIC
from distgraph.runtime.launch.host_heartbeats import HostHeartbeats, host_limit
from distgraph.runtime.launch.host_supervisor import (
    end_job,
    exchange_heartbeats,
    read_heartbeats,
    send_heartbeat,
)
from distgraph.runtime.launch.hosts import parse_hosts
from distgraph.runtime.launch.launch_hosts import launch_on_hosts

LIMIT = 4.0
STEP = 0.5
"""Seconds between two looks."""


class FakeConnection:
    """A pair of sockets: the launcher has one end, the test plays the supervisor at the other."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.source = self.target = self.near.fileno()
        self.closed = False

    def close(self) -> None:
        """See `Connection`."""
        self.closed = True

    def wait(self, seconds: float) -> int | None:
        """See `Connection`."""
        self.near.close()
        self.far.close()
        return 255


class Network:
    """Hosts with fake connections, and the time. `answering` hosts send a heartbeat before each look."""

    def __init__(self, *hosts: str) -> None:
        self.now, self.answering = 100.0, set(hosts)
        self.made: list[tuple[str, FakeConnection]] = []
        self.notes: list[str] = []
        self.refused: set[str] = set()
        self.heartbeats = HostHeartbeats(hosts, self.connect, LIMIT, self.notes.append, lambda: self.now)

    def connect(self, host: str) -> FakeConnection:
        """See `HostHeartbeats`."""
        if host in self.refused:
            raise OSError("no ssh")
        self.made.append((host, FakeConnection()))
        return self.made[-1][1]

    def of(self, host: str) -> FakeConnection:
        """The last connection of a host."""
        return dict(self.made)[host]

    def look(self, steps: int = 1, seconds: float = STEP) -> dict[str, str]:
        """Let time pass in steps with a look after each, until a host is lost."""
        lost: dict[str, str] = {}
        for _ in range(steps):
            self.now += seconds
            for host in self.answering:
                send_heartbeat(self.of(host).far.fileno())
            lost = lost or self.heartbeats.look()
        return lost


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network("a", "b", "c")
    yield made
    for _, connection in made.made:
        connection.wait(0)


# The launcher
# ------------------------------------------------------------------------------------------------------


def test_hosts_that_answer_are_not_lost_and_get_heartbeats(network: Network) -> None:
    assert network.look(50) == {}
    assert read_heartbeats(network.of("b").far.fileno()) == 51


def test_a_silent_host_is_lost_and_named(network: Network) -> None:
    network.look()
    network.answering -= {"b"}
    assert network.look(8) == {}
    assert network.look() == {"b": "host b has not answered for 4 s"}


def test_hosts_that_become_silent_together_are_lost_together(network: Network) -> None:
    network.look()
    network.answering -= {"b"}
    network.look(2)
    network.answering -= {"c"}
    assert set(network.look(7)) == {"b", "c"}


def test_a_host_that_answers_late_is_not_lost(network: Network) -> None:
    network.look()
    for _ in range(3):
        network.answering -= {"b"}
        assert network.look(8) == {}
        network.answering |= {"b"}
        assert network.look() == {}


def test_a_launcher_that_was_stopped_loses_no_host(network: Network) -> None:
    network.look()
    assert network.look(seconds=1000.0) == {}


def test_a_host_that_has_never_answered_is_not_lost(network: Network) -> None:
    network.answering -= {"c"}
    network.of("c").far.sendall(b"welcome to c\n")
    assert network.look(100) == {}
    network.of("c").far.close()
    assert network.look(100) == {}
    ended = "note: host c sends no heartbeats (its supervisor ended with exit code 255); its loss is noticed"
    assert network.notes == [f"{ended} after DISTGRAPH_TIMEOUT\n"]


def test_a_host_whose_remote_shell_cannot_be_started_is_not_lost(network: Network) -> None:
    del network
    other = Network()
    other.refused = {"a"}
    watched = HostHeartbeats(["a"], other.connect, LIMIT, other.notes.append, lambda: other.now)
    assert watched.look() == {}
    assert "host a sends no heartbeats (no ssh)" in other.notes[0]


@pytest.mark.parametrize("again", [True, False])
def test_a_supervisor_that_ends_is_started_again(again: bool, network: Network) -> None:
    network.look()
    network.answering -= {"b"}
    network.of("b").far.close()
    if not again:
        network.refused = {"b"}
    assert network.look(4) == {}
    if again:
        network.answering |= {"b"}
    assert network.look(20) == ({} if again else {"b": "host b has not answered for 4 s"})
    assert [host for host, _ in network.made] == ["a", "b", "c", *(["b"] if again else [])]
    assert network.notes == []


def test_closing_ends_all_supervisors(network: Network) -> None:
    network.look()
    network.heartbeats.close({"b"})
    assert all(connection.closed for _, connection in network.made)
    network.heartbeats.close()


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({}, 30.0),
        ({"DISTGRAPH_HEARTBEAT": "9"}, 9.0),
        ({ELASTIC: "folder", "DISTGRAPH_HEARTBEAT": "9"}, 3.0),
        ({ELASTIC: "folder", "DISTGRAPH_HOST_HEARTBEAT": "7"}, 7.0),
    ],
)
def test_the_limit(variables: dict[str, str], seconds: float) -> None:
    assert host_limit(variables) == seconds


def test_a_limit_that_is_no_time() -> None:
    with pytest.raises(RuntimeFault, match="DISTGRAPH_HOST_HEARTBEAT: expected a positive number of seconds"):
        host_limit({"DISTGRAPH_HOST_HEARTBEAT": "soon"})


# The supervisor of a host
# ------------------------------------------------------------------------------------------------------


def answers(near: socket.socket) -> Callable[[], bool]:
    """Start a supervisor; returns a function that waits for it and says whether it has heard something."""
    result: list[bool] = []

    def run() -> None:
        result.append(exchange_heartbeats(near.fileno(), near.fileno(), 0.2, 0.01))

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> bool:
        thread.join(100)
        return result[0]

    return wait


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("heard", [True, False])
def test_a_supervisor_ends_without_its_launcher(closes: bool, heard: bool) -> None:
    near, far = socket.socketpair()
    with near, far:
        if heard:
            send_heartbeat(far.fileno())
        wait = answers(near)
        if heard:
            assert read_heartbeats(far.fileno())
        if closes:
            far.close()
        assert wait() is heard


def test_a_supervisor_sends_nothing_before_it_has_heard_from_the_launcher() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert not answers(near)()
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)


def test_it_ends_the_processes_of_its_job_only() -> None:
    command = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    jobs = [
        subprocess.Popen(command, env={**os.environ, JOB: f"{os.getpid()}.{name}"}, stdout=subprocess.PIPE)
        for name in ("mine", "mine", "other")
    ]
    try:
        for job in jobs:
            assert job.stdout is not None
            job.stdout.readline()
        jobs[1].send_signal(signal.SIGSTOP)
        end_job(f"{os.getpid()}.mine")
        assert [job.wait(100) for job in jobs[:2]] == [-signal.SIGKILL, -signal.SIGKILL]
        assert jobs[2].poll() is None
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


# A job
# ------------------------------------------------------------------------------------------------------

SHELL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
case "$*" in *host_supervisor*) echo $$ > FOLDER/$host;; esac
exec sh -c "exec $*"
"""
WAITS = """
import os, pathlib, sys, time
from distgraph.runtime.launch.mpi_rank import current_transport
current_transport()
pathlib.Path(sys.argv[1], f"pid.{os.getpid()}").touch()
time.sleep(600)
"""


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_a_job_ends_when_a_host_is_stopped(tmp_path: Path) -> None:
    """The supervisor of a host of two is stopped; both hosts are this one."""
    shell, script = tmp_path / "shell", tmp_path / "script.py"
    shell.write_text(SHELL.replace("FOLDER", str(tmp_path)))
    shell.chmod(0o755)
    script.write_text(WAITS)
    env = {**os.environ, "HYDRA_LAUNCHER_EXEC": str(shell), "DISTGRAPH_HOST_HEARTBEAT": "2"}
    stopped, ended = list[int](), threading.Event()

    def stop() -> None:
        deadline = time.monotonic() + 100
        while len(list(tmp_path.glob("pid.*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        stopped.append(int((tmp_path / "b").read_text()))
        with suppress(ProcessLookupError):
            while not ended.is_set():  # again, if it was stopped before its first heartbeat
                os.kill(stopped[0], signal.SIGSTOP)
                ended.wait(20)
                os.kill(stopped[0], signal.SIGCONT)
                ended.wait(2)

    thread, errors = threading.Thread(target=stop), io.StringIO()
    thread.start()
    try:
        hosts = parse_hosts("a:1,b:1")
        code = launch_on_hosts(
            2, [str(script), str(tmp_path)], hosts, env=env, stdout=io.StringIO(), stderr=errors
        )
    finally:
        ended.set()
        thread.join()
    assert code == 1
    expected = "error: host b has not answered for 2 s (DISTGRAPH_HOST_HEARTBEAT); all ranks are stopped"
    assert expected in errors.getvalue()
    pids = [*stopped, *(int(path.suffix[1:]) for path in tmp_path.glob("pid.*"))]
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)
