"""The actor as a state machine, the policies, and the task graph's verifier."""

from __future__ import annotations

import ast
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

import distgraph.runtime.schedule.actor
from distgraph.errors import GraphError, RuntimeFault
from distgraph.plan.pipeline_schedules import GPIPE, ONE_F_ONE_B, schedule_names, schedule_policy
from distgraph.runtime.schedule.actor import (
    Actor,
    BufferFreed,
    DataReady,
    DeviceFree,
    Finished,
    Release,
    Request,
    Run,
    Send,
    actors,
)
from distgraph.runtime.schedule.flow_control import with_credits
from distgraph.runtime.schedule.task import Edge, Task, TaskGraph, barriers, phases, pipeline, verify


def test_a_middle_stage_runs_when_it_has_data_and_a_buffer() -> None:
    actor = actors(with_credits(pipeline([(0,), (1,), (2,)], 5), "1f1b"))["forward.s1"]
    assert actor.start() == ()
    assert actor.handle(DeviceFree()) == ()
    assert actor.handle(DataReady("forward.s0", 0)) == (Request("forward.s1", 0),)
    assert actor.handle(DataReady("forward.s0", 1)) == ()
    assert actor.handle(DeviceFree()) == (Run("forward.s1", 0),)
    assert actor.handle(DeviceFree()) == ()
    assert actor.handle(Finished(0)) == (
        Request("forward.s1", 1),
        Send("forward.s2", 0),
        Send("backward.s1", 0),
        Release("forward.s0", 0),
    )
    actor.handle(DeviceFree())
    assert Request("forward.s1", 2) not in actor.handle(Finished(1))
    assert actor.handle(DataReady("forward.s0", 2)) == ()
    # two of three stages are left from here: two micro-batches may be alive, and both next stages hold both
    assert actor.waits() == (
        "a free buffer towards forward.s2 (2 of 2 alive)",
        "a free buffer towards backward.s1 (2 of 2 alive)",
    )
    assert actor.handle(BufferFreed("forward.s2", 0)) == ()
    assert actor.handle(BufferFreed("backward.s1", 0)) == (Request("forward.s1", 2),)


@pytest.mark.parametrize("arrival", list(permutations(range(4))))
def test_micro_batches_run_in_order_whatever_the_order_of_arrival(arrival: tuple[int, ...]) -> None:
    actor = actors(pipeline([(0,), (1,)], 4))["forward.s1"]
    ran = []
    for micro in arrival:
        actor.handle(DataReady("forward.s0", micro))
        while actor.requested:
            (run,) = actor.handle(DeviceFree())
            assert isinstance(run, Run)
            ran.append(run.micro)
            actor.handle(Finished(run.micro))
    assert ran == [0, 1, 2, 3]
    assert actor.done
    assert actor.waits() == ()


def test_a_task_once_per_step_waits_for_every_micro_batch_and_frees_all() -> None:
    actor = actors(pipeline([(0,)], 3))["optimize.s0"]
    assert actor.handle(DataReady("backward.s0", 0)) == ()
    assert actor.waits() == ("data of micro-batch 1..2 from backward.s0",)
    assert actor.handle(DataReady("backward.s0", 1)) == ()
    assert actor.handle(DataReady("backward.s0", 2)) == (Request("optimize.s0", 0),)
    actor.handle(DeviceFree())
    assert actor.handle(Finished(0)) == tuple(Release("backward.s0", micro) for micro in range(3))


def test_a_result_of_a_task_once_per_step_is_freed_after_the_last_micro_batch() -> None:
    graph = TaskGraph(
        (Task("load", "load", 0, (0,), False), Task("forward", "forward", 0, (0,), True)),
        (Edge("load", "forward", 1),),
        2,
    )
    actor = actors(graph)["forward"]
    assert actor.handle(DataReady("load", 0)) == (Request("forward", 0),)
    actor.handle(DeviceFree())
    assert actor.handle(Finished(0)) == (Request("forward", 1),)
    actor.handle(DeviceFree())
    assert actor.handle(Finished(1)) == (Release("load", 0),)


def middle() -> Actor:
    return actors(pipeline([(0,), (1,)], 2))["forward.s1"]


def test_events_that_cannot_happen_are_refused() -> None:
    with pytest.raises(RuntimeFault, match=r"forward\.s1 got data of backward\.s0 0, which it does not use"):
        middle().handle(DataReady("backward.s0", 0))
    with pytest.raises(RuntimeFault, match=r"got data of forward\.s0 2, which"):
        middle().handle(DataReady("forward.s0", 2))
    for micro in (0, 1):  # in order and ahead of its turn
        actor = middle()
        actor.handle(DataReady("forward.s0", micro))
        with pytest.raises(RuntimeFault, match=f"data of forward.s0 {micro} twice"):
            actor.handle(DataReady("forward.s0", micro))
    with pytest.raises(
        RuntimeFault, match=r"backward\.s1 freed a buffer of forward\.s1 0 that holds nothing"
    ):
        middle().handle(BufferFreed("backward.s1", 0))
    with pytest.raises(RuntimeFault, match=r"forward\.s1 0 finished but was not running"):
        middle().handle(Finished(0))


def test_the_actor_has_no_clock_no_thread_and_no_io() -> None:
    tree = ast.parse(Path(distgraph.runtime.schedule.actor.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported == {
        "__future__",
        "collections.abc",
        "dataclasses",
        "distgraph.errors",
        "distgraph.runtime.schedule.task",
    }


def test_credits_of_1f1b_and_gpipe() -> None:
    graph = pipeline([(0,), (1, 2), (3,)], 8)
    room = {(edge.source, edge.target): edge.buffers for edge in with_credits(graph, "1f1b").edges}
    assert [room[f"forward.s{s}", f"backward.s{s}"] for s in range(3)] == [3, 2, 1]
    assert room["forward.s0", "forward.s1"] == room["backward.s2", "backward.s1"] == 2
    assert room["backward.s0", "optimize.s0"] is None  # accumulated in place, consumed after the last
    assert all(edge.buffers is None for edge in with_credits(graph, "gpipe").edges)


def test_data_that_a_backward_task_reads_too_may_be_one_ahead() -> None:
    tasks = (
        Task("recv", "recv", 1, (1,), True),
        Task("forward", "forward", 1, (1,), True),
        Task("backward", "backward", 1, (1,), True),
        Task("earlier", "backward", 0, (0,), True),
        Task("late", "forward", 3, (3,), True),
    )
    edges = [
        ("recv", "forward"),
        ("recv", "backward"),
        ("forward", "backward"),
        ("forward", "earlier"),
        ("recv", "late"),
    ]
    graph = TaskGraph(tasks, tuple(Edge(*names) for names in edges), 8)
    # four stages, at stage 1: three micro-batches from forward to backward, four from recv
    assert [edge.buffers for edge in with_credits(graph, "1f1b").edges] == [2, 4, 3, None, 3]


def test_a_limit_of_the_graph_goes_before_the_policy() -> None:
    graph = pipeline([(0,), (1,)], 8)
    narrow = replace(graph, edges=(replace(graph.edges[0], buffers=5), *graph.edges[1:]))
    assert with_credits(narrow, ONE_F_ONE_B).edges[0].buffers == 5
    assert with_credits(narrow, GPIPE).edges[0].buffers == 5


def test_unknown_policy() -> None:
    with pytest.raises(
        GraphError, match=f"schedule '2f2b' does not exist; choose one of {', '.join(schedule_names())}$"
    ):
        schedule_policy("2f2b")


def linear(*kinds: str, once: tuple[int, ...] = (), buffers: int | None = None) -> TaskGraph:
    tasks = tuple(Task(f"t{i}", kind, 0, (0,), i not in once) for i, kind in enumerate(kinds))
    edges = tuple(Edge(f"t{i}", f"t{i + 1}", buffers) for i in range(len(kinds) - 1))
    return TaskGraph(tasks, edges, 4)


def test_phases_follow_the_data() -> None:
    graph = linear("load", "forward", "send", "recv", "backward", "send", "sync", "optimize", once=(0, 6, 7))
    assert list(phases(graph).values()) == ["before", *["forward"] * 3, *["backward"] * 2, *["after"] * 2]


def test_a_barrier_inside_the_step_leaves_the_edges_across_it_without_limit() -> None:
    graph = linear("forward", "sync", "backward", once=(1,))
    graph = replace(graph, edges=(*graph.edges, Edge("t0", "t2")))
    assert barriers(graph)["t2"] == {"t1"}
    assert barriers(linear("forward", "sync", "backward", "send", once=(1,)))["t3"] == {"t1"}
    assert (
        barriers(linear("load", "forward", "backward", once=(0,)))["t2"] == set()
    )  # waits for no micro-batch
    assert [edge.buffers for edge in with_credits(graph, "1f1b").edges] == [None, None, None]


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (replace(linear("forward"), micro_batches=0), "has 0 micro-batches; a step needs at least 1"),
        (replace(linear("forward"), tasks=linear("forward").tasks * 2), "task 't0' appears twice"),
        (linear("fwd"), "task 't0' has kind 'fwd', expected one of load, forward"),
        (replace(linear("load"), tasks=(Task("a", "load", 0, (), True),)), r"runs on ranks \(\)"),
        (replace(linear("load"), tasks=(Task("a", "load", 0, (1, 1), True),)), r"runs on ranks \(1, 1\)"),
        (replace(linear("load"), tasks=(Task("a", "load", -1, (1,), True),)), "has stage -1"),
        (replace(linear("load"), edges=(Edge("t0", "x"),)), "edge t0 -> x: target 'x' is no task"),
        (replace(linear("load"), edges=(Edge("x", "t0"),)), "edge x -> t0: source 'x' is no task"),
        (replace(linear("load", "send"), edges=(Edge("t0", "t1"),) * 2), "edge t0 -> t1 appears twice"),
        (linear("load", "send", buffers=0), "has 0 buffers; it needs at least 1"),
        (
            linear("backward", "sync", once=(1,), buffers=3),
            "has 3 buffers but t1 waits for all 4 micro-batches",
        ),
        (
            replace(
                linear("load", "send", "recv", "sync"),
                edges=(Edge("t0", "t1"), Edge("t1", "t2"), Edge("t2", "t1")),
            ),
            "task graph has a cycle: t1 -> t2 -> t1",
        ),
        (
            replace(
                linear("forward", "sync", "backward", once=(1,)),
                edges=(Edge("t0", "t1"), Edge("t1", "t2"), Edge("t0", "t2", 2)),
            ),
            "edge t0 -> t2 has 2 buffers but t1 waits for all 4",
        ),
    ],
)
def test_malformed_task_graphs(graph: TaskGraph, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        verify(graph)


def test_looking_up_an_unknown_task() -> None:
    with pytest.raises(GraphError, match="task graph has no task 'x'; it has t0"):
        linear("load").task("x")
