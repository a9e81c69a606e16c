"""The README is true: its example runs as it stands, and the files it names are there. Links of all pages
lead to files, and every page of docs/ is in the README's list."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.paths import ROOT
from support.programs.forecasts import document

import distgraph as dg
from distgraph import nn
from distgraph.plan.plan import Plan

needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example, _, _ = blocks("python")
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    history, out = names["history"], capsys.readouterr().out
    assert len(history["loss"]) == 3
    assert history["valid_accuracy"][-1] > 2 * 0.1  # guessing among ten gives 0.1
    assert "4 ranks" in out
    assert re.search(r"steps\.0\.weight .*\[_, tp\] .*user README\.md:", out)
    assert re.search(r"steps\.2\.weight .*\[tp, _\]", out)  # nobody annotated it
    serial = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    other = dg.Engine(serial, nn.CrossEntropy())
    other.load("checkpoint")
    x = names["valid"][0]
    np.testing.assert_allclose(other.predict(x), names["engine"].predict(x), rtol=1e-4, atol=1e-5)
    names["engine"].close()


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_the_example_of_a_torch_model_runs() -> None:
    names: dict[str, Any] = {}
    exec(compile(blocks("python")[2], "README.md", "exec"), names)
    engine, module, x = names["engine"], names["net"], names["x"]
    trained = {name: names["torch"].from_numpy(array) for name, array in engine.parameters().items()}
    assert not np.allclose(trained["0.weight"], module.state_dict()["0.weight"])
    module.load_state_dict(trained)
    outputs = module(names["torch"].from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(engine.predict(x), outputs, rtol=1e-4, atol=1e-5)
    engine.close()


def test_files_that_it_names_are_there() -> None:
    linked = re.findall(r"\]\(([\w./]+)\)", README)
    named = [word for block in blocks("sh") for word in block.split() if word.endswith(".py")]
    run = [name for name in named if name != "train.py"]  # that one the reader makes
    assert linked
    assert run
    for path in (*linked, *run):
        assert (ROOT / path).exists(), path


PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_names_of_pages_lead_to_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", prose):
        assert (page.parent / link).exists(), f"{page} links to {link}"
    for name in re.findall(r"\bdocs/[\w/]+\.md\b", text):
        assert (ROOT / name).exists(), f"{page} names {name}"


def test_source_names_pages_that_exist() -> None:
    for folder in ("distgraph", "passes", "runtime", "resources", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text(encoding="utf-8")):
                assert (ROOT / name).exists(), f"{path} names {name}"


def test_every_page_is_in_the_list() -> None:
    _, listed = README.split("\n## More\n")
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages == set(re.findall(r"\((docs/[\w/]+\.md)\)", listed))


@needs_mpi
@pytest.mark.timeout(400)
def test_the_planned_example_runs_as_it_stands(tmp_path: Path) -> None:
    """All commands but the profile, in place of which two made-up devices stand."""
    (tmp_path / "train.py").write_text(blocks("python")[1])
    (tmp_path / "here.yaml").write_text(yaml.safe_dump(document(1, 2)))
    profile, *commands = [line.partition("#")[0].split() for line in blocks("sh")[-1].splitlines()]
    assert profile[:2] == ["distgraph", "profile"]
    said = {}
    for program, *args in commands:
        assert program == "distgraph"
        done = subprocess.run(
            [sys.executable, "-m", "distgraph", *args],
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said[args[0]] = done.stdout
    assert list(said) == ["plan", "forecast", "check", "run"]
    plan = Plan.load(tmp_path / "plan.json")
    assert said["plan"] == f"{plan}\n"
    assert said["check"].rstrip().endswith("partitioned == serial")
    first, last = re.search(r"loss (\S+) -> (\S+)", said["run"]).groups()
    assert float(last) < float(first)
    assert f"{len(plan.ranks)} rank" in said["run"]


@pytest.mark.parametrize(
    "name",
    [
        "models/control_flow.md",
        "models/models.md",
        "parallelism/data_parallel.md",
        "running/training_safety.md",
    ],
)
def test_examples_of_pages_run(name: str) -> None:
    """Those that import what they use."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(import .*?)^```", text, re.MULTILINE | re.DOTALL)
    examples = [example for example in examples if example.startswith("import numpy")]
    assert examples
    for example in examples:
        exec(compile(example, name, "exec"), {})
