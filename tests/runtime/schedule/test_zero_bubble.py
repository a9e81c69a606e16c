"""Interleaved 1F1B and ZB-H1: published bubbles and memory, equal training, tasks that are split right."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.errors import GraphError, RuntimeFault
from distgraph.ir.mesh import ProcessMesh
from distgraph.models import GPT, GPTConfig
from distgraph.models.megatron_layout import stages
from distgraph.passes.split_tasks import Parts
from distgraph.passes.task_splitting.split_backward import split_backward
from distgraph.runtime.program.build import Build
from distgraph.runtime.schedule.request_order import RequestOrder
from distgraph.runtime.schedule.simulate import simulate
from distgraph.runtime.schedule.task import Edge, Task, TaskGraph, pipeline
from distgraph.runtime.schedule.task_order import schedule
from distgraph.runtime.schedule.timeline import Timeline

SIZES = [(1, 3), (2, 4), (3, 6), (4, 8), (4, 16)]


def alive(timeline: Timeline, start: str, end: str) -> list[int]:
    """For each stage, most tasks of one kind that have started while their counterpart has not ended."""
    stage_of = {task.name: task.stage for task in timeline.graph.tasks}
    changes = [
        (run.start if run.task.startswith(start) else run.end, run.task.startswith(start), stage_of[run.task])
        for run in timeline.intervals
        if run.task.startswith((start, end))
    ]
    now, peak = Counter[int](), Counter[int]()
    for _, starts, stage in sorted(changes):  # at one moment, memory is freed first
        now[stage] += 1 if starts else -1
        peak[stage] = max(peak[stage], now[stage])
    return [peak[stage] for stage in range(timeline.graph.stages)]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_bubble_and_memory(p: int, m: int, v: int) -> None:
    graph = pipeline([(rank,) for rank in range(p)], m, chunks=v, optimize=False)
    times = {"forward": 1 / v, "backward": 2 / v}
    timeline = simulate(graph, times, policy="interleaved-1f1b")
    bubble = (p - 1) / v if m % p == 0 else p - 1
    assert timeline.makespan == pytest.approx(3 * (m + bubble))
    # Korthikanti et al. (2022), section 4.1: m L (1 + (p - 1) / (p v)) instead of m L on the first stage
    most = min(m * v, (v - 1) * p + 2 * (p - 1) + 1)
    assert alive(timeline, "forward", "backward")[0] == most


@pytest.mark.parametrize("v", [1, 2, 4])
def test_interleaved_with_any_number_of_micro_batches(v: int) -> None:
    for p in (2, 3, 5):
        for m in range(1, 14):
            graph = pipeline([(rank,) for rank in range(p)], m, chunks=v, optimize=False)
            timeline = simulate(graph, {"forward": 1.0, "backward": 2.0}, policy="interleaved-1f1b")
            assert len(timeline.intervals) == 2 * p * v * m  # no deadlock


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("forward", "backward", "weight"), [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8)])
def test_zero_bubble_h1(p: int, m: int, forward: float, backward: float, weight: float) -> None:
    graph = pipeline([(rank,) for rank in range(p)], m, weight=True, optimize=False)
    times = {"forward": forward, "backward": backward, "weight": weight}
    timeline = simulate(graph, times, policy="zb-h1")
    # Qi et al. (2024), table 1: (p - 1)(T_F + T_B - T_W), against (p - 1)(T_F + T_B + T_W) of 1F1B
    bubble = (p - 1) * (forward + backward - weight)
    assert timeline.makespan == pytest.approx(m * (forward + backward + weight) + bubble)
    assert alive(timeline, "forward", "backward") == [min(m, p - stage) for stage in range(p)]
    assert max(alive(timeline, "forward", "weight")) == min(m, p)


# programs


MESHES = [ProcessMesh.grid(0, dp=1), ProcessMesh.grid(1, dp=1)]
WIDE = [ProcessMesh.grid(0, dp=2), ProcessMesh.grid(2, dp=2)]


@cache
def tokens() -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(0).integers(0, 40, (8, 9)).astype("i4")
    return drawn[:, :-1], drawn[:, 1:]


def engine(meshes: list[ProcessMesh], policy: str, micro: int = 4) -> dg.Engine:
    model = GPT(GPTConfig(hidden=16, layers=4, heads=2, vocabulary=40, sequence=8))
    if meshes:
        stages(model, meshes)
    strategy = dg.Strategy(schedule=policy, micro_batches=micro)
    return dg.Engine(model, model.loss, optim.AdamW(3e-2, eps=1e-3, clip_norm=1.0), strategy=strategy, seed=3)


def losses(trained: dg.Engine) -> list[float]:
    return [trained.run(tokens())["loss"] for _ in range(3)]


@cache
def usual_losses() -> list[float]:
    return losses(engine([], "1f1b"))


@pytest.mark.parametrize(
    ("meshes", "policy"),
    [(MESHES, "zb-h1"), (MESHES * 2, "interleaved-1f1b"), (WIDE * 2, "interleaved-1f1b"), (WIDE, "zb-h1")],
    ids=["zb-h1", "interleaved", "dp2-interleaved", "dp2-zb-h1"],
)
def test_training_equals_one_rank(meshes: list[ProcessMesh], policy: str) -> None:
    found = losses(engine(meshes, policy))
    assert (
        found == usual_losses() if meshes[0].size == 1 else found == pytest.approx(usual_losses(), rel=1e-6)
    )


def test_zero_levels_and_recomputation_with_a_split_backward() -> None:
    model = GPT(GPTConfig(hidden=16, layers=4, heads=2, vocabulary=40, sequence=8))
    stages(model, WIDE, recompute=True)
    strategy = dg.Strategy(schedule="zb-h1", micro_batches=4, zero=3)
    trained = dg.Engine(
        model, model.loss, optim.AdamW(3e-2, eps=1e-3, clip_norm=1.0), strategy=strategy, seed=3
    )
    assert losses(trained) == pytest.approx(usual_losses(), rel=1e-6)


def built(meshes: list[ProcessMesh], policy: str) -> Build:
    trained = engine(meshes, policy)
    return trained.prepare(tokens()).build


def test_every_op_is_in_one_task_of_the_split_ones() -> None:
    before, after = built(WIDE, "1f1b").parts, built(WIDE, "zb-h1").parts
    assert sorted(ops_of(before)) == sorted(ops_of(after))
    names = {part.name for part in after.tasks}
    assert names - {part.name for part in before.tasks} == {"weight.s0", "weight.s1"}
    for part in after.tasks:
        products = [op for op in part.body if op.kind == "einsum"]
        makes = {op.result.name: {u.kind for u in after.graph.users[op.result.name]} for op in products}
        summed = [name for name, users in makes.items() if users == {"accumulate"}]
        assert (len(summed) == len(products)) if part.kind == "weight" else not summed
    assert not any(
        op.kind == "comm.transfer" for part in after.tasks if part.kind == "weight" for op in part.body
    )
    assert {source for source, _ in after.edges if source.startswith("weight")} == {"weight.s0", "weight.s1"}


def ops_of(parts: Parts) -> list[str]:
    return [op.name for part in parts.tasks for op in part.body]


def test_a_program_without_backward_tasks_is_as_it_was() -> None:
    parts = built(MESHES, "1f1b").parts
    forward = tuple(part for part in parts.tasks if part.kind != "backward")
    alone = Parts(parts.graph, forward, (), parts.phase)
    assert split_backward(alone).tasks == forward


def test_the_forecast_knows_the_smaller_bubble() -> None:
    seconds = {}
    for policy, meshes in (("1f1b", MESHES), ("zb-h1", MESHES), ("interleaved-1f1b", MESHES * 2)):
        model = GPT(GPTConfig(hidden=512, layers=4, heads=8, vocabulary=100, sequence=512))
        stages(model, meshes)
        strategy = dg.Strategy(schedule=policy, micro_batches=2)
        trained = dg.Engine(model, model.loss, optim.SGD(0.1), strategy=strategy, cluster="dgx_a100_pod")
        trained.prepare((np.empty((8, 512), "i4"), np.empty((8, 512), "i4")))
        seconds[policy] = trained.forecast().step_seconds
    assert max(seconds["zb-h1"], seconds["interleaved-1f1b"]) < 0.93 * seconds["1f1b"]


SHARED = [ProcessMesh.grid(0, dp=2), ProcessMesh.grid(1, dp=2)]


@pytest.mark.parametrize("policy", ["zb-h1", "zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize("stages", [[(0, 1), (1, 2)], [(0, 1, 2, 3), (1, 2)], [(0, 1), (1, 2), (2, 0)]])
def test_stages_that_share_ranks_follow_their_tables(policy: str, stages: list[tuple[int, ...]]) -> None:
    """With any number of micro-batches, so that a short last batch gets the verdict of the others."""
    for m in range(1, 9):
        graph = pipeline(stages, m, weight=policy != "interleaved-1f1b")
        apart = pipeline([(stage,) for stage in range(len(stages))], m, weight=policy != "interleaved-1f1b")
        shared, usual = schedule(graph, policy), schedule(apart, policy)
        for stage, ranks in enumerate(stages):
            for rank in ranks:
                of_stage = [step for step in shared.order(rank) if f".s{stage}" in step[0]]
                assert of_stage == list(usual.order(stage))


@pytest.mark.parametrize(
    ("meshes", "policy"),
    [(SHARED, "zb-h1"), (SHARED, "zb-v"), ([*SHARED, SHARED[0]], "zb-v"), (SHARED * 2, "interleaved-1f1b")],
)
def test_training_on_stages_that_share_ranks(meshes: list[ProcessMesh], policy: str) -> None:
    """Also with a short last batch, which has one micro-batch."""
    trained, serial = engine(meshes, policy, 2), engine([], "1f1b", 2)
    inputs, targets = tokens()
    batch = (inputs[:5], targets[:5])
    results = [each.fit(batch, batch_size=4, epochs=2, progress=False).losses for each in (trained, serial)]
    assert results[0] == pytest.approx(results[1], rel=1e-6)


class Supervised(nn.Module):
    """Blocks with a head behind the second one and one behind the last."""

    def __init__(self, meshes: list[ProcessMesh]) -> None:
        self.blocks = [nn.Linear(6, 6, dtype="f64") for _ in range(4)]
        self.heads = [nn.Linear(6, 3, dtype="f64") for _ in range(2)]
        self.meshes = meshes

    def forward(self, x: dg.Tensor) -> dict[str, dg.Tensor]:
        outputs = {}
        for number, (block, mesh) in enumerate(zip(self.blocks, self.meshes, strict=True)):
            with dg.on(mesh):
                x = x + ops.tanh(block(x))
                if number % 2:
                    outputs[str(number)] = self.heads[number // 2](x)
        return outputs


def both_losses(outputs: dict[str, dg.Tensor], labels: dg.Tensor) -> dg.Tensor:
    return nn.CrossEntropy()(outputs["3"], labels) + 0.3 * nn.CrossEntropy()(outputs["1"], labels)


def supervised(meshes: list[ProcessMesh], policy: str) -> list[float]:
    random = np.random.default_rng(0)
    data = random.normal(size=(16, 6)), random.integers(0, 3, 16)
    strategy = dg.Strategy(schedule=policy, micro_batches=4)
    trained = dg.Engine(Supervised(meshes), both_losses, optim.SGD(lr=0.1), strategy=strategy)
    return trained.fit(data, batch_size=8, progress=False).losses


@pytest.mark.parametrize(
    ("order", "policy"),
    [
        ((0, 0, 1, 1), "zb-h1"),
        ((0, 1, 1, 0), "zb-v"),
        ((0, 1, 2, 3), "zb-v"),
        ((0, 0, 1, 2), "interleaved-1f1b"),
        ((0, 0, 1, 1), "1f1b"),
    ],
)
def test_a_loss_of_a_stage_in_the_middle_does_not_lead_back(order: tuple[int, ...], policy: str) -> None:
    meshes = [ProcessMesh.grid(first, dp=1) for first in order]
    serial = supervised([ProcessMesh.grid(dp=1)] * 4, "1f1b")
    assert supervised(meshes, policy) == pytest.approx(serial, rel=1e-12)


def test_gradients_of_a_middle_chunk_alone_are_refused_under_interleaving() -> None:
    meshes = [ProcessMesh.grid(first, dp=1) for first in (0, 1, 0, 1)]
    with pytest.raises(RuntimeFault, match=r"2 chunks on stage 1 but 3 backward tasks: .* auxiliary loss"):
        supervised(meshes, "interleaved-1f1b")


def test_stages_with_different_numbers_of_chunks_are_refused() -> None:
    build = built([MESHES[0], MESHES[1], MESHES[0]], "1f1b")
    with pytest.raises(GraphError, match=r"2 forward tasks on stage 0 but 1 .* on stage 1; let the pipeline"):
        schedule(build.task_graph, "interleaved-1f1b")


def test_zero_bubble_on_a_stage_that_is_reached_again_is_refused() -> None:
    build = built(MESHES * 2, "1f1b")
    with pytest.raises(
        GraphError, match=r"zb-h1: a micro-batch comes back to stage 0, but .* or use schedule"
    ):
        schedule(build.task_graph, "zb-h1")


def test_chunks_without_a_backward_part_are_refused() -> None:
    graph = pipeline([(0,), (1,)], 2, chunks=2, optimize=False)
    ends = {task.name for task in graph.tasks} - {edge.source for edge in graph.edges}
    tasks = tuple(task for task in graph.tasks if task.name not in ends)
    edges = tuple(edge for edge in graph.edges if edge.target not in ends)
    with pytest.raises(GraphError, match="2 chunks on stage 0 but a backward part for 1 of them on stage 0"):
        schedule(TaskGraph(tasks, edges, 2), "interleaved-1f1b")


def test_a_table_without_weight_tasks_is_refused() -> None:
    task = Task("weight.s0", "weight", 0, (0,), True)
    graph = pipeline([(0,)], 2)
    more = TaskGraph((*graph.tasks, task), (*graph.edges, Edge("backward.s0", task.name)), 2)
    with pytest.raises(GraphError, match="has no weight of micro-batch 0 on stage 0"):
        simulate(more, policy="interleaved-1f1b")


def with_tasks_that_run_once(graph: TaskGraph, rng: np.random.Generator) -> TaskGraph:
    """The graph with some loads, and tasks behind micro-batches, that read and are read at random."""
    tasks, edges = list(graph.tasks), list(graph.edges)
    last = {task.stage: task.name for task in graph.tasks if task.per_micro}
    for stage in range(graph.stages):
        ranks = next(task.ranks for task in graph.tasks if task.stage == stage)
        for kind, read in (("load", "forward.s"), ("sync", "optimize.s")):
            if rng.random() < 0.6:
                tasks.append(Task(f"{kind}.s{stage}", kind, stage, ranks, False))
                to = f"{read}{rng.choice([stage, stage, 0])}"
                edges.append(Edge(f"{kind}.s{stage}", to if rng.random() < 0.5 else f"optimize.s{stage}"))
                if kind == "sync" and rng.random() < 0.8:
                    edges.append(Edge(last[rng.choice([stage, 0])], f"sync.s{stage}"))
    return TaskGraph(tuple(tasks), tuple(edges), graph.micro_batches)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("policy", ["zb-h1", "interleaved-1f1b"])
def test_an_order_that_a_table_forces_is_that_of_the_actors(
    seed: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    p, m = int(rng.integers(1, 5)), int(rng.integers(1, 9))
    chunks = 1 if policy == "zb-h1" else int(rng.integers(1, 4))
    graph = pipeline([(2 * s, 2 * s + 1) for s in range(p)], m, chunks=chunks, weight=policy == "zb-h1")
    graph = with_tasks_that_run_once(graph, rng)
    forced = simulate(graph, policy=policy)
    monkeypatch.setattr(RequestOrder, "forced", lambda self: None)
    simulated = simulate(graph, policy=policy)
    assert forced.by_column() == simulated.by_column()


def test_tables_force_the_order_of_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distgraph.runtime.schedule.simulate._SimulatedClock.run", lambda self: 1 / 0)
    simulate(pipeline([(0,), (1,)], 4, weight=True), policy="zb-h1")
    simulate(pipeline([(0,), (1,)], 4, chunks=2), policy="interleaved-1f1b")
    with pytest.raises(ZeroDivisionError):
        simulate(pipeline([(0,), (1,)], 4), policy="1f1b")
