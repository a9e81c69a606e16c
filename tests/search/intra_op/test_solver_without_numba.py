"""The loops of the solver and the array operations that replace them without Numba compute the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.paths import ROOT
from support.search.layout_problems import hard_problem

from distgraph.kernels._jit import has_numba
from distgraph.passes.search.solver import dominance, flat_problem, message_passing, solve

pytestmark = pytest.mark.skipif(not has_numba(), reason="compares with the loops that numba compiles")


def draw(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Small whole numbers, of which differences are exact, some of them infinite."""
    numbers = random.integers(-9, 9, shape).astype(float)
    numbers[random.random(shape) < random.random()] = np.inf
    return numbers


def test_regrets_are_equal() -> None:
    for seed in range(200):
        random = np.random.default_rng(seed)
        count, width = random.integers(1, 9, 2)
        table, regret = draw(random, (count, width)), draw(random, (count, count))
        by_rows = regret.copy()
        finite = dominance._add_worst(regret, table)
        assert dominance._add_worst_by_rows(by_rows, table) == finite, seed
        np.testing.assert_array_equal(by_rows, regret, str(seed))


@pytest.mark.parametrize("side", [2, 3])
def test_pulled_messages_are_equal(side: int) -> None:
    for seed in range(100):
        check_pulled_messages(np.random.default_rng(seed), side)


def check_pulled_messages(random: np.random.Generator, side: int) -> None:
    sizes = random.integers(1, 9, 4)  # edges between the nodes 0 and 2, and 1 and 3; the second is looked at
    first, ends = np.cumsum([0, *sizes]), np.array([[0, 2], [1, 3]])
    table_first = np.cumsum([0, sizes[0] * sizes[2], sizes[1] * sizes[3]])
    side_first = np.cumsum([0, sizes[0], sizes[2], sizes[1], sizes[3]])
    vectors, table = draw(random, (int(side_first[-1]),)), draw(random, (int(table_first[-1]),))
    out = np.full(10, 7.0)
    arrays = out.copy()
    message_passing._pull(out, vectors, side, first, ends, table_first, table, side_first)
    message_passing._pull_arrays(arrays, vectors, side, first, ends, table_first, table, side_first)
    np.testing.assert_array_equal(arrays, out)


def test_multiples_are_equal() -> None:
    random = np.random.default_rng(0)
    total, more = draw(random, (20,)), np.abs(draw(random, (30,)))[::2]
    arrays = total.copy()
    flat_problem.add_multiple(total, 0.5, more)
    flat_problem._add_multiple_arrays(arrays, 0.5, more)
    np.testing.assert_array_equal(arrays, total)


def test_a_problem_has_the_same_answer_without_numba(tmp_path: Path) -> None:
    script = tmp_path / "interpreted.py"
    script.write_text(
        "import sys\n"
        "sys.modules['numba'] = None\n"
        "from support.search.layout_problems import hard_problem\n"
        "from distgraph.passes.search.solver import solve\n"
        "found = solve(hard_problem(4), seconds=60)\n"
        "print(found.status, found.objective, *found.choice)\n"
    )
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": ""}
    run = [sys.executable, str(script)]
    answer = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    found = solve(hard_problem(4), seconds=60)
    assert found.choice is not None
    assert answer.split() == [found.status, str(found.objective), *map(str, found.choice)]
