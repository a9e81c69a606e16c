"""Actors of several meshes whose messages arrive in any order: all tasks run, within the limits."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs.task_graphs import with_transfers

from distgraph.errors import ShardingError
from distgraph.plan.pipeline_schedules import schedule_policy
from distgraph.runtime.program.actor_limits import actor_limits
from distgraph.runtime.schedule.actor_group import ActorPlan, GroupActors, actor_plan
from distgraph.runtime.schedule.task import Edge, TaskGraph, pipeline
from distgraph.runtime.schedule.task_order import schedule

POLICIES = ("1f1b", "gpipe", "eager-1f1b", "zb-h1")


@st.composite
def programs(draw: st.DrawFn) -> tuple[TaskGraph, str]:
    """Stages on one or two ranks each, skips, explicit transfers."""
    count, micro, policy = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.sampled_from(POLICIES))
    ranks = [(2 * stage, 2 * stage + 1)[: 1 + stage % 2] for stage in range(count)]
    graph = pipeline(ranks, micro, weight=policy == "zb-h1")
    place = st.integers(0, count - 1)
    explicit = policy != "zb-h1" and draw(st.booleans())
    for low, high in sorted(draw(st.sets(st.tuples(place, place), max_size=4))):
        if low + 1 < high:
            more = (
                Edge(f"forward.s{low}", f"forward.s{high}"),
                Edge(f"backward.s{high}", f"backward.s{low}"),
            )
            graph = TaskGraph(graph.tasks, graph.edges + more, micro)
        elif low > high and policy != "zb-h1" and not explicit:  # read in the backward part only
            late = Edge(f"forward.s{high}", f"backward.s{low}")
            graph = TaskGraph(graph.tasks, (*graph.edges, late), micro)
    return (with_transfers(graph) if explicit else graph), policy


class Network:
    """Runs all groups; which of the things that may happen is next, is drawn."""

    def __init__(self, plan: ActorPlan, seed: int) -> None:
        self.plan, self.draw = plan, random.Random(seed)
        self.groups = [GroupActors(plan, place) for place in range(len(plan.groups))]
        self.running: dict[int, tuple[str, int]] = {}
        self.data: list[tuple[str, str, int]] = []
        self.credits: dict[tuple[str, int], list[int]] = {}
        self.started = dict.fromkeys(plan.group_of, 0)
        self.finished = dict.fromkeys(plan.group_of, 0)
        self.order: list[tuple[str, int]] = []

    def run(self) -> None:
        """Until all is done.

        Raises:
            AssertionError: a deadlock, or more alive than the limits say.
        """
        while not all(group.all_finished for group in self.groups):
            for place, group in enumerate(self.groups):
                for name, micro in group.new_posts():
                    self._posted(place, name, micro)
            self.draw.choice(list(self._possible()))()
            for (first, second), limit in self.plan.limits.within.items():
                assert self.started[first] - self.finished[second] <= limit

    def _possible(self) -> Iterator[object]:
        for name, sources in self.credits.items():
            if sources:
                yield lambda name=name, sources=sources: self.groups[name[1]].receives_posted(
                    name[0], sources.pop(0)
                )
        for message in self.data:
            _, target, micro = message
            group = self.groups[self.plan.group_of[target]]
            if micro < group.posted[target]:
                yield lambda message=message, group=group: (
                    self.data.remove(message),
                    group.arrived(*message),
                )
        for place, group in enumerate(self.groups):
            if place in self.running:
                yield lambda place=place: self._finish(place)
            elif (chosen := group.choose()) is not None:
                self.running[place] = chosen
                self.started[chosen[0]] += 1
                self.order.append(chosen)
                yield lambda: None
        if not (self.running or self.data or any(self.credits.values())):
            raise AssertionError(f"deadlock: {[group.waiting() for group in self.groups]}")

    def _posted(self, place: int, name: str, micro: int) -> None:
        senders = {self.plan.group_of[e.source] for e in self.plan.graph.edges if e.target == name} - {place}
        for sender in senders:
            if micro < self.plan.credits(name, sender):
                self.credits.setdefault((name, sender), []).append(micro)

    def _finish(self, place: int) -> None:
        name, micro = self.running.pop(place)
        self.groups[place].finished()
        self.finished[name] += 1
        for edge in self.plan.graph.edges:
            if edge.source == name and self.plan.crossing(edge):
                once = not self.plan.graph.task(edge.target).per_micro
                if not once or micro == self.plan.graph.instances(self.plan.graph.task(name)) - 1:
                    self.data.append((name, edge.target, 0 if once else micro))


def plan_of(graph: TaskGraph, policy: str) -> ActorPlan:
    chosen = schedule_policy(policy)
    return actor_plan(graph, chosen, actor_limits(graph, chosen, schedule(graph, policy)))


@given(programs(), st.integers(0, 1 << 30))
def test_all_tasks_run_in_any_order_of_events(program: tuple[TaskGraph, str], seed: int) -> None:
    graph, policy = program
    network = Network(plan_of(graph, policy), seed)
    network.run()
    tasks = [task for task in graph.tasks if task.kind != "optimize"]
    assert sorted(network.order) == sorted((t.name, m) for t in tasks for m in range(graph.instances(t)))
    assert not network.data
    assert not any(network.credits.values())


def test_limits_of_1f1b() -> None:
    """As its credits: the stages that are left until a forward part is backward, two from stage to stage."""
    limits = plan_of(pipeline([(0,), (1,), (2,)], 8, optimize=False), "1f1b").limits
    assert limits.within == {(f"forward.s{s}", f"backward.s{s}"): 3 - s for s in range(3)}
    assert limits.across["forward.s0", "forward.s1"] == limits.across["backward.s2", "backward.s1"] == 2


def test_a_task_further_ahead_waits_for_credits() -> None:
    """The first stage of two runs two forward parts, then waits for a backward part."""
    network = GroupActors(plan_of(pipeline([(0,), (1,)], 5, optimize=False), "1f1b"), 0)
    chosen = []
    while (instance := network.choose()) is not None:
        chosen.append(instance)
        network.finished()
    assert chosen == [("forward.s0", 0), ("forward.s0", 1)]
    network.new_posts()
    network.arrived("backward.s1", "backward.s0", 0)
    assert network.choose() == ("backward.s0", 0)


def test_a_table_keeps_its_order() -> None:
    """Data that arrive early change nothing under ZB-H1."""
    graph = pipeline([(0,), (1,)], 4, weight=True)
    recorded = schedule(graph, "zb-h1").orders()
    for seed in range(5):
        network = Network(plan_of(graph, "zb-h1"), seed)
        network.run()
        for stage in (0, 1):
            ran = [step for step in network.order if step[0].endswith(f"s{stage}")]
            assert ran == [step for step in recorded[stage] if not step[0].startswith("optimize")]


def test_meshes_that_overlap_in_part() -> None:
    graph = pipeline([(0, 1), (1, 2)], 2)
    with pytest.raises(
        ShardingError, match=r"rank 1 runs forward.s0 with ranks \[0, 1\] and forward.s1 with"
    ):
        plan_of(graph, "1f1b")
