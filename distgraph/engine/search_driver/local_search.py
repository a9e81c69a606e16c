"""Local search: from the pipelines that were forecast, move by move, to programs whose forecast is better.

A local-search move leads to a candidate that differs from a given one in exactly one decision; the memory
multipliers of all stages count as one decision. Estimates add up what overlaps, so that the forecast may like
a neighbour better.

*In:* evaluations of pipelines. *Out:* evaluations of their neighbours. *Invariant:* every layer has one
stage, and no stage is empty; stages keep their devices or exchange them, unless two merge or one divides.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from distgraph.engine.search_driver.baselines.data_parallel_zero import groups_of_devices
from distgraph.engine.search_driver.candidate import Candidate, StageChoice, broken_constraint
from distgraph.engine.search_driver.evaluations import Evaluation
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.load_balancing import rebalanced
from distgraph.engine.search_driver.pipeline_search import SLOWER
from distgraph.engine.search_driver.search_space import Shape
from distgraph.engine.search_driver.search_state import FORECASTS, Event, SearchState
from distgraph.engine.search_driver.stage_search import PipelineEstimate, pipeline_estimate, shapes_for
from distgraph.engine.search_driver.uniform_pipelines import interleaved
from distgraph.errors import GraphError
from distgraph.passes.search.inter_op.submesh_placement import SubMesh, place
from distgraph.passes.search.intra_op.restrictions import RESTRICTION_NAMES, Restriction
from distgraph.plan.pipeline_schedules import schedule_policy, searched_schedules, substituted_schedules

_MOST_OPS = 30_000
"""Ops of the programs, together, that a local search builds: building takes time in proportion to them."""
_MOST_MEMORY = 1.1
"""Share of the memory that a neighbour may need by the estimate, which is above or below the forecast."""
_MOST_STAGES = 16
"""Stages of a pipeline whose stages are reshaped, at most: longer ones have too many such neighbours."""
_CHUNKS = 2
"""Times that a micro-batch reaches a stage under schedules that interleave stages."""
_LOWER_MULTIPLIERS = (0.25, 0.5)
"""Factors on memory multipliers that are tried: the multipliers of `layout_costs` are ten times apart."""


def local_search(state: SearchState) -> Iterator[Event]:
    """From each pipeline that was forecast, baselines included, to the first neighbour that is faster, as
    long as there is one. Data parallelism is a pipeline of one stage."""
    built_ops = 0
    candidates = (evaluation.candidate for evaluation in state.evaluations.all)
    seen = {candidate.decisions for candidate in candidates if candidate is not None}
    for start in sorted(_starts(state), key=lambda evaluation: evaluation.seconds):
        if built_ops >= _MOST_OPS or state.expired():
            return
        current, waiting = start, _unseen(state, start, seen)
        while waiting and built_ops < _MOST_OPS and not state.expired():
            left = math.ceil((_MOST_OPS - built_ops) / max(1, current.ops))
            state.evaluations.prefetch(waiting[: min(state.processes, left)])
            candidate = waiting.pop(0)
            if left == 1:
                _build_best_beside(state, candidate)
            seen.add(candidate.decisions)
            evaluation = state.evaluations.evaluate(candidate)
            built_ops += evaluation.ops
            yield state.record(evaluation)
            if evaluation.fits and evaluation.seconds < current.seconds:
                current, waiting = evaluation, _unseen(state, evaluation, seen)


def _build_best_beside(state: SearchState, candidate: Candidate) -> None:
    """Evaluate the last candidate in the background, while the best program is built once more where it is
    not at hand: its plan needs that, unless the candidate is better."""

    def evaluation() -> Iterator[Event]:
        yield Event("last", state.evaluations.evaluate(candidate))

    if state.best is not None and state.best.program is None and state.rehearse(evaluation):
        state.best.built(state.layout_costs)


def _starts(state: SearchState) -> Iterator[Evaluation]:
    """The pipelines that fit, and data parallelism on each group of devices as a pipeline of one stage."""
    groups = groups_of_devices(state)
    for evaluation in state.evaluations.all:
        candidate = evaluation.candidate
        if not evaluation.fits:
            continue
        if candidate is None and evaluation.eligible and evaluation.origin in groups:
            one_stage = _one_stage(state, groups[evaluation.origin])
            yield replace(evaluation, candidate=replace(one_stage, estimate=evaluation.seconds))
        elif candidate and math.isfinite(candidate.estimate) and not candidate.interleaved:
            yield evaluation


def _one_stage(state: SearchState, devices: tuple[int, ...]) -> Candidate:
    """Data parallelism, with layouts of the search."""
    start = state.constraints.start
    layers = len(state.layout_costs.layered_graph(start.micro_batches, start.recompute).layers)
    stage = StageChoice(0, layers, devices, Shape((("dp", len(devices)),)))
    candidate = Candidate("search", (stage,), state.layout_costs.restriction, math.inf)
    return replace(
        candidate, micro_batches=start.micro_batches, schedule=start.schedule, recompute=start.recompute
    )


def evaluate_substituted_schedules(state: SearchState) -> Iterator[Event]:
    """Pipelines under the schedules that are tried last: the fastest ones found under others, and those of
    the dynamic programme for the best micro-batch counts. Few are forecast, whose estimates are below the
    best program, the best estimates first. None where another runtime is to execute the plan, which may not
    have them."""
    given = state.constraints.schedule
    schedules = substituted_schedules() if given is None else ()
    if given is not None and schedule_policy(given).chunked_table is not None:
        schedules = (given,)  # its pipelines have one chunk on each stage until here
    if state.runtime is not None or state.best is None or state.expired():
        return
    waiting = sorted(_foremost_under(state, schedules), key=lambda candidate: candidate.estimate)
    while waiting and not state.expired() and waiting[0].estimate <= state.best.seconds:
        state.evaluations.prefetch(
            [each for each in waiting[: state.processes] if each.estimate <= state.best.seconds]
        )
        candidate = waiting.pop(0)
        try:
            yield state.record(state.evaluations.evaluate(candidate))
        except GraphError as error:  # such as chunks without a backward part
            yield Event(f"left out {candidate}: {error}")


def _foremost_under(state: SearchState, schedules: Iterable[str]) -> Iterator[Candidate]:
    """The few best pipelines by estimate under each of some schedules that were not evaluated yet."""
    evaluated = {each.candidate.decisions for each in state.evaluations.all if each.candidate}
    for candidates in state.layout_costs.solving.parallel_map(
        lambda schedule: list(_under(state, schedule)), tuple(schedules), state.evaluations.processes
    ):
        foremost = sorted(candidates, key=lambda candidate: candidate.estimate)
        unique = {each.decisions: each for each in foremost if each.decisions not in evaluated}
        yield from list(unique.values())[:FORECASTS]


def _under(state: SearchState, schedule: str) -> Iterator[Candidate]:
    """Pipelines under a schedule; under one for several chunks, with two on each stage."""
    chunked = schedule_policy(schedule).chunked_table is not None
    if chunked and state.constraints.stage_count is not None:
        return  # a plan counts every visit of a stage
    for candidate in (*_substituted(state, schedule), *state.pipelines.under(schedule, FORECASTS)):
        several = interleaved(state.layout_costs, candidate, _CHUNKS) if chunked else candidate
        if several is not None:
            yield several


def _substituted(state: SearchState, schedule: str) -> Iterator[Candidate]:
    """The fastest pipelines with another schedule, with estimates relative to their forecasts."""
    good = [e for e in state.evaluations.all if e.fits and e.candidate and len(e.candidate.stages) > 1]
    for evaluation in sorted(good, key=lambda evaluation: evaluation.seconds)[:FORECASTS]:
        assert evaluation.candidate is not None
        candidate = replace(evaluation.candidate, origin="search", schedule=schedule)
        ratio = _estimated_ratio(state.layout_costs, evaluation.candidate, candidate)
        yield replace(candidate, estimate=ratio * evaluation.seconds)


def _estimated_ratio(layout_costs: LayoutCosts, pipeline: Candidate, other: Candidate) -> float:
    """Seconds of another candidate over those of a pipeline, by estimates; 1 where costs are not known."""
    restriction = _restriction_with_costs(layout_costs, pipeline, other)
    if restriction is None:
        return 1.0
    before, after = (
        pipeline_estimate(layout_costs, replace(each, restriction=restriction)) for each in (pipeline, other)
    )
    return after.seconds / before.seconds


def _unseen(state: SearchState, evaluation: Evaluation, seen: Collection[object]) -> list[Candidate]:
    """The neighbours of a pipeline that were not evaluated yet, the most promising ones first.

    By how much a neighbour is faster is estimated where the costs of its stages are known. Others are taken
    to be as fast as the pipeline itself; what is slower by much, or needs more memory, is left out.
    """
    pipeline, layout_costs = evaluation.candidate, state.layout_costs
    assert pipeline is not None
    counts: list[int] = []
    if not has_fixed_count(pipeline):
        counts = [*state.pipelines.best, *state.pipelines.adjacent_counts(pipeline.micro_batches)]
    moves = chain(
        (pipeline,),  # it was not evaluated itself if data parallelism stands for it
        local_search_moves(pipeline, tuple(dict.fromkeys(counts)), layout_costs.pool_numbers),
        stage_moves(pipeline, layout_costs, state.pipelines.submeshes)
        if len(pipeline.stages) <= _MOST_STAGES
        else (),
    )
    ranked: list[tuple[float, Candidate]] = []
    estimates: dict[Restriction, PipelineEstimate] = {}
    for neighbour in moves:
        if neighbour.decisions in seen:
            continue
        candidate = replace(neighbour, origin="search", estimate=pipeline.estimate)
        restriction = _restriction_with_costs(layout_costs, pipeline, candidate)
        if restriction is None:
            ranked.append((1.0, candidate))
            continue
        if restriction not in estimates:
            estimates[restriction] = pipeline_estimate(
                layout_costs, replace(pipeline, restriction=restriction)
            )
        after, estimate = _fitting(layout_costs, replace(candidate, restriction=restriction))
        ratio = estimate.seconds / estimates[restriction].seconds
        if ratio <= SLOWER and estimate.memory_ratio <= _MOST_MEMORY:
            seconds = ratio * pipeline.estimate
            after = replace(after, restriction=candidate.restriction, estimate=seconds)
            ranked.append((ratio, after))
    ranked.sort(key=lambda pair: pair[0])
    unique = {candidate.decisions: candidate for _, candidate in ranked if candidate.decisions not in seen}
    return [candidate for candidate in unique.values() if not broken_constraint(candidate, layout_costs)]


def _restriction_with_costs(
    layout_costs: LayoutCosts, pipeline: Candidate, neighbour: Candidate
) -> Restriction | None:
    """That of the neighbour, or else none, where the costs of all stages of both were solved before."""
    options: tuple[Restriction, ...] = (neighbour.restriction, "none")
    for restriction in options:
        if all(
            has_costs(layout_costs, replace(each, restriction=restriction)) for each in (pipeline, neighbour)
        ):
            return restriction
    return None


def _fitting(layout_costs: LayoutCosts, candidate: Candidate) -> tuple[Candidate, PipelineEstimate]:
    """A candidate with its estimate; with all layers recomputed where it does not fit otherwise."""
    estimate = pipeline_estimate(layout_costs, candidate)
    if estimate.memory_ratio > 1:
        again = replace(candidate, recompute=layout_costs.all_layers(candidate.micro_batches))
        smaller = pipeline_estimate(layout_costs, again)
        if smaller.memory_ratio < estimate.memory_ratio:
            return again, smaller
    return candidate, estimate


def has_costs(layout_costs: LayoutCosts, candidate: Candidate) -> bool:
    """Whether the costs of all stages were solved before."""
    count, restriction = candidate.micro_batches, candidate.restriction
    return all(
        layout_costs.has_variants(
            count,
            layout_costs.submesh(stage.devices),
            stage.shape,
            restriction,
            "multipliers" if stage.memory_multiplier or stage.memory_limit else "fastest",
        )
        for stage in candidate.stages
    )


def stage_moves(
    candidate: Candidate, layout_costs: LayoutCosts, submeshes: Collection[SubMesh]
) -> Iterator[Candidate]:
    """The neighbours of a candidate with other stages: another shape of one stage or of all, two stages
    merged, one divided, another restriction of the layouts, all layers recomputed or none.
    """
    stages, count = candidate.stages, candidate.micro_batches
    shapes = {s: shapes_for(layout_costs, count, s) for s in submeshes}
    of_stages = [layout_costs.submesh(stage.devices) for stage in stages]
    for number, submesh in enumerate(of_stages):
        for shape in shapes.get(submesh, ()):
            changed = stages[number].reshaped(shape)
            yield replace(candidate, stages=(*stages[:number], changed, *stages[number + 1 :]))
    for shape in shapes.get(of_stages[0], ()) if len(set(of_stages)) == 1 and len(stages) > 1 else ():
        yield replace(candidate, stages=tuple(stage.reshaped(shape) for stage in stages))
    for parts in (*_merged(stages, of_stages, shapes), *_divided(stages, of_stages, shapes)):
        devices = place(layout_costs.pools, [submesh for _, submesh in parts])
        if devices is not None:
            placed = tuple(replace(s, devices=d) for (s, _), d in zip(parts, devices, strict=True))
            yield replace(candidate, stages=placed)
    for restriction in RESTRICTION_NAMES:
        if restriction != candidate.restriction:
            free = tuple(stage.reshaped(stage.shape) for stage in stages)
            yield replace(candidate, restriction=restriction, stages=free)
    for recompute in ((), layout_costs.all_layers(count)):
        yield replace(candidate, recompute=recompute)


_Parts = list[tuple[StageChoice, SubMesh]]
"""Stages in the order of the pipeline, each with the sub-mesh that it is to have."""


def _merged(
    stages: Sequence[StageChoice], of_stages: Sequence[SubMesh], shapes: Mapping[SubMesh, Sequence[Shape]]
) -> Iterator[_Parts]:
    """Two adjacent stages as one on the devices of both."""
    pairs = list(zip(stages, of_stages, strict=True))
    for number in range(1, len(stages)):
        before, behind = stages[number - 1 : number + 1]
        sizes = zip(of_stages[number - 1].sizes, of_stages[number].sizes, strict=True)
        both = SubMesh(tuple(a + b for a, b in sizes))
        for shape in shapes.get(both, ()):
            merged = replace(before.reshaped(shape), stop=behind.stop)
            yield [*pairs[: number - 1], (merged, both), *pairs[number + 1 :]]


def _divided(
    stages: Sequence[StageChoice], of_stages: Sequence[SubMesh], shapes: Mapping[SubMesh, Sequence[Shape]]
) -> Iterator[_Parts]:
    """A stage as two, each with half of its devices and about half of its layers."""
    pairs = list(zip(stages, of_stages, strict=True))
    for number, stage in enumerate(stages):
        half = SubMesh(tuple(size // 2 for size in of_stages[number].sizes))
        middle = (stage.first + stage.stop) // 2
        if 2 * half.size != len(stage.devices) or not stage.first < middle < stage.stop:
            continue
        for shape in shapes.get(half, ()):
            half_stage = stage.reshaped(shape)
            parts = replace(half_stage, stop=middle), replace(half_stage, first=middle)
            yield [*pairs[:number], *((part, half) for part in parts), *pairs[number + 1 :]]


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
    return any(s.memory_multiplier or s.memory_limit or s.shape.samples for s in candidate.stages)


def _other_shares(candidate: Candidate, pool_numbers: Sequence[int]) -> Iterator[Candidate]:
    stages = candidate.stages
    for number, stage in enumerate(stages):
        if stage.shape.samples:
            inner = stage.shape.size // len(stage.shape.samples)
            pools = [pool_numbers[device] for device in stage.devices[::inner]]
            for shape in rebalanced(stage.shape, pools):
                changed = stage.reshaped(shape)
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
    return (one.shape, one.memory_multiplier, one.memory_limit, one.stop - one.first, len(one.devices)) == (
        other.shape,
        other.memory_multiplier,
        other.memory_limit,
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
