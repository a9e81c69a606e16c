"""Local search: from the pipelines that were forecast, move by move, to programs whose forecast is better.

A local-search move leads to a candidate that differs from a given one in exactly one decision; the memory
multipliers of all stages count as one decision. Estimates add up what overlaps, so that the forecast may like
a neighbour better.

*In:* evaluations of pipelines. *Out:* evaluations of their neighbours. *Invariant:* every layer has one
stage, and no stage is empty; stages keep their devices or exchange them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from distgraph.engine.search_driver.candidate import Candidate, StageChoice
from distgraph.engine.search_driver.evaluations import Evaluation
from distgraph.engine.search_driver.load_balancing import rebalanced
from distgraph.engine.search_driver.search_state import Event, SearchState
from distgraph.plan.schedule_policies import searched_schedules

_MOST_OPS = 12_000
"""Ops of the programs, together, that a local search builds: building takes time in proportion to them."""
_LOWER_MULTIPLIERS = (0.25, 0.5)
"""Factors on memory multipliers that are tried: the multipliers of `layout_costs` are ten times apart."""


def local_search(state: SearchState) -> Iterator[Event]:
    """From each pipeline that was forecast to the first neighbour that is faster, as long as there is one."""
    built_ops = 0
    candidates = (evaluation.candidate for evaluation in state.evaluations.all)
    seen = {candidate.decisions for candidate in candidates if candidate is not None}
    starts = [
        e for e in state.evaluations.all if e.fits and e.candidate and math.isfinite(e.candidate.estimate)
    ]
    for start in sorted(starts, key=lambda evaluation: evaluation.seconds):
        if built_ops >= _MOST_OPS or state.expired():
            return
        current, waiting = start, _unseen(state, start, seen)
        while waiting and built_ops < _MOST_OPS and not state.expired():
            state.evaluations.prefetch(waiting[: state.processes])
            candidate = waiting.pop(0)
            seen.add(candidate.decisions)
            evaluation = state.evaluations.evaluate(candidate)
            built_ops += evaluation.ops
            yield state.record(evaluation)
            if evaluation.fits and evaluation.seconds < current.seconds:
                current, waiting = evaluation, _unseen(state, evaluation, seen)


def _unseen(state: SearchState, evaluation: Evaluation, seen: Collection[object]) -> list[Candidate]:
    """The neighbours of a pipeline that were not evaluated yet."""
    pipeline = evaluation.candidate
    assert pipeline is not None
    counts: list[int] = []
    if not has_fixed_count(pipeline):
        counts = [*state.pipelines.best, *state.pipelines.adjacent_counts(pipeline.micro_batches)]
    neighbours = local_search_moves(pipeline, tuple(dict.fromkeys(counts)), state.layout_costs.pool_numbers)
    return [replace(each, origin="search") for each in neighbours if each.decisions not in seen]


def local_search_moves(
    candidate: Candidate, counts: Sequence[int] = (), pool_numbers: Sequence[int] = ()
) -> Iterator[Candidate]:
    """The neighbours of a candidate: other shares of samples, lower memory multipliers, another micro-batch
    count, a border moved by one layer, two stages exchanged, all stages in reverse, another schedule.

    Memory multipliers are few where pipelines are searched, and what a program holds is above the estimate or
    below it: between one that does not suffice and one that does, faster layouts may fit.

    Exchanged stages keep their devices and about their share of the layers. The set of recomputed layers
    stays the same.

    Args:
        candidate: of any number of stages.
        counts: micro-batch counts to try; none where layouts are for one count (`has_fixed_count`).
        pool_numbers: of all devices of the cluster: samples pass from one kind to another.
    """
    yield from _other_shares(candidate, pool_numbers)
    for part in _LOWER_MULTIPLIERS if any(stage.memory_multiplier for stage in candidate.stages) else ():
        stages = (replace(s, memory_multiplier=part * s.memory_multiplier) for s in candidate.stages)
        yield replace(candidate, stages=tuple(stages))
    for count in sorted(counts, key=lambda count: abs(count - candidate.micro_batches)):
        if count != candidate.micro_batches and not has_fixed_count(candidate):
            yield replace(candidate, micro_batches=count)
    for other in _other_stages(candidate.stages):
        yield replace(candidate, stages=other)
    for schedule in searched_schedules() if len(candidate.stages) > 1 else ():
        if schedule != candidate.schedule:
            yield replace(candidate, schedule=schedule)


def has_fixed_count(candidate: Candidate) -> bool:
    """Whether its layouts are for one micro-batch count: they depend on memory multipliers or on shares."""
    return any(stage.memory_multiplier or stage.shape.samples for stage in candidate.stages)


def _other_shares(candidate: Candidate, pool_numbers: Sequence[int]) -> Iterator[Candidate]:
    stages = candidate.stages
    for number, stage in enumerate(stages):
        if stage.shape.samples:
            inner = stage.shape.size // len(stage.shape.samples)
            pools = [pool_numbers[device] for device in stage.devices[::inner]]
            for shape in rebalanced(stage.shape, pools):
                changed = replace(stage, shape=shape)
                yield replace(candidate, stages=(*stages[:number], changed, *stages[number + 1 :]))


def _other_stages(stages: tuple[StageChoice, ...]) -> Iterator[tuple[StageChoice, ...]]:
    """A border moved by one layer, two stages exchanged, all in reverse."""
    for number in range(1, len(stages)):
        before, behind = stages[number - 1 : number + 1]
        for border in (before.stop - 1, before.stop + 1):
            if before.first < border < behind.stop:
                moved = replace(before, stop=border), replace(behind, first=border)
                yield (*stages[: number - 1], *moved, *stages[number + 1 :])
    for number in range(1, len(stages)):
        before, behind = stages[number - 1 : number + 1]
        if not _equal(before, behind):
            exchanged = _in_sequence(before.first, (behind, before))
            yield (*stages[: number - 1], *exchanged, *stages[number + 1 :])
    if len(stages) > 2 and not all(_equal(a, b) for a, b in pairwise(stages)):
        yield _in_sequence(0, stages[::-1])


def _equal(one: StageChoice, other: StageChoice) -> bool:
    """Whether exchanging two stages may only change which devices of a kind they have."""
    return (one.shape, one.memory_multiplier, one.stop - one.first, len(one.devices)) == (
        other.shape,
        other.memory_multiplier,
        other.stop - other.first,
        len(other.devices),
    )


def _in_sequence(first: int, stages: tuple[StageChoice, ...]) -> tuple[StageChoice, ...]:
    """Stages one behind the other from a layer on, with as many layers as they had."""
    sequence = []
    for stage in stages:
        stop = first + stage.stop - stage.first
        sequence.append(replace(stage, first=first, stop=stop))
        first = stop
    return tuple(sequence)
