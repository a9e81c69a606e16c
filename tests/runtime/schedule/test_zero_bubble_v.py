"""ZB-V: the published bubble and memory, equal training, and the pipelines that are refused."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

import distgraph as dg
from distgraph import optim
from distgraph.errors import GraphError, ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.models import GPT, GPTConfig
from distgraph.models.megatron_layout import stages
from distgraph.plan.pipeline_schedules import ZB_V
from distgraph.plan.zero_bubble_v import zero_bubble_v
from distgraph.runtime.schedule.simulate import simulate
from distgraph.runtime.schedule.task import Edge, Task, TaskGraph, pipeline
from distgraph.runtime.schedule.task_order import schedule

FIRST, SECOND = ProcessMesh.grid(0, one=1), ProcessMesh.grid(1, one=1)
THIRD = ProcessMesh.grid(2, one=1)
SIZES = [(2, 4), (3, 6), (4, 8), (4, 16), (8, 16)]


def folded(p: int, m: int) -> TaskGraph:
    """A pipeline of p stages with two chunks on each but the last, with weight tasks."""
    way = [(s, 0) for s in range(p)] + [(s, 1) for s in reversed(range(p - 1))]
    tasks = [
        Task(f"{kind}.s{s}.c{c}", kind, s, (s,), True)
        for kind in ("forward", "backward", "weight")
        for s, c in way
    ]
    edges = []
    for (s, c), (t, d) in pairwise(way):
        edges.append(Edge(f"forward.s{s}.c{c}", f"forward.s{t}.c{d}"))
        edges.append(Edge(f"backward.s{t}.c{d}", f"backward.s{s}.c{c}"))
    for s, c in way:
        edges.append(Edge(f"forward.s{s}.c{c}", f"backward.s{s}.c{c}"))
        edges.append(Edge(f"backward.s{s}.c{c}", f"weight.s{s}.c{c}"))
    return TaskGraph(tuple(tasks), tuple(edges), m)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_and_memory(p: int, m: int) -> None:
    """Of p - 1 chunks: a sixth of the 6 (p - 1) of 1F1B. No stage holds more than its first one: p."""
    graph = folded(p, m)
    times = {task.name: 2.0 if task.stage == p - 1 else 1.0 for task in graph.tasks}
    timeline = simulate(graph, times, policy="zb-v")
    assert timeline.makespan == 6 * m + p - 1
    for stage in range(p):
        held = most = 0.0
        changes = [(run.start, run.task) for run in timeline.intervals if f".s{stage}." in run.task]
        for _, task in sorted(changes):
            size = times[task] / 2
            held += {"forward": size, "backward": 0.0, "weight": -size}[task.split(".")[0]]
            most = max(most, held)
        assert most <= p
        assert most <= ZB_V.in_flight(stage, p, m)


@pytest.mark.parametrize("p", [2, 3, 5])
@pytest.mark.parametrize("m", [1, 2, 3, 7])
def test_any_number_of_micro_batches(p: int, m: int) -> None:
    table = zero_bubble_v(p, m)
    assert len(set(table.values())) == len(table) == 3 * m * (2 * p - 1)
    schedule(folded(p, m), "zb-v")


@cache
def losses(policy: str, order: tuple[ProcessMesh, ...], micro: int = 4) -> list[float]:
    model = GPT(GPTConfig(hidden=16, layers=4, heads=2, vocabulary=40, sequence=8))
    if order:
        stages(model, list(order))
    drawn = np.random.default_rng(0).integers(0, 40, (8, 9)).astype("i4")
    strategy = dg.Strategy(schedule=policy, micro_batches=micro)
    optimizer = optim.AdamW(3e-2, eps=1e-3, clip_norm=1.0)
    engine = dg.Engine(model, model.loss, optimizer, strategy=strategy, seed=3)
    return [engine.run((drawn[:, :-1], drawn[:, 1:]))["loss"] for _ in range(3)]


@pytest.mark.parametrize(
    "order",
    [(FIRST, SECOND, SECOND, FIRST), (FIRST, SECOND, THIRD, SECOND, FIRST), (FIRST, SECOND)],
    ids=["two stages", "three stages", "without return"],
)
def test_training_equals_one_rank(order: tuple[ProcessMesh, ...]) -> None:
    assert losses("zb-v", order) == losses("1f1b", ())


def test_stages_of_two_ranks() -> None:
    wide = (ProcessMesh.grid(0, dp=2), ProcessMesh.grid(2, dp=2))
    found = losses("zb-v", (*wide, wide[0]), 2)
    assert found == pytest.approx(losses("1f1b", (), 2), rel=1e-6)


def test_a_pipeline_that_begins_again_is_refused() -> None:
    graph = pipeline([(0,), (1,)], 2, chunks=2, weight=True, optimize=False)
    message = "zb-v: a micro-batch has 2 forward tasks on stage 1 but 1 in a pipeline that goes down"
    with pytest.raises(GraphError, match=message):
        schedule(graph, "zb-v")


def test_the_search_makes_no_such_pipeline() -> None:
    with pytest.raises(
        ShardingError, match="schedule of Strategy is 'zb-v', for pipelines that come back up"
    ):
        dg.Strategy(mode="auto", schedule="zb-v")
