"""A proposal: stages, micro-batches, schedule, recomputed layers; and what becomes of it when it is built.

*In:* decisions. *Out:* `Realized`: the completed graph, its build, its forecast on the cluster. *Invariant:*
the forecast is that of the program that `Engine(plan=...)` would run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distgraph.engine.compile.fingerprint import program_of
from distgraph.engine.compile.plan_extract import describe, estimate
from distgraph.engine.search.layout_costs import Oracle, Traced
from distgraph.engine.search.restrictions import Restriction
from distgraph.engine.search.search_space import Shape
from distgraph.ir.gc_pause import collector_paused
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.assign_meshes import place
from distgraph.passes.search.intra_op.apply_layouts import assign
from distgraph.passes.search.intra_op.chosen_layouts import Layouts
from distgraph.passes.search.intra_op.formulate import Formulation
from distgraph.plan.plan import Plan, Program
from distgraph.runtime.forecast.forecast import Forecast, forecast, out_of_memory
from distgraph.runtime.forecast.memory_forecast import Shortage
from distgraph.runtime.program.build import Build, build

Solved = Mapping[ProcessMesh, tuple[Formulation, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class StageChoice:
    """One stage: layers `first` up to `stop`, devices, shape of the mesh, price of memory."""

    first: int
    stop: int
    devices: tuple[int, ...]
    shape: Shape
    memory_price: float = 0.0

    def __str__(self) -> str:
        return f"layers {self.first}-{self.stop - 1} on {self.shape}"


@dataclass(frozen=True, slots=True)
class Proposal:
    """What is decided beside layouts.

    Attributes:
        origin: where it comes from, such as "search" or "uniform dp=2 x tp=4, 2 stages".
        micro_batches, schedule, stages: of the pipeline.
        recompute: numbers of the layers that are computed again.
        restriction: what layouts may not be.
        estimate: seconds of a step, from costs by layer.
    """

    origin: str
    micro_batches: int
    schedule: str
    stages: tuple[StageChoice, ...]
    recompute: tuple[int, ...]
    restriction: Restriction
    estimate: float

    @property
    def decisions(self) -> tuple[object, ...]:
        """What makes two proposals the same."""
        return self.micro_batches, self.schedule, self.stages, self.recompute, self.restriction

    def __str__(self) -> str:
        stages = ", ".join(map(str, self.stages))
        again = f", {len(self.recompute)} layers recomputed" if self.recompute else ""
        return f"{self.micro_batches} micro-batches, {self.schedule}, {stages}{again}"


@dataclass(frozen=True, eq=False)
class Realized:
    """A proposal as a program.

    Attributes:
        origin, proposal: what it was made from; no proposal where it is a completion.
        traced: the serial graph and its layers.
        placements: mesh of every op of the serial graph; None where `place` finds them.
        completed, build, devices, forecast: the program on the cluster.
        solved: mesh -> the problem that its layouts solve and the choice; empty where they come from
            elsewhere.
        shortages: what it lacks of memory; nothing where it fits.
    """

    origin: str
    proposal: Proposal | None
    traced: Traced
    placements: Mapping[str, ProcessMesh] | None
    completed: Graph
    build: Build
    devices: tuple[int, ...]
    forecast: Forecast
    shortages: tuple[Shortage, ...]
    solved: Solved = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.forecast.step_seconds

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return not self.shortages


def realize(proposal: Proposal, oracle: Oracle) -> Realized:
    """Lay out, build and forecast a proposal."""
    traced = oracle.traced(proposal.micro_batches, proposal.recompute)
    meshes, devices = _meshes(proposal.stages)
    placements = _placements(traced, proposal.stages, meshes)
    solved: dict[ProcessMesh, tuple[Formulation, tuple[int, ...]]] = {}
    for mesh, stage in zip(meshes, proposal.stages, strict=True):
        key = oracle.like(stage.devices), stage.shape, stage.memory_price
        solved[mesh] = oracle.laid_out(traced, *key, proposal.restriction)
    completed = _completed(traced, placements, solved)
    schedule, origin = proposal.schedule, proposal.origin
    built = program(oracle, completed, traced, devices, schedule, origin, proposal, placements)
    return replace(built, solved=solved)


def laid_out_as(proposal: Proposal, oracle: Oracle) -> tuple[object, ...]:
    """What makes the programs of two proposals the same, though restrictions differ: layouts that came out
    the same in all stages."""
    micro, recompute = proposal.micro_batches, proposal.recompute
    kinds = dict.fromkeys((oracle.like(s.devices), s.shape, s.memory_price) for s in proposal.stages)
    traced = oracle.traced(micro, recompute)
    layouts = tuple(oracle.decided(traced, kind, proposal.restriction) for kind in kinds)
    return micro, proposal.schedule, proposal.stages, recompute, layouts


def rechosen(found: Realized, solved: Solved, oracle: Oracle) -> Realized:
    """A program with other choices of layouts, everything else as it is."""
    assert found.placements is not None
    completed = _completed(found.traced, found.placements, solved)
    schedule = found.build.policy
    built = program(
        oracle,
        completed,
        found.traced,
        found.devices,
        schedule,
        found.origin,
        found.proposal,
        found.placements,
    )
    return replace(built, solved=solved)


def rearranged(found: Realized, proposal: Proposal, oracle: Oracle) -> Realized | None:
    """A program with its layers on other stages, or others computed again, its layouts as they are.

    Args:
        found: it.
        proposal: with stages on the same devices, in the same shapes.
        oracle: of the search.

    Returns: None where layouts do not carry over.
    """
    traced = oracle.traced(proposal.micro_batches, proposal.recompute)
    meshes, devices = _meshes(proposal.stages)
    placements = _placements(traced, proposal.stages, meshes)
    solved = dict(found.solved)
    for mesh, stage in zip(meshes, proposal.stages, strict=True):
        if traced is not found.traced:
            target = oracle.formulation(traced, oracle.like(stage.devices), stage.shape)
            choice = oracle.carried_over(*found.solved[mesh], target, traced, found.traced)
            if choice is None:
                return None
            solved[mesh] = target, choice
    completed = _completed(traced, placements, solved)
    schedule = found.build.policy
    built = program(oracle, completed, traced, devices, schedule, found.origin, proposal, placements)
    return replace(built, solved=solved)


def _completed(traced: Traced, placements: Mapping[str, ProcessMesh], solved: Solved) -> Graph:
    """Every op and value laid out by the choices of its mesh."""
    decoded: dict[tuple[int, tuple[int, ...]], Layouts] = {}
    layouts: dict[ProcessMesh, Layouts] = {}
    for mesh, (found, choice) in solved.items():
        key = id(found.nodes), choice
        if key not in decoded:
            decoded[key] = found.decode(choice)
        layouts[mesh] = decoded[key]
    return replace(assign(traced.graph, placements, layouts), micro_batches=traced.graph.micro_batches)


@collector_paused()
def program(
    oracle: Oracle,
    completed: Graph,
    traced: Traced,
    devices: tuple[int, ...],
    schedule: str,
    origin: str,
    proposal: Proposal | None = None,
    placements: Mapping[str, ProcessMesh] | None = None,
) -> Realized:
    """Build and forecast a completed graph."""
    price = oracle.prices(devices).price
    built = build(completed, micro_batches=completed.micro_batches, policy=schedule, price=price)
    found = forecast(built, oracle.cluster, devices)
    short = out_of_memory(found, oracle.cluster)
    return Realized(origin, proposal, traced, placements, completed, built, devices, found, short)


@collector_paused()
def plan_of(found: Realized, oracle: Oracle, outline: bool = False) -> Plan:
    """A program as a plan with its forecast; an outline lacks the fingerprint and what exports need."""
    training, traced = oracle.training, found.traced
    unmarked = oracle.traced(traced.graph.micro_batches).graph
    name = type(training.recipe.model).__name__
    unnamed = Program(name=name, fingerprint="", parameters=0, inputs={})
    plan = describe(
        traced.graph,
        found.completed,
        traced.layers,
        program=unnamed if outline else program_of(training.recipe.model, unmarked),
        batch=training.size,
        schedule=found.build.policy,
        cluster=oracle.cluster.name,
        devices=found.devices,
        recompute=traced.recompute,
        placements=found.placements,
        exported=not outline,
    )
    return replace(plan, forecast=estimate(plan, found.forecast))


def _meshes(stages: Sequence[StageChoice]) -> tuple[list[ProcessMesh], tuple[int, ...]]:
    """A mesh a stage on consecutive ranks, and the device of every rank."""
    meshes: list[ProcessMesh] = []
    devices: list[int] = []
    for stage in stages:
        meshes.append(stage.shape.mesh(len(devices)))
        devices += stage.devices
    return meshes, tuple(devices)


def _placements(
    traced: Traced, stages: Sequence[StageChoice], meshes: Sequence[ProcessMesh]
) -> dict[str, ProcessMesh]:
    """Mesh of every op: that of its layer; what belongs to none goes where `place` puts it."""
    of_layer = {
        layer: mesh
        for stage, mesh in zip(stages, meshes, strict=True)
        for layer in range(stage.first, stage.stop)
    }
    graph, of = traced.graph, traced.layering.of
    if len(meshes) == 1:
        return {op.name: meshes[0] for op in graph.ops}
    known = {op.name: of_layer[of[op.name]] for op in graph.ops if of[op.name] >= 0}
    _, found = place(replace(graph, placements=known))
    return {op.name: found[op.name] for op in graph.ops}
