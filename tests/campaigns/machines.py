"""Machines for tests: network namespaces of this computer, joined by a switch of limited speed.

For Linux, root, iproute2. Each machine has a host name, an address of 10.77.0.0/24, shared memory of its own,
and a link that can be taken down or made slow and lossy. Nothing leaves this computer, and all of it is
removed at the end.

mpiexec starts ranks there through this file, which stands in for ssh: `python machines.py HOST COMMAND...`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_NETWORK: Final = "10.77.0"
_SWITCH: Final = "dgtest"
_NAME: Final = "dgtest-m"


def missing() -> str | None:
    """Why there can be no machines here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc", "unshare", "hostname") if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    if any(f" {_NETWORK}." in line for line in _said("ip", "-o", "addr").splitlines()):
        return f"{_NETWORK}.0/24 is in use"
    tried = subprocess.run(
        ["ip", "netns", "add", f"{_NAME}-try"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        return f"network namespaces are not allowed here: {tried.stderr.strip()}"
    _do("ip", "netns", "del", f"{_NAME}-try")
    return None


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=100)


def _quietly(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True, timeout=100)


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines that are up.

    Attributes:
        count: how many.
        rate: of every link, each way, as `tc` reads it.
        entry: program that stands in for ssh.
    """

    count: int
    rate: str
    entry: Path

    def command(self, mpiexec: str, ranks: int, command: Sequence[str]) -> list[str]:
        """Command that runs MPI ranks, as many on each machine."""
        each = -(-ranks // self.count)
        hosts = ",".join(f"{_NETWORK}.{number + 1}:{each}" for number in range(self.count))
        return [
            mpiexec,
            "-launcher",
            "ssh",
            "-launcher-exec",
            str(self.entry),
            "-iface",
            _SWITCH,
            "-hosts",
            hosts,
            "-n",
            str(ranks),
            *command,
        ]

    def link(self, number: int, state: str) -> None:
        """Take the link of a machine "down", or "up" again."""
        _do("ip", "link", "set", f"{_SWITCH}{number}", state)

    def lose(self, number: int, rate: str) -> None:
        """Have the link into a machine be slow and keep next to nothing back: what comes faster is lost."""
        limit = ("root", "tbf", "rate", rate, "burst", "16kb", "limit", "4kb")
        _do("tc", "qdisc", "replace", "dev", f"{_SWITCH}{number}", *limit)


@contextmanager
def machines(count: int, rate: str = "400mbit") -> Iterator[Machines]:
    """So many machines, removed behind."""
    try:
        _do("ip", "link", "add", _SWITCH, "type", "bridge")
        _do("ip", "addr", "add", f"{_NETWORK}.254/24", "dev", _SWITCH)
        _do("ip", "link", "set", _SWITCH, "up")
        for number in range(count):
            _add(number, rate)
        with tempfile.TemporaryDirectory(prefix="machines-") as folder:
            entry = Path(folder) / "enter"  # mpiexec takes the path of one program
            entry.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} "$@"\n')
            entry.chmod(0o755)
            yield Machines(count, rate, entry)
    finally:
        for number in range(count):
            _quietly("ip", "netns", "del", f"{_NAME}{number}")
            _quietly("ip", "link", "del", f"{_SWITCH}{number}")
        _quietly("ip", "link", "del", _SWITCH)


def _add(number: int, rate: str) -> None:
    name, outside = f"{_NAME}{number}", f"{_SWITCH}{number}"
    _do("ip", "netns", "add", name)
    _do("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
    _do("ip", "link", "set", outside, "master", _SWITCH, "up")
    _do("ip", "-n", name, "addr", "add", f"{_NETWORK}.{number + 1}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        _do("ip", "-n", name, "link", "set", device, "up")
    limit = ("root", "tbf", "rate", rate, "burst", "256kbit", "latency", "100ms")
    _do("tc", "qdisc", "add", "dev", outside, *limit)
    _do("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *limit)


def enter(words: Sequence[str]) -> None:
    """Become a command on a machine; its words come as ssh gets them: OPTIONS HOST COMMAND."""
    rest = list(words)
    while rest[0].startswith("-"):
        rest.pop(0)
    number = int(rest[0].rpartition(".")[2]) - 1
    inside = f"hostname m{number}; mount -t tmpfs none /dev/shm; exec {' '.join(rest[1:])}"
    command = ["ip", "netns", "exec", f"{_NAME}{number}", "unshare", "--uts", "--ipc", "sh", "-c", inside]
    os.execvp(command[0], command)


if __name__ == "__main__":
    enter(sys.argv[1:])
