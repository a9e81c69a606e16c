"""Schedules: the published grids and orders, text round trip, recorded orders that every rank agrees on."""

from __future__ import annotations

import doctest
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import DATA, ROOT
from support.programs.peak_live import peak_live
from support.programs.task_graphs import plain, task_graphs, with_transfers

from distgraph.errors import GraphError, RuntimeFault
from distgraph.plan.pipeline_schedules import schedule_policy
from distgraph.runtime.schedule.task import Edge, Task, TaskGraph, pipeline
from distgraph.runtime.schedule.task_order import Schedule, check, parse, schedule

FILE = DATA / "schedules.txt"  # read from the Alpa paper (OSDI 2022) and its artifact
UNEQUAL = {"forward": 1.0, "backward": 2.0}


def published() -> list[list[str]]:
    """The file's sections: a heading and its lines."""
    sections: list[list[str]] = []
    for line in FILE.read_text().splitlines():
        if re.match(r"(1f1b|gpipe|credits) n=", line):
            sections.append([])
        if sections and line.strip() and not line.startswith("#"):
            sections[-1].append(line)
    return sections


def letters(order: tuple[tuple[str, int], ...]) -> str:
    return " ".join(f"{name[0].upper()}{micro}" for name, micro in order)


def test_the_grid_is_the_published_one() -> None:
    (section,) = [lines for lines in published() if lines[0].startswith("1f1b")]
    planned = schedule(plain(3, 4), "1f1b")
    assert [line.split() for line in str(planned).splitlines()] == [line.split() for line in section]
    assert parse("\n".join(section)) == planned
    assert planned.clocks == 2 * (3 + 4 - 1)


def test_the_orders_under_unequal_times_are_the_published_ones() -> None:
    sections = [lines for lines in published() if lines[0].startswith("credits")]
    assert len(sections) == 3
    for heading, *orders in sections:
        facts = dict(fact.split("=") for fact in heading.split()[1:])
        stages, micro = int(facts["n"]), int(facts["m"])
        planned = schedule(plain(stages, micro), "1f1b", UNEQUAL)
        timeline = check(planned, plain(stages, micro), UNEQUAL)
        assert timeline.makespan == float(facts["makespan"])
        assert peak_live(timeline) == tuple(map(int, facts["peak"].split(",")))
        for line in orders:
            stage, order = line.split(": ")
            assert letters(planned.order(int(stage[1:]))) == order


def test_the_examples_of_the_documentation_run() -> None:
    document = ROOT / "docs" / "parallelism" / "schedules.md"
    result = doctest.testfile(str(document), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted >= 8
    assert result.failed == 0


def test_orders_that_were_decided_before_are_those_of_the_same_policy() -> None:
    graph = plain(3, 4)
    first, second = (replace(schedule_policy(name), name="mine") for name in ("gpipe", "1f1b"))
    of_first, of_second = schedule(graph, first).order(0), schedule(graph, second).order(0)
    assert of_first == schedule(graph, "gpipe").order(0) != of_second
    assert of_second == schedule(graph, "1f1b").order(0)


def test_gpipe_runs_forward_and_backward_in_order() -> None:
    planned = schedule(plain(4, 8), "gpipe", UNEQUAL)
    for rank in range(4):
        forward = " ".join(f"F{micro}" for micro in range(8))
        assert letters(planned.order(rank)) == f"{forward} {forward.replace('F', 'B')}"
    assert planned.clocks == 2 * (4 + 8 - 1)
    assert peak_live(check(planned, plain(4, 8), UNEQUAL)) == (8, 8, 8, 8)


@pytest.mark.parametrize("policy", ["1f1b", "gpipe", "eager-1f1b"])
def test_durations_that_are_equal_up_to_rounding_give_the_same_order(policy: str) -> None:
    exact = schedule(plain(4, 8), policy, UNEQUAL)
    assert schedule(plain(4, 8), policy, {"forward": 0.1, "backward": 0.2}) == exact
    assert schedule(plain(4, 8), policy, {"forward": 1e-7 / 3, "backward": 2e-7 / 3}) == exact


def test_the_text_names_the_columns_where_they_are_not_plain() -> None:
    planned = schedule(pipeline([(0,), (1, 2)], 1))
    assert str(planned).splitlines() == [
        "1f1b n=2 m=1",
        "0: F=forward.s0 B=backward.s0 O=optimize.s0",
        "1,2: F=forward.s1 B=backward.s1 O=optimize.s1",
        "F0 -",
        "-  F0",
        "-  B0",
        "B0 O0",
        "O0 -",
    ]
    assert parse(str(planned)) == planned


@given(task_graphs(), st.sampled_from(["1f1b", "gpipe", "eager-1f1b"]), st.data())
def test_any_schedule_prints_parses_agrees_and_runs(
    graph: TaskGraph, policy: str, data: st.DataObject
) -> None:
    durations = {task.name: data.draw(st.sampled_from([0.0, 0.2, 1.0, 3.0])) for task in graph.tasks}
    planned = schedule(graph, policy, durations)
    assert parse(str(planned)) == planned
    assert planned.ranks == graph.ranks
    orders = planned.orders()
    for a in graph.ranks:  # ranks that share tasks run them in the same order
        for b in graph.ranks:
            shared = {task.name for task in graph.tasks if {a, b} <= set(task.ranks)}
            of_a, of_b = ([step for step in orders[rank] if step[0] in shared] for rank in (a, b))
            assert of_a == of_b
    other = {task.name: data.draw(st.sampled_from([0.1, 1.0, 9.0])) for task in graph.tasks}
    assert check(planned, graph, other).orders() == orders  # whatever the durations turn out to be


def test_two_stages_on_one_mesh() -> None:
    # stages 0 and 2 are both on ranks 0 and 1, stage 1 on ranks 1 and 2: rank 1 runs all three
    planned = schedule(pipeline([(0, 1), (1, 2), (0, 1)], 3, optimize=False))
    assert [column.ranks for column in planned.columns] == [(0,), (1,), (2,)]
    assert dict(planned.columns[1].names) == {
        "F": "forward.s0",
        "Fa": "forward.s1",
        "Fb": "forward.s2",
        "B": "backward.s0",
        "Ba": "backward.s1",
        "Bb": "backward.s2",
    }
    assert len(planned.order(1)) == 18
    assert parse(str(planned)) == planned


def test_a_schedule_with_explicit_transfers_is_checked_with_them() -> None:
    graph = with_transfers(plain(3, 4))
    seconds = {"forward": 1.0, "backward": 2.0, "send": 0.0, "recv": 0.0}
    planned = schedule(graph, "1f1b", seconds)
    assert check(planned, graph, seconds).makespan == (3 + 4 - 1) * 3
    assert peak_live(check(planned, graph, seconds)) == (3, 2, 1)


def edited(old: str, new: str, stages: int = 2, micro: int = 2) -> Schedule:
    text = str(schedule(plain(stages, micro)))
    assert old in text
    return parse(text.replace(old, new, 1))


def test_a_swapped_order_is_refused_before_it_runs() -> None:
    # F0 -, F1 F0, - B0, B0 F1, - B1, B1 -: rank 1 takes its second forward before its first backward
    with pytest.raises(RuntimeFault, match=r"(?s)deadlock.*rank 1 waits in forward\.s1 1 for a free buffer"):
        check(edited("-  B0\nB0 F1", "-  F1\nB0 B0"), plain(2, 2))
    with pytest.raises(
        RuntimeFault,
        match=r"(?s)deadlock.*rank 0 waits in backward\.s0 1 for backward\.s0 0 on the same ranks",
    ):
        check(edited("F1 F0\n-  B0\nB0 F1\n-  B1\nB1 -", "F1 F0\n-  B0\nB1 F1\n-  B1\nB0 -"), plain(2, 2))
    with pytest.raises(RuntimeFault, match=r"rank 0: the order ends but leaves out backward\.s0"):
        check(edited("\nB1 -", ""), plain(2, 2))
    with pytest.raises(
        RuntimeFault, match=r"rank 0 has backward\.s0 1 in its order after all its work is done"
    ):
        check(edited("\nB1 -", "\nB1 -\nB1 -"), plain(2, 2))


def test_a_schedule_of_another_graph() -> None:
    with pytest.raises(GraphError, match="schedule has m=2 but the task graph has 3 micro-batches"):
        check(schedule(plain(2, 2)), plain(2, 3))
    with pytest.raises(GraphError, match=r"schedule has ranks \(0, 1\) but the task graph has \(0, 1, 2\)"):
        check(schedule(plain(2, 2)), plain(3, 2))
    with pytest.raises(GraphError, match="rank 5 is not in the schedule, which has ranks 0, 1"):
        schedule(plain(2, 2)).order(5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a first line such as \"1f1b n=3 m=4\", got ''"),
        ("1f1b n=two m=1\nF0", "expected a first line"),
        ("1f1b n=2 m=1\nF0", "expected 2 columns, got 1 in 'F0'"),
        ("1f1b n=1 m=1\nf0", "got 'f0' in 'f0'"),
        ("1f1b n=1 m=1\nS0", "S in column 0 has no name"),
        ("1f1b n=2 m=1\n0: F=forward.s0\nF0 -", "n=2 but 1 lines that name the ranks"),
    ],
)
def test_malformed_text(text: str, message: str) -> None:
    with pytest.raises(GraphError) as error:
        parse(text)
    assert message in str(error.value)


def test_the_graphs_own_limits_may_deadlock_a_policy() -> None:
    tasks = (Task("f", "forward", 0, (0,), True), Task("b", "backward", 0, (0,), True))
    with pytest.raises(
        RuntimeFault, match=r"(?s)F0\nF1\nrank 0 waits in f 2 for a free buffer towards b \(2 of 2"
    ):
        schedule(TaskGraph(tasks, (Edge("f", "b", 2),), 3), "gpipe")
