"""Where layers are computed, and whether once or twice: what was chosen, and what else could be.

*In:* a program of the search. *Out:* a `Decision` for each layer, and `Change`s: the other programs that may
be its runner-up. *Invariant:* a change keeps layouts, devices and everything of other layers.

A layer at a border of its stage may be moved over it. Equal layers of one stage that are computed again may
be computed once, others again, all of them together as parameters of equal layers are. Of several changes
of a layer the fastest that fits is its runner-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from distgraph.engine.compile.plan_extract import mesh_of
from distgraph.engine.search.candidate import Proposal, Realized, plan_of, rearranged
from distgraph.engine.search.decisions import RunnerUp
from distgraph.engine.search.given_meshes import recomputed
from distgraph.engine.search.layout_costs import Oracle
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.name_ranges import spans
from distgraph.passes.search.intra_op.chosen_layouts import Profile
from distgraph.plan.patch import difference
from distgraph.plan.plan import Decision, Plan

_AGAIN = "computed again in the backward part"
_UNTOLD = "no other choice was forecast: some are, while there is time"
_GIVEN = "no other choice was forecast: its mesh is given"


@dataclass(frozen=True)
class Change:
    """Other stages of layers, or recomputation.

    Attributes:
        layers: whose choice it changes.
        text: in words.
        proposal: with the change; None where the program has none.
        recompute: all layers that are computed again then.
    """

    layers: tuple[int, ...]
    text: str
    proposal: Proposal | None
    recompute: tuple[int, ...]


def changes(found: Realized) -> list[Change]:
    """What may be done otherwise with the layers of a program; nothing where its layouts are no choice, or
    its meshes are several that are given."""
    if found.proposal is not None and found.solved:
        stages = found.proposal.stages
        return [*_moved(found.proposal), *_again(found, [(stage.first, stage.stop) for stage in stages])]
    return list(_again(found, [(0, len(found.traced.layers))])) if len(found.solved) == 1 else []


def _moved(row: Proposal) -> Iterable[Change]:
    """A border moved by one layer."""
    stages = row.stages
    for at in range(1, len(stages)):
        before, behind = stages[at - 1 : at + 1]
        last, first = (before.stop - 1, before.stop - 1, at), (behind.first, behind.first + 1, at - 1)
        for layer, border, stage in (last, first):
            if before.first < border < behind.stop:
                moved = replace(before, stop=border), replace(behind, first=border)
                other = replace(row, stages=(*stages[: at - 1], *moved, *stages[at + 1 :]))
                yield Change((layer,), f"stage {stage}", other, row.recompute)


def _again(found: Realized, stages: Iterable[tuple[int, int]]) -> Iterable[Change]:
    """Equal layers of one stage computed again, or no more; a stage has the layers from one up to another."""
    row, known, alike = found.proposal, found.traced.recompute, found.traced.layering.classes
    for first, stop in stages:
        groups: dict[tuple[int, bool], list[int]] = {}
        for layer in range(first, stop):
            groups.setdefault((alike[layer], layer in known), []).append(layer)
        for (_, again), layers in groups.items():
            others = tuple(sorted({*known} ^ {*layers}))
            who = f"layers {spans(layers)}" if len(layers) > 1 else f"layer {layers[0]}"
            text = f"{who} computed once" if again else f"{who} {_AGAIN}"
            yield Change(tuple(layers), text, row and replace(row, recompute=others), others)


def with_change(found: Realized, change: Change, oracle: Oracle) -> Realized | None:
    """The program with a change; None where its layouts do not carry over."""
    if change.proposal is None:
        return recomputed(found, change.recompute, oracle)
    return rearranged(found, change.proposal, oracle)


@dataclass(frozen=True)
class Changed:
    """A program with a change.

    Attributes:
        plan: of it, in outline.
        found: its forecast, without the lines that differ.
    """

    plan: Plan
    found: RunnerUp

    def light(self) -> Changed:
        """The same without the program."""
        return replace(self, found=self.found.light())

    def compared(self, plan: Plan) -> RunnerUp:
        """The forecast, with the lines of a plan that are others."""
        return replace(self.found, instead=difference(plan, self.plan))


def changed(found: Realized, change: Change, oracle: Oracle) -> Changed | None:
    """Forecast `with_change`; None where its layouts do not carry over, or it computes nothing again."""
    other = with_change(found, change, oracle)
    if other is None:
        return None
    if change.recompute != found.traced.recompute and len(other.completed.ops) == len(found.completed.ops):
        return None
    forecast = RunnerUp(other.seconds, other.fits, len(other.build.lowered.ops), {}, other)
    return Changed(plan_of(other, oracle, outline=True), forecast)


def layer_decisions(
    found: Realized, profiles: Mapping[ProcessMesh, Profile], told: Mapping[Change, RunnerUp]
) -> dict[str, Decision]:
    """Every layer of a program with its runner-up; equal decisions of layers in a row stand as one.

    Args:
        found: it.
        profiles: its costs by layer on every mesh.
        told: changes that were forecast.
    """
    assert found.placements is not None  # where layouts were chosen
    meshes = [mesh_of(layer, found.placements) for layer in found.traced.layers]
    stages = accumulate((mesh != before for before, mesh in pairwise(meshes)), initial=0)
    rows = [
        _decision(found, layer, stage, profiles[mesh], told)
        for layer, (stage, mesh) in enumerate(zip(stages, meshes, strict=True))
    ]
    decided: dict[str, Decision] = {}
    first = 0
    for layer in range(1, len(rows) + 1):
        if layer == len(rows) or rows[layer] != rows[first]:
            name = f"{{{first}..{layer - 1}}}" if layer - first > 1 else str(first)
            decided[f"layer {name}"] = rows[first]
            first = layer
    return decided


def profiles_of(found: Realized) -> dict[ProcessMesh, Profile]:
    """Costs by layer on every mesh."""
    known: dict[tuple[int, tuple[int, ...]], Profile] = {}
    profiles = {}
    for mesh, (formulation, choice) in found.solved.items():
        key = id(formulation.nodes), choice
        if key not in known:
            known[key] = formulation.profile(choice)
        profiles[mesh] = known[key]
    return profiles


def _decision(
    found: Realized, layer: int, stage: int, profile: Profile, told: Mapping[Change, RunnerUp]
) -> Decision:
    again = f", {_AGAIN}" if layer in found.traced.recompute else ""
    micro = found.traced.graph.micro_batches
    chosen = Decision(
        chosen=f"stage {stage}{again}",
        terms={
            "forward": micro * float(profile.forward[layer]),
            "backward": micro * float(profile.backward[layer]),
            "once a step": float(profile.step[layer]),
        },
        note=_UNTOLD if changes(found) else _GIVEN,
    )
    others = [(change, other) for change, other in told.items() if layer in change.layers]
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
