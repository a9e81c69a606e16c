"""What the constants of the search do: each halved and doubled, on small problems that did not choose them.

    python benchmarks/support/search_sensitivity.py [--only NAME ...] [--problems NAME ...] [--groups]
                                                    [--seconds S] [--json FILE]

Of every problem of `small_search_problems.py` the search runs once, and once more with every constant halved
and doubled: of a factor close to one its distance from one, of a whole number at least to one. Printed are
the largest, the smallest and the mean (geometric) ratio of the forecast step to that with the constant as it
is, and the mean ratio of CPU seconds. With `--groups` all constants of a module are changed together first;
where neither the step nor the number of forecasts of a problem changes, they are not changed one by one.

Searches of one problem share traces, formulations of layout problems, their solutions and forecasts, which do
not depend on these constants. What another search has computed already is added to the clock of a search in
the CPU seconds that it took, so that each ends at its limit of CPU seconds as it would alone. Explanations of
the answer are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.support.small_search_problems import PROBLEMS, SmallProblem
from distgraph.engine.search_driver.baselines import baselines
from distgraph.engine.search_driver.candidate import Candidate
from distgraph.engine.search_driver.evaluations import Evaluation, evaluate, without_program
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.run_search import run_search
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.errors import InfeasibleError
from distgraph.passes.search.inter_op import recompute_choice  # noqa: F401 (its constants are changed)
from distgraph.passes.search.intra_op.formulate import Formulation

_DRIVER = "distgraph.engine.search_driver"
_MODES = "distgraph.passes.search"

CONSTANTS: Mapping[str, Sequence[str]] = {
    f"{_DRIVER}.search_state": ["FORECASTS"],
    f"{_DRIVER}.layout_costs": ["MEMORY_MULTIPLIERS", "_REACH", "_SMALLER"],
    f"{_DRIVER}.pipeline_search": ["SLOWER", "_RESOLVED"],
    f"{_DRIVER}.search_space": ["_WIDEST", "_MOST_SHARES", "FEW_COUNTS", "_MOST_DIVISORS"],
    f"{_DRIVER}.local_search": [
        "_MOST_OPS", "_MOST_MEMORY", "_MOST_STAGES", "_LOWER_MULTIPLIERS",
    ],
    f"{_DRIVER}.baselines.baselines": [
        "_MOST_SHAPES", "_MOST_ZERO_OPS", "_MOST_AXES",
    ],
    f"{_DRIVER}.baselines.data_parallel_zero": ["_SHARE", "_CORRECTIONS", "_BUILT_COUNTS"],
    f"{_DRIVER}.micro_batch_search": ["_ROUNDS", "_RETRIES", "_TIGHTER"],
    f"{_DRIVER}.load_balancing": ["_MOST_INNER", "_COARSER"],
    f"{_MODES}.inter_op.schedule_costs": ["_FOLLOWED", "_CYCLES", "_MOST_FOLLOWED"],
    f"{_MODES}.inter_op.recompute_choice": ["_MOST_CHOICES", "_GRID"],
}  # fmt: skip
"""Module -> constants whose searches may share layouts and forecasts."""


def scaled(value: Any, factor: float) -> Any:
    """A constant halved or doubled; of a number between 1 and 2 its distance from 1."""
    if isinstance(value, tuple):
        return tuple(scaled(part, factor) for part in value)
    if isinstance(value, int):
        return max(1, int(value * factor))
    return 1 + (value - 1) * factor if 1 < value < 2 else value * factor


@contextmanager
def changed(values: Mapping[tuple[str, str], float]) -> Iterator[None]:
    """(module, constant) -> factor, in all modules that import the constant."""
    undo: list[Callable[[], None]] = []
    for (home, name), factor in values.items():
        before = getattr(sys.modules[home], name)
        after = scaled(before, factor)
        for module in [m for key, m in sys.modules.items() if key.startswith("distgraph.")]:
            if vars(module).get(name) is before:
                setattr(module, name, after)
                undo.append(lambda m=module, n=name, b=before: setattr(m, n, b))
    try:
        yield
    finally:
        for step in undo:
            step()


@dataclass
class _Entry:
    result: Any
    seconds: float
    uses: set[Any]


@dataclass
class SharedWork:
    """What searches of one problem have computed, and a clock of CPU seconds that counts it for each search.

    Attributes:
        entries: key -> result, CPU seconds without the entries that it used, and these.
        counted: keys that the present search has been charged with.
        credit: seconds that the present search did not take because another one had.
    """

    entries: dict[Any, _Entry] = field(default_factory=dict)
    counted: set[Any] = field(default_factory=set)
    credit: float = 0.0
    _open: list[_Entry] = field(default_factory=list)

    def clock(self) -> float:
        """CPU seconds of the present search, with those that others took for it."""
        return time.process_time() + self.credit

    def begin(self) -> None:
        """Begin another search."""
        self.counted, self.credit = set(), 0.0

    def get(self, key: Any, compute: Callable[[], Any]) -> Any:
        """The result for a key, computed once."""
        if self._open:
            self._open[-1].uses.add(key)
        if key in self.entries:
            self._charge(key)
            return self.entries[key].result
        entry, start = _Entry(None, 0.0, set()), time.process_time()
        self._open.append(entry)
        try:
            entry.result = compute()
        finally:
            self._open.pop()
            spent = time.process_time() - start
            entry.seconds += spent
            if self._open:
                self._open[-1].seconds -= spent
        self.entries[key] = entry
        self.counted.add(key)
        return entry.result

    def _charge(self, key: Any) -> None:
        if key not in self.counted:
            self.counted.add(key)
            self.credit += self.entries[key].seconds
            for used in self.entries[key].uses:
                self._charge(used)


@dataclass
class SharedForecasts:
    """Evaluates candidates, each once for all searches of a problem."""

    layout_costs: LayoutCosts
    work: SharedWork
    processes: int = 1

    def evaluate(self, candidate: Candidate) -> Evaluation:
        """The forecast; the program is built again where it is needed."""
        key = "evaluate", *candidate.decisions
        compute = lambda: without_program(evaluate(candidate, self.layout_costs))  # noqa: E731
        return replace(self.work.get(key, compute), origin=candidate.origin, candidate=candidate)

    def evaluate_all(self, candidates: Sequence[Candidate], processes: int) -> list[Evaluation]:
        """One after the other."""
        return [self.evaluate(candidate) for candidate in candidates]


@contextmanager
def sharing(work: SharedWork) -> Iterator[None]:
    """Searches inside share traces, formulations, solutions, and the programs of two baselines."""
    trace, formulation, solve = LayoutCosts._trace, LayoutCosts.formulation, LayoutCosts.solve
    profile = Formulation.profile
    parallel, recursion = baselines.data_parallel, baselines.double_recursion

    def shared_trace(self: LayoutCosts, count: int, layers: tuple[int, ...]) -> Any:
        made, self.firsts = work.get(
            ("trace", count, layers), lambda: (trace(self, count, layers), self.firsts)
        )
        return made

    def shared_formulation(self: LayoutCosts, layered: Any, devices: Any, shape: Any) -> Any:
        key = "formulation", layered.graph.micro_batches, layered.recompute, devices, shape
        return work.get(key, lambda: formulation(self, layered, devices, shape))

    def shared_solve(self: LayoutCosts, layered: Any, query: Any) -> Any:
        key = layered.graph.micro_batches, layered.recompute, query
        made = work.get(("solve", *key), lambda: solve(self, layered, query))
        self._solutions.choices.setdefault(key, made[1:])
        return made

    def shared_profile(self: Formulation, choice: Any) -> Any:
        return work.get(("profile", id(self.nodes), tuple(choice)), lambda: profile(self, choice))

    def shared_data_parallel(costs: LayoutCosts, devices: Any, name: str, **given: Any) -> Any:
        key = "data parallel", devices, name, str(given)
        return work.get(key, lambda: parallel(costs, devices, name, **given))

    def shared_recursion(costs: LayoutCosts, *given: Any) -> Any:
        return work.get(("recursion", *given), lambda: recursion(costs, *given))

    with (
        patch.multiple(LayoutCosts, _trace=shared_trace, formulation=shared_formulation, solve=shared_solve),
        patch.object(Formulation, "profile", shared_profile),
        patch.multiple(baselines, data_parallel=shared_data_parallel, double_recursion=shared_recursion),
    ):
        yield


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one search came to: seconds of the step, number of forecasts, CPU seconds."""

    step: float
    forecasts: int
    seconds: float


def searched(name: str, problem: SmallProblem, seconds: float, work: SharedWork) -> Outcome:
    """One search of a problem, within a limit of CPU seconds."""
    work.begin()
    start = work.clock()
    state = SearchState(
        problem.request, problem.cluster(name), "auto", seconds,
        clock=work.clock, constraints=problem.constraints,
    )  # fmt: skip
    state.evaluations.evaluator = SharedForecasts(state.layout_costs, work)
    state.explainer.run = lambda: iter(())  # type: ignore[method-assign]
    try:
        for _ in run_search(state):
            pass
    except InfeasibleError:
        return Outcome(math.inf, len(state.evaluations.all), work.clock() - start)
    assert state.best is not None
    return Outcome(state.best.seconds, len(state.evaluations.all), work.clock() - start)


def changes(names: Sequence[str], grouped: bool) -> Iterator[tuple[str, Sequence[tuple[str, str]]]]:
    """What is changed together: every constant, or every module's with `grouped` first."""
    for module, constants in CONSTANTS.items():
        chosen = [constant for constant in constants if not names or constant in names]
        if grouped and len(chosen) > 1:
            yield module.rpartition(".")[2], [(module, constant) for constant in chosen]
        for constant in chosen:
            yield constant, [(module, constant)]


def study(
    problems: Sequence[str],
    names: Sequence[str],
    seconds: float,
    *,
    grouped: bool,
    report: Callable[..., None],
) -> list[dict[str, Any]]:
    """Rows (problem, constant, factor, ratios of step and CPU seconds, forecasts)."""
    rows: list[dict[str, Any]] = []
    for problem in problems:
        work = SharedWork()
        with sharing(work):
            searched(problem, PROBLEMS[problem], seconds, work)  # so that caches hold as much for all others
            usual = searched(problem, PROBLEMS[problem], seconds, work)
            report(
                f"{problem}: step {usual.step:.5g} s, {usual.forecasts} forecasts, {usual.seconds:.1f} CPU s"
            )
            for factor in (0.5, 2.0):
                skipped: set[str] = set()
                for name, constants in changes(names, grouped):
                    if name in skipped:
                        continue
                    with changed(dict.fromkeys(constants, factor)):
                        after = searched(problem, PROBLEMS[problem], seconds, work)
                    same = (after.step, after.forecasts) == (usual.step, usual.forecasts)
                    if len(constants) > 1 and same:
                        skipped |= {constant for _, constant in constants}
                    row = {
                        "problem": problem, "constant": name, "factor": factor,
                        "step": after.step / usual.step, "seconds": after.seconds / usual.seconds,
                        "forecasts": (usual.forecasts, after.forecasts),
                    }  # fmt: skip
                    rows.append(row)
                    if not same:
                        figures = f"{row['step']:.4f} {row['seconds']:.2f} {row['forecasts']}"
                        report(f"    {name} x {factor:g}: {figures}")
        gc.collect()
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each constant and factor."""
    lines = [f"{'constant':<24}{'factor':>7}{'worst':>8}{'best':>8}{'mean':>8}{'CPU':>7}{'changed':>9}"]
    for name, factor in dict.fromkeys((row["constant"], row["factor"]) for row in rows):
        of = [row for row in rows if (row["constant"], row["factor"]) == (name, factor)]
        steps, seconds = [row["step"] for row in of], [row["seconds"] for row in of]
        means = (math.exp(sum(map(math.log, each)) / len(each)) for each in (steps, seconds))
        figures = (max(steps), min(steps), *means)
        number = sum(row["step"] != 1 for row in of)
        cells = "".join(f"{figure:>8.4f}" for figure in figures[:3])
        lines.append(f"{name:<24}{factor:>7g}{cells}{figures[3]:>7.2f}{number:>5}/{len(of)}")
    return lines


def main() -> None:
    """Run the study and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="constants")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), metavar="NAME")
    parser.add_argument("--groups", action="store_true", help="all constants of a module together first")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a search, CPU seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    given = parser.parse_args()
    os.environ["DISTGRAPH_CACHE"] = "off"
    rows = study(
        given.problems, given.only, given.seconds,
        grouped=given.groups, report=lambda line: print(line, flush=True),
    )  # fmt: skip
    print("\n".join(summary(rows)))
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
