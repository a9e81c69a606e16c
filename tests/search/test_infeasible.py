"""A search that cannot answer says why, and what would help; without SCIP it answers all the same."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import cache

import pytest
from support.files.clusters import cluster_of
from support.programs.searched import PROGRAMS, SECONDS, finished_search, mixed, two_by_two
from support.search.plan_training import trains_as_one_rank

from distgraph.engine.commands.plan_search import SearchOptions
from distgraph.engine.search_driver import infeasibility
from distgraph.engine.search_driver.candidate import Candidate, StageChoice, build_candidate
from distgraph.engine.search_driver.run_search import plan_of_search
from distgraph.engine.search_driver.search_space import Shape
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.errors import InfeasibleError
from distgraph.ir.range_notation import parse_spans
from distgraph.passes.search.intra_op import solve_layouts
from distgraph.passes.search.intra_op.memory_limit import MemoryLimit
from distgraph.plan.plan import Plan
from distgraph.resources import Cluster

pytestmark = pytest.mark.timeout(600)  # several searches in one test
NEAREST = re.compile(
    r"search: no plan fits cluster boxes; the nearest, (?P<what>.*), needs (?P<missing>[\d.]+ \w+) more on "
    r"device (?P<device>\d): rank \d needs (?P<needed>[\d.]+ \w+) but device (?P=device) \(b\d/gpu\d\) has "
    r"(?P<has>[\d.]+ \w+): (?P=missing) are missing; devices? (?P<short>[\d\-, ]+) of (?P<used>\d) used fall "
    r"short; it takes (?P<parts>.*); it would fit with devices of (?P<enough>[\d.]+ \w+)(?P<ways>.*)$"
)
UNITS = {"B": 1, "KiB": 1024}


def number(text: str) -> float:
    value, _, unit = text.partition(" ")
    return float(value) * UNITS[unit]


def failure(program: str, cluster: Cluster) -> re.Match[str]:
    """What the search says."""
    with pytest.raises(InfeasibleError) as caught:
        PROGRAMS[program].search(cluster)
    found = NEAREST.match(str(caught.value))
    assert found is not None, str(caught.value)
    return found


@cache
def failure_within(program: str, memory: str) -> re.Match[str]:
    """What the search says of devices with this memory."""
    return failure(program, two_by_two(memory=memory))


@pytest.mark.parametrize(("name", "memory"), [("mlp", "4 KiB"), ("gpt", "20 KiB"), ("conv", "1 KiB")])
def test_nothing_fits(name: str, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which devices, how many bytes of what; a cluster with as much memory as it asks for has a plan."""
    found = failure_within(name, memory)
    assert found["has"] == memory
    assert number(found["missing"]) == pytest.approx(number(found["needed"]) - number(memory), rel=1e-3)
    parts = dict(reversed(part.split(" for ")) for part in found["parts"].split(", "))
    assert sum(map(number, parts.values())) == pytest.approx(number(found["needed"]), rel=1e-2)
    assert int(found["device"]) in parse_spans(found["short"])
    assert found["enough"] == found["needed"]
    devices = re.search(r"at least (\d+) devices like these", found["ways"])
    assert devices is not None
    assert 4 < int(devices[1]) <= 4 * number(found["needed"]) / number(memory) + 1
    enough = number(found["enough"]) * 1.001  # it is rounded
    monkeypatch.setattr(solve_layouts, "GAP", 0.02)  # any plan will do: no time for proofs
    plan = PROGRAMS[name].search(two_by_two(memory=f"{enough / 1024} KiB"))
    assert plan.forecast is not None
    assert max(plan.forecast.memory) <= enough
    trains_as_one_rank(PROGRAMS[name], plan)


def test_nothing_fits_devices_of_two_kinds() -> None:
    document = mixed(0.5, 2, 2)
    for machine, memory in zip(document["machines"], ("6 KiB", "2 KiB"), strict=True):
        machine["devices"]["memory"] = memory
    found = failure("mlp", cluster_of(document))
    assert found["has"] in ("6 KiB", "2 KiB")
    assert (found["has"] == "2 KiB") == (int(found["device"]) >= 2)


def test_what_the_memory_is_for_says_what_helps() -> None:
    """Few parameters and many samples: a smaller batch; the other way round: narrower states."""
    samples = replace(PROGRAMS["mlp"], batch=4096)
    with pytest.raises(InfeasibleError, match=r"a smaller batch or shorter samples"):
        samples.search(two_by_two(memory="100 KiB"))
    few = failure_within("mlp", "4 KiB")
    assert few["ways"].endswith("or a smaller model or narrower optimiser states")
    assert "batch" not in few["ways"]


def test_the_nearest_lacks_less_than_what_was_forecast_before(monkeypatch: pytest.MonkeyPatch) -> None:
    nearest = number(failure_within("mlp", "4 KiB")["missing"])
    monkeypatch.setattr(infeasibility, "candidates_by_memory", lambda *given: iter(()))
    assert nearest < number(failure("mlp", two_by_two(memory="4 KiB"))["missing"])


def test_without_scip_the_plan_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def timeless(plan: Plan) -> str:
        return replace(plan, search=replace(plan.search, seconds=None)).text()

    expected = plan_of_search(finished_search(PROGRAMS["mlp"]), SearchOptions(seconds=SECONDS).settings())
    monkeypatch.setitem(sys.modules, "pyscipopt", None)
    assert timeless(PROGRAMS["mlp"].search(two_by_two())) == timeless(expected)


def test_a_limit_that_no_layouts_keep_is_left_out_for_the_forecast() -> None:
    """It may be the limit of a program with other micro-batches; the forecast says what this one lacks."""
    state = SearchState(PROGRAMS["mlp"].compile_request(), two_by_two(memory="4 KiB"), "auto", 3600)
    layers = len(state.layout_costs.layered_graph(1).layers)
    stage = StageChoice(0, layers, (0, 1, 2, 3), Shape((("dp", 2), ("tp", 2))))
    limited = replace(stage, memory_limit=MemoryLimit(1.0))
    free, kept = (
        build_candidate(Candidate("search", (each,), "none", 0.0), state.layout_costs)
        for each in (stage, limited)
    )
    assert kept.completed == free.completed
    assert not kept.fits
