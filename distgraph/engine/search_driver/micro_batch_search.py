"""The search over micro-batch counts: which are tried, in which order, and which pipelines are forecast.

*In:* the counts that divide the batch. *Out:* the best pipeline by estimate for each count that is tried;
evaluations of the most promising of them. *Invariant:* no count comes twice; where there are few, all come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from distgraph.engine.search_driver.baselines.data_parallel_zero import evaluate_data_parallel_zero
from distgraph.engine.search_driver.candidate import Candidate
from distgraph.engine.search_driver.pipeline_search import (
    SLOWER,
    best_count,
    best_estimate,
    may_fit,
)
from distgraph.engine.search_driver.search_space import FEW_COUNTS
from distgraph.engine.search_driver.search_state import FORECASTS, Event, SearchState

_ROUNDS = 4
"""Micro-batches a stage of the longest pipeline, from which the search begins: its stages are then idle
for (p - 1) / (5 p - 1) of a step, about a fifth (GPipe, Huang et al., 2019, section 2.3: no more than 4 p are
needed)."""
_RETRIES = 2
"""How often a pipeline that does not fit by its forecast is searched again with less memory."""
_TIGHTER = 4
"""How often the memory of one such search is lowered while the same pipeline comes out."""


def search_micro_batch_counts(state: SearchState) -> Iterator[Event]:
    """The best pipelines of several micro-batch counts, the most promising of them forecast."""
    pipelines, counts = state.pipelines, state.pipelines.counts
    longest = min(len(state.layout_costs.devices), len(state.layout_costs.layered_graph(counts[-1]).layers))
    tried: set[int] = set()
    first, zero_begun = None, False
    for count in counts_to_try(counts, longest, pipelines.best, state.expired):
        tried.add(count)
        yield from _try_count(state, count)
        if first is not None:
            yield from _evaluate_promising(state, [first])
        first = pipelines.best.get(count) if state.best is None else None  # so that there is an answer early
        if first is not None and not state.rehearse(partial(_evaluate_promising, state, [first])):
            yield from _evaluate_promising(state, [first])
            first = None
        if state.best is not None and not zero_begun:
            zero_begun = True
            if not state.rehearse(partial(evaluate_data_parallel_zero, state)):
                yield from evaluate_data_parallel_zero(state)
    if first is not None:
        yield from _evaluate_promising(state, [first])
    if state.best is not None:  # so that pipelines which are much slower are left out
        yield from evaluate_data_parallel_zero(state)
    yield from _evaluate_best(state, pipelines.best.values())
    if pipelines.best and not state.expired():
        yield from _try_fewest(state, counts[-1], tried)


def evaluate_single_pools(state: SearchState) -> Iterator[Event]:
    """The best pipelines on each kind of device alone, which no plan may be behind."""
    for pipelines in state.pipelines.by_pool.values():
        for pipeline in _foremost(pipelines):
            yield from _compare(state, pipeline, _comes_too_late(state, pipeline))


def counts_to_try(
    counts: Sequence[int], stages: int, best: Mapping[int, Candidate], expired: Callable[[], bool]
) -> Iterator[int]:
    """Micro-batch counts, towards that of the best pipeline.

    From four times as many as the longest pipeline has stages; where nothing fits there, from the next
    smaller micro-batches that do. From there to more, else to fewer, in growing strides as long as that is
    better; last to the neighbours of the best. Then all others, where there are few: a pipeline needs many
    micro-batches, a single stage few, and both may be local optima.

    Args:
        counts: falling.
        stages: of the longest pipeline.
        best: pipeline by count; whoever tries a count adds its pipeline before the next count is taken.
        expired: whether only a first pipeline is still searched for.
    """
    start = min(range(len(counts)), key=lambda i: abs(math.log(counts[i] / (_ROUNDS * stages))))
    tried: set[int] = set()
    order = [*range(start, -1, -1), *range(start + 1, len(counts))]
    for position in order:
        tried.add(position)
        yield counts[position]
        if best or expired():
            break
    stride = {-1: 1, 1: 1}  # towards more, towards fewer
    while best and not expired():
        center, before = counts.index(best_count(best)), best_estimate(best)
        near = [(way, center + way * size) for way in stride for size in (stride[way], 1)]
        ahead = [(way, n) for way, n in near if 0 <= n < len(counts) and n not in tried]
        if not ahead:
            break
        way, position = ahead[0]
        tried.add(position)
        yield counts[position]
        stride[way] = 2 * stride[way] if best_estimate(best) < before else 1
    for position in order if len(counts) <= FEW_COUNTS else ():
        if expired():
            return
        if position not in tried:
            tried.add(position)
            yield counts[position]


def _try_count(state: SearchState, count: int) -> Iterator[Event]:
    yield Event(f"stages, {count} micro-batches")
    state.pipelines.try_count(count)


def _try_fewest(state: SearchState, fewest: int, tried: set[int]) -> Iterator[Event]:
    """The fewest micro-batches, where the best of all others are pipelines: a single stage likes few."""
    pipelines = state.pipelines
    count = min(pipelines.best)
    if fewest in tried or any(len(pipeline.stages) == 1 for pipeline in pipelines.best.values()):
        return
    if may_fit(state.layout_costs, count, pipelines.submeshes[-1], larger=count // fewest):
        yield from _try_count(state, fewest)
        yield from _evaluate_best(state, [pipelines.best[n] for n in pipelines.best if n == fewest])


def _foremost(pipelines: Iterable[Candidate]) -> list[Candidate]:
    """The few best by estimate."""
    return sorted(pipelines, key=lambda pipeline: pipeline.estimate)[:FORECASTS]


def _evaluate_best(state: SearchState, pipelines: Iterable[Candidate]) -> Iterator[Event]:
    """Forecast the best of some pipelines, and for each that mixes sizes of stages those of one size."""
    best = _foremost(pipelines)
    best += _foremost(
        single
        for pipeline in best
        if not _is_much_slower(state, pipeline)
        for single in state.pipelines.of_single_sizes(pipeline)
    )
    yield from _evaluate_promising(state, best)


def _evaluate_promising(state: SearchState, pipelines: Sequence[Candidate]) -> Iterator[Event]:
    """Forecast the pipelines that may be better than the best, each once; those that do not fit are searched
    again with less memory."""
    waiting = [(pipeline, 1.0) for pipeline in pipelines]
    for attempt in range(_RETRIES + 1):
        state.evaluations.prefetch([pipeline for pipeline, _ in waiting if _is_promising(state, pipeline)])
        unfit: list[tuple[Candidate, float, float]] = []
        for pipeline, slack in waiting:
            if _is_promising(state, pipeline):
                state.evaluated.add(pipeline.decisions)
                evaluation = state.evaluations.evaluate(pipeline)
                yield state.record(evaluation)
                if not evaluation.fits:
                    unfit.append((pipeline, slack, evaluation.memory_ratio))
        waiting.clear()
        for pipeline, slack, ratio in unfit if attempt < _RETRIES else ():
            if state.expired() and state.best is not None:
                return
            yield Event(f"stages, {pipeline.micro_batches} micro-batches, with less memory")
            waiting += _with_less_memory(state, pipeline, slack, ratio)


def _with_less_memory(
    state: SearchState, pipeline: Candidate, slack: float, ratio: float
) -> list[tuple[Candidate, float]]:
    """Another pipeline for the micro-batch count and the schedule of one that needs `ratio` times the memory,
    with the share of the memory that it may need by the estimate; none where there is no other."""
    for _ in range(_TIGHTER):  # the estimate may say of the same pipeline that it needs less
        slack /= ratio * 1.01
        smaller = state.pipelines.best_for(pipeline.micro_batches, slack, (pipeline.schedule,), pipeline)
        if smaller is None:
            return []
        if smaller.decisions != pipeline.decisions:
            return [(smaller, slack)]
    return []


def _is_promising(state: SearchState, pipeline: Candidate) -> bool:
    return not _comes_too_late(state, pipeline) and pipeline.decisions not in state.evaluated


def _comes_too_late(state: SearchState, pipeline: Candidate) -> bool:
    """Whether to skip a pipeline: its estimate is more than 15 % above the best, or the time limit is
    reached. The first pipeline is not skipped for the time limit, nor is any while there is no program."""
    if state.best is None:
        return False
    return _is_much_slower(state, pipeline) or (state.expired() and bool(state.evaluated))


def _is_much_slower(state: SearchState, pipeline: Candidate) -> bool:
    return state.best is not None and pipeline.estimate > SLOWER * state.best.seconds


def _compare(state: SearchState, pipeline: Candidate, late: bool) -> Iterator[Event]:
    """A pipeline among the baselines, by its forecast; a late one only where that was made before."""
    same = (e for e in state.evaluations.all if e.candidate is not None)
    before = next((e for e in same if e.candidate and e.candidate.decisions == pipeline.decisions), None)
    if before is not None:
        state.evaluations.add_baseline(pipeline.origin, before)
    elif not late:
        yield state.record(state.evaluations.evaluate(pipeline))
