"""Check of the hosts of a job before any rank starts: every host is asked what it has, at the same time.

A host that cannot be reached, has another version of distgraph, no script, a clock that differs, too few GPUs
or too little memory for the ranks that are to run there is an error of the launcher.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from distgraph import __version__
from distgraph.errors import RuntimeFault
from distgraph.ir.range_notation import spans
from distgraph.plan.placement import PlacedRanks
from distgraph.resources.units import format_bytes
from distgraph.runtime.launch.host_assignment import HostAssignment
from distgraph.runtime.launch.host_probe import HostFacts

ANSWER_SECONDS: Final = 8.0
_CLOCK_SECONDS: Final = 5.0
_MEMORY_SHARE: Final = 0.9  # of the planned memory that must be there: firmware and drivers take some
_SSH_OPTIONS: Final = ("-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_PASSED: Final = ("PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True)
class RemoteShell:
    """How to run a command on a host: ssh, srun, or a program that takes `HOST COMMAND...` as ssh does."""

    program: str = "ssh"

    def command(self, host: str, argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """The command that runs `argv` on a host, in this folder; on this host without a remote shell."""
        if is_this_host(host):
            return list(argv)
        if self.program == "srun":
            return ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", *argv]
        passed = [f"{name}={env[name]}" for name in _PASSED if name in env]
        remote = f"cd {shlex.quote(str(Path.cwd()))} && exec env {shlex.join([*passed, *argv])}"
        options = _SSH_OPTIONS if Path(self.program).name == "ssh" else ()
        return [self.program, *options, host, shlex.join(["sh", "-c", remote])]


def is_this_host(name: str) -> bool:
    """Whether a name in a list of hosts is that of this host."""
    local_name = socket.gethostname()
    return name in {"localhost", "127.0.0.1", local_name, local_name.partition(".")[0]}


def check_hosts(
    assignment: HostAssignment, placement: Sequence[PlacedRanks], script: str, facts: Mapping[str, HostFacts]
) -> None:
    """Compare what the hosts of a job have with what its ranks need.

    Raises:
        RuntimeFault: a host does not have what its ranks need; names host and rank.
    """
    for host, ranks in zip(assignment.hosts, assignment.ranks, strict=True):
        actual, rank = facts[host.name], ranks[0]
        if actual.version != __version__:
            raise RuntimeFault(
                f"run: host {host.name} of rank {rank} has distgraph {actual.version} but the launcher has "
                f"{__version__}; install the same version on all hosts"
            )
        if not actual.script:
            raise RuntimeFault(
                f"run: script {script} does not exist on host {host.name} of rank {rank}; put it in the same "
                "folder on all hosts"
            )
    for part in placement:
        _compare(part, assignment, facts)


def _compare(part: PlacedRanks, assignment: HostAssignment, facts: Mapping[str, HostFacts]) -> None:
    """Raise RuntimeFault if a host does not have the devices that a plan expects there."""
    host = assignment.machines[part.machine]
    actual, who = facts[host], f"rank{'s' * (len(part.ranks) > 1)} {spans(part.ranks)}"
    planned = f"run: the plan places {who} on {part.type} devices ({part.model}) of machine {part.machine}"
    if part.type == "cpu":
        needed = part.memory * len(part.ranks)
        if actual.memory < needed * _MEMORY_SHARE:
            raise RuntimeFault(
                f"{planned} with {format_bytes(part.memory)} memory each but host {host} has "
                f"{format_bytes(actual.memory)} in all; give another host"
            )
        return
    if part.type != "gpu":
        return
    for rank, number in zip(part.ranks, part.devices, strict=True):
        if number >= len(actual.gpus):
            has = f"{len(actual.gpus)} GPUs" if actual.gpus else "no GPU"
            raise RuntimeFault(
                f"{planned} but host {host} has {has}; rank {rank} needs GPU {number}; give another host"
            )
        if actual.gpus[number].memory < part.memory * _MEMORY_SHARE:
            gpu = actual.gpus[number]
            raise RuntimeFault(
                f"{planned} with {format_bytes(part.memory)} memory but GPU {number} of host {host}, "
                f"{gpu.name}, has {format_bytes(gpu.memory)}; rank {rank} needs more; give another host"
            )


def ask_hosts(
    hosts: Sequence[str], script: str, env: Mapping[str, str], shell: RemoteShell
) -> dict[str, HostFacts]:
    """The facts about each host by its name in the list. Takes 8 seconds at most.

    Raises:
        RuntimeFault: a host cannot be reached, does not answer in time, or has another clock.
    """
    argv = [sys.executable, "-m", "distgraph.runtime.launch.host_probe", script]
    running: dict[str, subprocess.Popen[str]] = {}
    deadline = time.monotonic() + ANSWER_SECONDS
    try:
        for host in hosts:
            running[host] = _started(shell, host, argv, env)
        return {host: _answer(host, process, deadline, shell) for host, process in running.items()}
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def silent_hosts(
    hosts: Sequence[str], script: str, env: Mapping[str, str], shell: RemoteShell
) -> dict[str, str]:
    """Hosts that cannot run ranks now -> the reason. Takes 8 seconds at most."""
    reasons: dict[str, str] = {}

    def ask(host: str) -> None:
        try:
            ask_hosts([host], script, env, shell)
        except RuntimeFault as error:
            reasons[host] = str(error).removeprefix("run: ")

    threads = [threading.Thread(target=ask, args=[host], daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reasons


def _started(
    shell: RemoteShell, host: str, argv: Sequence[str], env: Mapping[str, str]
) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            shell.command(host, argv, env),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise RuntimeFault(
            f"run: {shell.program} cannot be started: {error}; hosts are reached by ssh, or by the "
            "program in HYDRA_LAUNCHER_EXEC"
        ) from None


def _answer(host: str, process: subprocess.Popen[str], deadline: float, shell: RemoteShell) -> HostFacts:
    """The facts that a host reports."""
    name = Path(shell.program).name
    try:
        out, errors = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        raise RuntimeFault(
            f"run: host {host} has not answered by {name} in {ANSWER_SECONDS:.0f} s; check that it is up and "
            "that its name is right, or leave it out"
        ) from None
    received = time.time()
    try:
        facts = HostFacts.parse(out.splitlines()[-1])
    except (ValueError, KeyError, TypeError, IndexError):
        last_line = next(reversed([line for line in errors.splitlines() if line.strip()]), "it said nothing")
        raise RuntimeFault(
            f"run: host {host} cannot be reached by {name}, or has no distgraph in {sys.executable}: "
            f"{last_line}"
        ) from None
    # It answered between the start of this check and now.
    started = received - (ANSWER_SECONDS - (deadline - time.monotonic()))
    apart = max(facts.clock - received, started - facts.clock)
    if apart > _CLOCK_SECONDS:
        raise RuntimeFault(
            f"run: the clock of host {host} differs by {apart:.0f} s from that of this one; set both by NTP"
        )
    return facts
