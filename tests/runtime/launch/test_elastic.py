"""Elastic jobs: what they run on the ranks that are left, what they have lost, and that training goes on."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from campaigns import elastic
from typer.testing import CliRunner

from benchmarks.support.machines import missing
from distgraph.cli.application import app
from distgraph.cli.script_options import take_repeated
from distgraph.errors import RuntimeFault
from distgraph.runtime.job.job_files import PLAN_VARIABLE, STRATEGY_VARIABLE
from distgraph.runtime.job.losses import ELASTIC, Loss, forget_losses, read_losses, record_loss
from distgraph.runtime.launch.elastic import ElasticOptions, _ElasticJob, launch_elastic
from distgraph.runtime.launch.elastic_capacity import Capacity
from distgraph.runtime.launch.elastic_configurations import GivenPlan, ScriptProgram, choose
from distgraph.runtime.launch.hosts import Host, read_hostfile
from distgraph.runtime.launch.monitor import Signals

needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")


def program(batch_axis: tuple[str, ...] = ("dp",), samples: int = 16, **mesh: int) -> ScriptProgram:
    return ScriptProgram(mesh, batch_axis, samples, searches=False)


# What goes on
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "mesh", "ranks", "text"),
    [
        (3, {"dp": 4}, 3, "mesh=dp:3"),
        (3, {"dp": 2, "tp": 2}, 2, "mesh=dp:1,tp:2"),
        (6, {"dp": 2, "tp": 2}, 6, "mesh=dp:3,tp:2"),
        (40, {"dp": 4}, 16, "mesh=dp:16"),  # no more ranks than samples
        (7, {"tp": 2, "dp": 4}, 6, "mesh=tp:2,dp:3"),
    ],
)
def test_the_mesh_of_the_script_changes_along_its_batch_axis(
    available: int, mesh: dict[str, int], ranks: int, text: str
) -> None:
    configuration = choose(available, (), program(**mesh))
    assert configuration.ranks == ranks
    assert configuration.variables == {STRATEGY_VARIABLE: text}


def test_fields_that_the_user_gives_stay() -> None:
    configuration = choose(3, (), program(dp=4), "zero=2 mesh=dp:4")
    assert configuration.variables == {STRATEGY_VARIABLE: "zero=2 mesh=dp:3"}


def test_one_rank_with_the_whole_batch_has_nothing_to_share(tmp_path: Path) -> None:
    shared = {"zero": "0", "gradient_precision": "none"}
    ScriptProgram({"dp": 2, "tp": 2}, ("dp",), 16, False, shared).write(tmp_path)
    script = ScriptProgram.read(tmp_path)
    one, two = choose(3, (), script, "zero=2"), choose(4, (), script, "zero=2")
    assert one.variables == {STRATEGY_VARIABLE: "mesh=dp:1,tp:2 zero=0 gradient_precision=none"}
    assert one.text == "mesh dp:1,tp:2, without zero and gradient_precision"
    assert (two.variables, two.text) == ({STRATEGY_VARIABLE: "zero=2 mesh=dp:2,tp:2"}, "mesh dp:2,tp:2")


def test_the_largest_plan_that_fits_is_taken(tmp_path: Path) -> None:
    plans = [GivenPlan(str(tmp_path / f"{ranks}.json"), ranks) for ranks in (4, 2, 3)]
    assert choose(3, plans, None).variables == {PLAN_VARIABLE: str(tmp_path / "3.json")}
    assert choose(2, plans, program(dp=4)).ranks == 2
    assert choose(9, plans, None).ranks == 4


def test_a_strategy_that_searches_gets_the_devices_and_the_limit() -> None:
    searching = ScriptProgram({}, (), 16, searches=True)
    text = choose(3, (), searching, "precision=bf16", 20).variables[STRATEGY_VARIABLE]
    assert text == "precision=bf16 devices=3 seconds=20"


@pytest.mark.parametrize(
    ("available", "plans", "script", "message"),
    [
        (0, (), program(dp=4), "elastic: no rank is left"),
        (1, (GivenPlan("p.json", 2),), None, r"1 rank is left but the smallest plan of --plan needs 2"),
        (3, (), None, "has lost ranks before its script has called fit"),
        (1, (), program(dp=2, tp=2), r"1 rank is left but one position of axis dp .*\(dp=2, tp=2\) takes 2"),
        (3, (), program(()), "neither a mesh with a batch_axis nor a mode that searches"),
    ],
)
def test_where_nothing_fits_the_error_says_what_is_left(
    available: int, plans: tuple[GivenPlan, ...], script: ScriptProgram | None, message: str
) -> None:
    with pytest.raises(RuntimeFault, match=message):
        choose(available, plans, script)


def test_the_program_of_the_first_start_stays(tmp_path: Path) -> None:
    assert ScriptProgram.read(tmp_path) is None
    program(dp=4).write(tmp_path)
    program(dp=3).write(tmp_path)
    assert ScriptProgram.read(tmp_path) == program(dp=4)


# What is there
# ------------------------------------------------------------------------------------------------------


def test_each_rank_is_lost_once(tmp_path: Path) -> None:
    env = {ELASTIC: str(tmp_path)}
    for loss in (Loss("rank 2 is stopped", 2), Loss("rank 2 was killed", 2), Loss("rank 0 was killed", 0)):
        record_loss(loss, env)
    assert {loss.rank for loss in read_losses(tmp_path)} == {0, 2}
    forget_losses(tmp_path)
    assert read_losses(tmp_path) == []
    record_loss(Loss("rank 1 was killed", 1), {})  # no elastic job


def test_slots_are_lost_and_come_back_with_the_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("localhost slots=4\n")
    capacity = Capacity(read_hostfile(path), 8, str(path))
    capacity.lose([Loss("rank 1 was killed", 1), Loss("mpiexec was killed")])
    assert capacity.ranks == 3
    assert not capacity.read_again()
    path.write_text("localhost slots=5\n")
    assert capacity.read_again()
    assert capacity.ranks == 5
    path.unlink()
    with pytest.raises(RuntimeFault, match="has gone; the hosts stay as they were"):
        capacity.read_again()
    assert capacity.ranks == 5


def test_hosts_are_lost() -> None:
    capacity = Capacity([Host("a", 2), Host("b", 2)], 4)
    capacity.lose([Loss("a rank on host b was killed", host="b"), Loss("rank 1 was killed", 1)])
    assert capacity.hosts == (Host("a", 2), Host("b", 1))
    capacity.lose_hosts(["a"])
    assert capacity.hosts == (Host("b", 1),)
    assert not capacity.local


@pytest.mark.parametrize(
    ("silent", "left"),
    [({"b": "host b does not answer"}, {"a": 2}), ({}, {"a": 1, "b": 2})],
)
def test_ranks_that_crash_because_a_host_is_lost_keep_their_slots(
    silent: dict[str, str], left: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distgraph.runtime.launch.elastic.silent_hosts", lambda *_: silent)
    capacity = Capacity([Host("a", 2), Host("b", 2)], 4)
    out, env = io.StringIO(), {ELASTIC: str(tmp_path)}
    with Signals() as signals:
        job = _ElasticJob(["train.py"], capacity, ElasticOptions(), env, signals, tmp_path, out, out)
    record_loss(Loss("rank 1 was killed by SIGSEGV", 1, "a"), env)
    texts = [loss.text for loss in job._losses()]
    assert texts == [*silent.values(), "rank 1 was killed by SIGSEGV"]
    assert {host.name: host.slots for host in capacity.hosts} == left


def test_a_host_without_heartbeats_is_lost_without_another_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(hosts: list[str], *_: object) -> dict[str, str]:
        asked.extend(hosts)
        return {}

    monkeypatch.setattr("distgraph.runtime.launch.elastic.silent_hosts", ask)
    capacity = Capacity([Host("a", 2), Host("b", 2), Host("c", 2)], 6)
    out, env = io.StringIO(), {ELASTIC: str(tmp_path)}
    with Signals() as signals:
        job = _ElasticJob(["train.py"], capacity, ElasticOptions(), env, signals, tmp_path, out, out)
    record_loss(Loss("host b has not answered for 3 s", host="b", whole_host=True), env)
    assert [loss.text for loss in job._losses()] == ["host b has not answered for 3 s"]
    assert asked == []
    assert capacity.hosts == (Host("a", 2), Host("c", 2))


def test_a_host_of_a_new_list_that_does_not_answer_yet_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pauses that double, while only its return changes what can run."""
    now, answers, asked = [0.0], {"b": "no route to host"}, list[list[str]]()

    def ask(hosts: list[str], *_: object) -> dict[str, str]:
        asked.append(hosts)
        return {name: answers[name] for name in hosts if name in answers}

    monkeypatch.setattr("distgraph.runtime.launch.elastic.silent_hosts", ask)
    monkeypatch.setattr("distgraph.runtime.launch.elastic.time", SimpleNamespace(monotonic=lambda: now[0]))
    path, out = tmp_path / "hosts", io.StringIO()
    path.write_text("a slots=2\nb slots=2\n")
    capacity = Capacity(read_hostfile(path), 4, str(path))
    capacity.lose_hosts(["b"])
    with Signals() as signals:
        job = _ElasticJob(["train.py"], capacity, ElasticOptions(), {}, signals, tmp_path, out, out)
    assert not job._has_new_hosts()
    path.write_text("a slots=2\nb slots=2\n# again\n")
    assert job._has_new_hosts()
    assert (asked, capacity.ranks) == ([["a", "b"]], 2)
    assert "host b of the new host list is asked again until it answers: no route to host" in out.getvalue()
    for second in range(1, 8):  # asked after 1 and 3 seconds, then it answers, after 7
        now[0] = float(second)
        if second == 7:
            answers.clear()
        assert job._has_new_hosts() == (second == 7)
    assert (asked[1:], capacity.ranks) == ([["b"]] * 3, 4)
    now[0] = 100.0
    assert not job._has_new_hosts()
    assert len(asked) == 4


# Jobs
# ------------------------------------------------------------------------------------------------------


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stop", "return"])
def test_training_goes_on_as_if_nothing_had_happened(kind: str) -> None:
    result = elastic.campaign(1, 3, (kind,))
    assert result["failures"] == []


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["machine-return", "machine-silent"])
def test_training_goes_on_when_a_machine_is_lost(kind: str) -> None:
    """And on all when it comes back; processes of one whose link is cut end by themselves."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    result = elastic.campaign(1, 3, (kind,))
    assert result["failures"] == []


def run(script: str, tmp_path: Path, ranks: int = 2, restarts: int = 3) -> tuple[int, str]:
    """Exit code and error output of an elastic job."""
    path, errors = tmp_path / "script.py", io.StringIO()
    path.write_text(script)
    code = launch_elastic(
        [str(path)],
        Capacity((), ranks),
        ElasticOptions(restarts=restarts),
        stdout=io.StringIO(),
        stderr=errors,
    )
    return code, errors.getvalue()


KILL = """import os, signal, distgraph
if os.environ.get('PMI_RANK') == '1':
    os.kill(os.getpid(), signal.SIGKILL)
"""


SHARED = """import os, signal
import numpy as np
import distgraph as dg
from distgraph import callbacks, nn, optim

class Killed(callbacks.Callback):
    def on_batch_end(self, engine, step, logs):
        if step == 3 and os.environ.get('PMI_RANK') == '1':
            os.kill(os.getpid(), signal.SIGKILL)

strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp", zero=2, gradient_precision="bf16")
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
engine = dg.Engine(model, nn.MeanSquaredError(), optim.Adam(lr=1e-2), strategy=strategy)
x = np.random.default_rng(0).normal(size=(48, 6)).astype("f4")
engine.fit((x, x[:, :2]), epochs=2, batch_size=12, callbacks=[Killed()], progress=False)
assert engine.step == 8
"""


@needs_mpi
def test_training_goes_on_on_one_rank_without_what_several_share(tmp_path: Path) -> None:
    code, said = run(SHARED, tmp_path)
    assert code == 0, said
    assert "training goes on on 1 rank with mesh dp:1, without zero and gradient_precision" in said


@needs_mpi
def test_a_script_without_fit(tmp_path: Path) -> None:
    code, said = run(KILL, tmp_path)
    assert code == 137
    assert "error: elastic: the job has lost ranks before its script has called fit" in said
    assert run("print(1)", tmp_path) == (
        0,
        "distgraph: --elastic had no effect, because the script has not called engine.fit\n",
    )


@needs_mpi
def test_an_error_of_the_script_is_not_repeated(tmp_path: Path) -> None:
    code, said = run("raise ValueError('page 17 is torn')", tmp_path)
    assert code == 1
    assert said.count("error: ranks 0-1: ValueError: page 17 is torn") == 1
    assert "restart" not in said


@needs_mpi
def test_the_number_of_restarts_is_limited(tmp_path: Path) -> None:
    code, said = run(KILL, tmp_path, restarts=0)
    assert code == 137
    assert "error: elastic: rank 1 was killed by SIGKILL; the job was started again 0 times" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--elastic", "--restarts", "-1"], "--restarts is -1"),
        (["--elastic", "--search-seconds", "0"], "--search-seconds is 0"),
        (
            ["--plan", "a.json", "--plan", "b.json"],
            "plans a.json and b.json are for one job; give one, or --el",
        ),
    ],
)
def test_options_that_make_no_sense(options: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    result = CliRunner().invoke(app, ["run", *options, str(tmp_path / "script.py")])
    assert result.exit_code != 0
    assert message in str(result.exception) + result.output


def test_plans_before_and_behind_the_script() -> None:
    given = ["--lr", "1", "--plan", "a.json", "--plan=b.json", "--", "--plan", "c"]
    assert take_repeated("--plan", given) == (["a.json", "b.json"], ["--lr", "1", "--", "--plan", "c"])
