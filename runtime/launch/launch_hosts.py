"""Running a job on several hosts: `distgraph run -n 4 --hosts a:2,b:2 script.py`.

The hosts are checked first (`host_check.py`), so that a host that cannot be reached, or does not have
what its ranks need, is an error of the launcher and not a rank that never comes. Then mpiexec or srun
starts as many processes on each host as the assignment says, host by host, and every process takes its
rank from the order in DISTGRAPH_PLACEMENT. Files of a job directory reach one host only, so ranks have
no supervisors: they watch each other, as under plain mpiexec. The launcher watches mpiexec, and exchanges
heartbeats with a supervisor of each host (`host_heartbeats.py`).
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Final, TextIO

from distgraph.errors import RuntimeFault
from distgraph.plan.placement import PlacedRanks
from distgraph.runtime.job.job_files import (
    DEFAULT_TIME_LIMIT,
    JOB,
    JOB_DIRECTORY,
    TIMEOUT,
    setting_in_seconds,
)
from distgraph.runtime.job.losses import Loss, record_loss
from distgraph.runtime.launch.host_assignment import HostAssignment, assign_hosts, check_slots
from distgraph.runtime.launch.host_check import RemoteShell, ask_hosts, check_hosts, is_this_host
from distgraph.runtime.launch.host_heartbeats import VARIABLE, HostHeartbeats, host_limit, watch_hosts
from distgraph.runtime.launch.hosts import Host, merged
from distgraph.runtime.launch.launch import launch, script_environment
from distgraph.runtime.launch.monitor import Signals, ended
from distgraph.runtime.launch.mpiexec import find_mpiexec, start_mpiexec, wait_for
from distgraph.runtime.launch.process_placement import PLACEMENT_VARIABLE, placement_text

LAUNCHERS: Final = ("mpiexec", "srun")
"""Programs that start the ranks."""
_END_SECONDS: Final = 5.0
_SHELL_VARIABLE: Final = "HYDRA_LAUNCHER_EXEC"


def launch_on_hosts(
    n: int,
    argv: Sequence[str],
    hosts: Sequence[Host],
    *,
    placement: Sequence[PlacedRanks] = (),
    plan: str = "the plan",
    launcher: str = "mpiexec",
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    signals: Signals | None = None,
) -> int:
    """Run a script on `n` MPI ranks of several hosts and wait for it.

    Args:
        n: number of ranks.
        argv: path of the script, then its arguments. Script, Python and distgraph are in the same folders on
            all hosts.
        hosts: hosts and slots. Where all are this host, the job runs as `launch` does.
        placement: of a plan; see `assign_hosts`.
        plan: name of the plan, for messages.
        launcher: one of `LAUNCHERS`.
        env: environment of the ranks; default this process's.
        stdout: receives the output of the ranks line by line; default this process's.
        stderr: receives their error output; default this process's.
        signals: as of `launch`.

    Returns:
        The exit code; see `launch`.

    Raises:
        RuntimeFault: as `launch`, `assign_hosts`, `ask_hosts`, `check_hosts` and `host_limit`; unknown
            launcher.
    """
    settings = script_environment(n, argv, env)
    if launcher not in LAUNCHERS:
        raise RuntimeFault(f"run: launcher is {launcher!r} but must be one of {', '.join(LAUNCHERS)}")
    check_slots(n, hosts)
    if all(is_this_host(host.name) for host in hosts):
        return launch(n, argv, env=env, stdout=stdout, stderr=stderr, signals=signals)
    setting_in_seconds(TIMEOUT, DEFAULT_TIME_LIMIT, settings)
    host_limit(settings)
    settings.pop(JOB_DIRECTORY, None)
    shell = remote_shell(settings)
    script = str(Path(argv[0]).resolve())
    facts = ask_hosts([host.name for host in merged(hosts)], script, settings, shell)
    names = {name: fact.host for name, fact in facts.items()}
    assignment = assign_hosts(n, hosts, placement, plan, names)
    check_hosts(assignment, placement, script, facts)
    settings[PLACEMENT_VARIABLE] = placement_text(assignment, names)
    ranks = [sys.executable, "-m", "distgraph.runtime.launch.supervisor", script, *argv[1:]]
    recording = Signals() if signals is None else nullcontext(signals)
    with recording as received, tempfile.TemporaryDirectory(prefix="distgraph-run-") as directory:
        if launcher == "srun":
            command, variables = srun_command(assignment, ranks, Path(directory) / "hosts")
            settings |= variables
        else:
            command = mpiexec_command(assignment, ranks, shell)
        errors = stderr or sys.stderr
        settings[JOB] = f"{time.monotonic_ns():020}-{secrets.token_hex(4)}"
        heartbeats = watch_hosts(names, settings[JOB], shell, settings, errors.write)
        try:
            return _run(command, settings, received, heartbeats, stdout or sys.stdout, errors)
        finally:
            heartbeats.close()


def remote_shell(environ: Mapping[str, str]) -> RemoteShell:
    """How the hosts of a job are reached: by HYDRA_LAUNCHER_EXEC, by srun in Slurm, else ssh."""
    return RemoteShell(environ.get(_SHELL_VARIABLE) or ("srun" if "SLURM_JOB_ID" in environ else "ssh"))


def mpiexec_command(assignment: HostAssignment, ranks: Sequence[str], shell: RemoteShell) -> list[str]:
    """The command of MPICH's mpiexec (hydra) that starts the processes of an assignment, host by host."""
    listed = ",".join(f"{host.name}:{host.slots}" for host in assignment.hosts)
    start = ["-launcher", "slurm"] if shell.program == "srun" else ["-launcher", "ssh"]
    if shell.program not in ("ssh", "srun"):
        start += ["-launcher-exec", shell.program]
    count = sum(host.slots for host in assignment.hosts)
    return [find_mpiexec(), *start, "-hosts", listed, "-n", str(count), *ranks]


def srun_command(
    assignment: HostAssignment, ranks: Sequence[str], hostfile: Path
) -> tuple[list[str], dict[str, str]]:
    """The srun command that starts the processes of an assignment, host by host, and its variables.

    Writes the host of each process to `hostfile`, from which Slurm reads it.
    """
    names = [host.name for host in assignment.hosts for _ in range(host.slots)]
    hostfile.write_text("".join(f"{name}\n" for name in names))
    command = ["srun", f"--ntasks={len(names)}", "--distribution=arbitrary", "--mpi=pmi2"]
    return [*command, "--cpu-bind=none", "--kill-on-bad-exit=1", *ranks], {"SLURM_HOSTFILE": str(hostfile)}


def _run(
    command: Sequence[str],
    env: Mapping[str, str],
    signals: Signals,
    heartbeats: HostHeartbeats,
    out: TextIO,
    errors: TextIO,
) -> int:
    """Run mpiexec until it ends, a signal comes or a host is lost. Returns the exit code."""
    remarks: list[str] = []
    process, readers = start_mpiexec(command, env, out, errors, dies_with_launcher=True, remarks=remarks)
    lost: dict[str, str] = {}
    try:
        lost = _watch(process.pid, signals, heartbeats)
        if lost:  # mpiexec would wait for it
            process.kill()
            heartbeats.close(lost)
    finally:
        _end(process, signals, readers)
    if lost:
        for host, text in lost.items():
            record_loss(Loss(text, host=host, whole_host=True), env)
        errors.write(f"error: {'; '.join(lost.values())} ({VARIABLE}); all ranks are stopped\n")
        return 1
    if signals.received:
        first = signals.received[0]
        what = "interrupted" if first == signal.SIGINT else f"ended by {first.name}"
        errors.write(f"error: {what}; all ranks are stopped\n")
        return 128 + first
    code = process.returncode
    for host in re.findall(r"PID \d+ RUNNING AT (\S+)\s+=\s+EXIT CODE: (?:9|15|7|11)\s", "".join(remarks)):
        record_loss(Loss(f"a rank on host {host} was killed", host=host), env)
    if code < 0:
        record_loss(Loss(f"{Path(command[0]).name} was killed by {signal.Signals(-code).name}"), env)
        errors.write(f"error: {Path(command[0]).name} was killed by {signal.Signals(-code).name}\n")
    return code if code >= 0 else 128 - code


def _watch(mpiexec: int, signals: Signals, heartbeats: HostHeartbeats) -> dict[str, str]:
    """Wait until mpiexec ends, a signal comes or hosts are lost. Returns those, as `HostHeartbeats.look`."""
    descriptor, lost = os.pidfd_open(mpiexec), dict[str, str]()
    try:
        while not (signals.received or lost):
            signals.sleep(heartbeats.interval, descriptor)
            if ended(descriptor):
                break
            lost = heartbeats.look()
    finally:
        os.close(descriptor)
    return lost


def _end(process: subprocess.Popen[bytes], signals: Signals, readers: Sequence[threading.Thread]) -> None:
    """Leave no process behind."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        wait_for(process.pid, signals, _END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for reader in readers:
        reader.join(_END_SECONDS)
