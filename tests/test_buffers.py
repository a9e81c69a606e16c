"""A buffer is used again only when every message and collective that reads it is complete; nobody waits for
that in vain."""

from __future__ import annotations

import pytest
from delayed import Delayed
from forwarding import Case, cases, feeds, masked_and_reduced, params, read_in_backward
from partitioned import assert_same, run_partitioned, run_serial

from distgraph.graph import Graph
from distgraph.passes.complete import complete

BOUND = 1e-12


def check(graph: Graph, completed: Graph, micro: int, policy: str) -> None:
    expected, updates = run_serial(graph, feeds(micro), params())
    found, new, _ = run_partitioned(completed, feeds(micro), params(), policy, Delayed)
    assert_same(found, expected, BOUND)
    assert_same({k: [v] for k, v in new.items()}, {k: [v] for k, v in updates.items()}, BOUND)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_what_a_stage_passes_on_is_what_it_received(case: Case) -> None:
    check(case.graph(), case.completed(), case.micro, case.policy)


@pytest.mark.parametrize("policy", ["1f1b", "gpipe"])
@pytest.mark.parametrize("micro", [1, 2, 6])
@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (None, 1), (None, 4), (1, 3), (3, 1)])
def test_no_stage_waits_for_a_receive_that_is_posted_in_the_backward_part(
    sender: int | None, receiver: int, micro: int, policy: str
) -> None:
    """The receive comes as many micro-batches later as lie between a forward and its backward."""
    graph, mesh = read_in_backward(5, sender, receiver)
    check(graph, complete(graph, mesh), micro, policy)


def test_zeros_that_a_rank_keeps_for_a_partial_sum_stay_zeros() -> None:
    """They are filled in once, so no reduction may work in their memory."""
    graph, mesh = masked_and_reduced()
    check(graph, complete(graph, mesh), 3, "1f1b")
