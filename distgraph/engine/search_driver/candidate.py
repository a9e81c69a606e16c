"""A candidate: stages, micro-batches, schedule, recomputed layers; and the program that is built from it.

*In:* decisions. *Out:* a `BuiltCandidate`: the completed graph, its build, its forecast on the cluster.
*Invariant:* the forecast is that of the program that `Engine(plan=...)` would run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distgraph.engine.compile.compile import check_cluster
from distgraph.engine.compile.fingerprint import program_of
from distgraph.engine.compile.plan_apply import apply_plan, devices_of
from distgraph.engine.compile.plan_extract import estimate, plan_of_graph
from distgraph.engine.compile.strategy_passes import strategy_pipeline
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.layout_variants import LayoutQuery
from distgraph.engine.search_driver.search_space import Shape
from distgraph.errors import InfeasibleError, ShardingError
from distgraph.ir.gc_pause import collector_paused
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.assign_meshes import place
from distgraph.passes.matmul_algorithms.ring_attention import by_rings
from distgraph.passes.search.intra_op.apply_layouts import assign
from distgraph.passes.search.intra_op.chosen_layouts import Layouts
from distgraph.passes.search.intra_op.cost_model import MOST_AXES
from distgraph.passes.search.intra_op.formulate import Formulation
from distgraph.passes.search.intra_op.memory_limit import MemoryLimit
from distgraph.passes.search.intra_op.restrictions import Restriction, zero_of
from distgraph.passes.search.layering.layered_graph import LayeredGraph
from distgraph.plan.apply.stage_layouts import layouts_of
from distgraph.plan.decisions import Decisions
from distgraph.plan.plan import Plan, Program, SearchRecord
from distgraph.plan.strategy import with_decisions
from distgraph.runtime.forecast.forecast import Forecast, forecast, out_of_memory
from distgraph.runtime.forecast.memory_forecast import Shortage
from distgraph.runtime.program.build import Build, build

Solved = Mapping[ProcessMesh, tuple[Formulation, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class StageChoice:
    """One stage: layers `first` up to `stop`, devices, shape of the mesh, memory multiplier or limit."""

    first: int
    stop: int
    devices: tuple[int, ...]
    shape: Shape
    memory_multiplier: float = 0.0
    memory_limit: MemoryLimit | None = None

    def reshaped(self, shape: Shape) -> StageChoice:
        """This stage on a mesh of another shape, without the limit that was for the shape."""
        return replace(self, shape=shape, memory_limit=None)

    def __str__(self) -> str:
        return f"layers {self.first}-{self.stop - 1} on {self.shape}"


@dataclass(frozen=True, slots=True)
class Candidate(Decisions):
    """All decisions about a program but its layouts.

    Attributes:
        origin: where it comes from, such as "search" or "uniform dp=2 x tp=4, 2 stages".
        stages: of the pipeline.
        restriction: of the layouts.
        estimate: seconds of a step, from costs by layer.
    """

    origin: str
    stages: tuple[StageChoice, ...]
    restriction: Restriction
    estimate: float

    @property
    def decisions(self) -> tuple[object, ...]:
        """A key that is the same for two candidates with the same program."""
        return *self.decided().values(), self.stages, self.restriction

    @property
    def interleaved(self) -> bool:
        """Whether the pipeline reaches devices several times."""
        return len({stage.devices for stage in self.stages}) < len(self.stages)

    def __str__(self) -> str:
        stages = ", ".join(map(str, self.stages))
        again = f", {len(self.recompute)} layers recomputed" if self.recompute else ""
        zero = f", ZeRO-{self.zero}" if self.zero else ""
        return f"{self.micro_batches} micro-batches, {self.schedule}, {stages}{again}{zero}"


@dataclass(frozen=True, eq=False)
class BuiltCandidate:
    """A candidate as a program.

    Attributes:
        origin, candidate: what it was built from; no candidate where completion or a mode made its layouts.
        decisions: about the whole program.
        layered: the serial graph and its layers.
        placements: mesh of every op of the serial graph; None where `place` finds them.
        completed, build, devices, forecast: the program on the cluster.
        solved: mesh -> the problem that its layouts solve, and the choice; empty where they solve none.
        shortages: devices with too little memory; none where it fits.
        plan: the plan that it was built from, if any.
    """

    origin: str
    candidate: Candidate | None
    decisions: Decisions
    layered: LayeredGraph
    placements: Mapping[str, ProcessMesh] | None
    completed: Graph
    build: Build
    devices: tuple[int, ...]
    forecast: Forecast
    shortages: tuple[Shortage, ...]
    solved: Solved = field(default_factory=dict)
    plan: Plan | None = None

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.forecast.step_seconds

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return not self.shortages


def build_candidate(
    candidate: Candidate, layout_costs: LayoutCosts, runs_on: LayoutCosts | None = None
) -> BuiltCandidate:
    """Lay out, build and forecast a candidate.

    Args:
        candidate: what is decided.
        layout_costs: for which its layouts are solved.
        runs_on: costs of the same program on another cluster of as many devices, for which it is built and
            forecast; None for `layout_costs`. The program then has no candidate, because layouts that are
            solved for that cluster would be others.
    """
    layered, placements, devices, solved = _laid_out(candidate, layout_costs)
    completed = _completed(layered, placements, solved)
    origin = candidate.origin
    if runs_on is not None:
        return build_program(runs_on, completed, layered, devices, origin, decisions=candidate)
    built = build_program(layout_costs, completed, layered, devices, origin, candidate, placements)
    return replace(built, solved=solved)


def completed_graph(candidate: Candidate, layout_costs: LayoutCosts) -> Graph:
    """The completed graph of a candidate, which takes a small part of the time of building it."""
    layered, placements, _, solved = _laid_out(candidate, layout_costs)
    return _completed(layered, placements, solved)


def _laid_out(
    candidate: Candidate, layout_costs: LayoutCosts
) -> tuple[LayeredGraph, Mapping[str, ProcessMesh], tuple[int, ...], Solved]:
    """The layered graph of a candidate, the mesh of every op, the device of every rank, the layouts of every
    mesh."""
    layered = layout_costs.layered_graph(candidate.micro_batches, candidate.recompute)
    meshes, devices = _meshes(candidate.stages)
    layouts = [_stage_layouts(layered, query, layout_costs) for query in _queries(candidate, layout_costs)]
    solved = dict(zip(meshes, layouts, strict=True))
    return layered, _placements(layered, candidate.stages, meshes), devices, solved


def _stage_layouts(
    layered: LayeredGraph, query: LayoutQuery, layout_costs: LayoutCosts
) -> tuple[Formulation, tuple[int, ...]]:
    """Layouts of a stage within its limit of memory; without it where none are: the limit may be that of a
    candidate with other micro-batches, and the forecast says whether the program fits."""
    try:
        return layout_costs.stage_layouts(layered, query)
    except InfeasibleError:
        if query.memory_limit is None:
            raise
        return layout_costs.stage_layouts(layered, replace(query, memory_limit=None))


def _queries(candidate: Candidate, layout_costs: LayoutCosts) -> list[LayoutQuery]:
    """What the layouts of every stage are solved for."""
    return [
        LayoutQuery(
            layout_costs.reference_devices(stage.devices),
            stage.shape,
            stage.memory_multiplier,
            candidate.restriction,
            stage.memory_limit,
        )
        for stage in candidate.stages
    ]


def program_of_plan(plan: Plan, layout_costs: LayoutCosts) -> BuiltCandidate:
    """The program of a plan in the layouts of the plan, on its devices or else on the first ones.

    Raises:
        GraphError: the plan is for another program or another batch.
        ResourceError: the plan needs more devices than the cluster has.
        ShardingError: annotations of the model contradict the plan.
    """
    _, completed = apply_plan(replace(layout_costs.request, plan=plan), plan)
    check_cluster(completed.meshes, layout_costs.cluster)
    devices = _devices_of_plan(plan, layout_costs)
    layered = layout_costs.layered_graph(plan.micro_batches, plan.recompute)
    built = build_program(layout_costs, completed, layered, devices, "start", decisions=plan)
    return replace(built, plan=_with_devices(plan, devices, layout_costs.cluster.name))


def _with_devices(plan: Plan, devices: Sequence[int], cluster: str) -> Plan:
    """What a plan decides, for the devices of a cluster, without what a search found about it."""
    stages = (
        replace(stage, devices=tuple(devices[rank] for rank in stage.mesh.members)) for stage in plan.stages
    )
    return replace(
        plan, cluster=cluster, stages=tuple(stages), baselines={}, search=SearchRecord(), decisions={}
    )


def _devices_of_plan(plan: Plan, layout_costs: LayoutCosts) -> tuple[int, ...]:
    """The device of every rank."""
    return devices_of(plan, layout_costs.cluster) or tuple(range(max(plan.ranks) + 1))


def candidate_of_plan(plan: Plan, layout_costs: LayoutCosts) -> Candidate | None:
    """The stages and decisions of a plan, without its layouts; None where a stage has no whole layer, or a
    mesh that the search does not price: with weights, or of more axes than layouts are solved for."""
    devices, stages = _devices_of_plan(plan, layout_costs), []
    for stage in plan.stages:
        axes = tuple((axis, size) for axis, size in stage.mesh.sizes.items() if size > 1)
        if stage.first == stage.last or stage.mesh.weights or len(axes) > MOST_AXES:
            return None
        placed = tuple(devices[rank] for rank in stage.mesh.members)
        if max(placed) >= len(layout_costs.devices):
            return None
        stages.append(StageChoice(stage.first, stage.last, placed, Shape(axes or (("dp", 1),))))
    decided = {name: getattr(plan, name) for name in plan.decided()}
    return Candidate("search", tuple(stages), layout_costs.restriction, math.inf, **decided)


def broken_constraint(candidate: Candidate, layout_costs: LayoutCosts, split: int | None = None) -> str:
    """The first constraint of the search that a candidate does not keep, such as "stages=4", or "axes of
    annotations"; "" for none.

    Args:
        candidate: what is decided.
        layout_costs: with the constraints.
        split: what the data axes split in its program, see `split_by_data_axes`; None where it is not built,
            so that what its restriction allows counts.
    """
    if not all(layout_costs.allows(candidate.micro_batches, stage.shape) for stage in candidate.stages):
        return "axes of annotations"
    borders = [stage.first for stage in candidate.stages[1:]]
    if len(candidate.stages) > 1 and not layout_costs.capabilities.among([candidate.schedule]):
        return f"runtime={layout_costs.runtime_name}"
    layers = len(layout_costs.all_layers(candidate.micro_batches))
    equal = len({stage.shape for stage in candidate.stages}) == 1
    zero = zero_of(candidate.restriction) if split is None else split
    return layout_costs.constraints.broken_by(candidate, borders, layers, equal, zero)


def constraint_broken_by(program: BuiltCandidate, layout_costs: LayoutCosts) -> str:
    """The same of a program, by what its layouts really split; the restriction of its candidate, if any, may
    allow more."""
    meshes = dict.fromkeys(program.completed.meshes)
    if program.candidate is not None:
        borders = [stage.first for stage in program.candidate.stages[1:]]
    else:
        plan = program.plan or plan_of(program, layout_costs, outline=True)
        stages = plan.stages if len(meshes) > 1 else ()
        borders = [stage.first for stage in stages[1:] if stage.last > stage.first]
    layers, equal = len(program.layered.layers), len({tuple(mesh.sizes.items()) for mesh in meshes}) == 1
    split, usable = split_by_data_axes(program.completed), len(layout_costs.devices)
    if max(program.devices) >= usable:
        return f"devices={usable}"
    if refusal := refusal_by_runtime(program, layout_costs):
        return f"runtime={layout_costs.runtime_name} ({refusal})"
    return layout_costs.constraints.broken_by(program.decisions, borders, layers, equal, split)


def refusal_by_runtime(program: BuiltCandidate, layout_costs: LayoutCosts) -> str:
    """Why the runtime does not execute a program; "" where it does."""
    capabilities, schedule = layout_costs.capabilities, program.decisions.schedule
    if program.completed.algorithms and not capabilities.matmul_algorithms:
        return "products by distributed algorithms"
    if len(dict.fromkeys(program.completed.meshes)) > 1 and not capabilities.among([schedule]):
        return f"schedule {schedule}"
    if capabilities.axes == "any":
        return ""
    try:
        layouts_of(plan_of(program, layout_costs))
    except ShardingError as error:
        return str(error)
    return ""


def split_by_data_axes(graph: Graph) -> int:
    """What the axes split that split the batch, as a number of `SearchConstraints.zero`."""
    split: dict[str, set[str]] = {"input": set(), "param": set(), "state": set()}
    for op in graph.sources(*split):
        dims = graph.attrs[op.result.name].spec.dims
        split[op.kind].update(axis for dim in (dims[:1] if op.kind == "input" else dims) for axis in dim)
    data = split["input"]
    return 3 if split["param"] & data else int(bool(split["state"] & data))


def layout_identity(candidate: Candidate, layout_costs: LayoutCosts) -> tuple[object, ...]:
    """A key that is the same for two candidates of different restrictions only where their programs are the
    same: layouts came out the same in all stages."""
    queries = dict.fromkeys(_queries(candidate, layout_costs))
    layered = layout_costs.layered_graph(candidate.micro_batches, candidate.recompute)
    layouts = tuple(layout_costs.layout_key(layered, query) for query in queries)
    return *candidate.decided().values(), candidate.stages, layouts


def with_layouts(program: BuiltCandidate, solved: Solved, layout_costs: LayoutCosts) -> BuiltCandidate:
    """A program with other choices of layouts, everything else as it is."""
    assert program.placements is not None
    completed = _completed(program.layered, program.placements, solved)
    built = build_program(
        layout_costs,
        completed,
        program.layered,
        program.devices,
        program.origin,
        program.candidate,
        program.placements,
        program.decisions,
    )
    return replace(built, solved=solved)


def with_stages(
    program: BuiltCandidate, candidate: Candidate, layout_costs: LayoutCosts
) -> BuiltCandidate | None:
    """A program with its layers on other stages, or other layers recomputed, its layouts as they are.

    Args:
        program: its layouts are carried over.
        candidate: with stages on the same devices, in the same shapes.
        layout_costs: of the search.

    Returns:
        None where layouts do not carry over.
    """
    layered = layout_costs.layered_graph(candidate.micro_batches, candidate.recompute)
    meshes, devices = _meshes(candidate.stages)
    placements = _placements(layered, candidate.stages, meshes)
    solved = dict(program.solved)
    for mesh, stage in zip(meshes, candidate.stages, strict=True):
        if layered is not program.layered:
            target = layout_costs.formulation(
                layered, layout_costs.reference_devices(stage.devices), stage.shape
            )
            choice = layout_costs.carried_over(*program.solved[mesh], target, layered, program.layered)
            if choice is None:
                return None
            solved[mesh] = target, choice
    completed = _completed(layered, placements, solved)
    built = build_program(layout_costs, completed, layered, devices, program.origin, candidate, placements)
    return replace(built, solved=solved)


def _completed(layered: LayeredGraph, placements: Mapping[str, ProcessMesh], solved: Solved) -> Graph:
    """Every op and value laid out by the choices of its mesh."""
    decoded: dict[tuple[int, tuple[int, ...]], Layouts] = {}
    layouts: dict[ProcessMesh, Layouts] = {}
    for mesh, (formulation, choice) in solved.items():
        key = id(formulation.nodes), choice
        if key not in decoded:
            decoded[key] = formulation.decode(choice)
        layouts[mesh] = decoded[key]
    return replace(assign(layered.graph, placements, layouts), micro_batches=layered.graph.micro_batches)


@collector_paused()
def build_program(
    layout_costs: LayoutCosts,
    completed: Graph,
    layered: LayeredGraph,
    devices: tuple[int, ...],
    origin: str,
    candidate: Candidate | None = None,
    placements: Mapping[str, ProcessMesh] | None = None,
    decisions: Decisions | None = None,
) -> BuiltCandidate:
    """Build and forecast a completed graph, with the given decisions or those of a candidate, if any."""
    given = decisions or candidate
    decisions = replace(
        layout_costs.constraints.start if given is None else Decisions(**given.decided()),
        micro_batches=completed.micro_batches,
        recompute=layered.recompute,
    )
    price = layout_costs.cost_model(devices).price
    passes = strategy_pipeline(with_decisions(layout_costs.request.training_spec.strategy, decisions))
    micro_batches = completed.micro_batches
    built = build(
        completed, micro_batches=micro_batches, policy=decisions.schedule, price=price, passes=passes
    )
    result = forecast(built, layout_costs.cluster, devices, runtime=layout_costs.runtime)
    shortages = out_of_memory(result, layout_costs.cluster)
    return BuiltCandidate(
        origin, candidate, decisions, layered, placements, completed, built, devices, result, shortages
    )


def may_have_rings(completed: Graph) -> bool:
    """Whether a completed graph has attention over sequences that are split, without a ring."""
    return by_rings(completed) is not completed


def with_rings(program: BuiltCandidate, layout_costs: LayoutCosts) -> BuiltCandidate:
    """A program with rings for attention over sequences that are split."""
    return build_program(
        layout_costs,
        by_rings(program.completed),
        program.layered,
        program.devices,
        program.origin,
        program.candidate,
        program.placements,
        program.decisions,
    )


@collector_paused()
def plan_of(program: BuiltCandidate, layout_costs: LayoutCosts, outline: bool = False) -> Plan:
    """A program as a plan with its forecast; an outline is without fingerprint and what exports need."""
    request, layered = layout_costs.request, program.layered
    if program.plan is not None:
        return replace(program.plan, forecast=estimate(program.plan, program.forecast))
    unmarked = layout_costs.layered_graph(layered.graph.micro_batches).graph
    name = type(request.training_spec.model).__name__
    unnamed = Program(name=name, fingerprint="", parameters=0, inputs={})
    plan = plan_of_graph(
        layered.graph,
        program.completed,
        layered.layers,
        program=unnamed if outline else program_of(request.training_spec.model, unmarked),
        batch=request.size,
        decisions=program.decisions,
        cluster=layout_costs.cluster,
        devices=program.devices,
        placements=program.placements,
        exported=not outline,
    )
    return replace(plan, forecast=estimate(plan, program.forecast))


def _meshes(stages: Sequence[StageChoice]) -> tuple[list[ProcessMesh], tuple[int, ...]]:
    """A mesh a stage on consecutive ranks, the same one for stages on the same devices, and the device of
    every rank."""
    meshes: dict[tuple[tuple[int, ...], Shape], ProcessMesh] = {}
    devices: list[int] = []
    for stage in stages:
        key = stage.devices, stage.shape
        if key not in meshes:
            meshes[key] = stage.shape.mesh(len(devices))
            devices += stage.devices
    return [meshes[stage.devices, stage.shape] for stage in stages], tuple(devices)


def _placements(
    layered: LayeredGraph, stages: Sequence[StageChoice], meshes: Sequence[ProcessMesh]
) -> dict[str, ProcessMesh]:
    """Mesh of every op: that of its layer; what belongs to none goes where `place` puts it."""
    of_layer = {
        layer: mesh
        for stage, mesh in zip(stages, meshes, strict=True)
        for layer in range(stage.first, stage.stop)
    }
    graph, of = layered.graph, layered.layering.of
    if len(meshes) == 1:
        return {op.name: meshes[0] for op in graph.ops}
    of_layers = {op.name: of_layer[of[op.name]] for op in graph.ops if of[op.name] >= 0}
    _, of_ops = place(replace(graph, placements=of_layers))
    return {op.name: of_ops[op.name] for op in graph.ops}
