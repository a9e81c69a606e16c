"""Short forms of tests/campaigns/kills.py and faults.py, and what they rely on."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from campaigns import faults, kills

from benchmarks.support import machines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trials", "how"),
    [
        (3, ("in-process",)),
        pytest.param(
            2,
            ("run",),
            marks=pytest.mark.skipif(
                importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"
            ),
        ),
    ],
    ids=["in-process", "MPI"],
)
def test_kills(trials: int, how: Sequence[str]) -> None:
    result = kills.campaign(trials, 7, how, widths=(2,))
    assert result["failures"] == []


@pytest.mark.slow
def test_faults_of_the_disk() -> None:
    reason = faults.no_mounts()
    if reason:
        pytest.skip(reason)
    result = faults.campaign(2, 1, faults.DISK)
    assert result["failures"] == []


@pytest.mark.slow
def test_faults_of_the_network() -> None:
    reason = machines.missing()
    if reason:
        pytest.skip(reason)
    result = faults.campaign(1, 1, ("interrupted",))
    assert result["failures"] == []


@pytest.mark.parametrize("module", ["sitecustomize", "script"])
def test_ctrl_c_while_python_itself_starts_is_told_apart(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "" if module == "sitecustomize" else f"import {module}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    trial = kills.Trial("in-process", 1, "process", signal.SIGINT, "start", 1, 0.0)
    early = module == "sitecustomize"
    assert kills.in_start_of_python(trial, done.returncode, done.stderr) is early


def test_trials_are_seeded_and_of_every_kind() -> None:
    def drawn(seed: int) -> list[kills.Trial]:
        rng = random.Random(seed)
        return [kills.draw(rng, tuple(kills.TARGETS), (2, 4)) for _ in range(1000)]

    assert drawn(3) == drawn(3) != drawn(4)
    found = {(trial.how, trial.target, trial.number) for trial in drawn(3)}
    everything = {
        (how, target, number)
        for how, targets in kills.TARGETS.items()
        for target in targets
        for number in kills.SIGNALS
    }
    assert {(how, target, number.name) for how, target, number in everything - found} == {
        ("in-process", "process", "SIGSTOP"),
        ("mpiexec", "proxy", "SIGSTOP"),
        ("mpiexec", "mpiexec", "SIGSTOP"),
    }
    assert {trial.phase for trial in drawn(3)} == set(kills.PHASES)
