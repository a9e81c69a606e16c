"""What the constants of the layout solver do: each halved and doubled, on problems that did not choose them.

    python -m benchmarks.support.solver_sensitivity [--only NAME ...] [--problems NAME ...] [--each N]
                                                    [--seconds S] [--json FILE]

The searches of `small_search_problems.py` give the problems: of each search those that took most CPU seconds
to solve. Each of them is solved with all constants as they are, and then with one constant changed. Of a
share its odds are halved and doubled, of a factor close to one its distance from one, of a whole number at
least to one. Printed are the largest, the smallest and the mean (geometric) ratio of the objective to that
with the constant as it is, the ratio of CPU seconds of all problems, and how many objectives changed by more
than the gap that ends a search.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.support.search_sensitivity import scaled, summary
from benchmarks.support.small_search_problems import PROBLEMS, SmallProblem
from distgraph.engine.search_driver.run_search import run_search
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.errors import InfeasibleError
from distgraph.passes.search.intra_op import solution_cache
from distgraph.passes.search.intra_op.solve_layouts import GAP, SOLVE_SECONDS
from distgraph.passes.search.solver import infeasible_problem  # noqa: F401 (its constants are changed)
from distgraph.passes.search.solver.problem import Problem, Solution
from distgraph.passes.search.solver.solve import solve

_SOLVER = "distgraph.passes.search.solver"

CONSTANTS: Mapping[str, Sequence[str]] = {
    f"{_SOLVER}.lagrangian_dual": ["_WARM", "_PATIENCE", "_GUESS", "_LEAST_STEP"],
    f"{_SOLVER}.reductions": ["_WORTH", "_HUB", "_TABLE"],
    f"{_SOLVER}.rounding": ["_STEPS", "_SHARES", "_PART", "_IDLE"],
    f"{_SOLVER}.solve": [
        "_REDUCE_SHARE", "_DUAL_SHARE", "_DIVE_SHARE", "_PARTS", "_SHRUNK", "_DEARER", "_FEW_PAIRS", "_PAIRS",
    ],
}  # fmt: skip
"""Module -> constants."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A layout problem of a search, its solution, and the CPU seconds that it took."""

    search: str
    problem: Problem
    solution: Solution
    seconds: float


def changed(value: Any, factor: float) -> Any:
    """A constant halved or doubled; of a share, a number between 0.01 and 1, its odds."""
    if isinstance(value, tuple):
        return tuple(changed(part, factor) for part in value)
    if isinstance(value, float) and 0.01 < value < 1:
        odds = factor * value / (1 - value)
        return odds / (1 + odds)
    return scaled(value, factor)


def timed(name: str, problem: Problem) -> Recorded:
    """A problem solved as a search solves it."""
    start = time.process_time()
    solution = solve(problem, seconds=SOLVE_SECONDS, gap=GAP)
    return Recorded(name, problem, solution, time.process_time() - start)


def recorded(name: str, small: SmallProblem, seconds: float, each: int) -> list[Recorded]:
    """The layout problems of one search that took most CPU seconds to solve."""
    records: list[Recorded] = []

    def recording(problem: Problem, **_: Any) -> Solution:
        records.append(timed(name, problem))
        return records[-1].solution

    state = SearchState(
        small.request, small.cluster(name), "auto", seconds,
        clock=time.process_time, processes=1, constraints=small.constraints,
    )  # fmt: skip
    with patch.object(solution_cache, "solve", recording):
        try:
            for _ in run_search(state):
                pass
        except InfeasibleError:
            pass
    solved = [entry for entry in records if entry.solution.choice is not None]
    return sorted(solved, key=lambda entry: -entry.seconds)[:each]


def study(problems: Sequence[Recorded], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows (problem, constant, factor, ratios of objective and CPU seconds)."""
    usual = [timed(entry.search, entry.problem) for entry in problems]  # again: loops are compiled now
    for home, constants in CONSTANTS.items():
        for constant in [name for name in constants if not names or name in names]:
            module = sys.modules[home]
            for factor in (0.5, 2.0):
                value = changed(getattr(module, constant), factor)
                with patch.object(module, constant, value):
                    after = [timed(entry.search, entry.problem) for entry in problems]
                for before, now in zip(usual, after, strict=True):
                    ratio = now.solution.objective / before.solution.objective
                    yield {
                        "problem": before.search, "constant": constant, "factor": factor,
                        "step": 1.0 if abs(ratio - 1) <= GAP else ratio,
                        "seconds": max(now.seconds, 1e-3) / max(before.seconds, 1e-3),
                    }  # fmt: skip


def main() -> None:
    """Run the study and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="constants")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), metavar="NAME")
    parser.add_argument("--each", type=int, default=2, metavar="N", help="problems of a search")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a search, CPU seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    given = parser.parse_args()
    os.environ["DISTGRAPH_CACHE"] = "off"
    problems: list[Recorded] = []
    for name in given.problems:
        problems += recorded(name, PROBLEMS[name], given.seconds, given.each)
        print(f"{name}: {len(problems)} problems", flush=True)
    total = math.fsum(entry.seconds for entry in problems)
    print(f"{len(problems)} problems, {total:.1f} CPU s to solve", flush=True)
    rows = list(study(problems, given.only))
    print("\n".join(summary(rows)))
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
