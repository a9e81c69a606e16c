"""`distgraph plan`, and plans on the command line of the others, as a user runs them."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.files.command_line import SCRIPT, invoke
from support.programs.forecasts import document

import distgraph as dg
from distgraph.engine.commands.overrides import giving, plan_for
from distgraph.plan.plan import Plan
from distgraph.resources import load_cluster
from distgraph.runtime.job.job_files import CLUSTER_VARIABLE, PLAN_VARIABLE, STRATEGY_VARIABLE
from distgraph.runtime.launch import launch as launcher

PLAIN = SCRIPT.replace("mesh = dg.ProcessMesh.grid(dp=2, tp=2)", "mesh = None").replace('batch_axis="dp"', "")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """An annotated script, the same one without any layout, a cluster, and a place for a plan."""
    texts = {
        "train.py": SCRIPT,
        "plain.py": PLAIN,
        "boxes.yaml": yaml.safe_dump(document(2, 2)),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name.partition(".")[0]: str(tmp_path / name) for name in (*texts, "plan.json")}


@pytest.fixture
def planned(files: dict[str, str]) -> dict[str, str]:
    """With the plan of the annotated script."""
    code, output = invoke(
        "plan", files["train"], "--cluster", files["boxes"], "-o", files["plan"], "--mode", "semi"
    )
    assert code == 0, output
    return files


def test_plan_keeps_what_is_given(files: dict[str, str]) -> None:
    """Constraints on the command line, and their mistakes."""
    given = ("--stages", "2", "--schedule", "gpipe", "--micro-batches", "2", "--zero", "0", "--uniform")
    more = ("--memory", "1GiB", "--devices", "2", "--recompute", "none", "--borders", "1")
    code, output = invoke(
        "plan", *given, *more, "--cluster", files["boxes"], "-o", files["plan"], files["plain"]
    )
    assert code == 0, output
    plan = Plan.load(files["plan"])
    assert (plan.micro_batches, plan.schedule, len(plan.stages), plan.stages[1].first) == (2, "gpipe", 2, 1)
    assert plan.ranks == (0, 1)
    assert "; given: micro_batches=2, schedule=gpipe, stages=2, borders=1, recompute=False, zero=0" in output
    code, output = invoke(
        "plan", "--start", files["plan"], "--seconds", "0", "--cluster", files["boxes"], files["plain"]
    )
    assert code == 0, output
    assert re.search(r"^  start +[\d.]+ ms \([\d.]+ ms to [\d.]+ ms\)", output, re.MULTILINE)
    for option, value, message in (
        ("--start", files["plain"], "plain.py"),
        ("--recompute", "some", "--recompute is 'some' but must be numbers of layers such as 0-3,7"),
        ("--stages", "0", "stages of the search is 0 but must be a number from 1 up"),
        ("--memory", "8", "memory of the search is '8' but must be a size such as"),
        ("--micro-batches", "7", "micro_batches of the search is 7 but a batch of 22 samples"),
    ):
        code, output = invoke("plan", option, value, "--cluster", files["boxes"], files["plain"])
        assert code != 0
        assert message in " ".join(output.split())


def test_plan_recomputes_what_memory_asks_for(files: dict[str, str]) -> None:
    """In mode semi, where nothing else is searched, and in the strategy of a script."""
    given = ("--cluster", files["boxes"], "--mode", "semi", "--explain", "recompute")
    code, output = invoke("plan", *given, "--recompute", "auto", "-o", files["plan"], files["train"])
    assert code == 0, output
    assert Plan.load(files["plan"]).recompute == ()
    assert "without recomputation" in output
    strategy = ("--strategy", "recompute=auto memory=1MiB")
    code, output = invoke("plan", *given, *strategy, files["train"])
    assert code == 0, output
    assert "of 1 MiB without recomputation" in output
    code, output = invoke("plan", *given, "--recompute", "0-1", "-o", files["plan"], files["train"])
    assert code == 0, output
    assert Plan.load(files["plan"]).recompute == (0, 1)
    assert "chosen: 2 of 2 layers\n  given: recompute=0-1; nothing else was tried" in output
    code, output = invoke("plan", *given, "--recompute", "auto", "--memory", "1KiB", files["train"])
    assert code != 0
    assert "smallest memory that recomputation reaches" in " ".join(output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["plan", "--mode", "semi", "--seconds", "5"], "--seconds is 5 but mode 'semi' searches nothing"),
        (["plan", "--strategy", "mesh=dp:2,dp:2"], "mesh"),
        (["run", "-n", "99999999"], "got 99999999 ranks but this machine takes"),
        (["run", "--restarts", "2"], "--restarts is given without --elastic"),
        (["run", "--search-seconds", "2"], "--search-seconds is given without --elastic"),
        (["run", "--launcher", "srun"], "--launcher is srun but no hosts are given"),
    ],
)
def test_options_without_effect_are_refused(
    planned: dict[str, str], options: list[str], message: str
) -> None:
    command, *rest = options
    code, output = invoke(command, *rest, planned["train"])
    assert code == 1, output
    assert message in output


def test_plan_writes_and_shows_the_plan(planned: dict[str, str]) -> None:
    plan = Plan.load(planned["plan"])
    assert plan.ranks == (0, 1, 2, 3)
    assert (plan.batch, plan.cluster, plan.search.mode) == (22, "boxes", "semi")
    assert plan.search.settings == {"mode": "semi", "seconds": 60.0}
    code, output = invoke(
        "plan", planned["train"], "--cluster", planned["boxes"], "--mode", "semi",
        "--explain", "first.weight", "--compare", planned["plan"],
    )  # fmt: skip
    assert code == 0, output
    assert "plan of Net on boxes: 4 ranks, batch 22 in 1 micro-batch, 1f1b" in output
    assert "plain data parallel (dp=4)" in output
    assert "first.weight (param): [_, tp] on stage 0, mesh(dp=2, tp=2)" in output
    assert output.rstrip().endswith("no difference")
    assert "trained" not in output


def test_forecast_and_check_with_a_plan(planned: dict[str, str]) -> None:
    """A script without any layout is forecast and checked on the ranks of the plan."""
    plan = Plan.load(planned["plan"])
    assert plan.forecast is not None
    code, output = invoke(
        "forecast", planned["plain"], "--plan", planned["plan"], "--cluster", planned["boxes"]
    )
    assert code == 0, output
    code, annotated = invoke("forecast", planned["train"], "--cluster", planned["boxes"])
    assert code == 0
    assert output == annotated
    code, other = invoke("forecast", planned["train"], "--cluster", planned["boxes"], "--runtime", "megatron")
    assert code == 0
    assert "step under megatron" in other
    code, output = invoke("check", planned["plain"], "--plan", planned["plan"])
    assert code == 0, output
    assert "on 4 ranks" in output
    assert output.rstrip().endswith("partitioned == serial")
    code, output = invoke("check", planned["plain"])
    assert "on 1 ranks" in output


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_run_with_a_plan(planned: dict[str, str], tmp_path: Path) -> None:
    """Over MPI: as many ranks as the plan has, losses as on one."""
    script = tmp_path / "losses.py"
    script.write_text(
        PLAIN
        + "    if engine.is_chief:\n        print(engine.plan.build.ranks, repr(engine.history.losses))\n"
    )
    found = {}
    for name, ranks, env in (
        ("one", 1, dict(os.environ)),
        ("planned", 4, {**os.environ, PLAN_VARIABLE: planned["plan"]}),
    ):
        out, err = io.StringIO(), io.StringIO()
        assert launcher.launch(ranks, [str(script)], env=env, stdout=out, stderr=err) == 0, err.getvalue()
        (found[name],) = (line for line in out.getvalue().split("\n") if line.startswith("("))
    (_, one), (ranks, four) = (text.split(" [") for text in (found["one"], found["planned"]))
    assert ranks == "(0, 1, 2, 3)"
    assert json.loads(f"[{four}") == pytest.approx(json.loads(f"[{one}"), rel=1e-6)


def test_run_takes_the_ranks_of_the_plan(planned: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "distgraph.cli.run.launch", lambda n, argv, env: seen.append((n, argv, env[PLAN_VARIABLE])) or 0
    )
    assert invoke("run", "--plan", planned["plan"], planned["plain"], "--flag")[0] == 0
    assert invoke("run", "-n", "6", planned["plain"], "--plan", planned["plan"], "-x")[0] == 0
    assert invoke("run", planned["plain"], "-y", f"--plan={planned['plan']}")[0] == 0
    plan = str(Path(planned["plan"]).resolve())
    assert seen == [
        (4, [planned["plain"], "--flag"], plan),
        (6, [planned["plain"], "-x"], plan),
        (4, [planned["plain"], "-y"], plan),
    ]
    monkeypatch.setattr("distgraph.cli.run.launch", lambda n, argv, env: seen.append((n, argv)) or 0)
    assert invoke("run", planned["plain"], "--", "--plan", "mine")[0] == 0
    assert seen[-1] == (1, [planned["plain"], "--plan", "mine"])
    code, output = invoke("run", "-n", "2", "--plan", planned["plan"], planned["plain"])
    assert code == 1
    assert "needs 4 ranks but -n is 2; leave out -n" in output


def test_run_hands_the_cluster_on(planned: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Files by their full path, shipped ones by name; before or behind the script; mistakes come first."""
    seen: list[Any] = []
    monkeypatch.setattr(
        "distgraph.cli.run.launch",
        lambda n, argv, env: seen.append((n, argv, env.get(CLUSTER_VARIABLE), env.get(PLAN_VARIABLE))) or 0,
    )
    plain, boxes = planned["plain"], str(Path(planned["boxes"]).resolve())
    plan = str(Path(planned["plan"]).resolve())
    assert invoke("run", "--cluster", planned["boxes"], "--plan", planned["plan"], plain)[0] == 0
    assert (
        invoke("run", plain, "-x", "--plan", planned["plan"], f"--cluster={boxes}", "--", "--cluster")[0] == 0
    )
    assert invoke("run", "-n", "2", plain, "--cluster", "dgx_a100_pod")[0] == 0
    assert seen == [
        (4, [plain], boxes, plan),
        (4, [plain, "-x", "--cluster"], boxes, plan),
        (2, [plain], "dgx_a100_pod", None),
    ]
    code, output = invoke("run", "--cluster", "nowhere.yaml", plain)
    assert code == 1
    assert "nowhere.yaml" in output
    assert len(seen) == 3


def test_fields_of_the_strategy_go_before_the_script_s(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the command and in the ranks that it starts; mistakes come before the script runs."""
    seen: list[Any] = []
    monkeypatch.setattr(
        "distgraph.cli.run.launch", lambda n, argv, env: seen.append((argv, env.get(STRATEGY_VARIABLE))) or 0
    )
    plain = files["plain"]
    assert invoke("run", "--precision", "bf16", plain, "--strategy", "zero=2", "-x")[0] == 0
    assert seen == [([plain, "-x"], "precision=bf16 zero=2")]
    repeated = ("--strategy", "zero=2"), ("--strategy", "micro_batches=4")
    assert invoke("run", *repeated[0], *repeated[1], plain)[0] == 0
    assert invoke("run", *repeated[0], plain, *repeated[1], "-x")[0] == 0
    assert seen[1:] == [([plain], "zero=2 micro_batches=4"), ([plain, "-x"], "zero=2 micro_batches=4")]
    for command in ("plan", "check", "forecast", "run"):
        code, output = invoke(command, *repeated[0], "--strategy=zero=3", plain)
        assert (code, "zero is given twice" in output) == (1, True)
    with giving(None, strategy="precision=bf16"):
        assert dg.Engine(dg.nn.ReLU()).training_spec.strategy.precision == "bf16"
    monkeypatch.setenv(STRATEGY_VARIABLE, "precision=fp16")
    assert dg.Engine(dg.nn.ReLU()).training_spec.strategy.precision == "fp16"
    monkeypatch.delenv(STRATEGY_VARIABLE)
    fields = "mesh=dp:2 batch_axis=dp"
    code, output = invoke("forecast", "--strategy", fields, "--cluster", files["boxes"], plain)
    assert code == 0, output
    for command in ("plan", "check", "forecast", "run"):
        code, output = invoke(command, "--precision", "fp8", plain)
        assert code == 1
        assert "precision 'fp8' of Strategy does not exist" in " ".join(output.split())


def test_the_command_s_cluster_goes_before_the_script_s(
    planned: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = load_cluster(planned["boxes"])
    with giving(None, cluster):
        assert dg.Engine(dg.nn.ReLU(), cluster="dgx_a100_pod").cluster is cluster
    assert dg.Engine(dg.nn.ReLU()).cluster is None
    monkeypatch.setenv(CLUSTER_VARIABLE, planned["boxes"])
    found = dg.Engine(dg.nn.ReLU(), cluster="dgx_a100_pod").cluster
    assert found is not None
    assert found.name == cluster.name
    code, output = invoke("check", planned["plain"], "--plan", planned["plan"], "--cluster", planned["boxes"])
    assert code == 0, output
    assert "on 4 ranks" in output


def test_the_command_s_plan_goes_before_the_script_s(planned: dict[str, str]) -> None:
    plan = Plan.load(planned["plan"])
    training_spec = dg.Engine(dg.nn.ReLU(), dg.nn.MeanSquaredError(), dg.optim.Adam()).training_spec
    assert plan_for(training_spec, planned["plan"]) == plan
    assert plan_for(training_spec, None) is None
    with giving(plan):
        assert plan_for(training_spec, "nowhere.json") is plan
        assert plan_for(dg.Engine(dg.nn.ReLU()).training_spec, None) is None  # it does not train


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("missing/p.json", r"missing is no folder; choose another place"),
        (".", r"it is a folder"),
        ("train.py/p.json", r"train\.py is no folder"),
    ],
)
def test_a_place_where_nothing_can_be_written_is_refused_before_the_search(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch, place: str, reason: str
) -> None:
    monkeypatch.setattr("distgraph.cli.plan.plan_script", lambda *given: pytest.fail("the script was run"))
    output = Path(files["train"]).parent / place
    code, text = invoke("plan", files["train"], "--cluster", files["boxes"], "-o", str(output))
    assert code == 1
    assert re.search(rf"{re.escape(str(output))}: cannot be written: .*{reason}", text)


def test_ctrl_c_before_any_plan_is_one_message(files: dict[str, str]) -> None:
    """The program itself presses it while it is traced."""
    script = Path(files["plain"])
    text = script.read_text()
    assert "def forward(self, x):\n" in text
    pressed = "        import os, signal\n        os.kill(os.getpid(), signal.SIGINT)\n"
    script.write_text(text.replace("def forward(self, x):\n", f"def forward(self, x):\n{pressed}"))
    command = [sys.executable, "-m", "distgraph", "plan", str(script), "--cluster", files["boxes"]]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 1
    assert re.search(
        r"^error: search: interrupted after .* s, before there was any plan; give it", found.stderr
    )
    assert "Traceback" not in found.stderr
    assert not found.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("plan", "{train}", "--mode", "semi"), "engine has no cluster, so there are no devices"),
        (
            ("plan", "{train}", "--cluster", "{boxes}", "--mode", "fast"),
            "mode 'fast' of the search does not exist",
        ),
        (("plan", "{train}", "--cluster", "{boxes}", "--seconds", "-1"), "seconds of the search is -1"),
        (
            ("plan", "{train}", "--cluster", "{boxes}", "--mode", "semi", "--explain", "w"),
            "has nothing named 'w'",
        ),
        (("plan", "{train}", "--mode", "foo", "--seconds", "2"), "mode 'foo' of the search does not exist"),
        (
            ("plan", "{train}", "--strategy", "mode=semi"),
            "the mode of a plan is given by --mode, which is auto",
        ),
        (("forecast", "{train}", "--cluster", "{boxes}", "--trace", "/"), "/: cannot be written: it is a"),
        (("profile", "-o", "/"), "/: cannot be written: it is a folder"),
        (("plan", "{train}", "--compare", "nowhere.json"), "nowhere.json: cannot be read"),
        (
            ("plan", "{train}", "--cluster", "{boxes}", "--mode", "semi", "-o", "/nowhere/p.json"),
            "cannot be written",
        ),
        (
            ("plan", "{train}", "--cluster", "{boxes}", "--mode", "semi", "--", "--idle"),
            "there is nothing to plan",
        ),
        (("plan", "nowhere.py", "--cluster", "{boxes}"), "script 'nowhere.py' does not exist"),
        (("forecast", "{plain}", "--plan", "nowhere.json"), "nowhere.json: cannot be read"),
        (("plan", "{plain}", "--runtime", "nobody"), "nobody: neither a file nor a runtime"),
        (("check", "{plain}", "--plan", "{boxes}"), "not JSON"),
        (
            ("check", "--samples", "3", "--plan", "{plan}", "{plain}"),
            "3 samples are asked for but the plan is for",
        ),
        (("run", "--plan", "{train}", "{plain}"), "not JSON"),
    ],
)
def test_mistakes_are_one_message(planned: dict[str, str], args: tuple[str, ...], message: str) -> None:
    code, output = invoke(*(arg.format(**planned) for arg in args))
    assert code == 1
    assert message in output
