"""The study of the search's constants: changed and restored; shared work is charged once a search."""

from __future__ import annotations

import sys
import time

import pytest

from benchmarks.support import search_sensitivity as study
from benchmarks.support.small_search_problems import PROBLEMS
from distgraph.engine.search_driver import layout_costs, pipeline_search, search_state


@pytest.mark.parametrize(
    ("value", "halved", "doubled"),
    [(4, 2, 8), (1, 1, 2), (1.15, 1.075, 1.3), (0.25, 0.125, 0.5), ((0.0, 3.0), (0.0, 1.5), (0.0, 6.0))],
)
def test_a_constant_is_halved_and_doubled(value: object, halved: object, doubled: object) -> None:
    assert study.scaled(value, 0.5) == pytest.approx(halved)
    assert study.scaled(value, 2.0) == pytest.approx(doubled)


def test_a_constant_is_changed_wherever_it_is_imported_and_restored() -> None:
    home = "distgraph.engine.search_driver"
    values = {(f"{home}.search_state", "FORECASTS"): 2.0, (f"{home}.layout_costs", "MEMORY_MULTIPLIERS"): 0.5}
    before = search_state.FORECASTS, layout_costs.MEMORY_MULTIPLIERS
    with study.changed(values):
        users = [m for m in sys.modules.values() if m.__name__.startswith(home) and "FORECASTS" in vars(m)]
        assert len(users) > 3
        assert {module.FORECASTS for module in users} == {2 * before[0]}
        assert layout_costs.MEMORY_MULTIPLIERS == (0.0, 0.15, 1.5)
    assert before == (search_state.FORECASTS, layout_costs.MEMORY_MULTIPLIERS)


def test_every_constant_exists() -> None:
    for module, names in study.CONSTANTS.items():
        assert set(names) <= set(vars(sys.modules[module])), module
    assert pipeline_search.SLOWER > 1


def test_work_of_another_search_is_charged_with_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: seconds[0])

    def spend(amount: float, result: str) -> str:
        seconds[0] += amount
        return result

    work = study.SharedWork()

    def outer() -> str:
        work.get("inner", lambda: spend(2.0, "inner"))
        return spend(3.0, "outer")

    assert work.get("outer", outer) == "outer"
    assert (work.clock(), work.credit) == (5.0, 0.0)
    work.begin()
    assert work.get("outer", outer) == "outer"
    assert work.clock() == 5.0 + 5.0
    work.get("inner", outer)  # charged already, as a part of the outer one
    work.get("outer", outer)
    assert work.clock() == 5.0 + 5.0


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_have_a_program_and_as_many_devices_as_their_names_say(name: str) -> None:
    problem = PROBLEMS[name]
    assert len(problem.cluster(name).devices) == sum(count * each for count, each in problem.machines)
    assert problem.request.size == problem.batch
