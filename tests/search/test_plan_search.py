"""The search for a plan as its callers see it: modes, options, progress, Ctrl-C, several processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.programs.forecasts import machines
from support.programs.plan_cases import CASES, classifier
from support.programs.searched import PROGRAMS, two_by_two

import distgraph as dg
from distgraph import nn, optim
from distgraph.engine.commands import plan_search
from distgraph.engine.commands.interrupt import Interrupt, remembered
from distgraph.engine.commands.plan_search import Progress, SearchOptions, Step, search, with_searched_plan
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.data import whole
from distgraph.errors import GraphError, InfeasibleError, ResourceError, RuntimeFault, ShardingError
from distgraph.passes.search.intra_op import solve_layouts
from distgraph.passes.search.solver.problem import Problem, Solution
from distgraph.plan.plan import Plan

CASE = CASES["narrow"]


def compile_request_of(engine: dg.Engine, mode: str = "train") -> CompileRequest:
    """What the first batch of the case would be given to."""
    return engine._session.compile_request(mode, whole(CASE.first()))


def test_semi_is_the_forecast_of_the_annotated_program() -> None:
    cluster = machines(2, 2)
    engine = CASE.engine(cluster=cluster)
    told: list[Progress] = []
    plan = search(compile_request_of(engine), cluster, SearchOptions(mode="semi", watch=told.append))
    assert told[-1].incumbent == plan.forecast.seconds
    engine.prepare(CASE.first())
    forecast = engine.forecast()
    assert plan.forecast is not None
    assert plan.forecast.seconds == forecast.step_seconds
    assert plan.forecast.memory == (max(memory.total for memory in forecast.memory.values()),)
    assert plan.search.mode == "semi"
    assert plan.search.seconds is not None
    assert list(plan.baselines) == ["plain data parallel (dp=4)"]
    assert not engine.plan.portable.compare(replace(plan, forecast=None))
    planned = CASE.engine(plan, cluster=cluster)
    planned.prepare(CASE.first())
    assert planned.forecast().step_seconds == plan.forecast.seconds


def test_a_mode_that_searches_does_so_at_the_first_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that the search gives is what runs; evaluation follows it; it is searched once."""
    cluster, asked = machines(2, 2), []
    wanted = CASE.engine(cluster=cluster)
    wanted.prepare(CASE.first())

    def found(request: CompileRequest, cluster: Any, options: SearchOptions) -> Plan:
        asked.append((request.mode, cluster.name, options.mode))
        return wanted.plan.portable

    monkeypatch.setattr(plan_search, "search", found)
    strategy = dg.Strategy(mode="auto")
    engine = dg.Engine(
        classifier(dtype="f32")(False), nn.CrossEntropy(), CASE.optimizer, strategy=strategy, cluster=cluster
    )
    x, y = CASE.data()
    engine.fit((x, y), epochs=2, batch_size=8, valid_data=(x[:3], y[:3]), progress=False)
    assert asked == [("train", "boxes", "auto")]
    assert engine.plan.portable == wanted.plan.portable
    assert engine.plan.build.ranks == (0, 1, 2, 3)
    assert engine.training_spec.strategy.micro_batches == 2


def test_what_a_mode_that_searches_needs() -> None:
    strategy = dg.Strategy(mode="recursive")
    model = classifier(dtype="f32")(False)
    engine = dg.Engine(model, nn.CrossEntropy(), optim.Adam(), strategy=strategy)
    with pytest.raises(
        ResourceError, match=r"mode 'recursive' of Strategy .* but the engine has none; give it"
    ):
        engine.fit(CASE.data(), batch_size=8, progress=False)
    engine = dg.Engine(model, nn.CrossEntropy(), optim.Adam(), strategy=strategy, cluster=machines(2))
    with pytest.raises(
        GraphError, match=r"searches a plan for training but the first program is one to predict"
    ):
        engine.predict(CASE.data()[0])
    with pytest.raises(
        ShardingError, match="modes are manual, semi, sharding_propagation, recursive, mesh2d, auto"
    ):
        dg.Strategy(mode="fast")
    with pytest.raises(GraphError, match="mode 'fast' of the search does not exist"):
        SearchOptions(mode="fast")
    with pytest.raises(GraphError, match=r"seconds of the search is -1 but must be"):
        SearchOptions(seconds=-1)
    with pytest.raises(GraphError, match=r"seconds of the search is nan but must be"):
        SearchOptions(seconds=float("nan"))


def test_a_plan_or_annotations_need_no_search() -> None:
    engine = CASE.engine()
    request = compile_request_of(engine)
    assert with_searched_plan(request, None) is request
    engine.prepare(CASE.first())
    planned = CASE.engine(engine.plan.portable)
    assert with_searched_plan(compile_request_of(planned), None).plan == engine.plan.portable


@pytest.mark.parametrize("swallowed", [False, True])
def test_ctrl_c_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch, swallowed: bool) -> None:
    """Also where a solver swallows the interrupt and returns what it has."""
    engine = CASE.engine()
    engine.prepare(CASE.first())
    plan = engine.plan.portable
    more = []

    def improved(*given: Any) -> Iterator[Step]:
        yield Step("first", 1.0, lambda: plan)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        except KeyboardInterrupt:
            if not swallowed:
                raise
        yield Step("second", 0.9, lambda: replace(plan, cluster="better"))
        more.append("went on")

    monkeypatch.setattr(plan_search, "_search_events", improved)
    found = search(compile_request_of(engine), machines(2, 2), SearchOptions())
    assert found.search.status == "interrupted"
    assert found.cluster == ("better" if swallowed else "")
    assert not more
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_ends_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CASE.engine()
    engine.prepare(CASE.first())
    plan = engine.plan.portable

    def improved(*given: Any) -> Iterator[Step]:
        yield Step("first", 1.0, lambda: plan)
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):  # as a solver may
                os.kill(os.getpid(), signal.SIGINT)
                signal.pause()
        yield Step("second")

    monkeypatch.setattr(plan_search, "_search_events", improved)
    with pytest.raises(KeyboardInterrupt):
        search(compile_request_of(engine), machines(2, 2), SearchOptions())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("then", ["at once", "swallowed", "an error of what broke off"])
def test_ctrl_c_before_any_plan(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """One error that says so, whatever the solver makes of the interrupt."""

    def improved(*given: Any) -> Iterator[Step]:
        yield Step("first")
        with contextlib.ExitStack() as stack:
            if then != "at once":
                stack.enter_context(contextlib.suppress(KeyboardInterrupt))
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        if then != "swallowed":
            raise InfeasibleError("nothing was found in so little time")
        yield Step("second")
        pytest.fail("went on")

    monkeypatch.setattr(plan_search, "_search_events", improved)
    with pytest.raises(
        RuntimeFault, match=r"search: interrupted after .* s, before there was any plan; give"
    ):
        search(compile_request_of(CASE.engine()), machines(2, 2), SearchOptions())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_first_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver swallows it and has no choice: no assertion of ours, no claim that nothing fits."""

    pressed: list[str] = []

    def solve(problem: Problem, **given: Any) -> Solution:
        if not pressed:
            pressed.append("once")
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                signal.pause()
        return Solution(None, np.inf, -np.inf, np.inf, "unknown", message="interrupted")

    monkeypatch.setattr(solve_layouts, "solve_cached", solve)
    with pytest.raises(RuntimeFault, match="before there was any plan"):
        PROGRAMS["gpt"].search(two_by_two())  # two samples: no data parallelism before


def test_no_handler_outside_of_the_main_thread() -> None:
    found: list[Interrupt] = []

    def work() -> None:
        with remembered() as interrupt:
            found.append(interrupt)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not found[0].requested


def test_progress_reads() -> None:
    assert str(Progress("tracing", 0.4)) == "tracing: no plan yet (0 s)"
    shown = str(Progress("stages", 12.0, incumbent=0.1052, bound=0.0981))
    assert shown == "stages: best 105.2 ms a step, none below 98.1 ms (12 s)"


def test_one_process_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 searches; the others get its plan or its error."""
    engine = CASE.engine()
    engine.prepare(CASE.first())
    plan, sent = engine.plan.portable, []

    class Transport:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def broadcast_object(self, value: Any, owner: int) -> Any:
            sent.append(value)
            return sent[0]

    def on(rank: int, make: Any) -> Plan:
        monkeypatch.setattr(plan_search, "ranks_of_job", lambda: 2)
        monkeypatch.setattr(plan_search, "current_transport", lambda: Transport(rank))
        return plan_search._plan_of_rank_0(make)

    assert on(0, lambda: plan) == plan
    assert on(1, lambda: pytest.fail("rank 1 searched")) == plan
    sent.clear()

    def fail() -> Plan:
        raise ResourceError("too small")

    for rank in (0, 1):
        with pytest.raises(ResourceError, match="too small"):
            on(rank, fail)
    assert np.array_equal([value[0] for value in sent], ["", ""])
