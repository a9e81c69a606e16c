"""Other choices for the whole program: micro-batches, schedule, recomputation.

*In:* the best program of a search. *Out:* `OtherChoice`s, and the program of each. *Invariant:* the program
differs in exactly the decision that the choice is named for; layouts, stages and devices stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distgraph.engine.search_driver.candidate import BuiltCandidate, build_candidate, with_stages
from distgraph.engine.search_driver.evaluations import Evaluation
from distgraph.engine.search_driver.explain.decisions import RunnerUp
from distgraph.engine.search_driver.explain.layer_decisions import Change
from distgraph.engine.search_driver.fixed_mesh_search import with_decisions
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.search_space import adjacent_counts
from distgraph.errors import GraphError
from distgraph.plan.decisions import Decisions
from distgraph.plan.pipeline_schedules import schedule_policy, searched_schedules, substituted_schedules
from distgraph.plan.plan import Decision


@dataclass(frozen=True)
class OtherChoice:
    """Another choice of one decision about the whole program.

    Attributes:
        name: of the decision.
        decisions: with the other choice.
    """

    name: str
    decisions: Decisions


def other_choices(program: BuiltCandidate, layout_costs: LayoutCosts) -> Iterator[OtherChoice]:
    """The choices that are forecast besides those of a program: another schedule of a pipeline, the adjacent
    micro-batch counts, all layers recomputed or none; not of what constraints give."""
    decisions, given = program.decisions, layout_costs.constraints.given()
    several = len(program.completed.meshes) > 1
    if program.candidate is not None and program.candidate.interleaved:
        several = False  # the other schedules are for one visit of each stage
    schedules = layout_costs.capabilities.among(searched_schedules()) if several else ()
    if several and layout_costs.runtime is None:
        last = substituted_schedules()
        schedules += tuple(name for name in last if schedule_policy(name).chunked_table is None)
    every = layout_costs.all_layers(decisions.micro_batches)
    values: dict[str, Sequence[Any]] = {
        "schedule": [name for name in schedules if name != decisions.schedule],
        "micro_batches": adjacent_counts(layout_costs.request.size, decisions.micro_batches),
        "recompute": [layers for layers in (every, ()) if layers != tuple(decisions.recompute)],
    }
    decided = Decisions(**decisions.decided())
    for name, others in values.items():
        for value in others if name not in given else ():
            yield OtherChoice(name, replace(decided, **{name: value}))


def with_choice(
    program: BuiltCandidate, choice: OtherChoice, layout_costs: LayoutCosts
) -> BuiltCandidate | None:
    """The program with another choice, in the same layouts or, where they do not carry over to other
    micro-batches, in the best ones; None where there is no such program."""
    try:
        layout_costs.layered_graph(choice.decisions.micro_batches)
    except GraphError:  # the samples of one micro-batch are too few for the model
        return None
    if program.candidate is None:
        return with_decisions(program, choice.decisions, layout_costs, solve=choice.name == "micro_batches")
    candidate = replace(program.candidate, **choice.decisions.decided())
    other = with_stages(program, candidate, layout_costs)
    return build_candidate(candidate, layout_costs) if other is None else other


def decision_with(name: str, chosen: Mapping[str, str], others: Iterable[Evaluation]) -> Decision:
    """A decision with the best other choice of it."""
    best = min(others, key=lambda other: (not other.fits, other.seconds))
    return _decision(chosen[name], best.choices[name], best)


def _decision(chosen: str, text: str, runner_up: Evaluation | RunnerUp, given: str = "") -> Decision:
    unfit = "" if runner_up.fits else "; the runner-up does not fit memory"
    note = f"{given}the runner-up differs in this alone{unfit}"
    return Decision(chosen=chosen, runner_up=text, runner_up_seconds=runner_up.seconds, note=note)


def border_decision(
    program: BuiltCandidate, forecasts: Mapping[Change, RunnerUp], given: str
) -> dict[str, Decision]:
    """The stages with the best border moved by a layer as their runner-up; empty where none was forecast."""
    if program.candidate is None:
        return {}
    stages = program.candidate.stages
    moved = [
        (change.candidate, other)
        for change, other in forecasts.items()
        if change.candidate is not None and change.candidate.stages != stages
    ]
    if not moved:
        return {}
    candidate, other = min(moved, key=lambda pair: (not pair[1].fits, pair[1].seconds))
    chosen, text = ("; ".join(map(str, each)) for each in (stages, candidate.stages))
    return {"stages": _decision(chosen, text, other, given)}
