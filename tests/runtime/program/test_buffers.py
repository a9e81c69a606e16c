"""A buffer is used again only when every message and collective that reads it is complete; nobody waits for
that in vain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.devices.delayed import Delayed
from support.pipelines.forwarding import Case, cases, feeds, masked_and_reduced, params, read_in_backward
from support.programs.partitioned import assert_same, run_partitioned, run_serial

import distgraph as dg
from distgraph import nn, ops
from distgraph.ir.graph import Graph
from distgraph.passes.complete import complete

BOUND = 1e-12


def check(graph: Graph, completed: Graph, micro: int, policy: str) -> None:
    expected, updates = run_serial(graph, feeds(micro), params())
    found, new, _ = run_partitioned(completed, feeds(micro), params(), policy, Delayed)
    assert_same(found, expected, BOUND)
    assert_same({k: [v] for k, v in new.items()}, {k: [v] for k, v in updates.items()}, BOUND)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_a_stage_passes_on_the_data_that_it_received(case: Case) -> None:
    check(case.graph(), case.completed(), case.micro, case.policy)


@pytest.mark.parametrize("policy", ["1f1b", "gpipe", "eager-1f1b"])
@pytest.mark.parametrize("micro", [1, 2, 6])
@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (None, 1), (None, 4), (1, 3), (3, 1)])
def test_no_stage_waits_for_a_receive_that_is_posted_in_the_backward_part(
    sender: int | None, receiver: int, micro: int, policy: str
) -> None:
    """The receive comes as many micro-batches later as lie between a forward and its backward."""
    graph, mesh = read_in_backward(5, sender, receiver)
    check(graph, complete(graph, mesh), micro, policy)


def test_zeros_of_a_rank_for_a_partial_sum_stay_zeros() -> None:
    """They are filled in once, so no reduction may work in their memory."""
    graph, mesh = masked_and_reduced()
    check(graph, complete(graph, mesh), 3, "1f1b")


GRID = dg.ProcessMesh.grid
OVERLAPPING = {
    "two": (GRID(a=2), GRID(a=1), GRID(1, a=1)),
    "sub": (GRID(a=4), GRID(1, a=2), GRID(3, a=1)),
    "three": (GRID(a=3), GRID(1, a=1), GRID(2, a=1)),
}


class Skip(nn.Module):
    """The third place reads what the first one made, and what the second made of it."""

    def __init__(self, *places: dg.ProcessMesh) -> None:
        self.places = places
        self.mix = nn.Parameter((6, 6), "f64", ("normal", 0.5))
        self.scale = nn.Parameter((), "f64", ("ones",))

    def forward(self, x: Any) -> Any:
        with dg.on(self.places[0]):
            h = ops.sin(x @ self.mix)
        with dg.on(self.places[1]):
            z = ops.tanh(h)
        with dg.on(self.places[2]):
            return z * h * self.scale


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("layout", OVERLAPPING)
def test_memory_is_planned_for_updates_after_all_other_tasks(
    layout: str, schedule: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update between two backward tasks made room for a receive that came before it in the run."""
    monkeypatch.setenv("DISTGRAPH_CHECK", "1")
    x, y = rng.normal(size=(12, 6)), rng.normal(size=(12, 6))
    losses = []
    for places in (OVERLAPPING[layout], [GRID(a=1)] * 3):
        strategy = dg.Strategy(micro_batches=2, schedule=schedule)
        trained = dg.Engine(
            Skip(*places), nn.MeanSquaredError(), dg.optim.SGD(lr=0.1), strategy=strategy, seed=7
        )
        losses.append([trained.run((x * scale, y))["loss"] for scale in (0.5, 1.0, 1.5)])
        trained.close()
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-12)
