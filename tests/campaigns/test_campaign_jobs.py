"""Short forms of tests/campaigns/kills.py and faults.py, and what they rely on."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence

import pytest
from campaigns import faults, kills, machines


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
