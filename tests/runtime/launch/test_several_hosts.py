"""Jobs on several hosts: ranks run where the plan places them, and failures and signals end all of them.

Hosts are names that a program in place of ssh accepts; all of them are this machine. The last test uses
machines made of network namespaces, each with its own host name.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.support import machines
from distgraph.errors import RuntimeFault
from distgraph.ir.range_notation import spans
from distgraph.plan.placement import PlacedRanks
from distgraph.runtime.job.job_files import PLAN_VARIABLE
from distgraph.runtime.launch.hosts import parse_hosts
from distgraph.runtime.launch.launch_hosts import launch_on_hosts

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")

SHELL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec sh -c "$*"
"""
PREAMBLE = """
import os, socket, sys, time
from distgraph.runtime.launch.mpi_rank import current_transport
t = current_transport()
"""
PLACED = """
# One write a line: unbuffered, the parts of a print of several ranks may be mixed.
sys.stdout.write(f"rank {t.rank} is process {os.environ['PMI_RANK']} on {socket.gethostname()}\\n")
"""
PLACEMENT = tuple(
    PlacedRanks(machine=name, type="cpu", model="x", memory=1, count=2, ranks=ranks, devices=(0, 1))
    for name, ranks in (("m0", (0, 2)), ("m1", (1, 3)))
)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Environment with a remote shell that reaches any host, and with a plan."""
    path = tmp_path / "shell"
    path.write_text(SHELL)
    path.chmod(0o755)
    plan = tmp_path / "plan.json"
    parts = [asdict(part) | {"ranks": spans(part.ranks), "devices": "0-1"} for part in PLACEMENT]
    plan.write_text(json.dumps({"placement": parts}))
    return {**os.environ, "HYDRA_LAUNCHER_EXEC": str(path), PLAN_VARIABLE: str(plan)}


def script(tmp_path: Path, body: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(PREAMBLE + textwrap.dedent(body))
    return str(path)


def start(path: str, hosts: str, env: Mapping[str, str]) -> tuple[int, list[str], str]:
    out, err = io.StringIO(), io.StringIO()
    code = launch_on_hosts(
        4, [path], parse_hosts(hosts), placement=PLACEMENT, plan="plan p", env=env, stdout=out, stderr=err
    )
    return code, sorted(line for line in out.getvalue().splitlines() if line), err.getvalue()


def test_processes_take_the_ranks_of_the_plan(tmp_path: Path, env: dict[str, str]) -> None:
    code, lines, errors = start(script(tmp_path, PLACED), "m1:2,m0:2", env)
    assert (code, [line.split(" on ")[0] for line in lines]) == (
        0,
        ["rank 0 is process 2", "rank 1 is process 0", "rank 2 is process 3", "rank 3 is process 1"],
    ), errors


def test_a_failing_rank_ends_all(tmp_path: Path, env: dict[str, str]) -> None:
    body = """
    if t.rank == 2:
        raise ValueError("page 17")
    t.barrier()
    """
    code, _, errors = start(script(tmp_path, body), "a:2,b:2", env)
    assert code == 1
    assert "error: rank 2: ValueError: page 17" in errors


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_signals_to_the_launcher(number: int, code: int, tmp_path: Path, env: dict[str, str]) -> None:
    """No rank stays, also where the launcher is killed."""
    body = """
    open(f"pid.{os.getpid()}", "w").close()
    time.sleep(600)
    """
    command = [
        sys.executable,
        "-m",
        "distgraph",
        "run",
        "-n",
        "2",
        "--hosts",
        "a:1,b:1",
        script(tmp_path, body),
    ]
    del env[PLAN_VARIABLE]
    with subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as job:
        try:
            _until(lambda: len(pids(tmp_path)) == 2)
            job.send_signal(number)
            _, errors = job.communicate(timeout=100)
        finally:
            job.kill()
    assert job.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert ("all ranks are stopped" in errors) is (number != signal.SIGKILL)
    _until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids(tmp_path)))


def pids(folder: Path) -> list[str]:
    return [path.suffix[1:] for path in folder.glob("pid.*")]


def _until(reached: object) -> None:
    deadline = time.monotonic() + 100
    while not reached():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_machines(tmp_path: Path, env: dict[str, str]) -> None:
    """Planned = placed on two machines of two ranks, whatever the order of hosts; the network is not slow."""
    reason = machines.missing()
    if reason:
        pytest.skip(reason)
    path, reached = script(tmp_path, PLACED), env | machines.launch_environment()
    with machines.machines(2) as network:
        code, lines, errors = start(path, "10.77.0.2:1,10.77.0.1:2,10.77.0.2:1", reached)
        assert (code, [line.split()[:2] + line.split()[6:7] for line in lines]) == (
            0,
            [["rank", "0", "m0"], ["rank", "1", "m1"], ["rank", "2", "m0"], ["rank", "3", "m1"]],
        ), errors
        given = network.run(4, [sys.executable, path], 60, **{PLAN_VARIABLE: env[PLAN_VARIABLE]})
        assert sorted(line.split()[1] + line.split()[6] for line in given.stdout.splitlines()) == [
            "0m0", "1m1", "2m0", "3m1"
        ]  # fmt: skip
        assert "note: ranks are mapped to the processes as plan" in given.stderr
        with pytest.raises(RuntimeFault, match=r"host 10.77.0.7 cannot be reached"):
            start(path, "10.77.0.1:2,10.77.0.7:2", reached)
