"""Layouts within a limit on memory: as brute force finds, on random graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.programs.random_programs import Program, programs
from support.programs.search_cases import MESHES, SLOW, cost_model, task
from support.search.search_limited import Everything, Limited

from distgraph.passes.search.intra_op.formulate import Formulation, formulate
from distgraph.passes.search.intra_op.memory_limit import MemoryLimit, limited_nodes
from distgraph.passes.search.solver import solve
from distgraph.passes.search.solver.problem import Problem

SLACK = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
SPEEDS = (SLOW, 1e-3, 1.0)
"""Of computing: from where splitting pays by itself to where only the limit splits."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=max(200, settings.default.max_examples), suppress_health_check=SLACK)
@given(
    programs(tuple((mesh,) for mesh in MESHES), train=False, micro=False, steps=6),
    st.booleans(),
    st.sampled_from(SPEEDS),
    st.sampled_from((1, 3)),
)
def test_within_every_limit_equals_brute_force(
    program: Program, annotated: bool, speed: float, micro_batches: int
) -> None:
    """At every limit where the best choice changes, and between; one byte below the least there is none."""
    graph = replace(program.graph, micro_batches=micro_batches)
    mesh = next(iter(graph.attrs.values())).mesh
    graph = graph if annotated else replace(graph, attrs={})
    brute = Limited(graph, mesh, cost_model(speed))
    assume(2 <= len(brute.ops) <= 7 and brute.size <= 10_000 and brute.choices <= 100_000)
    formulation, every = formulate(graph, mesh, cost_model(speed)), brute.everything()
    front = every.front()
    for limit in {*front[:3], front[-1], (front[0] + front[-1]) // 2}:
        found = solve(within(formulation, limit), seconds=30)
        assert found.status == "optimal"
        assert found.objective == pytest.approx(every.within(limit), rel=1e-9, abs=1e-15)
    is_infeasible(formulation, every, front[0] - 1)
    is_infeasible(formulation, every, front[0] // 2)


def within(formulation: Formulation, limit: float) -> Problem:
    return limited_nodes(formulation, formulation.problem, MemoryLimit(limit))


def is_infeasible(formulation: Formulation, every: Everything, limit: float) -> None:
    """Proved, with a time at which all choices use too much, and no more bytes missing than are."""
    found = solve(within(formulation, limit), seconds=30)
    assert found.status == "infeasible"
    assert found.choice is None
    short = {time: least - limit for time, least in every.least.items() if least > limit}
    assert found.time in short
    assert 0 < found.missing <= short[found.time] * (1 + 1e-9)
    assert f"at time {found.time} every choice uses" in found.message


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_the_bytes_of_a_choice_are_no_fewer_than_it_holds(name: str, micro: int) -> None:
    """Nodes and copies together, for any choice: those of the step and those of activations."""
    graph = task(name).graph(micro=micro)
    formulation = formulate(graph, MESHES[2], cost_model(SLOW))
    terms, rng = formulation.cost_terms, np.random.default_rng(0)
    copied = 0
    for _ in range(50):
        choice = [rng.choice(np.flatnonzero(np.isfinite(costs))) for costs in formulation.problem.costs]
        profile = formulation.profile(choice)
        for nodes, copies, held in (
            (terms.fixed, terms.fixed_copies, profile.fixed),
            (terms.activations, terms.activation_copies, profile.activations),
        ):
            alone = sum(float(nbytes[each]) for nbytes, each in zip(nodes, choice, strict=True))
            besides = sum(float(nbytes[choice[i], choice[j]]) for (i, j), nbytes in copies.items())
            assert held.sum() <= (alone + besides) * (1 + 1e-9)
            copied += held.sum() > alone * (1 + 1e-9)
    assert copied
