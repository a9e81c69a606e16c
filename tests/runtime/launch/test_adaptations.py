"""Elastic jobs that start again with another plan: what is counted, said and given up; losses stay."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs import adaptive_program

import distgraph as dg
from distgraph.engine.checkpoints import elastic_fit
from distgraph.engine.checkpoints.elastic_fit import ElasticFit
from distgraph.errors import RuntimeFault
from distgraph.runtime.execute.process_group import InProcessWorld
from distgraph.runtime.job.adaptations import ADAPTED, Adaptation, give_up_adaptation
from distgraph.runtime.job.losses import ELASTIC, Loss, record_loss
from distgraph.runtime.launch import elastic as launcher
from distgraph.runtime.launch.elastic import ElasticOptions, launch_elastic
from distgraph.runtime.launch.elastic_capacity import Capacity
from distgraph.runtime.launch.elastic_configurations import GROW, STOPPED, GivenPlan, ScriptProgram

needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
STATE = Adaptation(1, 3, 40, 2, {0: 1.0, 1: 2.5}, "the plan", "rank 1 is slow", ("/tmp/plan.json", "12"))
KILLED = "rank 1 was killed by SIGKILL"

Start = Callable[[Path], int]
"""What the ranks of a start do with the folder of the job; returns the exit code."""


def adapts(number: int, grows: bool = False) -> Start:
    """Ranks that stop to start again with another plan."""

    def start(folder: Path) -> int:
        replace(STATE, number=number).write(folder)
        (folder / ADAPTED).touch()
        if grows:
            (folder / GROW).touch()
        return 0

    return start


def loses(folder: Path) -> int:
    """Ranks of which one is killed."""
    record_loss(Loss(KILLED, 1), {ELASTIC: str(folder)})
    return 137


def ends(folder: Path) -> int:
    """Ranks that train to the end."""
    return 0


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[str], list[Any]]]:
    """Runs a job whose starts do what is given: exit code, what it says, (ranks, state before) of starts."""

    def run(*starts: Start, restarts: int = 3) -> tuple[int, list[str], list[Any]]:
        begun: list[Any] = []

        def launch(ranks: int, argv: Sequence[str], *, env: Mapping[str, str], **others: Any) -> int:
            folder = Path(env[ELASTIC])
            ScriptProgram({"dp": 3}, ("dp",), 12, searches=False).write(folder)
            assert not (folder / ADAPTED).exists()
            begun.append((ranks, Adaptation.read(folder)))
            return starts[len(begun) - 1](folder)

        monkeypatch.setattr(launcher, "launch", launch)
        script, errors = tmp_path / "script.py", io.StringIO()
        script.write_text("")
        options = ElasticOptions(restarts=restarts)
        code = launch_elastic([str(script)], Capacity((), 3), options, stdout=io.StringIO(), stderr=errors)
        assert len(begun) == len(starts)
        return code, errors.getvalue().splitlines(), begun

    return run


def test_starts_with_another_plan_are_counted_apart(job: Any) -> None:
    code, said, begun = job(adapts(1), adapts(2), ends, restarts=0)
    assert code == 0
    assert said == [
        "distgraph: rank 1 is slow; training goes on on 3 ranks with that plan (adaptation 1 of 3)",
        "distgraph: rank 1 is slow; training goes on on 3 ranks with that plan (adaptation 2 of 3)",
    ]
    assert [ranks for ranks, _ in begun] == [3, 3, 3]
    assert [state and state.plan for _, state in begun] == [None, "the plan", "the plan"]


def test_a_loss_gives_the_plan_up_and_the_count_stays(job: Any) -> None:
    code, said, begun = job(adapts(1), loses, ends)
    assert code == 0
    assert said[1:] == [
        f"distgraph: {KILLED}; training goes on on 2 ranks with mesh dp:2 (restart 1 of 3)",
        "distgraph: the plan of Adapt was for the ranks before; speeds are measured again",
    ]
    ranks, state = begun[2]
    assert ranks == 2
    assert (state.number, state.step, state.plan, state.slowdowns, state.file) == (1, 40, "", {}, STATE.file)
    assert state.given_up == KILLED


def test_a_loss_while_the_ranks_stop_counts_as_a_loss(job: Any) -> None:
    def both(folder: Path) -> int:
        adapts(1)(folder)
        return loses(folder)

    code, said, begun = job(both, ends, restarts=1)
    assert code == 0
    assert said[0].endswith("(restart 1 of 1)")
    assert begun[1][1].plan == ""


def test_hosts_that_were_added_meanwhile_are_taken(job: Any) -> None:
    _, said, begun = job(adapts(1, grows=True), ends)
    assert said[0].startswith("distgraph: hosts have been added; training goes on on 3 ranks with mesh dp:3")
    assert said[1].startswith("distgraph: the plan of Adapt was for the ranks before")
    assert begun[1][1].plan == ""


def test_a_stop_to_grow_gives_the_plan_up(job: Any) -> None:
    def grows(folder: Path) -> int:
        (folder / STOPPED).touch()
        return 0

    _, said, begun = job(adapts(1), grows, ends)
    assert said[1].startswith("distgraph: hosts have been added")
    assert begun[2][1].given_up == "hosts have been added"


def test_the_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert Adaptation.read(tmp_path) is None
    assert not give_up_adaptation(tmp_path, "rank 1 was lost")
    STATE.write(tmp_path)
    assert Adaptation.read(tmp_path) == STATE
    assert give_up_adaptation(tmp_path, "rank 1 was lost")
    assert not give_up_adaptation(tmp_path, "rank 0 was lost")


# What ranks do with it
# ------------------------------------------------------------------------------------------------------


class TwoHosts(InProcessWorld):
    """A world that learns of another host whether it sees the folder."""

    def gather(self, values: dict[int, Any]) -> dict[int, Any]:
        return {**values, 1: (False, "m1"), 2: (False, "m1")}


def elastic(folder: Path, monkeypatch: pytest.MonkeyPatch, world: InProcessWorld) -> ElasticFit:
    engine = adaptive_program.engine(1)
    monkeypatch.setattr(engine._session, "world", world)
    return ElasticFit(engine, folder)


def test_a_folder_that_hosts_do_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elastic(tmp_path, monkeypatch, InProcessWorld(1)).check_shared()
    with pytest.raises(
        RuntimeFault, match=r"ranks 1-2 \(m1\) do not see it; start the job in a folder that all"
    ):
        elastic(tmp_path, monkeypatch, TwoHosts(1)).check_shared()


def test_a_plan_for_other_ranks_is_given_up_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    STATE.write(tmp_path)
    fit = elastic(tmp_path, monkeypatch, InProcessWorld(1))
    fit._take_adaptation()
    assert (fit.adaptation.plan, fit.adaptation.slowdowns, fit.adaptation.number) == ("", {}, 1)
    assert "the plan of Adapt is given up: it is for 2 ranks, and 1 run" in capsys.readouterr().err


def test_a_plan_after_a_program_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(STATE, ranks=1).write(tmp_path)
    fit = elastic(tmp_path, monkeypatch, InProcessWorld(1))
    fit.compiled_before = True
    with pytest.raises(RuntimeFault, match="call fit before prepare, evaluate and predict"):
        fit._take_adaptation()


def test_training_goes_on_where_memory_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is left of a start that was asked for, and training comes to its end."""

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    class Ask(dg.callbacks.Callback):
        def on_batch_end(self, engine: dg.Engine, step: int, logs: dict[str, float]) -> None:
            if step == 2:
                assert engine._elastic is not None
                engine._elastic.request_start(STATE)

    monkeypatch.setenv(ELASTIC, str(tmp_path))
    monkeypatch.setattr(elastic_fit, "write_survivor", full)
    engine = adaptive_program.engine(1)
    engine.fit(adaptive_program.data(192), 1, 48, callbacks=[Ask()], progress=False)
    assert engine.step == 4
    assert not (tmp_path / ADAPTED).exists()
    assert Adaptation.read(tmp_path) is None
    said = capsys.readouterr().err
    assert (
        "Adapt goes on with the present plan, because memory was not kept: rank 0: [Errno 28] No space"
        in said
    )


# Jobs
# ------------------------------------------------------------------------------------------------------


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and error output of an elastic job on two ranks."""
    errors = io.StringIO()
    code = launch_elastic(
        [str(Path(adaptive_program.__file__)), str(folder), *arguments],
        Capacity((), 2),
        ElasticOptions(),
        stdout=io.StringIO(),
        stderr=errors,
    )
    return code, errors.getvalue()


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("kill", [0, 20])
def test_a_slow_rank_gives_work_away_and_no_step_is_lost(kill: int, tmp_path: Path) -> None:
    """Rank 1 takes eight times as long. With `kill` it is lost after the job has started again."""
    code, said = run(tmp_path, "24", "8", *([str(kill)] if kill else []))
    assert code == 0, said
    assert said.count("(adaptation 1 of 1)") == 1
    assert "distgraph: rank 1 (machine local) runs at " in said
    assert "distgraph: fit goes on after step 7 (epoch 0, sample 336), from the memory of rank" in said
    assert ("the plan of Adapt was for the ranks before" in said) == bool(kill)
    assert ("(restart 1 of 3)" in said) == bool(kill)
    assert (tmp_path / "plan.json").exists() == (not kill)
    serial = adaptive_program.train(None, 24)
    losses = json.loads((tmp_path / "losses").read_text())
    assert len(losses) == 24
    np.testing.assert_allclose(losses, serial.losses, rtol=1e-9)
    if not kill:
        shares = dg.Plan.load(tmp_path / "plan.json").stages[0].mesh.weights["dp"]
        assert shares[0] > shares[1]


def test_a_plan_of_the_command_line_comes_back_after_a_loss(
    job: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--plan` decides what is left again, as before any adaptation."""
    plans = (GivenPlan(str(tmp_path / "p3.json"), 3), GivenPlan(str(tmp_path / "p2.json"), 2))
    monkeypatch.setattr(
        sys.modules[__name__], "ElasticOptions", lambda restarts: launcher.ElasticOptions(plans, restarts)
    )
    _, said, _ = job(adapts(1), loses, ends)
    assert f"training goes on on 2 ranks with plan {tmp_path / 'p2.json'}" in said[1]
