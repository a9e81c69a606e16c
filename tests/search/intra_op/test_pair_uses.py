"""Memory of pairs of choices: the problem with nodes for it is equal to the one without."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.solver.pair_uses import with_pair_uses
from distgraph.passes.search.solver.problem import Problem, Use
from distgraph.passes.search.solver.solve import solve

SIZES = (3, 4, 2, 3)
EDGES = ((0, 1), (2, 1), (1, 3))
LIMIT = 8.0

Amounts = dict[tuple[int, int], Floats]


def a_problem(seed: int) -> tuple[Problem, Amounts]:
    """Four nodes in a star, some pairs forbidden, and units of two of its three edges."""
    rng = np.random.default_rng(seed)
    tables = [rng.integers(0, 4, (SIZES[i], SIZES[j])).astype(float) for i, j in EDGES]
    tables[0][rng.random(tables[0].shape) < 0.2] = np.inf
    costs = tuple(rng.integers(0, 4, size).astype(float) for size in SIZES)
    uses = tuple((Use(1, 3, rng.integers(0, 3, size).astype(float)),) for size in SIZES)
    amounts = {edge: rng.integers(0, 3, (SIZES[edge[0]], SIZES[edge[1]])).astype(float) for edge in EDGES[:2]}
    return Problem("star", costs, EDGES, tuple(tables), uses, limit=LIMIT), amounts


def units(problem: Problem, amounts: Amounts, choice: Sequence[int]) -> float:
    """That a choice uses where everything is used at the same time."""
    paired = sum(table[choice[i], choice[j]] for (i, j), table in amounts.items())
    alone = sum(uses[0].amounts[each] for uses, each in zip(problem.uses, choice, strict=True))
    return float(paired + alone)


@pytest.mark.parametrize("seed", range(5))
def test_every_choice_goes_with_one_choice_of_the_further_nodes(seed: int) -> None:
    """It has the same objective, and uses the units of the pairs besides."""
    problem, amounts = a_problem(seed)
    more = with_pair_uses(problem, amounts, 2, 5)
    further = [range(len(costs)) for costs in more.costs[len(SIZES) :]]
    assert len(further) == len(amounts)
    for choice in itertools.product(*map(range, SIZES)):
        every = [(*choice, *rest) for rest in itertools.product(*further)]
        finite = [each for each in every if math.isfinite(more.objective(each))]
        if math.isinf(problem.objective(choice)):
            assert not finite
            continue
        (one,) = finite
        assert more.objective(one) == problem.objective(choice)
        assert more.peak(one)[1] == units(problem, amounts, choice)


@pytest.mark.parametrize("seed", range(5))
def test_the_best_choice_within_the_limit(seed: int) -> None:
    problem, amounts = a_problem(seed)
    solution = solve(with_pair_uses(problem, amounts, 2, 5), seconds=30)
    every = itertools.product(*map(range, SIZES))
    fit = [choice for choice in every if units(problem, amounts, choice) <= LIMIT]
    assert solution.objective == min(map(problem.objective, fit))


def test_no_node_for_units_of_forbidden_pairs() -> None:
    table = np.array([[0.0, np.inf], [1.0, 2.0]])
    problem = Problem("two", (np.zeros(2), np.zeros(2)), ((0, 1),), (table,), limit=1.0)
    same = with_pair_uses(problem, {(0, 1): np.array([[0.0, 7.0], [0.0, 0.0]])}, 0, 1)
    assert len(same.costs) == 2
