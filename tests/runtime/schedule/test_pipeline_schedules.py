"""Schedules declared outside the package: registered, trained with, searched, planned and exported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.programs.plan_cases import CASES, Case
from support.programs.task_graphs import plain

import distgraph as dg
from distgraph.errors import GraphError, ShardingError
from distgraph.plan import pipeline_schedules
from distgraph.plan.export.torch_source import torch_schedules
from distgraph.plan.pipeline_schedules import (
    ONE_F_ONE_B,
    Action,
    SchedulePolicy,
    StageTask,
    Table,
    register_schedule,
    schedule_names,
    schedule_policy,
    searched_schedules,
)
from distgraph.plan.plan import Plan
from distgraph.runtime.schedule.task import pipeline
from distgraph.runtime.schedule.task_order import schedule


def early_forwards(stages: int, micro_batches: int) -> Table:
    """1F1B with one more forward on every stage before its first backward."""
    table = {}
    for stage in range(stages):
        ahead = min(micro_batches, stages - stage + 1)
        order = [Action("forward", stage, number) for number in range(ahead)]
        for number in range(micro_batches):
            order.append(Action("backward", stage, number))
            if ahead + number < micro_batches:
                order.append(Action("forward", stage, ahead + number))
        table |= {(stage, time): action for time, action in enumerate(order)}
    return table


def early_credits(source: StageTask, target: StageTask, stages: int, turns: bool) -> int | None:
    return 2 * (stages - source.stage) - 1 if turns else None


EARLY_TABLE = SchedulePolicy("early-table", table=early_forwards, export_names={"torch": "ScheduleEarly"})
EARLY_CREDITS = replace(
    ONE_F_ONE_B,
    name="early-credits",
    credits=early_credits,
    in_flight=lambda stage, stages, micro_batches: min(micro_batches, 2 * (stages - stage) - 1),
    export_names={},
)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_schedules, "_POLICIES", dict(pipeline_schedules._POLICIES))
    register_schedule(EARLY_TABLE)
    register_schedule(EARLY_CREDITS)


def trained(schedule: str) -> tuple[dg.Engine, list[float]]:
    case: Case = CASES["pipeline"]
    case = replace(case, strategy=replace(case.strategy, micro_batches=4, schedule=schedule))
    engine = case.engine(annotated=True)
    engine.fit(case.data(16), epochs=2, batch_size=case.batch, progress=False)
    return engine, list(engine.history.losses)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["early-table", "early-credits"])
def test_training_with_a_registered_schedule(name: str) -> None:
    engine, losses = trained(name)
    _, expected = trained("1f1b")
    np.testing.assert_array_equal(losses, expected)
    plan = engine.plan.portable
    assert plan.schedule == name
    assert Plan.parse(plan.text()) == plan


@pytest.mark.usefixtures("registered")
def test_a_program_follows_the_table_of_its_schedule() -> None:
    engine, _ = trained("early-table")
    built = engine.plan.build
    first, second = (
        [
            f"{task.split('.')[0][0]}{micro}"
            for task, micro in order
            if task.startswith(("forward", "backward"))
        ]
        for order in built.schedule.orders().values()
    )
    assert first == ["f0", "f1", "f2", "b0", "f3", "b1", "b2", "b3"]
    assert second == ["f0", "f1", "b0", "f2", "b1", "f3", "b2", "b3"]


def test_a_table_sets_the_order_of_every_rank() -> None:
    text = str(schedule(pipeline([(0,), (1, 2)], 4, optimize=False), EARLY_TABLE))
    assert text.splitlines()[3:] == [
        "F0 -",
        "F1 F0",
        "F2 F1",
        "-  B0",
        "B0 F2",
        "F3 B1",
        "B1 F3",
        "-  B2",
        "B2 B3",
        "B3 -",
    ]


def test_tables_that_do_not_fit_the_program() -> None:
    def doubled(stages: int, micro_batches: int) -> Table:
        return {**early_forwards(stages, micro_batches), (0, 99): Action("forward", 0, 1)}

    def late(stages: int, micro_batches: int) -> Table:
        return early_forwards(stages, micro_batches - 1)

    with pytest.raises(GraphError, match="has forward of micro-batch 1 on stage 0 2 times; keep one"):
        schedule(plain(2, 3), SchedulePolicy("doubled", table=doubled))
    with pytest.raises(GraphError, match="has no forward of micro-batch 2 on stage 0; add it"):
        schedule(plain(2, 3), SchedulePolicy("late", table=late))


def test_search_and_exports_take_a_registered_schedule_as_it_is_declared(
    request: pytest.FixtureRequest,
) -> None:
    searched, exported = searched_schedules(), torch_schedules()
    assert {"1f1b", "gpipe"} <= set(searched)
    assert exported.items() >= {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"}.items()
    request.getfixturevalue("registered")
    assert searched_schedules() == (*searched, "early-credits")
    assert torch_schedules() == {**exported, "early-table": "ScheduleEarly"}
    assert [schedule_policy("early-credits").in_flight(stage, 3, 8) for stage in range(3)] == [5, 3, 1]


@pytest.mark.usefixtures("registered")
def test_names_of_schedules_are_checked() -> None:
    with pytest.raises(GraphError, match="schedule 'early-table' is declared twice"):
        register_schedule(EARLY_TABLE)
    with pytest.raises(GraphError, match="needs a name without blanks"):
        register_schedule(SchedulePolicy("early table"))
    assert schedule_names()[-2:] == ("early-table", "early-credits")
    with pytest.raises(ShardingError, match=f"the schedules are {', '.join(schedule_names())}"):
        dg.Strategy(schedule="late")
