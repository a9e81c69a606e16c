"""Models with loops train as on one rank: modules in bodies, dropout, micro-batches, ZeRO, stages, plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.loops.models import CASES, batches, check, engine, grid

import distgraph as dg
from distgraph import nn, ops
from distgraph.engine import Engine
from distgraph.errors import GraphError
from distgraph.plan.strategy import Strategy


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_rank(case: str) -> None:
    check(case)


def test_a_plan_has_the_layouts_of_bodies_and_gives_the_same_program(tmp_path: Path) -> None:
    first = engine((grid(dp=2, tp=2),), Strategy())
    losses = [first.run(batch)["loss"] for batch in batches()]
    plan = first.plan.portable
    first.plan.save(tmp_path / "plan.json")
    first.close()
    again = engine((None,), Strategy(), plan=tmp_path / "plan.json")
    assert [again.run(batch)["loss"] for batch in batches()] == losses
    assert again.plan.portable.ops == plan.ops
    again.close()


def test_turns_draw_different_numbers() -> None:
    def program(x: Any) -> Any:
        return ops.scan(lambda c, v: (c, ops.dropout(v, 0.5)), None, x)[1]

    with dg.eager() as trace:
        kept = np.asarray(program(trace.input("x", np.ones((4, 64))))) > 0
    assert len({row.tobytes() for row in kept}) == 4


def test_a_forecast_grows_with_the_number_of_turns() -> None:
    seconds, flops = [], []
    for turns in (4, 8, 12):
        trained = engine((grid(dp=2, tp=2),), Strategy())
        trained.prepare((np.zeros((12, turns, 4)), np.zeros((12, 3))))
        tasks = trained.forecast(cluster="p3_16xlarge_x8").tasks.values()
        seconds.append(sum(task.last.seconds for task in tasks if task.kind != "optimize"))
        flops.append(sum(task.last.flops for task in tasks))
        trained.close()
    assert flops[2] - flops[1] == pytest.approx(flops[1] - flops[0], rel=1e-9)
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0], rel=0.01)
    assert seconds[1] > 1.3 * seconds[0]


def test_a_state_that_is_updated_in_a_body_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            self.count = nn.Buffer((4,), "f64")

        def forward(self, x: Any) -> Any:
            def turn(c: Any, v: Any) -> Any:
                self.count.update(self.count.tensor() + v[0])
                return c + v, None

            return ops.scan(turn, ops.zeros(x.shape[1:], "f64"), x)[0]

    model = Engine(Counting(), strategy=Strategy())
    with pytest.raises(GraphError, match=r"updates state %count, but a state has one new value in a step"):
        model.predict(np.ones((3, 2, 4)))
