"""The search for a plan: candidates, the forecast of each, the best.

plan = search(training, load_cluster("dgx_a100_pod"), SearchOptions(seconds=30))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from distgraph.engine.commands.interrupt import Interrupt, remembered
from distgraph.engine.commands.recompute_search import RecomputeSearch
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.plan_apply import with_plan_settings
from distgraph.engine.compile.plan_extract import estimate, extract_plan
from distgraph.engine.compile.program_forecast import forecast_training
from distgraph.engine.search_driver.evaluations import Evaluation
from distgraph.engine.search_driver.run_search import finalists_of_search, plan_of_search, run_search
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.engine.search_driver.worker_pool import available_processes
from distgraph.errors import DistGraphError, GraphError, ResourceError, RuntimeFault
from distgraph.ir.gc_pause import collector_paused
from distgraph.plan.constraints import FREE, SEARCHED, SearchConstraints
from distgraph.plan.plan import Decision, Plan, SearchRecord
from distgraph.plan.strategy import MODES, Strategy
from distgraph.resources import Cluster
from distgraph.resources.runtimes.load_runtime import load_runtime
from distgraph.resources.runtimes.runtime_model import RuntimeModel
from distgraph.runtime.launch.mpi_rank import current_transport, ranks_of_job


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a search stands. Print it.

    Attributes:
        phase: what it is at.
        seconds: since it began.
        incumbent: seconds of a step of the best plan so far, by forecast; None while there is none.
        bound: seconds of a step that no plan goes below (see `search.lower_bound`), where that is known.
    """

    phase: str
    seconds: float
    incumbent: float | None = None
    bound: float | None = None

    def __str__(self) -> str:
        best = "no plan yet" if self.incumbent is None else f"best {self.incumbent * 1e3:.4g} ms a step"
        bound = "" if self.bound is None else f", none below {self.bound * 1e3:.4g} ms"
        return f"{self.phase}: {best}{bound} ({self.seconds:.0f} s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What is searched, and for how long.

    Attributes:
        mode: "semi" and "manual" keep to annotations and completion; "sharding_propagation", "recursive" and
            "auto" search, see docs/planning/plan.md.
        seconds: after which the best so far is taken.
        watch: receives the progress of the search.
        processes: that search at the same time, which changes nothing but the time it takes; None for one on
            each core that this process may use.
        runtime: what is to execute the plan (docs/planning/runtimes.md); None for distgraph.
        constraints: decisions that the search keeps to.
        start: a plan from which the search starts, in modes that search; the answer is never behind it.
        measure: called with the fastest plans by forecast, each in words and as a plan; returns the answer.
            None where the forecast decides.
        finalists: number of these plans.

    Raises:
        GraphError: an unknown mode, or seconds are negative.
        ShardingError: the mode does not keep the constraints.
    """

    mode: str = "auto"
    seconds: float = 60.0
    watch: Callable[[Progress], None] | None = None
    processes: int | None = None
    runtime: RuntimeModel | None = None
    constraints: SearchConstraints = FREE
    start: Plan | None = None
    measure: Callable[[list[tuple[str, Plan]]], Plan] | None = None
    finalists: int = 1

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise GraphError(
                f"mode {self.mode!r} of the search does not exist; the modes are {', '.join(MODES)}"
            )
        if not self.seconds >= 0:
            raise GraphError(f"seconds of the search is {self.seconds} but must be a number from 0 up")
        if self.processes is not None and self.processes < 1:
            raise GraphError(
                f"processes of the search is {self.processes} but must be 1 or more; None takes every core"
            )
        self.constraints.check_mode(self.mode)
        if self.start is not None and self.mode not in SEARCHED:
            raise GraphError(
                f"start of the search is a plan but mode {self.mode!r} searches nothing; leave start out, or "
                f'use mode "auto"'
            )

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """The options as they are stored in the plan."""
        runtime = {} if self.runtime is None else {"runtime": self.runtime.name}
        start = {} if self.start is None else {"start": self.start.digest}
        return {"mode": self.mode, "seconds": self.seconds, **runtime, **start, **self.constraints.given()}


@collector_paused()  # objects of a search stay alive, or are in no reference cycle
def search(request: CompileRequest, cluster: Cluster, options: SearchOptions) -> Plan:
    """Search for the best plan; Ctrl-C ends the search with the best plan so far, a second one raises.

    Raises:
        GraphError: the program does not train.
        ResourceError: the cluster is too small, or does not state a number that a cost needs.
        InfeasibleError: no plan fits the cluster.
        RuntimeFault: Ctrl-C before there was any plan.
    """
    start = time.monotonic()
    best: Step | None = None
    with collector_paused(), remembered() as interrupt:
        try:
            for event in _search_events(request, cluster, options, interrupt):
                best = event if event.plan is not None else best
                if options.watch is not None:
                    now = time.monotonic() - start
                    incumbent = None if best is None else best.seconds
                    options.watch(Progress(event.phase, now, incumbent, event.bound))
                if interrupt.requested:
                    break
        except KeyboardInterrupt:
            if interrupt.again:
                raise
            interrupt.requested = True  # also outside of the main thread
        except DistGraphError:
            if not interrupt.requested:  # else the search is unfinished, and its error does not matter
                raise
    if interrupt.again:  # the search has caught the exception
        raise KeyboardInterrupt
    seconds = time.monotonic() - start
    if best is None:
        assert interrupt.requested  # a search without any plan raises
        raise RuntimeFault(
            f"search: interrupted after {seconds:.1f} s, before there was any plan; give it more time, or "
            f"search with 0 seconds for the first plan that fits"
        )
    assert best.plan is not None
    plan = best.plan()
    if options.measure is not None and not interrupt.requested:
        others = best.finalists(options.finalists) if best.finalists is not None else []
        rest = [(words, each) for words, each in others if each.digest != plan.digest]
        words = next((words for words, each in others if each.digest == plan.digest), "best by forecast")
        chosen = options.measure([(words, plan), *rest][: options.finalists])
        figures = replace(plan.search, measured=chosen.search.measured)
        plan = replace(chosen, baselines=plan.baselines, search=figures)
        seconds = time.monotonic() - start
    status = "interrupted" if interrupt.requested else plan.search.status
    return replace(plan, search=replace(plan.search, status=status, seconds=seconds))


def options_of(strategy: Strategy) -> SearchOptions:
    """The options of the search that a strategy asks for."""
    constraints = strategy.constraints
    if strategy.mode != "auto":  # a number of micro-batches that does not divide takes fewer there
        constraints = replace(constraints, micro_batches=None)
    options = SearchOptions(mode=strategy.mode, constraints=constraints, runtime=_runtime_of(strategy))
    return options if strategy.seconds is None else replace(options, seconds=strategy.seconds)


def _runtime_of(strategy: Strategy) -> RuntimeModel | None:
    """What is to execute the plan. Raises ResourceError: there is no such runtime."""
    return None if strategy.runtime is None else load_runtime(strategy.runtime)


def with_constraints_of(strategy: Strategy, options: SearchOptions) -> SearchOptions:
    """Options that also keep the constraints of a strategy that searches, for its runtime; what the options
    give goes first."""
    if strategy.mode != "auto" or options.mode != "auto":
        return options
    runtime = options.runtime or _runtime_of(strategy)
    return replace(options, constraints=options.constraints.over(strategy.constraints), runtime=runtime)


def with_searched_plan(request: CompileRequest, cluster: Cluster | None) -> CompileRequest:
    """The request with a plan if the mode of its strategy requires a search; else the request itself.

    Raises:
        ResourceError: the mode requires a search but there is no cluster.
        GraphError: the mode requires a search but the program does not train.
        Others: as `search`.
    """
    strategy = request.training_spec.strategy
    if request.plan is not None or not strategy.searches:
        return request
    searched, other = f"mode {strategy.mode!r}", 'take mode "semi"'
    if strategy.mode not in SEARCHED:
        searched, other = f"recompute {strategy.recompute!r}", "give numbers of layers"
    if cluster is None:
        raise ResourceError(
            f"{searched} of Strategy searches a plan for a cluster but the engine has none; give it one "
            f"with Engine(cluster=...), such as distgraph.resources.local_cluster(4) or the path of a file, "
            f"a plan with Engine(plan=...), or {other}"
        )
    if request.mode != "train":
        raise GraphError(
            f"{searched} of Strategy searches a plan for training but the first program is one to "
            f"{request.mode}; call prepare(batch) or fit before, or give the engine a plan"
        )
    options = options_of(request.training_spec.strategy)
    plan = _plan_of_rank_0(lambda: search(request, cluster, options))
    return replace(request, training_spec=with_plan_settings(request.training_spec, plan), plan=plan)


@dataclass(frozen=True, slots=True)
class Step:
    """An event of a search: a phase begins, or a program is better than all before.

    Attributes:
        phase: description of the phase.
        seconds: seconds of a step of the better program; None if only a phase begins.
        plan: makes the plan of the better program.
        bound: see `Progress`.
        finalists: makes N of the fastest plans by forecast, each with its words; None where the mode
            searches nothing.
    """

    phase: str
    seconds: float | None = None
    plan: Callable[[], Plan] | None = None
    bound: float | None = None
    finalists: Callable[[int], list[tuple[str, Plan]]] | None = None


def _search_events(
    request: CompileRequest, cluster: Cluster, options: SearchOptions, interrupt: Interrupt
) -> Iterator[Step]:
    """The events of a search, in the given mode; they end soon after an interrupt."""
    if options.mode in SEARCHED:
        yield from _automatic_search(request, cluster, options, interrupt)
        return
    request, decisions = _constrained(request, options.constraints), dict[str, Decision]()
    if request.training_spec.strategy.constraints.chooses:
        layers = RecomputeSearch(request, cluster, options.runtime)
        for phase in layers.run():
            yield Step(phase)
        request, decisions = layers.decided, {"recompute": layers.decision()}
    forecasted = forecast_training(request, cluster, runtime=options.runtime)

    def as_compiled() -> Plan:
        plan = extract_plan(request, forecasted.build, forecasted.mapping, cluster)
        compared = forecasted.data_parallel_baseline()
        baselines = {n: each if isinstance(each, str) else each.step_seconds for n, each in compared.items()}
        shares = {n: each.shares for n, each in compared.items() if not isinstance(each, str)}
        figures = replace(estimate(plan, forecasted.forecast), beside=shares)
        status = "recomputation chosen" if decisions else "not searched"
        search = SearchRecord(mode=options.mode, status=status, settings=options.settings())
        return replace(
            plan, forecast=figures, baselines=baselines, search=search, decisions=decisions or plan.decisions
        )

    yield Step("forecast", forecasted.forecast.step_seconds, as_compiled)


def _constrained(request: CompileRequest, given: SearchConstraints) -> CompileRequest:
    """The request of a mode that searches no layouts, with the constraints that are for these modes."""
    if not given.given():
        return request
    strategy = request.training_spec.strategy
    both = given.over(strategy.constraints)
    strategy = replace(
        strategy,
        micro_batches=both.start.micro_batches,
        schedule=both.start.schedule,
        recompute=both.recompute,
        memory=both.memory,
    )
    return replace(request, training_spec=replace(request.training_spec, strategy=strategy))


def _automatic_search(
    request: CompileRequest, cluster: Cluster, options: SearchOptions, interrupt: Interrupt
) -> Iterator[Step]:
    runtime = options.runtime
    if runtime is not None:
        cluster, runtime = runtime.applied(cluster)
    state = SearchState(
        request,
        cluster,
        options.mode,
        options.seconds,
        lambda: interrupt.requested,
        processes=options.processes or available_processes(),
        runtime=runtime,
        constraints=options.constraints,
        start=options.start,
    )
    best: Evaluation | None = None
    for event in run_search(state):
        if state.best is best or state.best is None:
            yield Step(event.phase, bound=state.bound)
            continue
        best = state.best
        plan = partial(plan_of_search, state, options.settings())
        yield Step(event.phase, best.seconds, plan, state.bound, partial(finalists_of_search, state))


def _plan_of_rank_0(make: Callable[[], Plan]) -> Plan:
    """The plan that rank 0 makes, on every process of a job. Collective."""
    transport = current_transport() if ranks_of_job() > 1 else None
    if transport is None:
        return make()
    outcome: tuple[str, DistGraphError | None] = "", None
    if transport.rank == 0:
        try:
            outcome = make().text(), None
        except DistGraphError as error:
            outcome = "", error
    text, failure = transport.broadcast_object(outcome, 0)
    if failure is not None:
        raise failure
    return Plan.parse(text)
