"""Adapt: what it proposes for given seconds, when it says nothing, what it leaves, and bad arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs.adaptive_program import BATCH, data, engine, slow_down
from support.programs.training import engine as small_engine

import distgraph as dg
from distgraph import callbacks
from distgraph.engine.adaptive.better_plan import find_better_plan, forecast_plan
from distgraph.engine.adaptive.neighbour_plans import (
    devices_by_rank,
    exchange_plans,
    on_present_devices,
    renumbered,
    with_meshes,
)
from distgraph.engine.adaptive.slowed_cluster import slowed_cluster
from distgraph.engine.callbacks import adapt as adapt_module
from distgraph.engine.callbacks.adapt import on_rank_0, planned_job
from distgraph.engine.checkpoints import elastic_fit
from distgraph.errors import DistGraphError, RuntimeFault
from distgraph.resources import load_cluster
from distgraph.runtime.execute.measured_timeline import MeasuredTimeline
from distgraph.runtime.execute.worker import Worker
from distgraph.runtime.forecast.rank_seconds import rank_seconds
from distgraph.runtime.job.adaptations import Adaptation, give_up_adaptation
from distgraph.runtime.job.losses import ELASTIC


@pytest.fixture
def factors(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Rank -> how many times as long as by the described cluster its steps take, in place of a clock."""
    given: dict[int, float] = {}
    trained: list[Any] = []
    measured = adapt_module.Adapt._measured

    def remember(self: Any, compiled: Any, cluster: Any, devices: Any, records: Any) -> Any:
        trained[:] = [rank_seconds(compiled.build, cluster, devices)]
        return measured(self, compiled, cluster, devices, records)

    def seconds(steps: Any) -> dict[int, float]:
        return {rank: 13.0 * given.get(rank, 1.0) * length for rank, length in trained[0].items()}

    monkeypatch.setattr(adapt_module.Adapt, "_measured", remember)
    monkeypatch.setattr(adapt_module, "computing_seconds", seconds)
    return given


class At(callbacks.Callback):
    """Calls functions after steps."""

    def __init__(self, functions: Mapping[int, Callable[[], None]]) -> None:
        self.functions = functions

    def on_batch_end(self, engine: dg.Engine, step: int, logs: dict[str, float]) -> None:
        if step in self.functions:
            self.functions[step]()


def fit(trained: dg.Engine, steps: int, *watchers: callbacks.Callback) -> None:
    trained.fit(data(BATCH * steps), 1, BATCH, callbacks=list(watchers), progress=False)


def adapt(path: Path, **given: Any) -> callbacks.Adapt:
    return callbacks.Adapt(**{"every": 3, "steps": 1, "path": path / "plan.json", **given})


def test_a_slow_rank_gets_less_of_the_batch(
    factors: dict[int, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factors[1] = 2.0
    trained, watcher = engine(2), adapt(tmp_path)
    fit(trained, 5, watcher)
    proposal = watcher.proposal
    assert proposal is not None
    assert (proposal.step, dict(proposal.slowdowns)) == (4, {0: 1.0, 1: 2.0})
    assert proposal.after < 0.9 * proposal.before
    (stage,) = proposal.plan.stages
    assert stage.mesh.weights["dp"][0] > stage.mesh.weights["dp"][1]
    assert (stage.mesh.members, stage.devices) == ((0, 1), (0, 1))
    assert dg.Plan.load(tmp_path / "plan.json") == proposal.plan
    said = capsys.readouterr().err
    assert (
        "after step 4 rank 1 (machine local) runs at 0.50 of the described speed, planned at 1.00; "
        "mesh(dp=" in said
    )
    assert f"and is in {tmp_path / 'plan.json'}; distgraph run --elastic would apply it" in said
    other = dg.Engine(
        trained.training_spec.model, trained.training_spec.loss, dg.optim.Adam(lr=1e-3), cluster="local",
        seed=5, plan=tmp_path / "plan.json",
    )  # fmt: skip
    other.fit(data(BATCH * 5), 1, BATCH, progress=False)
    np.testing.assert_allclose(other.history.losses, trained.history.losses, rtol=1e-9)


def test_equal_speeds_and_a_wrong_forecast_propose_nothing(
    factors: dict[int, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factors |= {0: 31.0, 1: 36.0}
    watcher = adapt(tmp_path)
    fit(engine(2), 8, watcher)
    assert watcher.proposal is None
    assert not (tmp_path / "plan.json").exists()
    assert capsys.readouterr().err == ""


def test_one_change_is_proposed_once_and_withdrawn_when_the_machine_recovers(
    factors: dict[int, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factors[1] = 2.0
    watcher, searches = adapt(tmp_path), []
    seen: list[Any] = []

    def look() -> None:
        seen.append((watcher.proposal is not None, (tmp_path / "plan.json").exists()))
        searches.append(capsys.readouterr().err)

    def recover() -> None:
        look()
        factors.clear()

    fit(engine(2), 18, At({5: look, 10: recover, 15: look}), watcher)
    assert seen == [(True, True), (True, True), (False, False)]
    assert [said.count("runs at 0.50") for said in searches] == [1, 0, 0]
    assert "all ranks run at the planned speeds again" in searches[2]


def test_a_file_that_somebody_else_has_written_stays(factors: dict[int, float], tmp_path: Path) -> None:
    factors[1] = 2.0
    path = tmp_path / "plan.json"

    def recover() -> None:
        factors.clear()
        path.write_text(path.read_text().replace("1f1b", "gpipe"))

    watcher = adapt(tmp_path)
    fit(engine(2), 12, At({5: recover}), watcher)
    assert watcher.proposal is None
    assert path.exists()


def test_too_little_gain_is_said(
    factors: dict[int, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factors[1] = 1.4
    watcher = adapt(tmp_path, gain=0.9)
    fit(engine(2), 5, watcher)
    assert watcher.proposal is None
    assert "saves 90% of a step by forecast" in capsys.readouterr().err


def test_a_shorter_last_batch_is_left_out_and_said(
    factors: dict[int, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factors[1] = 2.0
    watcher = adapt(tmp_path, steps=3)
    trained = engine(2)
    trained.fit(data(BATCH * 5 - 24), 2, BATCH, callbacks=[watcher], progress=False)
    assert watcher.proposal is not None
    assert "(1 step of other batch sizes left out)" in capsys.readouterr().err


def test_recording_for_adapt_and_for_a_timeline_do_not_disturb_each_other(
    factors: dict[int, float], tmp_path: Path
) -> None:
    factors[1] = 2.0
    timeline = callbacks.Timeline(tmp_path / "timeline.json", after=2, steps=4)
    watcher = adapt(tmp_path)
    fit(engine(2), 8, watcher, timeline)
    assert watcher.proposal is not None
    content = MeasuredTimeline.read(tmp_path / "timeline.json")
    assert [step.number for step in content.steps] == [3, 4, 5, 6]


def test_one_rank_has_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watcher = adapt(tmp_path)
    fit(engine(1), 9, watcher)
    assert capsys.readouterr().err.count("nothing to compare, because one rank computes") == 1


def test_the_search_ends_with_its_time(tmp_path: Path) -> None:
    trained = engine(2)
    fit(trained, 1)
    (compiled,) = trained._session.programs.values()
    job = planned_job(trained, compiled)
    now = iter(range(100))
    better = find_better_plan(job, slowed_cluster(job.cluster, {1: 2.0}), 2.0, clock=lambda: float(next(now)))
    assert better.tried <= 2
    assert better.ended == "the limit of 2 s was reached"


def test_a_searched_plan_is_searched_again_and_every_rank_keeps_its_device() -> None:
    strategy = dg.Strategy(mode="auto", seconds=2.0)
    model = dg.nn.Sequential(
        dg.nn.Linear(64, 96, dtype="f64"), dg.nn.ReLU(), dg.nn.Linear(96, 3, dtype="f64")
    )
    trained = dg.Engine(
        model, dg.nn.MeanSquaredError(), dg.optim.SGD(lr=1e-3), strategy=strategy, cluster="local", seed=5
    )
    trained.prepare(data(BATCH))
    (compiled,) = trained._session.programs.values()
    job = planned_job(trained, compiled)
    assert job.searched
    ticks: list[int] = []
    better = find_better_plan(job, slowed_cluster(job.cluster, {1: 3.0}), 20.0, lambda: ticks.append(0))
    assert ticks
    assert better.after <= better.before
    if better.plan is not None:
        assert set(devices_by_rank(better.plan).items()) <= set(enumerate(job.devices))


def test_ranks_of_a_pipeline_exchange_places() -> None:
    """The first stage has more work; its rank on a slow device changes places with the other one."""
    strategy = dg.Strategy(mode="auto", stages=2, borders=[1], layers=2, micro_batches=4, seconds=1.0)
    model = dg.nn.Sequential(
        dg.nn.Linear(64, 192, dtype="f64"), dg.nn.ReLU(), dg.nn.Linear(192, 3, dtype="f64")
    )
    trained = dg.Engine(
        model, dg.nn.MeanSquaredError(), dg.optim.SGD(lr=1e-3), strategy=strategy, cluster="local", seed=5
    )
    trained.prepare(data(BATCH))
    (compiled,) = trained._session.programs.values()
    job = planned_job(trained, compiled)
    seconds = rank_seconds(compiled.build, job.cluster, job.devices)
    busiest = max(seconds, key=lambda rank: seconds[rank])
    factors = {rank: 3.0 if rank == busiest else 1.0 for rank in seconds}
    (exchanged,) = exchange_plans(job.plan, factors)
    slowed = slowed_cluster(job.cluster, {job.devices[busiest]: 3.0})
    assert dict(devices_by_rank(exchanged)) == dict(enumerate(job.devices))
    assert (
        forecast_plan(job, exchanged, slowed).step_seconds < forecast_plan(job, job.plan, slowed).step_seconds
    )


def test_shares_are_the_best_of_all_by_forecast() -> None:
    """Hill climbing from shares by speed comes to the same number of samples as trying all of them."""
    trained = engine(2)
    fit(trained, 1)
    (compiled,) = trained._session.programs.values()
    job = planned_job(trained, compiled)
    slowed = slowed_cluster(job.cluster, {0: 2.5})
    better = find_better_plan(job, slowed, 1e9)
    assert better.plan is not None
    mesh = job.plan.stages[0].mesh
    seconds = {}
    for share in range(1, BATCH):
        other = with_meshes(job.plan, {mesh: mesh.weighted(dp=(share, BATCH - share))}, "shares")
        seconds[share] = forecast_plan(job, other, slowed).step_seconds
    assert better.after == pytest.approx(min(seconds.values()), rel=1e-9)
    assert better.before == pytest.approx(seconds[BATCH // 2], rel=1e-9)


def test_renumbering_keeps_devices() -> None:
    trained = engine(2)
    fit(trained, 1)
    (compiled,) = trained._session.programs.values()
    plan = planned_job(trained, compiled).plan
    swapped = renumbered(plan, {0: 1, 1: 0}, "swapped")
    (stage,) = swapped.stages
    assert (stage.mesh.members, stage.devices) == ((1, 0), (1, 0))
    assert on_present_devices(plan, (1, 0)).stages[0].mesh.members == (1, 0)
    assert list(exchange_plans(plan, {0: 1.0, 1: 2.0})) == []  # both ranks do the same


# Starts of an elastic job, in one process
# ------------------------------------------------------------------------------------------------------


def start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, watcher: callbacks.Callback, steps: int = 18, call: int = 0
) -> dg.Engine:
    """A start of an elastic job whose script calls `fit` for the `call`-th time."""
    (folder / "job").mkdir(exist_ok=True)
    monkeypatch.setenv(ELASTIC, str(folder / "job"))
    monkeypatch.setattr(elastic_fit, "_calls", itertools.count(call))
    trained = engine(2)
    fit(trained, steps, watcher)
    return trained


def test_a_job_starts_again_with_the_plan_and_loses_no_step(
    factors: dict[int, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    factors[1] = 2.0
    with pytest.raises(SystemExit):
        start(tmp_path, monkeypatch, adapt(tmp_path, restarts=1, cooldown=6))
    state = Adaptation.read(tmp_path / "job")
    assert state is not None
    assert (state.number, state.most, state.step, state.slowdowns) == (1, 1, 4, {0: 1.0, 1: 2.0})
    assert state.text == "rank 1 (machine local) runs at 0.50 of the described speed, planned at 1.00"
    said = capsys.readouterr().err
    assert "the job starts again with it" in said
    watcher = adapt(tmp_path, restarts=1, cooldown=6)
    again = start(tmp_path, monkeypatch, watcher)
    said = capsys.readouterr().err
    assert said == "distgraph: fit goes on after step 4 (epoch 0, sample 192), from the memory of rank 0\n"
    assert watcher.proposal is None
    assert again.plan.meshes[0].weights == dg.Plan.parse(state.plan).stages[0].mesh.weights
    serial = engine(1)
    fit(serial, 18)
    np.testing.assert_allclose(again.history.losses, serial.history.losses, rtol=1e-9)


def test_starts_are_limited_and_a_recovery_waits_for_the_cooldown(
    factors: dict[int, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    factors[1] = 2.0
    with pytest.raises(SystemExit):
        start(tmp_path, monkeypatch, adapt(tmp_path, restarts=1, cooldown=8))
    factors.clear()
    capsys.readouterr()
    watcher = adapt(tmp_path, restarts=1, cooldown=8)
    start(tmp_path, monkeypatch, watcher)
    assert watcher.proposal is not None
    assert watcher.proposal.step == 4 + 8 + 1
    assert watcher.proposal.plan.stages[0].mesh.weights == {}
    said = capsys.readouterr().err
    assert "rank 1 (machine local) runs at 1.00 of the described speed, planned at 0.50; mesh(dp=2)" in said
    assert "it is not applied, because all 1 starts for that are used" in said
    assert dg.Plan.load(tmp_path / "plan.json") == watcher.proposal.plan


def test_a_plan_that_is_given_up_leaves_no_file(
    factors: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors[1] = 2.0
    with pytest.raises(SystemExit):
        start(tmp_path, monkeypatch, adapt(tmp_path, restarts=1))
    assert (tmp_path / "plan.json").exists()
    assert give_up_adaptation(tmp_path / "job", "rank 2 was lost")
    again = start(tmp_path, monkeypatch, adapt(tmp_path, restarts=1, every=50))
    assert not (tmp_path / "plan.json").exists()
    assert again.step == 18
    assert again.plan.meshes[0].weights == {}


@pytest.mark.parametrize(
    ("given", "call", "steps", "reason"),
    [
        ({"restarts": 0}, 0, 8, "all 0 starts for that are used"),
        ({}, 1, 8, "only the first fit of a script starts again for that"),
        ({}, 0, 6, "training ends in 2 steps"),
    ],
)
def test_a_plan_that_is_not_applied_is_said_with_the_reason(
    given: dict[str, Any],
    call: int,
    steps: int,
    reason: str,
    factors: dict[int, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    factors[1] = 2.0
    watcher = adapt(tmp_path, **given)
    trained = start(tmp_path, monkeypatch, watcher, steps, call)
    assert trained.step == steps
    assert watcher.proposal is not None
    assert f"it is not applied, because {reason}" in capsys.readouterr().err


def test_a_plan_after_a_program_was_compiled_is_not_applied(
    factors: dict[int, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    factors[1] = 2.0
    monkeypatch.setenv(ELASTIC, str(tmp_path))
    monkeypatch.setattr(elastic_fit, "_calls", itertools.count())
    trained = engine(2)
    trained.prepare(data(BATCH))
    fit(trained, 9, adapt(tmp_path))
    assert "because the engine has compiled a program before fit" in capsys.readouterr().err


class SharingRank:
    """A world of two processes, seen from one of them."""

    def __init__(self, chief: bool, messages: list[Any]) -> None:
        self.is_chief, self.messages = chief, messages

    def share(self, value: Any, owner: int) -> Any:
        if self.is_chief:
            self.messages.append(value)
            return value
        return self.messages.pop(0)


def test_rank_0_decides_and_the_others_wait_as_long_as_it_searches() -> None:
    messages: list[Any] = []
    seconds = iter([0.0, 0.5, 1.1, 1.1, 1.2, 3.0, 3.0])

    def decide(tick: Callable[[], None]) -> Any:
        for _ in range(4):
            tick()
        return "outcome"

    chief: Any = SharingRank(True, messages)
    assert on_rank_0(chief, decide, lambda: next(seconds)) == "outcome"
    assert messages == [None, None, "outcome"]
    other: Any = SharingRank(False, messages)

    def never(tick: Callable[[], None]) -> Any:
        raise AssertionError("only rank 0 decides")

    assert on_rank_0(other, never) == "outcome"
    assert messages == []


def test_an_error_of_rank_0_is_raised_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(steps: Any) -> Any:
        raise RuntimeFault("clock: it stands still")

    monkeypatch.setattr(adapt_module, "computing_seconds", fails)
    with pytest.raises(RuntimeFault, match="it stands still"):
        fit(engine(2), 6, adapt(tmp_path))


def test_a_rank_that_is_really_slow_gives_work_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tasks of rank 1 sleep; its part of the batch in the proposal is smaller."""
    monkeypatch.setattr(Worker, "_compile_tasks", Worker._compile_tasks)  # restored at the end
    slow_down(1, 12.0)
    watcher = adapt(tmp_path, margin=1.0, steps=5)
    fit(engine(2), 10, watcher)
    assert watcher.proposal is not None
    assert watcher.proposal.slowdowns[1] > watcher.proposal.slowdowns[0] == 1.0
    shares = watcher.proposal.plan.stages[0].mesh.weights["dp"]
    assert shares[0] > shares[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"margin": 0}, "margin of Adapt is 0 but must be a number above 0"),
        ({"margin": "0.2"}, "margin of Adapt is '0.2' but"),
        ({"seconds": float("inf")}, "seconds of Adapt is inf but"),
        ({"gain": 1.0}, "gain of Adapt is 1.0 but must be a number of at least 0 and below 1"),
        ({"gain": True}, "gain of Adapt is True but"),
        ({"every": 0}, "every of Adapt"),
        ({"steps": 1.5}, "steps of Adapt"),
        ({"restarts": -1}, "restarts of Adapt"),
        ({"cooldown": -1}, "cooldown of Adapt"),
        ({"path": ""}, "Adapt: '' cannot be written"),
    ],
)
def test_arguments_that_make_no_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(DistGraphError) as raised:
        callbacks.Adapt(**given)
    assert message in str(raised.value)


def test_an_engine_without_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFault, match="Adapt: the engine has no cluster"):
        fit(engine(2, cluster=None), 1, adapt(tmp_path))


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(RuntimeFault, match="it is a folder"):
        fit(engine(2), 1, adapt(tmp_path))


def test_annotations_on_a_mesh_keep_it(
    factors: dict[int, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shares would contradict them; that is said, and training goes on."""
    factors[1] = 3.0
    described = load_cluster("local")
    trained = small_engine("tp2", cluster=described)
    x = np.random.default_rng(0).normal(size=(48, 6))
    y = np.zeros(48, "i4")
    watcher = adapt(tmp_path)
    trained.fit((x, y), 1, 8, callbacks=[watcher], progress=False)
    said = capsys.readouterr().err
    assert watcher.proposal is None
    assert "saves 5% of a step by forecast" in said
    assert "is annotated" in said
