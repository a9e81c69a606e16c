"""Where layers are computed, and whether once or twice: what was chosen, and what else could be.

*In:* a program of the search. *Out:* a `Decision` for each layer, and `Change`s: the other programs that may
be its runner-up. *Invariant:* a change keeps layouts, devices and everything of other layers.

A layer at a border of its stage may be moved over it. Equal layers of one stage that are recomputed may
be computed once, others recomputed, all of them together as parameters of equal layers are. Of several
changes of a layer the fastest that fits is its runner-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from distgraph.engine.compile.plan_extract import layer_mesh
from distgraph.engine.search_driver.candidate import BuiltCandidate, Candidate, plan_of, with_stages
from distgraph.engine.search_driver.explain.decisions import RunnerUp
from distgraph.engine.search_driver.fixed_mesh_search import with_decisions
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.range_notation import spans
from distgraph.passes.search.intra_op.chosen_layouts import Profile
from distgraph.plan.plan import Decision, Plan
from distgraph.plan.plan_diff import difference

_RECOMPUTED = "recomputed in the backward part"
_NOT_FORECAST = "no other choice was forecast: some are, while there is time"
_GIVEN = "no other choice was forecast: its mesh is given"


@dataclass(frozen=True)
class Change:
    """Other stages of layers, or recomputation.

    Attributes:
        layers: whose choice it changes.
        text: in words.
        candidate: with the change; None where the program has none.
        recompute: all layers that are recomputed with the change.
    """

    layers: tuple[int, ...]
    text: str
    candidate: Candidate | None
    recompute: tuple[int, ...]


def changes(program: BuiltCandidate) -> list[Change]:
    """What may be done otherwise with the layers of a program; nothing where its layouts are no choice, or
    its meshes are several that are given."""
    if program.candidate is not None and program.solved:
        stages = program.candidate.stages
        return [*_moved(program.candidate), *_again(program, [(stage.first, stage.stop) for stage in stages])]
    return list(_again(program, [(0, len(program.layered.layers))])) if len(program.solved) == 1 else []


def _moved(pipeline: Candidate) -> Iterable[Change]:
    """A border moved by one layer."""
    stages = pipeline.stages
    for number in range(1, len(stages)):
        before, behind = stages[number - 1 : number + 1]
        last, first = (before.stop - 1, before.stop - 1, number), (behind.first, behind.first + 1, number - 1)
        for layer, border, stage in (last, first):
            if before.first < border < behind.stop:
                moved = replace(before, stop=border), replace(behind, first=border)
                other = replace(pipeline, stages=(*stages[: number - 1], *moved, *stages[number + 1 :]))
                yield Change((layer,), f"stage {stage}", other, pipeline.recompute)


def _again(program: BuiltCandidate, stages: Iterable[tuple[int, int]]) -> Iterable[Change]:
    """Equal layers of one stage recomputed, or no more; a stage is its first layer and its stop."""
    pipeline, recomputed, classes = (
        program.candidate,
        program.layered.recompute,
        program.layered.layering.classes,
    )
    for first, stop in stages:
        groups: dict[tuple[int, bool], list[int]] = {}
        for layer in range(first, stop):
            groups.setdefault((classes[layer], layer in recomputed), []).append(layer)
        for (_, again), layers in groups.items():
            others = tuple(sorted({*recomputed} ^ {*layers}))
            who = f"layers {spans(layers)}" if len(layers) > 1 else f"layer {layers[0]}"
            text = f"{who} computed once" if again else f"{who} {_RECOMPUTED}"
            yield Change(tuple(layers), text, pipeline and replace(pipeline, recompute=others), others)


def with_change(program: BuiltCandidate, change: Change, layout_costs: LayoutCosts) -> BuiltCandidate | None:
    """The program with a change; None where its layouts do not carry over."""
    if change.candidate is None:
        decisions = replace(program.decisions, recompute=change.recompute)
        return with_decisions(program, decisions, layout_costs)
    return with_stages(program, change.candidate, layout_costs)


@dataclass(frozen=True)
class Changed:
    """A program with a change.

    Attributes:
        plan: of it, in outline.
        forecast: of it, without the lines that differ.
    """

    plan: Plan
    forecast: RunnerUp

    def without_program(self) -> Changed:
        """The same without the program."""
        return replace(self, forecast=self.forecast.without_program())

    def compared(self, plan: Plan) -> RunnerUp:
        """The forecast, with the lines of a plan that are others."""
        return replace(self.forecast, instead=difference(plan, self.plan))


def changed(program: BuiltCandidate, change: Change, layout_costs: LayoutCosts) -> Changed | None:
    """Forecast `with_change`; None where its layouts do not carry over, or it computes nothing again."""
    other = with_change(program, change, layout_costs)
    if other is None:
        return None
    if change.recompute != program.layered.recompute and len(other.completed.ops) == len(
        program.completed.ops
    ):
        return None
    forecast = RunnerUp(other.seconds, other.fits, len(other.build.lowered.ops), {}, other)
    return Changed(plan_of(other, layout_costs, outline=True), forecast)


def layer_decisions(
    program: BuiltCandidate, profiles: Mapping[ProcessMesh, Profile], forecasts: Mapping[Change, RunnerUp]
) -> dict[str, Decision]:
    """Every layer of a program with its runner-up; equal decisions of consecutive layers become one."""
    assert program.placements is not None  # where layouts were chosen
    meshes = [layer_mesh(layer, program.placements) for layer in program.layered.layers]
    stages = accumulate((mesh != before for before, mesh in pairwise(meshes)), initial=0)
    decisions = [
        _decision(program, layer, stage, profiles[mesh], forecasts)
        for layer, (stage, mesh) in enumerate(zip(stages, meshes, strict=True))
    ]
    decided: dict[str, Decision] = {}
    first = 0
    for layer in range(1, len(decisions) + 1):
        if layer == len(decisions) or decisions[layer] != decisions[first]:
            name = f"{{{first}..{layer - 1}}}" if layer - first > 1 else str(first)
            decided[f"layer {name}"] = decisions[first]
            first = layer
    return decided


def profiles_of(program: BuiltCandidate) -> dict[ProcessMesh, Profile]:
    """Costs by layer on every mesh."""
    by_choice: dict[tuple[int, tuple[int, ...]], Profile] = {}
    profiles = {}
    for mesh, (formulation, choice) in program.solved.items():
        key = id(formulation.nodes), choice
        if key not in by_choice:
            by_choice[key] = formulation.profile(choice)
        profiles[mesh] = by_choice[key]
    return profiles


def _decision(
    program: BuiltCandidate, layer: int, stage: int, profile: Profile, forecasts: Mapping[Change, RunnerUp]
) -> Decision:
    again = f", {_RECOMPUTED}" if layer in program.layered.recompute else ""
    micro = program.layered.graph.micro_batches
    chosen = Decision(
        chosen=f"stage {stage}{again}",
        terms={
            "forward": micro * float(profile.forward[layer]),
            "backward": micro * float(profile.backward[layer]),
            "once a step": float(profile.step[layer]),
        },
        note=_NOT_FORECAST if changes(program) else _GIVEN,
    )
    others = [(change, other) for change, other in forecasts.items() if layer in change.layers]
    if not others:
        return chosen
    change, other = min(others, key=lambda each: (not each[1].fits, each[1].seconds))
    return replace(
        chosen,
        runner_up=change.text,
        runner_up_seconds=other.seconds,
        note="" if other.fits else "the runner-up does not fit memory",
        instead=other.instead,
    )
