"""Actors that run what has arrived give the bits of the recorded order, whatever the messages do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.devices.jittery import JitteryTransport, connected
from support.pipelines.branching import batch, branching_engine, row_engine
from support.pipelines.forwarding import VIEWS, Case, feeds, params, read_in_backward
from support.programs.equivalence import gathered
from support.programs.partitioned import run_partitioned, run_rank
from support.programs.rank_threads import run_ranks

import distgraph as dg
from distgraph.errors import RuntimeFault, ShardingError
from distgraph.passes.complete import complete
from distgraph.runtime.execute import process_group
from distgraph.runtime.execute.process_group import InProcessWorld, register_transport
from distgraph.runtime.execute.worker import Worker
from distgraph.runtime.program.build import build

grid = dg.ProcessMesh.grid
Orders = dict[int, list[tuple[str, int]]]


@pytest.fixture
def jitter(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Engines made after a call run on ranks whose messages take random times, drawn from its argument."""

    def register(seed: int) -> None:
        others = {name: kind for name, kind in process_group._TRANSPORTS.items() if name != "jittery"}
        monkeypatch.setattr(process_group, "_TRANSPORTS", others)
        register_transport("jittery", lambda ranks, _: InProcessWorld(ranks, lambda n: connected(n, seed)))

    return register


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Orders:
    """Rank -> the (task, micro-batch) pairs that it ran."""
    ran: Orders = defaultdict(list)
    run_task = Worker._run_task

    def run(self: Worker, name: str, m: int, *rest: Any) -> None:
        ran[self.program.rank].append((name, m))
        run_task(self, name, m, *rest)

    monkeypatch.setattr(Worker, "_run_task", run)
    return ran


def trained(
    make: Callable[[str], dg.Engine], executor: str, data: Any, steps: int = 2
) -> dict[str, np.ndarray]:
    """Losses, parameters and states after some steps."""
    engine = make(executor)
    try:
        losses = [engine.run(data)["loss"] for _ in range(steps)]
        return {"losses": np.array(losses), **gathered(engine)}
    finally:
        engine.close()


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


PIPELINES: dict[str, tuple[list[dg.ProcessMesh], str]] = {
    "1f1b": ([grid(0, a=1), grid(1, a=1), grid(2, a=1)], "1f1b"),
    "gpipe": ([grid(0, a=1), grid(1, a=1), grid(2, a=1)], "gpipe"),
    "eager-1f1b, unequal meshes": ([grid(0, dp=1), grid(1, dp=2), grid(3, tp=2)], "eager-1f1b"),
    "dp x pp": ([grid(0, dp=2), grid(2, dp=2)], "1f1b"),
    "tp x pp": ([grid(0, tp=2), grid(2, tp=2)], "1f1b"),
    "zb-h1": ([grid(0, a=1), grid(1, a=1)], "zb-h1"),
    "interleaved": ([grid(0, dp=1), grid(1, dp=1)] * 2, "interleaved-1f1b"),
    "zb-v": ([grid(0, a=1), grid(1, a=1), grid(1, a=1), grid(0, a=1)], "zb-v"),
    "one rank": ([], "1f1b"),
}


@pytest.mark.parametrize("micro", [1, 3, 8])
@pytest.mark.parametrize("name", PIPELINES)
def test_training_equals_the_recorded_order(name: str, micro: int, jitter: Callable[[int], None]) -> None:
    meshes, policy = PIPELINES[name]

    def make(executor: str) -> dg.Engine:
        return row_engine(meshes, schedule=policy, micro_batches=micro, executor=executor)

    static = trained(make, "static", batch())
    jitter(micro)
    assert_equal(trained(make, "actors", batch()), static)


@pytest.mark.parametrize(
    ("meshes", "policy"),
    [
        ([grid(0, a=1), grid(1, a=1), grid(2, a=1)], "1f1b"),
        ([grid(0, dp=2), grid(2, a=1)], "gpipe"),
        ([grid(0, a=1), grid(1, dp=2), grid(3, tp=2)], "eager-1f1b"),
    ],
    ids=["a rank for each", "one branch on the first mesh", "unequal"],
)
def test_branches_run_in_the_order_of_arrival(
    meshes: list[dg.ProcessMesh], policy: str, jitter: Callable[[int], None], orders: Orders
) -> None:
    def make(executor: str) -> dg.Engine:
        return branching_engine(meshes, schedule=policy, micro_batches=6, executor=executor)

    static = trained(make, "static", batch())
    recorded = {rank: list(order) for rank, order in orders.items()}
    for seed in range(2):
        orders.clear()
        jitter(seed)
        assert_equal(trained(make, "actors", batch()), static)
        for rank, order in orders.items():
            assert sorted(order) == sorted(recorded[rank])
        for mesh in meshes:
            assert len({tuple(orders[rank]) for rank in mesh.members}) == 1


def test_orders_differ_from_the_recorded_one(jitter: Callable[[int], None], orders: Orders) -> None:
    """Else the other tests would show nothing."""
    meshes = [grid(0, a=1), grid(1, a=1), grid(2, a=1)]

    def make(executor: str) -> dg.Engine:
        return branching_engine(meshes, schedule="eager-1f1b", micro_batches=8, executor=executor)

    trained(make, "static", batch(), 1)
    seen = {tuple(orders[0])}
    for seed in range(4):
        orders.clear()
        jitter(seed)
        trained(make, "actors", batch(), 1)
        seen.add(tuple(orders[0]))
    assert len(seen) > 1


def jittery(seed: int) -> Callable[[Any], Any]:
    return lambda transport: JitteryTransport(transport, seed, 1e-3)


def same_step(completed: Any, micro: int, policy: str, seed: int) -> None:
    """A step under actors, checked, with late messages, gives what the recorded order gives."""
    static = run_partitioned(completed, feeds(micro), params(), policy)
    actors = run_partitioned(completed, feeds(micro), params(), policy, jittery(seed), "actors")
    for found, expected in zip(actors[:2], static[:2], strict=True):
        assert found.keys() == expected.keys()
        for name, arrays in expected.items():
            np.testing.assert_array_equal(np.array(found[name]), np.array(arrays), err_msg=name)


@pytest.mark.parametrize("policy", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    ("view", "row"),
    [
        *((view, "one rank each") for view in VIEWS),
        ("twice", "1, 2 and 1 ranks"),
        ("slice", "2, 1 and 1 ranks"),
    ],
)
def test_memory_that_is_sent_on(view: str, row: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receives are posted into memory that a message is sent from."""
    monkeypatch.setenv("DISTGRAPH_CHECK", "1")
    same_step(Case(view, row, policy, 5).completed(), 5, policy, len(view))


@pytest.mark.parametrize("policy", ["1f1b", "gpipe", "eager-1f1b"])
@pytest.mark.parametrize(("sender", "receiver"), [(0, 2), (1, 2), (0, 1)])
def test_receives_that_are_posted_late(
    policy: str, sender: int, receiver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward part of one stage reads what the forward part of another makes."""
    monkeypatch.setenv("DISTGRAPH_CHECK", "1")
    graph, mesh = read_in_backward(4, sender, receiver)
    same_step(complete(graph, mesh), 7, policy, receiver)


def test_rank_that_does_not_take_part_is_reported() -> None:
    graph, mesh = read_in_backward(3, 0, 1)
    built = build(complete(graph, mesh), micro_batches=4)
    with pytest.raises(RuntimeFault, match=r"made no progress in 0.3 s") as caught:
        run_ranks(
            3,
            lambda t: t.rank != 0 and run_rank(built, t, feeds(4), params(), "actors"),
            limit=0.3,
            waiting=2,
        )
    text = str(caught.value)
    assert "rank 0 does not wait" in text
    assert "rank 1 waits for what one of its tasks needs (" in text
    assert "forward.s1 of micro-batch 0: data of micro-batch 0 from forward.s0" in text


def test_failure_of_a_rank_ends_the_others() -> None:
    graph, mesh = read_in_backward(3, 0, 1)
    built = build(complete(graph, mesh), micro_batches=4)

    def body(transport: Any) -> Any:
        if transport.rank == 2:
            raise ValueError("no memory left")
        return run_rank(built, transport, feeds(4), params(), "actors")

    with pytest.raises(RuntimeFault, match="rank 2 failed: ValueError: no memory left"):
        run_ranks(3, body, limit=100.0)


def test_meshes_that_overlap_in_part_are_refused() -> None:
    built = build(Case("identity", "overlapping", "1f1b", 2).completed(), micro_batches=2)
    with pytest.raises(ShardingError, match=r'executor of Strategy is "actors" but rank 1 runs .* and .*'):
        built.actor_plan  # noqa: B018
    text = 'executor "dynamic" of Strategy does not exist; it is one of static, actors'
    with pytest.raises(ShardingError, match=text.replace('"', "'")):
        dg.Strategy(executor="dynamic")
