"""The command line, run as a user runs it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.files.command_line import SCRIPT, invoke
from support.paths import ROOT
from support.programs.small_graphs import mlp

import distgraph
from distgraph.cli import application
from distgraph.ir.parser import parse_graph, print_graph
from distgraph.passes.pass_registry import PASSES
from distgraph.resources import shipped_clusters


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "mlp.dg"
    path.write_text(print_graph(mlp()))
    return path


def test_check_says_that_partitioned_is_serial(script):
    code, output = invoke("check", str(script))
    assert code == 0
    assert "on 4 ranks" in output
    assert "output loss: off by" in output
    assert "gradients of 4 parameters" in output
    assert output.rstrip().endswith("partitioned == serial")
    assert "trained" not in output


def test_check_names_the_first_diverging_op(script):
    """In a process of its own, for the script changes the registry."""
    command = [sys.executable, "-m", "distgraph", "check", str(script), "--wrong"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    assert "first diverging op: %" in done.stdout
    assert "tanh (train.py:" in done.stdout
    assert "[forward]" in done.stdout


def test_check_looks_at_as_many_samples_as_asked(script):
    code, output = invoke("check", "--samples", "3", str(script))
    assert code == 0, output


def test_check_of_a_script_that_does_not_train(script):
    code, output = invoke("check", str(script), "--idle")
    assert code == 1
    assert "ends without a training step" in output
    code, output = invoke("check", "nowhere.py")
    assert code == 1
    assert "script 'nowhere.py' does not exist" in output


def test_inspect_prints_graph_text_again(file):
    code, output = invoke("inspect", str(file), "-p", "complete,reshard")
    assert code == 0
    assert any(op.kind == "reshard" for op in parse_graph(output).ops)
    assert invoke("inspect", "-", text=file.read_text()) == (0, file.read_text())


def test_inspect_prints_each_pass(file):
    code, output = invoke("inspect", str(file), "-p", "complete,reshard,lower", "--print-each")
    assert code == 0
    assert output.count("graph @mlp") == 3
    assert [line.split(":")[0] for line in output.split("\n") if line.startswith("# ")] == [
        "# complete", "# reshard", "# lower",
    ]  # fmt: skip


def test_inspect_lists_the_passes():
    code, output = invoke("inspect", "--list-passes")
    assert code == 0
    (line,) = [line for line in output.split("\n") if line.startswith("| decompose ")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    needs = "after dead_code_elimination"
    assert cells == ["decompose", "serial", "serial", "", needs, "Replace every fused op by simpler ops."]
    assert output.count("\n") == len(PASSES) + 4


def test_inspect_explains_and_lists_conflicts(tmp_path):
    path = tmp_path / "conflict.dg"
    path.write_text(print_graph(mlp(rows="[tp, _]")))
    code, output = invoke("inspect", str(path), "-p", "complete", "--conflicts", "--explain", "fc1.weight")
    assert code == 0
    assert "# %fc1.weight : f32[6, 10] [_, tp] on mesh(dp=2, tp=3), decided by user train.py:12" in output
    assert "but held by train.py:9" in output
    parse_graph(output)  # what is said stands in comments


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("inspect", "nowhere.dg"), "nowhere.dg: cannot be read"),
        (("inspect", "-", "-p", "fuse"), "pass 'fuse' does not exist"),
        (("inspect", "-", "-p", "lower"), "run the pass complete"),
        (
            ("inspect", "-", "-p", "complete,split_tasks"),
            "pass split_tasks gives no graph but inspect prints",
        ),
        (("cluster", "nowhere"), "neither a file nor a shipped cluster"),
        (("run", "-n", "2", "nowhere.py"), "script 'nowhere.py' does not exist"),
    ],
)
def test_mistakes_are_one_message(args, message):
    code, output = invoke(*args, text=print_graph(mlp()))
    assert code == 1
    assert message in output


def test_inspect_draws_malformed_text():
    code, output = invoke("inspect", "-", text="graph @g\n  %x : f32[3] = \n")
    assert code == 1
    assert "line 2" in output
    assert "^" in output


def test_cluster_lists_and_describes():
    code, output = invoke("cluster")
    assert code == 0
    assert len(output.strip().split("\n")) == len(shipped_clusters())
    assert (code, output) == invoke("cluster", "--list")
    code, output = invoke("cluster", "dgx_a100_pod")
    assert code == 0
    assert "mesh gpu" in output


def test_cluster_checks_a_file(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("name: bad\nmachines: 3\n")
    code, output = invoke("cluster", str(path))
    assert code == 1
    assert "bad.yaml" in output
    assert "machines" in output


def test_run_passes_arguments_and_exit_code_on(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("distgraph.cli.run.launch", lambda n, argv, env: seen.append((n, argv)) or 7)
    code, _ = invoke("run", "-n", "3", "train.py", "-n", "9", "--flag")
    assert code == 7
    assert seen == [(3, ["train.py", "-n", "9", "--flag"])]


@pytest.mark.parametrize("given", [["-n", "2"], ["-n2"], ["-n=2"], ["-v", "-n", "2"]])
def test_ranks_behind_the_script_are_refused_unless_they_are_the_script_s(given, monkeypatch):
    seen = []
    monkeypatch.setattr("distgraph.cli.run.launch", lambda n, argv, env: seen.append((n, argv)) or 0)
    code, output = invoke("run", "train.py", *given)
    said = " ".join(word for word in given if word != "-v")
    assert code == 1
    assert f"run: {said} follows train.py" in output
    assert f"write distgraph run {said} train.py, or" in output
    assert f"distgraph run train.py -- {said}" in output
    assert seen == []
    assert invoke("run", "train.py", "--", *given)[0] == 0
    assert invoke("run", "train.py", "-v", "--n", "2", "--", "--", "-n")[0] == 0
    assert seen == [(1, ["train.py", *given]), (1, ["train.py", "-v", "--n", "2", "--", "-n"])]


def test_samples_behind_the_script_are_refused_unless_they_are_the_script_s(script):
    code, output = invoke("check", str(script), "--samples", "3")
    assert code == 1
    assert f"check: --samples 3 follows {script}" in output
    code, output = invoke("check", str(script), "--", "--samples", "3")
    assert code == 0, output


def test_version_is_that_of_the_package():
    code, output = invoke("--version")
    assert (code, output) == (0, f"distgraph {distgraph.__version__}\n")
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert metadata["project"]["dynamic"] == ["version"]
    assert metadata["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "distgraph.__version__"}


def test_a_mistake_is_no_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "distgraph", "inspect", str(tmp_path / "none.dg")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'none.dg'}: cannot be read: ")
    assert "Traceback" not in done.stderr


COMMANDS: dict[str, tuple[list[str], str]] = {
    "no ranks": (["run", "-n", "0", "x.py"], "run: got 0 ranks, expected at least 1"),
    "no script": (["run", "nosuch.py"], "run: script 'nosuch.py' does not exist"),
    "no cluster": (["cluster", "nosuch"], "nosuch: neither a file nor a shipped cluster"),
    "garbage": (["inspect", "garbage.dg"], "garbage.dg, line 1, column 1: found"),
    "no graph": (["inspect", "nosuch.dg"], "nosuch.dg: cannot be read"),
    "check without engine": (
        ["check", "idle.py"],
        "ends without a training step; there is nothing to compare",
    ),
    "check of an exit": (["check", "exits.py"], "exits (0) before its first training step"),
    "check of what raises": (
        ["check", "raises.py"],
        "raised ValueError: torn before its first training step",
    ),
}


@pytest.mark.parametrize("mistake", COMMANDS)
def test_mistake_on_the_command_line(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, message = COMMANDS[mistake]
    files = {"garbage.dg": "?? 12", "idle.py": "", "exits.py": "raise SystemExit(0)", "x.py": "",
             "raises.py": "raise ValueError('torn')"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["distgraph", *args])
    with pytest.raises(SystemExit) as caught:
        application.main()
    assert caught.value.code == 1
    err = capsys.readouterr().err
    assert err.rpartition("error: ")[2].startswith(message) or message in err.splitlines()[-1]


def test_only_what_is_used_is_loaded() -> None:
    """What `distgraph run` and its ranks import is waited for at every start of a job."""
    code = """
import sys
from distgraph.cli import application

application.load_command(["run", "train.py", "plan"])
early = "distgraph.engine", "distgraph.resources", "numpy", "pydantic"
print([name for name in early if name in sys.modules])
import distgraph.engine

unused = "distgraph.engine.search_driver", "distgraph.runtime.profile", "scipy", "numba", "rich.progress"
print([name for name in unused if name in sys.modules])
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "[]\n[]\n"


def test_no_command_loads_scipy_before_it_is_used() -> None:
    """Loading it takes a third as long as all other modules of a command."""
    code = """
import sys
from distgraph.cli import application

for name in application._MODULES:
    application.load_command([name])
print([name for name in ("scipy", "networkx", "numba") if name in sys.modules])
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "[]\n"


def test_a_misspelt_command_is_answered_with_similar_ones() -> None:
    code, output = invoke("chek", "train.py")
    assert code == 2
    assert "Did you mean 'check'?" in output


def test_commands_load_nothing_that_they_may_not_use() -> None:
    """They start sooner without the search and without what checks files."""
    names = ("application", "run", "check", "forecast", "export", "discover", "cluster", "tune")
    code = f"import sys, {', '.join(f'distgraph.cli.{name}' for name in names)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    others = {"pydantic", "yaml", "lark", "scipy", "networkx", "cvxpy", "pyscipopt", "numba", "rich"}
    assert not loaded & others
    assert not any(name.startswith("distgraph.engine.search_driver") for name in loaded)
