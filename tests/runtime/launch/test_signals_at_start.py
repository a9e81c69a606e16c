"""Signals to the processes of a job while they start and end: one clear line, no traceback, 128 + signal.

A `sitecustomize` on the path of every Python of the job sends the signal at a given place, so that each test
sends it in the same instruction every time.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")

SITE = """
import os, signal, sys, threading

by, place, to, number = os.environ["PRESS"].split()
supervisor = "distgraph.runtime.launch.supervisor" in sys.orig_argv
pressed = False

def press():
    global pressed
    pressed = True
    sys.setprofile(None)
    pid = os.getpid()
    if to == "launcher":
        with open(os.path.join(os.environ["DISTGRAPH_JOB_DIRECTORY"], "launcher")) as file:
            pid = int(file.read().split()[0])
    os.kill(pid, int(number))

def reached(code):
    if place == "end":
        return code is threading._shutdown.__code__
    # a callback of the garbage collector, from which Python passes no exception on
    callback = code.co_name == "cb" and code.co_filename == "<frozen importlib._bootstrap>"
    loading = {
        "launcher": "distgraph.cli.application" in sys.modules,
        "supervisor": "distgraph.runtime.launch.supervisor" not in sys.modules,
        "rank": "distgraph.runtime.launch.mpi_rank" in sys.modules,
    }
    return callback and (sys.argv[0].endswith("script.py") if place == "script" else loading[by])

def watch():
    if pressed:
        return
    if place == "start":
        press()
    else:
        sys.setprofile(lambda frame, event, given: event == "call" and reached(frame.f_code) and press())

if supervisor and os.environ["PMI_RANK"] == "0":
    if by == "supervisor":
        watch()
    if by == "rank":
        os.register_at_fork(after_in_child=watch)
if by == "launcher" and "run" in sys.orig_argv:
    watch()
"""
SCRIPT = """
import colorsys, os, select
import numpy as np
from distgraph.runtime.launch.mpi_rank import current_transport
transport = current_transport()
if transport is not None and transport.rank == 1 and "rank end" in os.environ["PRESS"]:
    transport.recv(np.zeros(1), 1, 4).wait()  # for a message that nobody sends
while "rank script" in os.environ["PRESS"]:
    select.select([], [], [], 0.01)
"""
STOPPED = "error: interrupted; all ranks are stopped\n"


def run(folder: Path, ranks: int, press: str) -> tuple[int, str]:
    """Exit code and standard error of `distgraph run`; nothing is left of the job."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "tmp").mkdir()
    path = os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", "from distgraph.cli.entry import main; main()"]
    job = subprocess.run(
        [*command, "run", "-n", str(ranks), str(folder / "script.py")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder / "tmp"), "PRESS": press},
    )
    assert list((folder / "tmp").iterdir()) == []
    return job.returncode, job.stderr


@pytest.mark.parametrize("place", ["start", "import"])
def test_ctrl_c_to_a_supervisor_has_no_effect(tmp_path: Path, place: str) -> None:
    """Before the first line of distgraph, and while modules are loaded."""
    assert run(tmp_path, 2, f"supervisor {place} itself {signal.SIGINT}") == (0, "")


def test_ctrl_c_while_the_command_loads(tmp_path: Path) -> None:
    assert run(tmp_path, 2, f"launcher import itself {signal.SIGINT}") == (130, "error: interrupted\n")


@pytest.mark.parametrize("place", ["supervisor start", "supervisor import", "rank start", "rank import"])
def test_ctrl_c_to_the_launcher_while_ranks_start(tmp_path: Path, place: str) -> None:
    assert run(tmp_path, 2, f"{place} launcher {signal.SIGINT}") == (130, STOPPED)


@pytest.mark.parametrize("place", ["start", "import"])
def test_ctrl_c_to_a_rank_that_starts(tmp_path: Path, place: str) -> None:
    killed = "error: rank 0 was killed by SIGINT, all 1 ranks are stopped\n"
    assert run(tmp_path, 1, f"rank {place} itself {signal.SIGINT}") == (130, killed)


def test_ctrl_c_in_an_import_of_the_script(tmp_path: Path) -> None:
    """Python prints the exception of a callback and goes on; the rank raises it again."""
    said = "error: interrupted (SIGINT)\n"
    assert run(tmp_path, 1, f"rank script itself {signal.SIGINT}") == (130, said)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_at_the_end_of_a_rank(tmp_path: Path, ranks: int) -> None:
    """One rank has nothing left to do; one of several tells the others that it waits for no longer."""
    said = (130, "error: rank 0: interrupted (SIGINT); rank 1 stops too\n") if ranks > 1 else (0, "")
    assert run(tmp_path, ranks, f"rank end itself {signal.SIGINT}") == said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_supervisor_that_is_killed_at_its_start(tmp_path: Path, number: signal.Signals, ranks: int) -> None:
    which = "supervisor of rank 0" if number == signal.SIGHUP else "mpiexec or a supervisor"
    said = f"error: {which} was killed by {number.name}, all {ranks} ranks are stopped\n"
    code, printed = run(tmp_path, ranks, f"supervisor start itself {number}")
    if printed.startswith("[mpiexec@"):  # it failed itself, which was seen once, and not in 700 more runs
        last = "error: mpiexec ended with exit code 255 before the ranks could say why\n"
        assert (code, printed.splitlines(keepends=True)[-1]) == (255, last)
    else:
        assert (code, printed) == (128 + number, said)
