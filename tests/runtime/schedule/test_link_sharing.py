"""Messages that need one directed link at the same time follow one another."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs.task_graphs import plain

from distgraph.errors import GraphError
from distgraph.passes.analysis.link_contention import LinkQueues, decisive_links, link_totals
from distgraph.passes.search.inter_op.schedule_costs import simulated_makespan
from distgraph.plan.pipeline_schedules import GPIPE, ONE_F_ONE_B, SchedulePolicy
from distgraph.runtime.schedule.simulate import simulate
from distgraph.runtime.schedule.task import Edge, Task, TaskGraph, pipeline
from distgraph.runtime.schedule.timeline import Timeline

Links = dict[tuple[str, str], dict[int, float]]

POLICIES = pytest.mark.parametrize("policy", [ONE_F_ONE_B, GPIPE], ids=lambda policy: policy.name)


def two_senders(links: Links, order: bool) -> dict[str, float]:
    """Starts of two receivers, of which each waits for a message of another sender, sent at 1 s."""
    names = ["a", "b", "c", "d"]
    tasks = tuple(Task(name, "forward", n, (n,), True) for n, name in enumerate(names))
    graph = TaskGraph(tasks, (Edge("a", "c"), Edge("b", "d")), 1)
    transfer = dict.fromkeys(links, 4.0)
    orders = {n: [(name, 0)] for n, name in enumerate(names)} if order else None
    found = simulate(graph, dict.fromkeys(names, 1.0), transfer=transfer, links=links, order=orders)
    return {run.task: run.start for run in found.intervals}


@pytest.mark.parametrize("order", [False, True], ids=["policy", "recorded order"])
def test_messages_over_one_link_follow_one_another(order: bool):
    starts = two_senders({("a", "c"): {0: 4.0}, ("b", "d"): {0: 4.0}}, order)
    assert (starts["c"], starts["d"]) == (5.0, 9.0)
    starts = two_senders({("a", "c"): {0: 4.0, 1: 1.0}, ("b", "d"): {1: 1.0, 2: 4.0}}, order)
    assert (starts["c"], starts["d"]) == (5.0, 6.0)  # what both need is a faster link


@pytest.mark.parametrize("order", [False, True], ids=["policy", "recorded order"])
def test_messages_over_different_links_or_in_opposite_directions_do_not_wait(order: bool):
    starts = two_senders({("a", "c"): {0: 4.0}, ("b", "d"): {1: 4.0}}, order)
    assert (starts["c"], starts["d"]) == (5.0, 5.0)


def test_latencies_of_messages_under_way_overlap():
    """Of 4 s to the receiver, 1 s occupies the link: micro-batches arrive one second apart."""
    graph = plain(2, 3)
    links = {("forward.s0", "forward.s1"): {0: 1.0}}
    durations = {"forward": 0.5, "backward": 0.5}
    found = simulate(graph, durations, policy="gpipe", transfer=dict.fromkeys(links, 4.0), links=links)
    assert [run.start for run in found.intervals if run.task == "forward.s1"] == [4.5, 5.5, 6.5]


def test_a_message_does_not_begin_before_its_task():
    graph = plain(2, 1)
    found = simulate(graph, {"forward": 1.0, "backward": 1.0}, links={("forward.s0", "forward.s1"): {0: 5.0}})
    assert next(run.start for run in found.intervals if run.task == "forward.s1") == 5.0


def test_a_task_that_runs_once_waits_for_the_message_of_the_last_micro_batch_alone():
    tasks = (Task("many", "forward", 0, (0,), True), Task("once", "sync", 0, (1,), False))
    graph = TaskGraph(tasks, (Edge("many", "once"),), 4)
    links, transfer = {("many", "once"): {0: 10.0}}, {("many", "once"): 10.0}
    order = {0: [("many", m) for m in range(4)], 1: [("once", 0)]}
    for orders in (None, order):
        found = simulate(graph, {"many": 1.0, "once": 1.0}, transfer=transfer, links=links, order=orders)
        assert found.makespan == 4 + 10 + 1


def bordered(
    forward: list[float],
    backward: list[float],
    micro: int,
    transfer: list[float],
    links: list[tuple[dict[int, float], ...]],
    policy: SchedulePolicy,
) -> tuple[Timeline, TaskGraph, dict[str, float], dict[tuple[str, str], float], Links]:
    """A pipeline on the actors, its graph, durations, transfers and links."""
    graph = pipeline([(stage,) for stage in range(len(forward))], micro, optimize=False)
    parts = {"forward": forward, "backward": backward}
    seconds = {task.name: parts[task.kind][task.stage] for task in graph.tasks}
    delays, occupied = {}, {}
    for stage, (there, back) in enumerate(links):
        for edge, mine in (
            ((f"forward.s{stage}", f"forward.s{stage + 1}"), there),
            ((f"backward.s{stage + 1}", f"backward.s{stage}"), back),
        ):
            delays[edge], occupied[edge] = transfer[stage], mine
    found = simulate(graph, seconds, policy=policy, transfer=delays, links=occupied)
    return found, graph, seconds, delays, occupied


@POLICIES
def test_the_period_of_a_pipeline_is_that_of_its_slowest_link(policy: SchedulePolicy):
    """Stages of 1 s, a link of 2 s each way: 2 s for a micro-batch, if enough are in flight."""
    many = SchedulePolicy("many", lambda *_: None, policy.priority, policy.forward_is_done_first)
    links = [({}, {}), ({7: 2.0}, {8: 2.0}), ({}, {})]
    steps = [
        bordered([0.25] * 4, [0.75] * 4, micro, [0.0, 2.0, 0.0], links, many)[0].makespan
        for micro in (16, 24)
    ]
    estimates = [
        simulated_makespan(many, [0.25] * 4, [0.75] * 4, micro, [0.0, 2.0, 0.0], (), links)
        for micro in (16, 24)
    ]
    period = 4.0 if policy.forward_is_done_first else 2.0  # GPipe: one direction after the other
    assert steps[1] - steps[0] == pytest.approx(8 * period)
    assert estimates == pytest.approx(steps)


@POLICIES
def test_borders_that_leave_one_machine_share_its_link(policy: SchedulePolicy):
    """Stages 0 and 2 in one machine, 1 and 3 in another: two of three borders go the same way."""
    out, back = 0, 1
    links = [({out: 1.0}, {back: 1.0}), ({back: 1.0}, {out: 1.0}), ({out: 1.0}, {back: 1.0})]
    forward, backward, transfer = [0.1] * 4, [0.1] * 4, [1.0] * 3
    found = bordered(forward, backward, 32, transfer, links, policy)[0]
    estimate = simulated_makespan(policy, forward, backward, 32, transfer, (), links)
    assert found.makespan >= 32 * 3 * 1.0  # three messages of a micro-batch on each direction
    assert estimate == pytest.approx(found.makespan, rel=1e-9)


@POLICIES
def test_the_estimate_is_the_simulation(policy: SchedulePolicy):
    choose = random.Random(0)
    for _ in range(40):
        stages, micro = choose.randint(2, 5), choose.choice([1, 2, 3, 5, 8, 24])
        forward = [choose.uniform(0.5, 2.0) for _ in range(stages)]
        backward = [choose.uniform(0.5, 3.0) for _ in range(stages)]
        shared = choose.random() < 0.5
        links = []
        for stage in range(stages - 1):
            numbers = (0, 1) if shared else (2 * stage, 2 * stage + 1)
            seconds = choose.uniform(0.1, 2.0)
            links.append(({numbers[0]: seconds}, {numbers[1]: seconds}))
        transfer = [max(there.values()) + choose.uniform(0.0, 0.5) for there, _ in links]
        found = bordered(forward, backward, micro, transfer, links, policy)[0]
        estimate = simulated_makespan(policy, forward, backward, micro, transfer, (), links)
        assert estimate == pytest.approx(found.makespan, rel=1e-9)


@POLICIES
@pytest.mark.parametrize("micro", [8, 32, 96])
def test_the_estimate_of_many_stages_is_near_the_simulation(policy: SchedulePolicy, micro: int):
    """Stages that differ, and borders of which some are slower than a stage."""
    choose = random.Random(0)
    for stages in (6, 9, 16):
        forward = [choose.uniform(0.8, 1.2) for _ in range(stages)]
        backward = [2 * seconds for seconds in forward]
        links = []
        for stage in range(stages - 1):
            seconds = choose.choice([0.02, 0.3, 1.2])
            links.append(({2 * stage: seconds}, {2 * stage + 1: seconds}))
        transfer = [0.01 + max(there.values()) for there, _ in links]
        found = bordered(forward, backward, micro, transfer, links, policy)[0]
        estimate = simulated_makespan(policy, forward, backward, micro, transfer, (), links)
        assert estimate == pytest.approx(found.makespan, rel=0.05)


@st.composite
def messages(draw: st.DrawFn) -> dict[int, dict[int, float]]:
    seconds = st.sampled_from([0.0, 0.5, 1.0, 1.5, 4.0])
    links = st.dictionaries(st.integers(0, 5), seconds, max_size=4)
    return draw(st.dictionaries(st.integers(0, 4), links, min_size=1, max_size=5))


@given(messages(), st.lists(st.tuples(st.integers(0, 4), st.floats(0, 3)), max_size=30))
def test_no_two_messages_are_on_a_link_at_once_and_none_waits_without_need(
    occupied: Mapping[int, dict[int, float]], sent: list[tuple[int, float]]
):
    """Also, leaving out links that never decide changes nothing."""
    queues = LinkQueues(occupied)
    busy: dict[int, list[tuple[float, float]]] = {}
    time = 0.0
    for message, later in sent:
        time += later
        if message not in queues.longest:
            continue
        links = {link: seconds for link, seconds in occupied[message].items() if seconds}
        free = max(busy.get(link, [(0.0, 0.0)])[-1][1] for link in links)
        arrival = queues.send(message, time)
        begin = max(time, free)
        assert arrival == pytest.approx(begin + max(links.values()))
        for link, seconds in links.items():
            busy.setdefault(link, []).append((begin, begin + seconds))
    for intervals in busy.values():
        assert all(before[1] <= after[0] for before, after in pairwise(intervals))


@given(messages())
def test_a_link_that_always_decides_is_kept(occupied: Mapping[int, dict[int, float]]):
    kept = {link for links in decisive_links(occupied).values() for link, _ in links}
    totals = link_totals(occupied)
    assert max((totals[link] for link in kept), default=0.0) == max(totals.values(), default=0.0)


@given(st.integers(2, 5), st.integers(1, 12), st.sampled_from([ONE_F_ONE_B, GPIPE]), st.data())
def test_the_recorded_order_takes_as_long_as_the_actors(
    stages: int, micro: int, policy: SchedulePolicy, data: st.DataObject
):
    """Distinct durations, so that no two messages are handed over at the same time."""
    choose = random.Random(data.draw(st.integers(0, 10**6)))
    forward, backward, transfer = ([choose.uniform(0.1, 3.0) for _ in range(stages)] for _ in range(3))
    links = [
        tuple({choose.randrange(4): choose.uniform(0.1, 3.0) for _ in range(2)} for _ in range(2))
        for _ in range(stages - 1)
    ]
    found, graph, seconds, delays, occupied = bordered(forward, backward, micro, transfer, links, policy)
    again = simulate(graph, seconds, policy=policy, transfer=delays, links=occupied, order=found.orders())
    assert again.makespan == pytest.approx(found.makespan, rel=1e-9)
    free = simulate(graph, seconds, policy=policy, transfer=delays, order=found.orders())
    assert free.makespan <= again.makespan * (1 + 1e-9)


def test_mistakes():
    with pytest.raises(
        GraphError, match=r"links are given for 'forward.s1' -> 'forward.s0', which is no edge"
    ):
        simulate(plain(2, 1), links={("forward.s1", "forward.s0"): {0: 1.0}})
    with pytest.raises(
        GraphError, match=r"'forward.s0' -> 'forward.s1' occupies a link for -1 s, expected a"
    ):
        simulate(plain(2, 1), links={("forward.s0", "forward.s1"): {0: -1}})
