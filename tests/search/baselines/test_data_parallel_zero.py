"""Data parallelism with ZeRO: micro-batches and recomputed layers that fit, and how much work that takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from support.files.clusters import cluster_of
from support.programs.searched import SECONDS, Program, mixed, slow, two_by_two
from support.search.plan_training import trains_as_one_rank

from distgraph.engine.search_driver.baselines import data_parallel_zero
from distgraph.engine.search_driver.baselines.data_parallel_zero import (
    evaluate_data_parallel_zero,
    groups_of_devices,
)
from distgraph.engine.search_driver.candidate import plan_of
from distgraph.engine.search_driver.evaluations import Evaluation
from distgraph.engine.search_driver.fixed_mesh_search import data_parallel
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.models import GPT, GPTConfig
from distgraph.plan.constraints import SearchConstraints
from distgraph.resources import Cluster

LAYERS, SEQUENCE = 4, 16


def gpt() -> GPT:
    """Equal blocks, whose activations take most of the memory."""
    return GPT(GPTConfig(hidden=16, layers=LAYERS, heads=2, vocabulary=12, sequence=SEQUENCE, dtype="f64"))


PROGRAM = Program(gpt, (SEQUENCE,), (SEQUENCE,), tokens=True, batch=8)


def state_of(seconds: float = SECONDS, cluster: Cluster | None = None, **constraints: Any) -> SearchState:
    """A search that has not begun."""
    return SearchState(
        PROGRAM.compile_request(),
        cluster or two_by_two(),
        "auto",
        seconds,
        constraints=SearchConstraints(**constraints),
    )


@cache
def bytes_needed(micro_batches: int, recompute: tuple[int, ...] = ()) -> int:
    """Of the fullest device under ZeRO-3."""
    state = state_of()
    decisions = replace(state.constraints.start, micro_batches=micro_batches, zero=3, recompute=recompute)
    program = data_parallel(state.layout_costs, state.layout_costs.devices, "zero", decisions=decisions)
    assert not isinstance(program, str), program
    return math.ceil(program.forecast.peak_memory)


def with_best(state: SearchState, seconds: float = 1e9) -> SearchState:
    """The search after another program was found that fits and takes so long."""
    state.evaluations.best = Evaluation("other", None, seconds, 1.0, 0.0, 0, {}, None)
    return state


def evaluated(state: SearchState) -> list[Evaluation]:
    """All programs that are built, in their order."""
    return [e.evaluation for e in evaluate_data_parallel_zero(state) if e.evaluation is not None]


def recomputed(evaluation: Evaluation) -> int:
    """Number of its recomputed layers."""
    return int(evaluation.choices["recompute"].split()[0])


@pytest.fixture(scope="module")
def tight() -> int:
    """Memory in which neither one nor two micro-batches fit without recomputation, nor one with all."""
    return (bytes_needed(2) + bytes_needed(2, tuple(range(1, LAYERS + 1)))) // 2


def test_as_many_layers_are_recomputed_as_memory_asks_for(tight: int) -> None:
    state = state_of(memory=tight)
    programs = evaluated(state)
    assert [recomputed(each) for each in programs[:2]] == [0, 0]
    best = state.best
    assert best is not None
    assert best.origin == "data parallel, ZeRO-3"
    assert 0 < recomputed(best) < LAYERS
    assert best.memory <= tight
    count, layers = int(best.choices["micro_batches"]), recomputed(best)
    fewer = best.built(state.layout_costs).decisions.recompute[: layers - 1]
    assert bytes_needed(count, fewer) > tight
    assert best.seconds == min(each.seconds for each in programs if each.fits)
    assert state.evaluations.baselines["data parallel, ZeRO-3"] == best.seconds


def test_the_program_trains_as_one_rank(tight: int) -> None:
    state = state_of(memory=tight)
    evaluated(state)
    assert state.best is not None
    state.best.release()
    built = state.best.built(state.layout_costs)
    assert built.seconds == state.best.seconds
    trains_as_one_rank(PROGRAM, plan_of(built, state.layout_costs))


def test_recomputed_layers_compete_with_more_micro_batches() -> None:
    """Two micro-batches fit as they are; one fits with some layers recomputed."""
    state = state_of(memory=bytes_needed(2) + 1)
    programs = evaluated(state)
    choices = {(each.choices["micro_batches"], bool(recomputed(each))) for each in programs if each.fits}
    assert choices == {("2", False), ("1", True)}
    assert state.best is not None
    assert state.best.seconds == min(each.seconds for each in programs if each.fits)


@pytest.mark.parametrize("fits", [True, False])
def test_what_was_rehearsed_is_not_built_again(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without and with recomputation, where one micro-batch alone leaves every device a sample: with the same
    outcome."""
    program = replace(PROGRAM, batch=4)
    needed = bytes_needed(2, tuple(range(1, LAYERS + 1)))  # as much as one micro-batch of half the samples
    cluster = two_by_two(memory=f"{needed + 1 if fits else needed // 2} B")
    outcomes, built = [], []
    build = data_parallel_zero.data_parallel

    def counted(*args: Any, **given: Any) -> Any:
        built.append(given["decisions"])
        return build(*args, **given)

    monkeypatch.setattr(data_parallel_zero, "data_parallel", counted)
    for rehearsed in (False, True):
        state = SearchState(program.compile_request(), cluster, "auto", SECONDS, processes=2)
        if rehearsed:
            assert state.rehearse(partial(evaluate_data_parallel_zero, state))
            built.clear()
        programs = evaluated(state)
        assert bool(built) != rehearsed
        outcomes.append([(each.seconds, each.memory, recomputed(each)) for each in programs])
        outcomes[-1].append((state.evaluations.baselines, 0, 0))
        assert (state.best is not None) == fits
        assert all(each.built(state.layout_costs).seconds == each.seconds for each in programs)
    assert outcomes[0] == outcomes[1]


def test_given_layers_stay(tight: int) -> None:
    state = state_of(memory=tight, recompute=False)
    assert all(not recomputed(each) for each in evaluated(state))
    assert state.best is None


@pytest.mark.parametrize(("affordable", "complete"), [(0.5, False), (2.5, False), (100.0, True)])
def test_work_is_a_share_of_the_seconds_of_the_search(
    tight: int, affordable: float, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the count of ops alone: the clock stands still. Without another program there is no limit."""
    state = with_best(state_of(memory=tight))
    state.expired = lambda: False
    ops = len(state.layout_costs.layered_graph(1).graph.ops)
    each = data_parallel_zero._SHARE * SECONDS / (ops * affordable)
    monkeypatch.setattr(data_parallel_zero, "SECONDS_PER_OP", each)
    programs = evaluated(state)
    assert len(programs) <= affordable
    assert any(program.fits for program in programs) is complete
    if not programs:
        reason = f"left out: there is no time for it in {SECONDS:g} s"
        assert state.evaluations.baselines == {"data parallel, ZeRO-3": reason}
    if not complete:
        assert any(program.fits for program in evaluated(state_of(memory=tight)))


def _slow_network() -> Cluster:
    document = slow(2, 2)
    for machine in document["machines"]:
        machine["nics"]["bandwidth"] = "0.01 Mbit/s"
    return cluster_of(document)


@pytest.mark.parametrize(("make", "built"), [(two_by_two, True), (_slow_network, False)])
def test_messages_alone_are_not_to_take_longer_than_the_best(
    make: Callable[[], Cluster], built: bool
) -> None:
    state = with_best(state_of(cluster=make()), 1.0)
    assert bool(evaluated(state)) is built
    if not built:
        reason = state.evaluations.baselines["data parallel, ZeRO-3"]
        assert reason == "left out: messages alone take longer than the best program"


def test_nothing_is_recomputed_for_a_program_that_is_slower_anyway(tight: int) -> None:
    state = state_of(memory=tight)
    fastest = min(each.seconds for each in evaluated(state))
    again = with_best(state_of(memory=tight), fastest / 2)
    assert all(not recomputed(each) for each in evaluated(again))


def test_devices_of_one_kind_are_left_out_when_the_time_is_over() -> None:
    """All devices are tried also then, if there is no program that fits."""
    state = state_of(memory=1 << 10, cluster=cluster_of(mixed(0.5, 2, 2)))
    state.expired = lambda: True
    evaluated(state)
    names = {name for name in state.evaluations.baselines if name.startswith("data parallel")}
    assert names == {"data parallel, ZeRO-3"}


def test_kinds_with_one_name_are_told_apart() -> None:
    """Machines of two and of four equal devices: two kinds of four devices."""
    state = state_of(cluster=cluster_of(slow(2, 2, 4)))
    assert [len(devices) for devices in groups_of_devices(state).values()] == [8, 4, 4]
    assert len(set(groups_of_devices(state).values())) == 3
