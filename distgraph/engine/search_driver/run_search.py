"""The search of everything: layouts, stages, sub-meshes, micro-batches, schedule, recomputation, ZeRO.

*In:* a program and a cluster. *Out:* evaluations of programs, the best of them as a plan. *Invariant:*
plain data parallelism and the best uniform dp x tp x pp pipelines, without and with ZeRO, are evaluated too,
so that the answer is never behind them.

    for several micro-batch counts:
        costs by layer on every sub-mesh and shape      one intra-operator problem each (`LayoutCosts`)
        best pipeline by dynamic programming            an estimate
    the pipelines with the best estimates are built and forecast; the best forecast that fits memory wins

Micro-batch counts are tried in growing strides (`micro_batch_search`). The first pipeline that fits is
forecast at once, so that there is an answer early, and then data parallelism with ZeRO; with several
processes one of them does that in the background, while the next counts are tried. Shapes that are slower by
themselves than the best pipeline are left out from then on, and before that those that are much slower than a
first estimate. A pipeline that does not fit memory by its forecast is searched again with less memory. The
neighbours of the pipelines that were forecast are forecast too (`local_search`), fewer of larger programs:
those of uniform ones, too, but on devices of several kinds only where one of these is best.

What runs in the background or ahead of its turn is run once more when its turn comes, with what was evaluated
at hand (`SearchState.rehearse`, `Evaluations.prefetch`), so that the plan does not depend on the number of
processes.

Constants are named where they are used. `benchmarks/support/search_sensitivity.py` halves and doubles each;
benchmarks/HISTORY.md has what that changes.

Source: Zheng et al., Alpa (OSDI 2022), sections 4 and 5; the comparison by forecast instead of by estimate is
ours.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace

from distgraph.engine.search_driver.baselines.baselines import (
    evaluate_context_parallel,
    evaluate_data_parallel,
    evaluate_double_recursion,
    evaluate_mesh2d,
    evaluate_mesh2d_where_it_gains,
    evaluate_rings,
    evaluate_sharding_propagation,
    evaluate_single_devices,
    evaluate_start,
    evaluate_uniform_and_recursive,
    evaluate_zero,
)
from distgraph.engine.search_driver.candidate import plan_of
from distgraph.engine.search_driver.evaluations import evaluation_of, front, in_words
from distgraph.engine.search_driver.explain.decisions import decisions
from distgraph.engine.search_driver.fixed_mesh_search import (
    annotated_meshes,
    best_on_given_meshes,
    completed_annotations,
    given_mesh_trials,
    repetitions,
)
from distgraph.engine.search_driver.infeasibility import evaluate_nearest, infeasible_message
from distgraph.engine.search_driver.local_search import evaluate_substituted_schedules, local_search
from distgraph.engine.search_driver.lower_bound import least_seconds
from distgraph.engine.search_driver.micro_batch_search import evaluate_single_pools, search_micro_batch_counts
from distgraph.engine.search_driver.search_space import check_axes, check_constraints, micro_batch_counts
from distgraph.engine.search_driver.search_state import FORECASTS, Event, SearchState
from distgraph.errors import InfeasibleError
from distgraph.plan.plan import Plan, SearchRecord


def run_search(state: SearchState) -> Generator[Event, None, None]:
    """Search from the first baseline to the last explanation.

    Args:
        state: of a search that has not begun; holds the best program afterwards.

    Yields:
        an event for each phase that begins and each program that is evaluated.

    Raises:
        InfeasibleError: nothing fits the cluster.
        ResourceError: the cluster has fewer devices than annotations name.
        ShardingError: annotations contradict each other.
    """
    yield from evaluate_start(state)
    layered = state.layout_costs.reference_graph
    check_constraints(state.constraints, state.request.size, len(layered.layers), state.cluster)
    if state.constraints.given():
        yield Event(f"search with {state.constraints}")
    annotated = bool(annotated_meshes(layered.graph, state.layout_costs))
    named = state.layout_costs.named_axes
    if state.mode == "auto" and not annotated:
        check_axes(named)
    state.bound = least_seconds(layered.fold, state.cluster) or None
    yield from evaluate_data_parallel(state, eligible=not (annotated or named) and state.mode != "mesh2d")
    if state.mode == "sharding_propagation":
        yield from evaluate_sharding_propagation(state)
    elif state.mode == "recursive":
        yield from evaluate_double_recursion(state)
    elif state.mode == "mesh2d":
        yield from evaluate_mesh2d(state)
    elif annotated:
        yield from search_given_meshes(state)
    elif state.best is None or not state.expired():
        try:
            yield from search_everything(state)
        finally:
            state.layout_costs.solving.end_background()
    for step in state.explainer.run():  # a runner-up that turns out faster becomes the best
        yield Event(step) if isinstance(step, str) else state.record(step)
    if state.best is None and state.mode == "auto" and not annotated and not state.expired():
        yield from evaluate_nearest(state)
    if (
        not state.evaluations.all and not state.single_stage_breaks()
    ):  # so that the error can tell how much memory is missing
        yield from evaluate_data_parallel(state, eligible=not (annotated or named), hopeless=True)
    if state.best is None:
        raise InfeasibleError(infeasible_message(state))


def search_everything(state: SearchState) -> Iterator[Event]:
    """Layouts, stages and all other decisions, on meshes that the search makes."""
    yield from evaluate_single_devices(state)
    yield from search_micro_batch_counts(state)
    yield from evaluate_single_pools(state)
    yield from evaluate_uniform_and_recursive(state)
    yield from evaluate_mesh2d_where_it_gains(state)
    yield from evaluate_context_parallel(state)
    yield from evaluate_zero(state)
    yield from evaluate_substituted_schedules(state)
    yield from local_search(state)
    yield from evaluate_rings(state)
    if (error := state.evaluations.estimate_error) is not None:
        yield Event(f"estimates are {error:.1%} off the forecasts on average")


def search_given_meshes(state: SearchState) -> Iterator[Event]:
    """Layouts on the meshes that annotations name, for several micro-batch counts."""
    layout_costs, given = state.layout_costs, state.micro_batches
    counts = (given,) if given > 1 else micro_batch_counts(state.request.size)[::-1][:FORECASTS]
    counts = tuple(n for n in state.constraints.among("micro_batches", counts) if state.pipelines.is_batch(n))
    yield state.record(evaluation_of(completed_annotations(layout_costs, given)))
    for repeats in sorted({1, repetitions(layout_costs)}, reverse=True):
        where = f" repeated {repeats} times" if repeats > 1 else ""
        for count, recompute, memory_share in given_mesh_trials(layout_costs, counts):
            if state.best is not None and (memory_share or state.expired()):
                break  # what fits needs no memory multiplier
            yield Event(f"layouts on the annotated meshes{where}, {count} micro-batches")
            program = best_on_given_meshes(layout_costs, count, recompute, memory_share, repeats)
            yield state.record(evaluation_of(program))


def finalists_of_search(state: SearchState, count: int) -> list[tuple[str, Plan]]:
    """The `count` fastest programs by forecast that fit and may be the answer, in words and as plans.

    Programs that come to the same plan count once.
    """
    finalists: dict[str, tuple[str, Plan]] = {}
    ranked = sorted(state.evaluations.all, key=lambda evaluation: evaluation.seconds)
    for evaluation in ranked:
        if len(finalists) == count:
            break
        if evaluation.fits and evaluation.eligible:
            plan = plan_of(evaluation.built(state.layout_costs), state.layout_costs)
            finalists.setdefault(plan.digest, (in_words(evaluation.choices), plan))
            if evaluation is not state.best:
                evaluation.release()
    return list(finalists.values())


def plan_of_search(state: SearchState, settings: Mapping[str, str | int | float | bool | None]) -> Plan:
    """The best program so far as a plan, with what it was compared with."""
    assert state.best is not None
    status = "feasible" if not state.expired() else "out of time"
    gap = None if state.bound is None else state.best.seconds / state.bound - 1
    evaluations = state.evaluations
    plan = state.explainer.plan_of(state.best.built(state.layout_costs))
    forecast = plan.forecast and replace(plan.forecast, beside=dict(evaluations.baseline_shares))
    return replace(
        plan,
        forecast=forecast,
        baselines=dict(evaluations.baselines),
        search=SearchRecord(
            mode=state.mode,
            status=status,
            bound=state.bound,
            gap=gap,
            settings=settings,
            front=front(evaluations.all),
        ),
        decisions={
            **decisions(state.best, evaluations.all, state.constraints),
            **state.explainer.decisions,
        },
    )
