"""`distgraph plan --measure`: finalists are run, the fastest is kept, measured beside forecast."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.files.command_line import invoke
from support.plans.plan_files import plan_of

import distgraph as dg
from distgraph.engine.commands import measure_plans
from distgraph.engine.commands.measure_plans import measured_best
from distgraph.errors import RuntimeFault

SCRIPT = """
import numpy as np
import distgraph as dg
from distgraph import nn, ops, optim
x = np.ones((4, 4), np.float32)
engine = dg.Engine(nn.Linear(4, 4), lambda y, t: ops.mean((y - t) ** 2), optim.SGD(lr=0.1))
for _ in range({steps}):
    engine.run((x, x))
print("not reached")
"""


def test_the_fastest_measured_plan_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = plan_of(), replace(plan_of(), recompute=(0,)), replace(plan_of(), recompute=(1,))
    seconds = {first.digest: 0.5, second.digest: 0.3, third.digest: None}
    monkeypatch.setattr(measure_plans, "measured_seconds", lambda plan, argv, hosts: seconds[plan.digest])
    seen: list[str] = []
    best = measured_best([("a", first), ("b", second), ("c", third)], ["s.py"], watch=seen.append)
    assert best.digest == second.digest
    assert [(each.plan, each.seconds, each.forecast) for each in best.search.measured] == [
        ("b", 0.3, 0.25), ("a", 0.5, 0.25), ("c", None, 0.25)
    ]  # fmt: skip
    assert seen == ["measuring plan 1 of 3", "measuring plan 2 of 3", "measuring plan 3 of 3"]
    assert dg.Plan.parse(best.text()) == best
    assert "300 ms measured  250 ms forecast  b" in str(best)
    with pytest.raises(RuntimeFault, match="none of 1 plans ran; see the errors above"):
        measured_best([("c", third)], ["s.py"])


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_plans_are_run(tmp_path: Path) -> None:
    script, output = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(SCRIPT.format(steps=20))
    options = ["--cluster", "local", "--seconds", "0", "--measure", "2", "-o", str(output)]
    code, out = invoke("plan", *options, str(script))
    assert code == 0, out
    measured = json.loads(output.read_text())["search"]["measured"]
    assert 1 <= len(measured) <= 2
    assert all(each["seconds"] > 0 and each["forecast"] > 0 for each in measured)
    assert "not reached" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--measure", "-1"], "plan: --measure is -1 but must be"),
        (["--hosts", "a"], "plan: hosts are given but nothing is measured"),
        (
            ["--measure", "1", "--hosts", "a", "--hostfile", "b"],
            "--hosts and --hostfile both",
        ),
    ],
)
def test_bad_options(options: list[str], message: str) -> None:
    code, out = invoke("plan", *options, "train.py")
    assert (code, message in out) == (1, True), out
