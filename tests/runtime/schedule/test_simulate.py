"""The simulated clock: known facts of pipelines, an independent longest-path oracle, deadlock reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.programs.peak_live import peak_live
from support.programs.task_graphs import plain, task_graphs, with_transfers

from distgraph.errors import GraphError, RuntimeFault
from distgraph.plan.pipeline_schedules import EAGER_1F1B, SchedulePolicy, schedule_names, schedule_policy
from distgraph.runtime.schedule.flow_control import with_credits
from distgraph.runtime.schedule.simulate import Timeline, seconds_of, simulate, symbols
from distgraph.runtime.schedule.steady_state import unit_timeline
from distgraph.runtime.schedule.task import Edge, Ring, Task, TaskGraph, pipeline

Room = Callable[[Task, Task, int, bool], int | None]


def room(forward_to_backward: int | None, elsewhere: int | None) -> Room:
    return lambda source, target, stages, turns: forward_to_backward if turns else elsewhere


def backward_first(phase: str, micro: int, request: int) -> tuple[int, ...]:
    return (phase != "backward", micro)


# Equal stages: each is busy for m (tf + tb); the first micro-batch goes up and down the other p - 1 stages.
@pytest.mark.parametrize("policy", ["1f1b", "gpipe", "eager-1f1b"])
@pytest.mark.parametrize(
    ("stages", "micro"), [(1, 1), (1, 5), (2, 4), (3, 7), (4, 1), (4, 3), (4, 8), (6, 12)]
)
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 1.0), (1.0, 2.0), (3.0, 2.0), (0.1, 0.2)])
def test_makespan_of_equal_stages(
    policy: str, stages: int, micro: int, forward: float, backward: float
) -> None:
    timeline = simulate(plain(stages, micro), {"forward": forward, "backward": backward}, policy=policy)
    assert timeline.makespan == pytest.approx((micro + stages - 1) * (forward + backward), rel=1e-12)
    peak = [schedule_policy(policy).in_flight(stage, stages, micro) for stage in range(stages)]
    assert peak_live(timeline) == tuple(peak)
    assert timeline.busy() == pytest.approx(
        dict.fromkeys(range(stages), micro * (forward + backward)), rel=1e-12
    )


def test_inference_takes_a_clock_per_stage_and_micro_batch() -> None:
    timeline = simulate(pipeline([(0,), (1,), (2,)], 5, backward=False))
    assert timeline.makespan == 3 + 5 - 1
    assert peak_live(timeline) == (1, 1, 1)


@pytest.mark.parametrize("policy", ["1f1b", "gpipe", "eager-1f1b"])
def test_a_step_with_its_update_takes_the_published_clocks(policy: str) -> None:
    assert simulate(pipeline([(0,), (1, 2), (3,)], 4), policy=policy).makespan == 2 * (3 + 4 - 1) + 1


def test_the_update_adds_one_clock() -> None:
    meshes = [(0,), (1, 2), (3,)]
    for policy in schedule_names():
        without = simulate(pipeline(meshes, 4, optimize=False), policy=policy)
        assert simulate(pipeline(meshes, 4), policy=policy).makespan == without.makespan + 1


# support/data/schedules.txt, last line: n=4 m=8, forward 1, backward 2, buffers 2 on the edges between ranks.
def test_unlimited_credit_costs_memory_and_gains_nothing() -> None:
    first_come = SchedulePolicy("first come", room(None, 2), lambda phase, micro, request: (request,))
    timeline = simulate(plain(4, 8), {"forward": 1, "backward": 2}, policy=first_come)
    assert timeline.makespan == 33
    assert peak_live(timeline) == (8, 6, 4, 2)
    # the priority alone, without credits, saves one micro-batch per stage
    timeline = simulate(
        plain(4, 8), {"forward": 1, "backward": 2}, policy=SchedulePolicy("x", room(None, 2), backward_first)
    )
    assert timeline.makespan == 33
    assert all(low <= high for low, high in zip(peak_live(timeline), (8, 6, 4, 2), strict=True))


def test_credit_one_runs_one_micro_batch_at_a_time() -> None:
    timeline = simulate(
        plain(4, 8), {"forward": 1, "backward": 2}, policy=SchedulePolicy("one", room(1, 2), backward_first)
    )
    assert timeline.makespan == 96
    assert peak_live(timeline) == (1, 1, 1, 1)


def test_eager_1f1b_is_another_credit_on_the_same_actors() -> None:
    timeline = simulate(plain(4, 8), policy="eager-1f1b")
    assert timeline.makespan == 2 * (4 + 8 - 1)
    assert peak_live(timeline) == (7, 5, 3, 1)
    assert [EAGER_1F1B.in_flight(stage, 4, 6) for stage in range(4)] == [6, 5, 3, 1]


def test_eager_1f1b_hides_messages_that_1f1b_waits_for() -> None:
    """A message takes half as long as a stage for a micro-batch."""
    graph, durations = plain(4, 32), {"forward": 1.0, "backward": 2.0}
    borders = [(f"forward.s{s}", f"forward.s{s + 1}") for s in range(3)]
    borders += [(f"backward.s{s + 1}", f"backward.s{s}") for s in range(3)]
    transfer = dict.fromkeys(borders, 1.5)
    links = {border: {number: 1.5} for number, border in enumerate(borders)}
    eager, usual = (
        simulate(graph, durations, policy=policy, transfer=transfer, links=links).makespan
        for policy in ("eager-1f1b", "1f1b")
    )
    assert eager < 1.05 * (4 + 32 - 1) * 3 + 2 * 3 * 1.5
    assert usual > 32 * (3 + 1.5)


def test_gpipe_runs_all_forwards_first_even_when_it_has_to_wait_for_them() -> None:
    timeline = simulate(plain(2, 3), {"forward.s0": 5, "forward.s1": 1, "backward": 1}, policy="gpipe")
    for order in timeline.orders().values():
        assert [name.split(".")[0] for name, _ in order] == ["forward"] * 3 + ["backward"] * 3


def test_columns_may_be_meshes_of_different_size() -> None:
    timeline = simulate(pipeline([(0,), (1, 2, 3)], 2, optimize=False))
    assert timeline.columns == ((0,), (1, 2, 3))
    assert timeline.orders()[1] == timeline.orders()[3]
    assert sorted(timeline.orders()) == [0, 1, 2, 3]
    assert sum(len(timeline.of_rank(rank)) for rank in range(4)) == 4 * 4
    assert timeline.of_rank(2)[0].start == 1.0


def test_grid_shows_durations_and_tasks_without_duration() -> None:
    graph = pipeline([(0,), (1,)], 2)
    durations = {"forward": 1.0, "backward": 2.0, "optimize": 0.0}
    expected = """
        F0 -
        F1 F0
        -  B0
        B0 F1
        |  B1
        -  |
        -  O0
        B1 -
        O0 -"""
    # by hand, something starts or ends at 0, 1, 2, 4, 5, 6, 7 and 9; the updates take no time at 7 and at 9
    assert [line.split() for line in simulate(graph, durations).grid().splitlines()] == [
        line.split() for line in expected.split("\n") if line
    ]


def test_grid_gives_each_task_without_duration_a_line() -> None:
    graph = with_transfers(plain(2, 1))
    timeline = simulate(graph, {"forward": 1.0, "backward": 1.0, "send": 0.0, "recv": 0.0})
    assert [line.split() for line in timeline.grid().splitlines()] == [
        ["F0", "-"],
        ["S0", "R0"],
        ["-", "F0"],
        ["-", "B0"],
        ["R0", "S0"],
        ["B0", "-"],
    ]
    tasks = tuple(Task(name, "sync", 0, (0,), True) for name in "ab")
    assert simulate(TaskGraph(tasks, (Edge("a", "b"),), 1), {"sync": 0.0}).grid() == "G0\nGa0"


def test_symbols_of_tasks_of_one_kind_differ() -> None:
    tasks = [Task(f"send.{i}", "send", 0, (0,), True) for i in range(28)]
    named = list(symbols(tasks).values())
    assert named[:3] == ["S", "Sa", "Sb"]
    assert named[26:] == ["Sz", "Saa"]
    assert len(set(named)) == 28


def test_transfer_time_counts_between_ranks_only() -> None:
    timeline = simulate(plain(3, 1), transfer=0.25)
    assert timeline.makespan == 6 + 4 * 0.25  # two hops up, two down; forward to backward of one rank is free


@pytest.mark.parametrize("policy", ["1f1b", "gpipe", "eager-1f1b"])
@pytest.mark.parametrize(("stages", "micro"), [(2, 1), (2, 4), (3, 7), (4, 8)])
def test_transfers_that_take_no_time_change_nothing(policy: str, stages: int, micro: int) -> None:
    durations = {"forward": 0.1, "backward": 0.2, "send": 0.0, "recv": 0.0}
    direct = simulate(plain(stages, micro), durations, policy=policy)
    explicit = simulate(with_transfers(plain(stages, micro)), durations, policy=policy)
    for rank, order in explicit.orders().items():
        compute = tuple(step for step in order if step[0].startswith(("forward", "backward")))
        assert compute == direct.orders()[rank]
    assert explicit.makespan == pytest.approx(direct.makespan, rel=1e-12)
    assert peak_live(explicit) == peak_live(direct)


def test_events_of_tasks_without_duration_are_handled_before_longer_tasks_start() -> None:
    # rank 0 ends its fourth forward at 4, when the first gradient comes by way of a send: that goes first
    graph = plain(2, 6)
    edges = [edge for edge in graph.edges if edge.source != "backward.s1"]
    edges += [Edge("backward.s1", "send"), Edge("send", "backward.s0")]
    graph = TaskGraph((*graph.tasks, Task("send", "send", 1, (1,), True)), tuple(edges), 6)
    policy = SchedulePolicy("no credits", room(None, None), backward_first)
    timeline = simulate(graph, {"forward": 1.0, "backward": 2.0, "send": 0.0}, policy=policy)
    steps = [(run.task, run.micro, run.start) for run in timeline.of_rank(0)]
    assert steps[3:5] == [("forward.s0", 3, 3.0), ("backward.s0", 0, 4.0)]


def test_a_task_on_many_ranks_waits_for_all_of_them_and_is_not_starved() -> None:
    tasks = (
        Task("seed", "load", 0, (1,), False),
        Task("long", "forward", 0, (0,), True),
        Task("rest", "forward", 0, (1,), True),
        Task("both", "forward", 0, (0, 1), True),
    )
    graph = TaskGraph(tasks, (Edge("seed", "both"),), 2)
    timeline = simulate(graph, {"seed": 1, "long": 3, "rest": 5, "both": 1})
    # ready at 1, rank 0 is busy until 3: rank 1 is kept for it and does not begin five seconds of rest
    for rank in (0, 1):
        assert next(run.start for run in timeline.of_rank(rank) if run.task == "both") == 3
    no_overlap(timeline)


def no_overlap(timeline: Timeline) -> None:
    for rank in timeline.graph.ranks:
        runs = timeline.of_rank(rank)
        assert all(before.end <= after.start * (1 + 1e-9) for before, after in pairwise(runs))


@st.composite
def timed(draw: st.DrawFn) -> tuple[TaskGraph, dict[str, float]]:
    graph = draw(task_graphs())
    seconds = st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.0, 7.0])
    return graph, {task.name: draw(seconds) for task in graph.tasks}


def longest_path(graph: TaskGraph, durations: Mapping[str, float], timeline: Timeline) -> float:
    """Makespan of the given orders by another way: a longest path over task instances.

    An instance starts after what it reads, after what runs before it on each of its ranks, and after the
    consumer has taken the result that occupies the buffer it needs.
    """
    tasks = {task.name: task for task in graph.tasks}
    paths: nx.DiGraph[tuple[str, int]] = nx.DiGraph()
    paths.add_nodes_from((task.name, i) for task in graph.tasks for i in range(graph.instances(task)))
    for edge in graph.edges:
        source, target = tasks[edge.source], tasks[edge.target]
        for micro in range(graph.micro_batches):
            a = (edge.source, micro if source.per_micro else 0)
            b = (edge.target, micro if target.per_micro else 0)
            paths.add_edge(a, b)
            if edge.buffers is not None and source.per_micro and micro + edge.buffers < graph.micro_batches:
                paths.add_edge(b, (edge.source, micro + edge.buffers))
    for order in timeline.orders().values():
        paths.add_edges_from(pairwise(order))
    for a, b in paths.edges:
        paths.edges[a, b]["seconds"] = durations[a[0]]
    for name, micro in list(paths.nodes):
        paths.add_edge((name, micro), ("end", 0), seconds=durations[name])
    return float(nx.dag_longest_path_length(paths, weight="seconds"))


@settings(deadline=None)
@given(task_graphs(), st.integers(1, 90), st.sampled_from(["1f1b", "gpipe", "eager-1f1b"]))
def test_a_repeated_period_equals_the_whole_simulation(graph: TaskGraph, micro: int, name: str) -> None:
    graph = replace(graph, micro_batches=micro)
    whole = simulate(graph, policy=name)
    found = unit_timeline(graph, schedule_policy(name))
    assert sorted(found.intervals, key=str) == sorted(whole.intervals, key=str)
    assert found.orders() == whole.orders()
    assert found.graph == whole.graph
    again = simulate(graph, policy=name, order=whole.orders())
    assert sorted(again.intervals, key=str) == sorted(whole.intervals, key=str)


@given(timed(), st.sampled_from(["1f1b", "gpipe", "eager-1f1b"]), st.booleans())
def test_no_deadlock_and_the_clock_agrees_with_the_longest_path(
    case: tuple[TaskGraph, dict[str, float]], name: str, limited: bool
) -> None:
    graph, durations = case
    policy = schedule_policy(name)
    if not limited:
        policy = SchedulePolicy(name, room(None, None), policy.priority, policy.forward_is_done_first)
    timeline = simulate(graph, durations, policy=policy)
    ran = sorted((run.task, run.micro) for run in timeline.intervals)
    assert ran == sorted((task.name, i) for task in graph.tasks for i in range(graph.instances(task)))
    no_overlap(timeline)
    again = simulate(graph, durations, policy=policy, order=timeline.orders())
    assert again.orders() == timeline.orders()
    expected = longest_path(with_credits(graph, policy), durations, timeline)
    assert again.makespan == pytest.approx(expected, rel=1e-9, abs=1e-12)
    # a rank may be kept free for a task on many ranks: the free choice is never earlier than its own order
    assert timeline.makespan >= expected * (1 - 1e-9)


@given(st.integers(1, 6), st.integers(1, 12), st.data())
def test_1f1b_never_holds_more_than_the_stages_that_are_left(
    stages: int, micro: int, data: st.DataObject
) -> None:
    graph = plain(stages, micro)
    durations = {task.name: data.draw(st.sampled_from([0.0, 0.5, 1.0, 5.0])) for task in graph.tasks}
    peak = peak_live(simulate(graph, durations))
    assert all(alive <= min(micro, stages - stage) for stage, alive in enumerate(peak))


def swapped() -> dict[int, list[tuple[str, int]]]:
    """One micro-batch at a time; rank 1 wants its second input before it sends the first gradient."""
    return {
        0: [("forward.s0", 0), ("backward.s0", 0), ("forward.s0", 1), ("backward.s0", 1)],
        1: [("forward.s1", 0), ("forward.s1", 1), ("backward.s1", 0), ("backward.s1", 1)],
    }


def test_a_swapped_order_is_a_deadlock_with_the_grid() -> None:
    with pytest.raises(RuntimeFault) as fault:
        simulate(plain(2, 2), order=swapped(), policy="gpipe")
    assert str(fault.value).splitlines() == [
        "deadlock: the run stopped with 6 of 8 task instances not run",
        "F0 -",
        "-  F0",
        "rank 0 waits in backward.s0 0 for data of micro-batch 0 from backward.s1",
        "rank 1 waits in forward.s1 1 for data of micro-batch 1 from forward.s0",
        "make the order of the ranks agree, or give the edges named above more buffers",
    ]


def test_a_swapped_send_and_recv_is_a_deadlock() -> None:
    # each rank sends to the other; a rendezvous is a task on both ranks; rank 1 has them swapped
    tasks = (Task("send.0to1", "send", 0, (0, 1), True), Task("send.1to0", "send", 0, (0, 1), True))
    graph = TaskGraph(tasks, (), 1)
    good = [("send.0to1", 0), ("send.1to0", 0)]
    assert simulate(graph, order={0: good, 1: good}).makespan == 2
    with pytest.raises(RuntimeFault) as fault:
        simulate(graph, order={0: good, 1: good[::-1]})
    assert "rank 0 waits in send.0to1 0 for rank 1, which is at send.1to0 0" in str(fault.value)
    assert "rank 1 waits in send.1to0 0 for rank 0, which is at send.0to1 0" in str(fault.value)


def test_two_recvs_before_their_sends_are_a_deadlock() -> None:
    graph = with_transfers(plain(2, 1))
    right = simulate(graph).orders()
    assert simulate(graph, order=right).makespan == 8
    wrong = dict(right)
    position = [name for name, _ in right[0]].index("send.forward.s0.s1")
    order = list(right[0])
    order[position], order[position + 1] = order[position + 1], order[position]
    assert order[position][0] == "recv.backward.s1.s0"
    wrong[0] = tuple(order)
    with pytest.raises(
        RuntimeFault, match=r"(?s)F0 -\n.*rank 0 waits in recv\.backward\.s1\.s0 0.*rank 1 waits"
    ):
        simulate(graph, order=wrong)


def test_a_credit_cycle_is_a_deadlock_that_names_the_buffer() -> None:
    orders = simulate(plain(2, 4), policy="gpipe").orders()
    with pytest.raises(
        RuntimeFault, match=r"rank 1 waits in forward\.s1 1 for a free buffer .*\(1 of 1 alive"
    ):
        simulate(plain(2, 4), order=orders, policy="1f1b")
    narrow = TaskGraph(plain(2, 4).tasks, (*plain(2, 4).edges[1:], Edge("forward.s0", "forward.s1")), 4)
    narrow = TaskGraph(narrow.tasks, (Edge("forward.s0", "backward.s0", 2), *narrow.edges[1:]), 4)
    with pytest.raises(RuntimeFault, match=r"rank 0 waits in backward\.s0 0 for .*from backward\.s1"):
        simulate(narrow, policy="gpipe")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda order: order[:-1], "rank 1: the order ends but leaves out backward.s1"),
        (
            lambda order: [*order[:2], ("forward.s0", 0)],
            "rank 1 waits in forward.s0 0, which the task graph does not run there",
        ),
        (
            lambda order: order[::-1],
            "rank 1 waits in backward.s1 1 for backward.s1 0 on the same ranks, which comes",
        ),
        (lambda order: [("x", 0)], "rank 1 waits in x 0, which the task graph does not run there"),
    ],
)
def test_orders_that_do_not_fit(change: object, message: str) -> None:
    order = {rank: list(steps) for rank, steps in simulate(plain(2, 2)).orders().items()}
    order[1] = change(order[1])  # type: ignore[operator]
    with pytest.raises(RuntimeFault) as fault:
        simulate(plain(2, 2), order=order)
    assert message in str(fault.value)


def test_durations_are_checked() -> None:
    graph = pipeline([(0,)], 1)
    assert (
        seconds_of(graph, {"forward": 2, "forward.s0": 3, "backward": 1, "optimize": 0})["forward.s0"] == 3.0
    )
    with pytest.raises(GraphError, match=r"no entry for task 'optimize\.s0' nor for kind 'optimize'"):
        simulate(graph, {"forward": 1, "backward": 1})
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(
            GraphError, match=r"duration of task 'forward\.s0' is .* s, expected a finite number"
        ):
            simulate(graph, {"forward": wrong, "backward": 1, "optimize": 1})
        with pytest.raises(GraphError, match=r"transfer time is .* s, expected a finite number"):
            simulate(graph, transfer=wrong)


def test_a_long_step_is_simulated_whole() -> None:
    stages, micro = 16, 400
    timeline = simulate(plain(stages, micro), {"forward": 1, "backward": 2})
    assert len(timeline.intervals) == 2 * stages * micro
    assert timeline.makespan == (micro + stages - 1) * 3


def test_sender_waits_for_the_receive_of_what_its_buffer_still_holds() -> None:
    """A ring of two buffers, ten times slower a receiver: receives are posted when the task two places before
    is done, at 0, 0, 11, 21, 31."""
    graph = pipeline([(0,), (1,)], 5, backward=False)
    order = {rank: [(f"forward.s{rank}", m) for m in range(5)] for rank in (0, 1)}
    seconds = {"forward.s0": 1.0, "forward.s1": 10.0}
    free = simulate(graph, seconds, policy="gpipe", order=order)
    assert [run.start for run in free.of_rank(0)] == [0, 1, 2, 3, 4]
    ring = Ring("forward.s0", "forward.s1", 2, False)
    found = simulate(graph, seconds, policy="gpipe", order=order, rings=[ring])
    assert [run.start for run in found.of_rank(0)] == [0, 1, 2, 3, 11]
    assert [run.start for run in found.of_rank(1)] == [1, 11, 21, 31, 41]
    ring = Ring("forward.s0", "forward.s1", 1, False)
    found = simulate(graph, seconds, policy="gpipe", order=order, rings=[ring])
    assert [run.start for run in found.of_rank(0)] == [0, 1, 2, 11, 21]
    ring = Ring("forward.s0", "forward.s1", 2, True)  # the wait is before the task in front
    found = simulate(graph, seconds, policy="gpipe", order=order, rings=[ring])
    assert [run.start for run in found.of_rank(0)] == [0, 1, 2, 11, 12]


def test_ring_that_is_too_short_for_an_order_is_a_deadlock() -> None:
    """The first stage writes its only buffer again before the receive in the backward part can be posted."""
    graph = pipeline([(0,), (1,)], 3, optimize=False)
    stages = {s: [(f"{kind}.s{s}", m) for kind in ("forward", "backward") for m in range(3)] for s in (0, 1)}
    ring = Ring("forward.s0", "backward.s1", 3, False)
    simulate(graph, policy="gpipe", order=stages, rings=[ring])
    with pytest.raises(RuntimeFault, match="deadlock: the order can be run, but not with rings of 1 buffers"):
        simulate(graph, policy="gpipe", order=stages, rings=[Ring("forward.s0", "backward.s1", 1, False)])
