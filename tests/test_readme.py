"""The README is true: its example runs as it stands, and the files it names are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("python")
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


def test_files_that_it_names_are_there() -> None:
    linked = re.findall(r"\]\(([\w./]+)\)", README)
    run = [word for block in blocks("sh") for word in block.split() if word.endswith(".py")]
    assert linked
    assert run
    for path in (*linked, *run):
        assert (ROOT / path).exists(), path
