"""Why a plan is as it is: what else could have been, and how much slower that is.

*In:* the best program, all that were forecast. *Out:* `Decision`s of a plan. *Invariant:* a runner-up with
seconds is a program that was built, and they are its forecast.

For the whole program the runner-up is the best one forecast that differs in one choice alone; an algorithm
of matrix products may bring its own mesh. For a parameter it is
the layout that costs least, by the problem, once its neighbours have followed; everything else stays, and
the program is built and forecast. A runner-up may turn out faster than what it replaces, for
the problem adds up what overlaps: then it is taken (the search goes on from it). What the runner-up changes
is kept line by line, so that a plan with it in place of the choice can be made (`Plan.instead`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distgraph.engine.compile.plan_extract import lines_of
from distgraph.engine.search_driver.candidate import BuiltCandidate, with_layouts
from distgraph.engine.search_driver.evaluations import Evaluation
from distgraph.engine.search_driver.fixed_mesh_search import formulate_on_mesh
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.errors import ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.range_notation import fold
from distgraph.passes.search.intra_op.alternatives import Neighbourhoods
from distgraph.passes.search.intra_op.chosen_layouts import Layouts
from distgraph.passes.search.intra_op.cost_model import MOST_AXES
from distgraph.passes.search.intra_op.decision_nodes import ValueNode
from distgraph.passes.search.solver.problem import Problem
from distgraph.plan.constraints import AUTO, FREE, SearchConstraints
from distgraph.plan.plan import Decision
from distgraph.resources.units import format_bytes

_FOLLOWERS = 4
"""Moves a node, at most, while neighbours follow; they may go round in a circle where costs are equal."""


def decisions(
    best: Evaluation, evaluations: Sequence[Evaluation], constraints: SearchConstraints = FREE
) -> dict[str, Decision]:
    """Choices of the whole program, each with the best program in which it was taken otherwise; given ones
    say so."""
    by_name, given = {}, constraints.given()
    for name, chosen in best.choices.items():
        note = f"given: {name}={given[name]}; " if name in given and given[name] != AUTO else ""
        if note and name != "stages":  # stages of a given number differ in their layers and shapes
            by_name[name] = Decision(chosen=chosen, note=f"{note}nothing else was tried")
            continue
        if name == "products" and all(other.choices[name] == chosen for other in evaluations):
            continue  # no other algorithm of matrix products was tried
        others = [other for other in evaluations if other.fits and _differs_in(name, best, other)]
        runner_up = min(others, key=lambda other: other.seconds, default=None)
        if runner_up is None:
            single = "; of single layers other choices may be: explain a layer" if name == "recompute" else ""
            by_name[name] = Decision(
                chosen=chosen, note=f"{note}nothing that differs in this alone and fits was forecast{single}"
            )
            continue
        alone = "this and its mesh" if name == "products" else "this alone"
        note += f"the runner-up is the best program of the search that differs in {alone}: {runner_up.origin}"
        by_name[name] = Decision(
            chosen=chosen,
            runner_up=runner_up.choices[name],
            runner_up_seconds=runner_up.seconds,
            note=note,
        )
    return by_name


def _differs_in(name: str, best: Evaluation, other: Evaluation) -> bool:
    """Whether a program differs from the best in one choice alone.

    One stage has no schedule, and an algorithm that splits both axes of a mesh needs a mesh of two axes.
    """
    stages = (best.choices["stages"], other.choices["stages"])
    free = {name} if all("; " in text for text in stages) else {name, "schedule"}
    if name == "products":
        free.add("stages")
    same = all(other.choices[key] == text for key, text in best.choices.items() if key not in free)
    return same and other.choices[name] != best.choices[name]


@dataclass(frozen=True, eq=False)
class ParameterStorage:
    """Where parameters that are laid out as one are stored, and where else they could be.

    Attributes:
        name: of the parameters, those of repeated layers in one.
        decision: without the forecast of the runner-up.
        nbytes: of one of them.
        meshes: whose choices change with it.
        node, option: of their problem, for the runner-up; option is None where there is none.
    """

    name: str
    decision: Decision
    nbytes: int
    meshes: tuple[ProcessMesh, ...]
    node: int
    option: int | None


def parameter_storages(program: BuiltCandidate) -> list[ParameterStorage]:
    """Every group of parameters of a program, the largest first."""
    groups: dict[int, list[ProcessMesh]] = {}
    for mesh, (formulation, _) in program.solved.items():
        groups.setdefault(id(formulation.nodes), []).append(mesh)
    storages = [storage for meshes in groups.values() for storage in _stored(program, tuple(meshes))]
    return sorted(storages, key=lambda storage: -storage.nbytes)


def _stored(program: BuiltCandidate, meshes: tuple[ProcessMesh, ...]) -> Iterator[ParameterStorage]:
    assert program.placements is not None
    formulation, choice = program.solved[meshes[0]]
    producers = program.layered.graph.producers
    for number, node in enumerate(formulation.nodes.all):
        if not isinstance(node, ValueNode):
            continue
        value = formulation.fold.values[node.number]
        if producers[value.members[0]].kind != "param":
            continue
        here = [name for name in value.members if program.placements[name] in meshes]
        if not here:
            continue
        terms = formulation.terms(choice, number)
        costs = {"compute": terms.compute, "communication": terms.communication}
        option = terms.runner_up
        where = formulation.nodes.pinned.get(node.number)
        fixed = "" if where is None else f"; annotated ({where.origin.where})"
        yield ParameterStorage(
            next(iter(fold({str(producers[name].attrs["name"]): 0 for name in here}))),
            Decision(
                chosen=terms.options[terms.chosen],
                terms=costs,
                runner_up="" if option is None else terms.options[option],
                note=_held(value.value.type, len(here), terms.nbytes) + fixed,
            ),
            value.value.nbytes,
            meshes,
            number,
            option,
        )


def _held(type_: str, layers: int, nbytes: float) -> str:
    """What is stored, in how many layers, and its bytes on a rank."""
    where = f", in {layers} layers" if layers > 1 else ""
    return f"{type_}{where}, {format_bytes(nbytes)} of a rank"


def with_reasons(stored: Mapping[str, Decision]) -> dict[str, Decision]:
    """Decisions of parameters; those whose runner-up was not forecast say why."""
    why = "the runner-up was not forecast: those of the largest parameters are, while there is time"
    return {
        name: replace(decision, note=f"{decision.note}; {why}")
        if decision.runner_up and decision.runner_up_seconds is None
        else decision
        for name, decision in stored.items()
    }


def with_problems(program: BuiltCandidate, layout_costs: LayoutCosts) -> BuiltCandidate:
    """A program with the problem that its layouts are a choice of, where completion or a mode made them.

    The program itself where there is no such problem: it has several meshes, or one of so many axes that the
    problem would be too large, or ops that are no longer those of the serial graph, or equal layers have
    different layouts, so that the layouts of the choice are slower.
    """
    graph = program.layered.graph
    if program.solved or len(program.completed.meshes) > 1:
        return program
    if sum(size > 1 for size in program.completed.meshes[0].shape) > MOST_AXES:
        return program
    if [op.name for op in program.completed.ops] != [op.name for op in graph.ops]:
        return program
    (mesh,) = program.completed.meshes
    layouts = Layouts(
        {op.name: op.layout for op in program.completed.ops if op.layout is not None}, program.completed.attrs
    )
    problem = formulate_on_mesh(layout_costs, program.layered, mesh)
    try:
        choice = problem.encode(layouts)
    except ShardingError:
        return program
    placed = replace(program, placements=dict.fromkeys((op.name for op in graph.ops), mesh))
    again = with_layouts(placed, {mesh: (problem, choice)}, layout_costs)
    return again if again.fits and again.seconds <= program.seconds else program


def changes(program: BuiltCandidate, other: BuiltCandidate) -> dict[str, str]:
    """The lines of a plan of `program` that are others in one of `other`, which differs in layouts alone."""
    mine, theirs = program.completed, other.completed
    differ = [
        b
        for a, b in zip(mine.ops, theirs.ops, strict=True)
        if a.layout != b.layout
        or any(mine.attrs[v.name].spec != theirs.attrs[v.name].spec for v in a.results)
    ]
    return lines_of(program.layered.layering, theirs, differ)


def with_runner_up(
    program: BuiltCandidate, storage: ParameterStorage, layout_costs: LayoutCosts
) -> BuiltCandidate:
    """The program with parameters stored as the runner-up has it, once what is around them has followed."""
    assert storage.option is not None
    formulation, choice = program.solved[storage.meshes[0]]
    other = followed(formulation.problem, choice, storage.node, storage.option)
    changed = {mesh: (program.solved[mesh][0], other) for mesh in storage.meshes}
    return with_layouts(program, {**program.solved, **changed}, layout_costs)


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """What becomes of a program with another storage of some parameters.

    Attributes:
        seconds, fits, ops: of its forecast, its memory and its size.
        instead: lines of the plan that are others.
        program: the program itself, where it is at hand.
    """

    seconds: float
    fits: bool
    ops: int
    instead: dict[str, str]
    program: BuiltCandidate | None

    def without_program(self) -> RunnerUp:
        """The same without the program."""
        return replace(self, program=None)


def runner_up(program: BuiltCandidate, storage: ParameterStorage, layout_costs: LayoutCosts) -> RunnerUp:
    """Forecast `with_runner_up`."""
    other = with_runner_up(program, storage, layout_costs)
    return RunnerUp(other.seconds, other.fits, len(other.build.lowered.ops), changes(program, other), other)


def followed(problem: Problem, choice: Sequence[int], node: int, option: int) -> tuple[int, ...]:
    """A choice with one node on another option; neighbours take their best options, and so on."""
    neighbourhoods = Neighbourhoods(problem)
    choices = list(choice)
    choices[node] = option
    waiting = deque(other for other, _ in neighbourhoods.edges[node])
    for _ in range(_FOLLOWERS * len(choices)):
        if not waiting:
            break
        current = waiting.popleft()
        if current == node:
            continue
        change = neighbourhoods.fixed(choices, current)
        best = int(change.argmin())
        if change[best] < 0 or not np.isfinite(change[best]):
            choices[current] = best
            waiting.extend(other for other, _ in neighbourhoods.edges[current])
    return tuple(choices)
