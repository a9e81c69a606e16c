"""The simulated makespan of unequal stages is that of the runtime's schedule; the closed form is not."""

from __future__ import annotations

import random

import pytest

from distgraph.passes.search.inter_op.schedule_costs import makespan, simulated_makespan
from distgraph.plan.pipeline_schedules import GPIPE, ONE_F_ONE_B, ZB_H1, SchedulePolicy
from distgraph.runtime.schedule.simulate import simulate
from distgraph.runtime.schedule.task import pipeline


def by_the_runtime(
    policy: SchedulePolicy, forward: list[float], backward: list[float], micro_batches: int
) -> float:
    graph = pipeline([(stage,) for stage in range(len(forward))], micro_batches, optimize=False)
    seconds = {
        task.name: {"forward": forward, "backward": backward}[task.kind][task.stage] for task in graph.tasks
    }
    return simulate(graph, seconds, policy=policy).makespan


@pytest.mark.parametrize("policy", [ONE_F_ONE_B, GPIPE], ids=lambda policy: policy.name)
def test_the_simulation_is_that_of_the_runtime(policy: SchedulePolicy) -> None:
    choose = random.Random(0)
    for _ in range(40):
        stages, micro_batches = choose.randint(1, 5), choose.choice([1, 2, 3, 5, 8, 24])
        forward = [choose.uniform(0.5, 2.0) for _ in range(stages)]
        backward = [choose.uniform(0.5, 3.0) for _ in range(stages)]
        expected = by_the_runtime(policy, forward, backward, micro_batches)
        found = simulated_makespan(policy, forward, backward, micro_batches)
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (24, 30)])
def test_zero_bubble_h1_fills_in_a_third_of_the_time(stages: int, micro_batches: int) -> None:
    found = simulated_makespan(ZB_H1, [1.0] * stages, [2.0] * stages, micro_batches)
    # Qi et al. (2024), table 1, with parts of one length: (p - 1)(T_F + T_B - T_W)
    assert found == pytest.approx(3.0 * micro_batches + stages - 1)


def test_many_micro_batches_are_extrapolated_exactly() -> None:
    forward, backward = [1.0, 2.0, 1.0], [3.0, 1.0, 1.0]
    expected = by_the_runtime(ONE_F_ONE_B, forward, backward, 400)
    assert simulated_makespan(ONE_F_ONE_B, forward, backward, 400) == pytest.approx(expected, rel=1e-9)


def test_few_unequal_stages_do_not_wait_for_every_transfer() -> None:
    """1F1B keeps two micro-batches in flight on the first of two stages: a fast one hides its transfers."""
    forward, backward, transfer = [1.0, 3.0], [1.0, 3.0], [0.5]
    assert simulated_makespan(ONE_F_ONE_B, forward, backward, 8, transfer) == pytest.approx(2 + 8 * 6 + 1.0)
    period_with_transfer = makespan(ONE_F_ONE_B, [1.5, 3.0], [1.5, 3.0], 8)
    assert period_with_transfer == pytest.approx(3 + 8 * 6)
    forward, backward = [3.0, 2.0], [3.0, 2.0]
    assert simulated_makespan(ONE_F_ONE_B, forward, backward, 8, transfer) < 8 * (6 + 2 * 0.5)


@pytest.mark.parametrize("policy", [ONE_F_ONE_B, GPIPE], ids=lambda policy: policy.name)
@pytest.mark.parametrize("stages", [8, 24])
def test_pipelines_of_many_equal_stages_are_not_followed(policy: SchedulePolicy, stages: int) -> None:
    forward, backward = [1.0] * stages, [2.0] * stages
    expected = by_the_runtime(policy, forward, backward, 2 * stages)
    assert simulated_makespan(policy, forward, backward, 2 * stages) == pytest.approx(expected, rel=1e-9)


def test_of_many_unequal_stages_the_estimate_is_near_the_runtime() -> None:
    choose = random.Random(0)
    for _ in range(10):
        stages = choose.randint(6, 10)
        forward = [choose.uniform(0.8, 1.2) for _ in range(stages)]
        backward = [2 * seconds for seconds in forward]
        expected = by_the_runtime(ONE_F_ONE_B, forward, backward, 32)
        found = simulated_makespan(ONE_F_ONE_B, forward, backward, 32)
        assert found == pytest.approx(expected, rel=0.05)
