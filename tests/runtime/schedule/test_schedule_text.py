"""Schedules given as text: read, verified, printed, trained with, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs.equivalence import gathered
from typer.testing import CliRunner

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.cli.application import app
from distgraph.errors import DistGraphError, GraphError, ShardingError
from distgraph.plan import pipeline_schedules
from distgraph.plan.pipeline_schedules import Action, schedule_names
from distgraph.plan.schedule_text import given_schedule, parse_schedule
from distgraph.runtime.schedule.table_report import known_table, schedule_report
from distgraph.runtime.schedule.task import pipeline
from distgraph.runtime.schedule.task_order import schedule

WIDTH = 6
EAGER = """
# both micro-batches forward on the first stage before the second begins
ahead n=2 m=3
F0 -
F1 -
F2 F0
-  B0
B0 F1
-  B1
B1 F2
-  B2
B2 -
"""


@pytest.fixture(autouse=True)
def _own_schedules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(pipeline_schedules, "_POLICIES", dict(pipeline_schedules._POLICIES))
        yield


class Net(nn.Module):
    """Four layers on the given meshes, in order."""

    def __init__(self, meshes: list[dg.ProcessMesh]) -> None:
        self.layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.meshes = [meshes[n * len(meshes) // 4] for n in range(4)]

    def forward(self, x: Any) -> Any:
        for layer, mesh in zip(self.layers, self.meshes, strict=True):
            with dg.on(mesh):
                x = ops.tanh(layer(x))
        return x


FIRST, SECOND = dg.ProcessMesh.grid(0, one=1), dg.ProcessMesh.grid(1, one=1)


def trained(given: str, micro: int | None = None, visits: int = 1) -> tuple[list[float], dict[str, Any], Any]:
    rng = np.random.default_rng(0)
    batch = [rng.normal(size=(12, WIDTH)).astype("f4") for _ in range(2)]
    strategy = dg.Strategy(schedule=given, micro_batches=micro)
    model = Net([FIRST, SECOND] * visits)
    engine = dg.Engine(model, nn.MeanSquaredError(), optim.SGD(lr=0.1), strategy=strategy, seed=3)
    with closing(engine):
        losses = [engine.run(batch)["loss"] for _ in range(2)]
        losses.append(engine.run([x[:8] for x in batch])["loss"])  # of fewer micro-batches, if they divide
        (compiled, *_) = engine._session.programs.values()
        return losses, gathered(engine), compiled.build.schedule


def test_a_table_is_read_and_printed() -> None:
    table = parse_schedule(EAGER)
    assert (table.name, table.stages, table.micro_batches, table.chunks) == ("ahead", 2, 3, 1)
    assert table.actions[0, 2] == Action("forward", 0, 2)
    assert table.actions[1, 3] == Action("backward", 1, 0)
    assert [table.in_flight(stage, 2, 3) for stage in (0, 1)] == [3, 1]
    assert parse_schedule(str(table)) == table
    assert not table.splits_backward


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "zb-v"])
def test_the_table_of_every_schedule_can_be_edited(name: str) -> None:
    table = known_table(name, 2, 4)
    text = schedule_report(f"{name} n=2 m=4", "x")
    assert parse_schedule(text) == table
    assert schedule_report(text, "x") == text


def test_a_table_trains_as_other_schedules_do() -> None:
    losses, tensors, order = trained(EAGER)
    expected, values, _ = trained("1f1b", 3)
    assert losses == expected
    for name, value in values.items():
        np.testing.assert_array_equal(tensors[name], value, name)
    first = [(step.task.split(".")[0], step.micro) for step in order.columns[0].steps]
    assert [step for step in first if step[0] == "forward"][:3] == [("forward", n) for n in range(3)]
    assert first.index(("forward", 2)) < first.index(("backward", 0))


@pytest.mark.parametrize(("known", "visits"), [("zb-h1", 1), ("interleaved-1f1b", 2)])
def test_tables_with_weight_parts_and_several_visits(known: str, visits: int) -> None:
    text = str(known_table(known, 2, 4)).replace(known, "edited", 1)
    losses, _, _ = trained(text, visits=visits)
    assert losses == trained(known, 4, visits)[0]


def test_a_file_is_read_and_may_be_given_again(tmp_path: Path) -> None:
    path = tmp_path / "ahead.txt"
    path.write_text(EAGER)
    strategy = dg.Strategy(schedule=str(path))
    assert (strategy.schedule, strategy.micro_batches) == ("ahead", 3)
    assert dg.Strategy(schedule=EAGER) == strategy == dg.Strategy(schedule="ahead")
    with pytest.raises(ShardingError, match="the name 'ahead' is that of another schedule; choose another"):
        dg.Strategy(schedule=EAGER.replace("F2 F0", "-  F0").replace("B0 F1", "F2 -\nB0 F1"))
    with pytest.raises(ShardingError, match="the name '1f1b' is that of another schedule"):
        dg.Strategy(schedule=EAGER.replace("ahead", "1f1b"))


LINES = EAGER.strip().splitlines()[1:]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["ahead n=2"], "expected a first line such as \"mine n=2 m=4\", got 'ahead n=2'"),
        ([], "expected a first line such as .*, got ''"),
        ([*LINES, "F0"], "has 1 columns but n=2 stages; give each stage a cell"),
        ([*LINES, "X0 -"], "expected a cell such as F0, B0, W0, F0.1, F0:mlp or \"-\", got 'X0'"),
        ([*LINES, "B2 -"], "B2 on stage 0 stands at time 8 and at time 9; keep one"),
        (LINES[:-1], "B2 on stage 0 is missing; add it to column 0"),
        ([*LINES, "F3 -"], "F3 on stage 0 but the first line says m=3; micro-batches are numbered from 0"),
        ([*LINES, "W0 -"], "W1 on stage 0 is missing"),
        ([*LINES, "F0.1 -"], r"F0\.1 on stage 1 is missing|F1\.1 on stage 0 is missing"),
        (
            [LINES[0], "F0 F0", "F1 -", "F2 -", *LINES[4:]],
            "F0 on stage 1 stands at time 0 but needs F0 on stage 0, which stands at time 0; move it below",
        ),
        (
            [*LINES[:4], "B0 B0", "-  F1", *LINES[6:]],
            "B0 on stage 0 stands at time 3 but needs B0 on stage 1, which stands at time 3",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        parse_schedule("\n".join(lines))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": EAGER, "micro_batches": 4}, "micro_batches of Strategy is 4 but the table of .* has 3"),
        (
            {"schedule": EAGER, "mode": "auto"},
            "table ahead for 2 stages and 3 micro-batches, but mode 'auto'",
        ),
        ({"schedule": 3}, "schedule of Strategy is 3 but must be text or None"),
        (
            {"schedule": "no\0path"},
            "does not exist; the schedules are 1f1b.* or the path of a file|file with",
        ),
        ({"schedule": "late"}, "schedule 'late' of Strategy does not exist; the schedules are 1f1b"),
    ],
)
def test_a_strategy_that_makes_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        dg.Strategy(**options)


def test_a_pipeline_that_comes_back_has_no_table_as_text() -> None:
    with pytest.raises(
        GraphError, match="schedule zb-v: its pipeline comes back through the stages, which no"
    ):
        schedule_report("zb-v n=2 m=4", "x")


def test_another_number_of_stages_is_refused() -> None:
    name = given_schedule(EAGER)
    assert schedule(pipeline([(0,), (1,)], 2, optimize=False), name).micro_batches == 2
    for stages, micro in ((3, 3), (2, 4)):
        graph = pipeline([(n,) for n in range(stages)], micro, optimize=False)
        with pytest.raises(DistGraphError, match=f"is for 2 stages and 3 .*the program has {stages} stages"):
            schedule(graph, name)


def test_inspect_verifies_and_prints(tmp_path: Path) -> None:
    path = tmp_path / "ahead.txt"
    path.write_text(EAGER)
    found = CliRunner().invoke(app, ["inspect", str(path)])
    assert found.exit_code == 0
    assert found.output.splitlines()[0] == "ahead n=2 m=3"
    assert "# stage 0 holds up to 3 micro-batches" in found.output
    path.write_text(EAGER.replace("B2 -", "-  -"))
    with pytest.raises(GraphError, match=r"ahead\.txt: B2 on stage 0 is missing"):
        CliRunner().invoke(app, ["inspect", str(path)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zb-h9 n=2 m=2", "standard input: schedule 'zb-h9' does not exist; it is one of 1f1b, gpipe, "),
        ("zb-h1 n=0 m=2", "got 'zb-h1 n=0 m=2'; give a name, and the numbers of stages and micro-batches"),
        ("zb-h1 n=a m=2", "got 'zb-h1 n=a m=2'; give a name"),
        ("zb-h1 n=2", "got 'zb-h1 n=2'; give a name"),
    ],
)
def test_inspect_explains_a_first_line_that_does_not_fit(text: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        CliRunner().invoke(app, ["inspect", "-"], input=text, catch_exceptions=False)
