"""Schedules that the search chooses, such as GPipe where messages are slow and activations fit."""

from __future__ import annotations

from typing import Any

import pytest
from support.files.clusters import cluster_of
from support.programs.searched import Program, slow
from support.search.distant_machines import WIDE, Wide, far

from distgraph.errors import GraphError
from distgraph.models import GPT, GPTConfig
from distgraph.plan.constraints import SearchConstraints
from distgraph.plan.plan import Plan

pytestmark = pytest.mark.timeout(600)


class Pairs(Wide):
    """The same, of which no batch may have an odd number of samples."""

    def forward(self, x: Any) -> Any:
        if x.shape[0] % 2:
            raise GraphError(f"a batch of {x.shape[0]} samples has no pairs")
        return super().forward(x)


def in_seconds(plan: Plan) -> float:
    """A step by forecast."""
    assert plan.forecast is not None
    return plan.forecast.seconds


def test_gpipe_where_messages_take_long() -> None:
    plan = WIDE.search(far("20 us"))
    assert plan.schedule == "gpipe"
    assert len(plan.stages) == 2
    assert plan.decisions["schedule"].runner_up == "eager-1f1b"
    usual, eager = (
        WIDE.search(far("20 us"), constraints=SearchConstraints(schedule=name, stages=2))
        for name in ("1f1b", "eager-1f1b")
    )
    assert (usual.schedule, eager.schedule) == ("1f1b", "eager-1f1b")
    assert in_seconds(plan) <= in_seconds(eager) < in_seconds(usual)
    # every message of 1F1B but the first is waited for on its way there and back
    assert in_seconds(usual) > in_seconds(plan) + 2 * 20e-6


def test_a_plan_with_gpipe_is_forecast_as_found() -> None:
    cluster = far("20 us")
    plan = Plan.parse(WIDE.search(cluster).text())
    engine = WIDE.engine(plan=plan, cluster=cluster)
    engine.prepare(WIDE.data(1))
    assert plan.schedule == "gpipe"
    assert engine.forecast().step_seconds == in_seconds(plan)


def test_a_schedule_that_splits_the_backward_part_is_found_unasked() -> None:
    document = slow(1, 1, 1, 1)
    for machine in document["machines"]:
        machine["nics"]["latency"] = "100 ns"
    given = SearchConstraints(stages=4, micro_batches=4)
    plan = WIDE.search(cluster_of(document), constraints=given)  # checked against one rank
    assert plan.schedule == "zb-h1"
    assert plan.decisions["schedule"].runner_up in ("1f1b", "eager-1f1b", "gpipe")
    assert in_seconds(plan) < (plan.decisions["schedule"].runner_up_seconds or 0.0)
    again = Plan.parse(plan.text())
    assert again == plan
    assert "zb-h1" in plan.explain("schedule")
    engine = WIDE.engine(plan=again, cluster=cluster_of(document))
    engine.prepare(WIDE.data(1))
    assert engine.forecast().step_seconds == in_seconds(plan)


def long_sequences() -> GPT:
    """Blocks in which attention, whose backward part cannot be put off, takes longer than the parameters."""
    return GPT(GPTConfig(hidden=8, layers=12, heads=2, vocabulary=12, sequence=128, dtype="f64"))


def test_interleaved_stages_are_found_unasked() -> None:
    """Two machines get every other part of the blocks; uniform pipelines with one part each are slower."""
    document = slow(1, 1)
    for machine in document["machines"]:
        machine["nics"]["latency"] = "10 us"
    program = Program(long_sequences, (128,), (128,), tokens=True, batch=4)
    given = SearchConstraints(micro_batches=4)
    plan = program.search(cluster_of(document), constraints=given, processes=1)  # checked against one rank
    assert plan.schedule == "interleaved-1f1b"
    assert [stage.devices for stage in plan.stages] == [(0,), (1,), (0,), (1,)]
    baselines = [seconds for seconds in plan.baselines.values() if not isinstance(seconds, str)]
    assert in_seconds(plan) < min(baselines)


def test_micro_batches_that_the_model_refuses_are_left_out() -> None:
    plan = Program(Pairs, (96,), batch=16).search(far("20 us"))
    assert plan.micro_batches <= 8
