#!/usr/bin/env python3
"""Several machines on one: network namespaces behind a switch of limited speed, with shares of the cores.

    with machines(2, rate="400mbit") as network:
        network.run(4, [sys.executable, "train.py"])     # ranks 0 and 1 on machine m0, 2 and 3 on m1

*Needs:* Linux, root, `ip` and `tc` of iproute2, and the mpiexec of MPICH. `missing()` names what is
absent. Ranks of one machine share memory; ranks of different machines meet over TCP on 10.77.0.0/24. Every
machine has a host name of its own, so that distgraph tells them apart. Nothing leaves this computer.

mpiexec and distgraph start this file in place of ssh (`-launcher-exec`), with the address of a machine and a
command. As with ssh, input and output of the command pass through the network, so that nothing comes from a
machine whose link is down, its end neither. Those of the proxies of mpiexec do not: these open connections of
their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

SWITCH, NETWORK = "dgswitch", "10.77.0"
_CPU_V1, _CPU_V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
_LOCK = Path("/run/lock/distgraph-machines")
_SPACE = re.compile(
    r"dgm\d+"
)  # network namespaces and control groups of machines; their links are dgv0, dgv1, ...
_IFF_UP = 0x1  # <linux/if.h>
_FORWARDING = "3"  # BR_STATE_FORWARDING of <linux/if_bridge.h>, as /sys writes it
_PROXY = "hydra_pmi_proxy"
_CONNECT_SECONDS = 10.0
_TRIED = f"dgtry{os.getpid()}"
_OWN_CORES = "DISTGRAPH_MACHINES_OWN_CORES"  # in the environment of a job: see `Network`
_SEGMENT_BYTES = 30_000
"""Bytes that TCP gives to the link at once, less than the burst of the link (32 KiB).

A network card cuts them into packets by itself. Of longer ones the kernel would cut the packets, on the core
that computes: a sum of 4 MiB at 400 Mbit/s then takes 39 ms of the core's time, otherwise 13 ms.
"""
_PERIOD = 10_000  # microseconds in which a machine may use its share: short, so that steps vary little


def missing() -> str:
    """Why there can be no machines here; empty where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    absent = [name for name in ("ip", "tc", "unshare", "hostname") if shutil.which(name) is None]
    absent += [] if _mpiexec() else ["mpiexec"]
    if absent:
        return f"{', '.join(absent)} not installed"
    tried = subprocess.run(["ip", "netns", "add", _TRIED], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces are not allowed here: {tried.stderr.strip()}"
    _run("ip", "netns", "del", _TRIED, check=False)
    return ""


def _mpiexec() -> str | None:
    """The mpiexec of this Python's environment, or the first one of the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


@dataclass(frozen=True, slots=True)
class Network:
    """Machines that are up: `count` of them, named m0, m1, ...

    Attributes:
        count: how many.
        own_cores: whether `run` has all processes of a machine on one core, which other machines share only
            where all together use no more than it. Without it, a machine has its share of the cores, but
            which processes of several machines share a core is decided anew in every job.
    """

    count: int
    own_cores: bool = False

    def command(self, ranks: int, argv: Sequence[str], order: Sequence[int] | None = None) -> list[str]:
        """The mpiexec that runs a command on ranks, which fill the machines one after the other.

        Args:
            ranks: in all.
            argv: the command.
            order: machines in the order in which they are filled.

        Raises:
            ValueError: ranks do not divide evenly among the machines.
        """
        order = range(self.count) if order is None else order
        if ranks % len(order):
            raise ValueError(f"{ranks} ranks cannot be shared equally by {len(order)} machines")
        hosts = ",".join(f"{NETWORK}.{machine + 1}:{ranks // len(order)}" for machine in order)
        starter = ["-launcher", "ssh", "-launcher-exec", str(Path(__file__).resolve()), "-iface", SWITCH]
        return [_mpiexec() or "mpiexec", *starter, "-hosts", hosts, "-n", str(ranks), *argv]

    def run(
        self, ranks: int, argv: Sequence[str], timeout: float = 600.0, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on ranks and return its output; see `command`."""
        return subprocess.run(
            self.command(ranks, argv),
            env={**launch_environment(), **env, _OWN_CORES: str(int(self.own_cores))},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=True,
        )

    # Faults
    # ------------------------------------------------------------------------------------------------

    def link(self, machine: int, state: str) -> None:
        """Take the link of a machine "down", or "up" again. While it is down, nothing starts there."""
        _ip("link", "set", f"dgv{machine}", state)
        if state == "up":
            _await_forwarding(machine)
            # Addresses that the machine looked for while the link was down would still fail for a second.
            _ip("-n", f"dgm{machine}", "neigh", "flush", "dev", "eth0")

    def lose_messages(self, machine: int, rate: str) -> None:
        """Have the link into a machine be slow and keep next to nothing back: what comes faster is lost."""
        limit = ("root", "tbf", "rate", rate, "burst", "16kb", "limit", "4kb")
        _run("tc", "qdisc", "replace", "dev", f"dgv{machine}", *limit)

    def kill(self, machine: int) -> None:
        """Kill all processes of a machine."""
        while self.send_signal(machine, signal.SIGKILL):
            time.sleep(0.01)

    def send_signal(self, machine: int, number: signal.Signals) -> int:
        """Send a signal to all processes of a machine. Returns how many there are."""
        pids = _run("ip", "netns", "pids", f"dgm{machine}").split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)
        return len(pids)


def launch_environment() -> dict[str, str]:
    """Environment in which `distgraph run --hosts 10.77.0.1:2,10.77.0.2:2` reaches the machines."""
    transports = {"UCX_TLS": "posix,sysv,tcp,self", "UCX_NET_DEVICES": "all"}
    starter = {"HYDRA_LAUNCHER_EXEC": str(Path(__file__).resolve()), "HYDRA_IFACE": SWITCH}
    return {**transports, **os.environ, **starter}


class MachinesInUseError(RuntimeError):
    """Another process has machines up, and the time to wait for it has passed."""


@contextmanager
def machines(
    count: int,
    rate: str | None = None,
    cpu: Sequence[float] = (),
    wait_seconds: float | None = None,
    *,
    own_cores: bool = False,
) -> Iterator[Network]:
    """Machines for the body of a `with` statement.

    Args:
        count: how many.
        rate: speed of each machine's link, in each direction, as `tc` writes it, such as "400mbit"; None for
            links that are not limited.
        cpu: cores that each machine may use, such as (1.0, 0.5); empty for no limit.
        wait_seconds: how long to wait while another process has machines up; None for as long as it takes.
        own_cores: see `Network`.

    Raises:
        MachinesInUseError: another process still has machines up after `wait_seconds`.
        RuntimeError: see `missing`; or a command of iproute2 failed.
    """
    reason = missing()
    if reason:
        raise RuntimeError(f"no machines can be made here: {reason}")
    with _LOCK.open("a+") as lock:
        _acquire(lock, wait_seconds)  # one user at a time: names and addresses are the same for all
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        with _up_and_down(count, rate, cpu) as network:
            yield replace(network, own_cores=own_cores)


def _acquire(lock: TextIO, wait_seconds: float | None) -> None:
    """Lock a file, or raise MachinesInUseError with the process whose number the file has."""
    if wait_seconds is None:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return
    end = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                lock.seek(0)
                holder = lock.read() or "with an unknown number"
                raise MachinesInUseError(
                    f"process {holder} has had machines up for the {wait_seconds:g} seconds for "
                    "which this process waited; wait until it has ended, or end it"
                ) from None
            time.sleep(0.1)
        else:
            return


@contextmanager
def _up_and_down(count: int, rate: str | None, cpu: Sequence[float]) -> Iterator[Network]:
    _down()
    try:
        _ip("link", "add", SWITCH, "type", "bridge")
        _ip("addr", "add", f"{NETWORK}.254/24", "dev", SWITCH)
        _ip("link", "set", SWITCH, "up")
        for machine in range(count):
            _up(machine, rate)
            if cpu:
                _limit_cpu(machine, cpu[machine])
        yield Network(count)
    finally:
        _down()


def _up(machine: int, rate: str | None) -> None:
    space, outside = f"dgm{machine}", f"dgv{machine}"
    _ip("netns", "add", space)
    _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
    _ip("link", "set", outside, "master", SWITCH, "up")
    _ip("-n", space, "addr", "add", f"{NETWORK}.{machine + 1}/24", "dev", "eth0")
    _ip("-n", space, "link", "set", "eth0", "up")
    _ip("-n", space, "link", "set", "lo", "up")
    _await_forwarding(machine)
    if rate is not None:  # into the machine, and out of it
        shape = ("root", "tbf", "rate", rate, "burst", "256kbit", "latency", "100ms")
        _ip("-n", space, "link", "set", "eth0", "gso_max_size", str(_SEGMENT_BYTES))
        _run("tc", "qdisc", "add", "dev", outside, *shape)
        _run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", *shape)


def _await_forwarding(machine: int) -> None:
    """Wait until the switch forwards to a machine, up to a second after the link is up: what connects before
    that tries again after seconds."""
    port = Path(f"/sys/class/net/dgv{machine}/brport/state")
    end = time.monotonic() + _CONNECT_SECONDS
    while port.read_text().strip() != _FORWARDING:
        if time.monotonic() > end:
            raise RuntimeError(f"the switch does not forward to machine {machine}")
        time.sleep(0.01)


def _limit_cpu(machine: int, cores: float) -> None:
    quota = str(int(_PERIOD * cores))
    if (_CPU_V1 / "cpu.cfs_quota_us").exists():
        group = _CPU_V1 / f"dgm{machine}"
        group.mkdir(exist_ok=True)
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
        (group / "cpu.cfs_quota_us").write_text(quota)
        (group / "cpu.shares").write_text("262144")  # all other programs come after the machines
    else:
        group = _CPU_V2 / f"dgm{machine}"
        group.mkdir(exist_ok=True)
        (group / "cpu.max").write_text(f"{quota} {_PERIOD}")
        (group / "cpu.weight").write_text("10000")


def _groups(machine: int) -> list[Path]:
    return [path for path in (_CPU_V1 / f"dgm{machine}", _CPU_V2 / f"dgm{machine}") if path.exists()]


def _share(machine: int) -> float:
    """Cores that a machine may use, 0 where it has no limit."""
    for group in _groups(machine):
        if (group / "cpu.cfs_quota_us").exists():
            return int((group / "cpu.cfs_quota_us").read_text()) / _PERIOD
        return int((group / "cpu.max").read_text().split()[0]) / _PERIOD
    return 0.0


def _own_core(machine: int) -> int | None:
    """The core on which the processes of a machine run, shared with no more machines than fill it; None where
    it may use more than one core, has no limit, or no core has room."""
    room = dict.fromkeys(sorted(os.sched_getaffinity(0)), 1.0)
    for other in range(machine + 1):
        share = _share(other)
        core = next((core for core, left in room.items() if 0 < share <= left + 1e-9), None)
        if core is not None:
            room[core] -= share
    return core


def _down() -> None:
    """Remove all machines: those of this use, and those of a former use of any size that was killed."""
    spaces = _run("ip", "netns", "list", check=False).split()  # "dgm0 (id: 1)" a line
    roots = [root for root in (_CPU_V1, _CPU_V2) if root.exists()]
    groups = [path for root in roots for path in root.glob("dgm*")]
    for space in sorted({*spaces, *(path.name for path in groups)}):
        if _SPACE.fullmatch(space):
            _run("ip", "netns", "del", space, check=False)
            _run("ip", "link", "del", space.replace("dgm", "dgv"), check=False)
    for group in groups:
        if _SPACE.fullmatch(group.name):
            with contextlib.suppress(OSError):  # a process may still be in it
                group.rmdir()
    _run("ip", "link", "del", SWITCH, check=False)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _enter(argv: Sequence[str]) -> None:
    """What is started in place of ssh: OPTIONS... ADDRESS COMMAND...; does not return."""
    words = list(argv)
    while words[0].startswith("-"):
        words.pop(0)
    machine = int(words[0].rpartition(".")[2]) - 1
    flags = Path(f"/sys/class/net/dgv{machine}/flags")
    if not flags.exists() or not int(flags.read_text(), 16) & _IFF_UP:
        sys.exit(f"connect to host {words[0]}: no route to host")
    for group in _groups(machine):
        (group / "cgroup.procs").write_text(str(os.getpid()))
    if os.environ.get(_OWN_CORES) == "1" and (core := _own_core(machine)) is not None:
        os.sched_setaffinity(0, {core})
    # `ip netns exec` mounts a /sys without control groups, in which a rank would not find its share of cores.
    kept = "/dev/shm/cgroup"
    before = f"mount -t tmpfs none /dev/shm; mkdir {kept}; mount --rbind /sys/fs/cgroup {kept}"
    after = f"mount --rbind {kept} /sys/fs/cgroup; umount -l {kept}; rmdir {kept}; "
    entered = f'exec ip netns exec dgm{machine} bash -c "$0" rank {" ".join(words[1:])}'
    script = f"hostname m{machine}; {before}; {entered}"
    command = ["unshare", "--uts", "--ipc", "--mount", "bash", "-c", script]
    if any(_PROXY in word for word in words):
        os.execvp("unshare", [*command, f'{after}exec "$@"'])
    _run_through_network(command, after)


def _run_through_network(command: Sequence[str], prepare: str) -> None:
    """Run a command of a machine with a connection as its input and output; does not return.

    Args:
        command: runs a script, its last argument, in the machine.
        prepare: what the script does before it runs the arguments that the command gives it.
    """
    with socket.create_server((f"{NETWORK}.254", 0)) as server:
        connect = f"exec <>/dev/tcp/{NETWORK}.254/{server.getsockname()[1]} >&0"
        script = f'{prepare}{connect} || exit 255; exec "$@"'
        # In a session of its own: whoever kills this process does not reach the machine.
        process = subprocess.Popen([*command, script], stdin=subprocess.DEVNULL, start_new_session=True)
        connection = _accepted(server, process)
    with connection:
        sources: dict[int, int] = {0: connection.fileno(), connection.fileno(): 1}
        while connection.fileno() in sources:
            for source in select.select(list(sources), [], [])[0]:
                if not _copy(source, sources[source]):
                    del sources[source]
                    if source == 0:
                        connection.shutdown(socket.SHUT_WR)
    sys.exit(process.wait())


def _accepted(server: socket.socket, process: subprocess.Popen[bytes]) -> socket.socket:
    """The connection that a process opens. This process ends where that one has ended or takes too long."""
    end = time.monotonic() + _CONNECT_SECONDS
    server.settimeout(0.1)
    while time.monotonic() < end:
        ended = process.poll() is not None
        with contextlib.suppress(TimeoutError):
            return server.accept()[0]
        if ended:
            sys.exit("the machine did not connect")
    process.kill()
    sys.exit("connection to the machine timed out")


def _copy(source: int, target: int) -> bool:
    """Copy what can be read from a descriptor to another one. Returns whether there may be more."""
    try:
        content = os.read(source, 1 << 16)
        while content:
            content = content[os.write(target, content) :]
            if not content:
                return True
    except OSError:  # the connection was reset
        pass
    return False


if __name__ == "__main__":
    _enter(sys.argv[1:])
