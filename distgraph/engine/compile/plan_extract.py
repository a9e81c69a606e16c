"""Extracts the plan of a compiled program: the inverse of `distgraph.engine.compile.plan_apply`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.fingerprint import program_of
from distgraph.engine.compile.op_positions import OpPositions, is_named
from distgraph.engine.compile.rank_placement import placement_of
from distgraph.engine.compile.recomputed_layers import recomputed_program
from distgraph.errors import GraphError
from distgraph.ir.graph import Graph, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import lookup
from distgraph.ir.range_notation import fold
from distgraph.passes.assign_meshes import place
from distgraph.passes.communication.defer_cross_mesh_sums import spread_over_meshes
from distgraph.passes.complete import flat_on_meshes
from distgraph.passes.decompose import decompose
from distgraph.passes.search.layering.layer_sequence import REST, Layering, cluster_layers
from distgraph.passes.search.layering.layer_sequence import Layer as GraphLayer
from distgraph.passes.serial.loops.flatten import flat_layers, flatten, has_loops
from distgraph.plan.decisions import Decisions
from distgraph.plan.export.module_interface import surface_of
from distgraph.plan.plan import (
    Computed,
    Decision,
    Estimate,
    Layer,
    LayerOps,
    Plan,
    Program,
    Rest,
    Stage,
    Stored,
)
from distgraph.plan.plan_components import KINDS
from distgraph.plan.plan_diff import layer_line, rest_line
from distgraph.resources import Cluster, RankMapping
from distgraph.runtime.program.build import Build

if TYPE_CHECKING:
    from distgraph.runtime.forecast.forecast import Forecast


def extract_plan(
    request: CompileRequest, build: Build, mapping: RankMapping | None, cluster: Cluster | None
) -> Plan:
    """The plan of a program that was compiled from annotations and completion, or from a plan.

    Raises:
        GraphError: the program does not train.
    """
    if request.mode != "train":
        raise GraphError(
            f"plan: the program is one to {request.mode} but a plan is for training; give the engine a loss "
            f"and an optimizer, and call prepare(batch) or fit first"
        )
    if request.planned:
        assert request.plan is not None
        return request.plan
    traced, strategy = recomputed_program(request), request.training_spec.strategy
    decisions = Decisions(
        micro_batches=build.completed.micro_batches,
        schedule=build.policy,
        recompute=traced.recomputed,
        zero=strategy.split,
    )
    plan = plan_of_graph(
        traced.graph,
        build.planned or build.completed,
        traced.layers or cluster_layers(traced.graph),
        program=program_of(request.training_spec.model, traced.unmarked),
        batch=request.size,
        decisions=decisions,
        cluster=cluster,
        devices=() if mapping is None else mapping.devices,
    )
    if not traced.recomputed:
        return plan
    chosen = decisions.choices(len(plan.layers))["recompute"]
    note = f"given: recompute={strategy.constraints.given()['recompute']}; nothing else was tried"
    return replace(plan, decisions={"recompute": Decision(chosen=chosen, note=note)})


def plan_of_graph(
    serial: Graph,
    completed: Graph,
    layers: Sequence[GraphLayer],
    *,
    program: Program,
    batch: int,
    decisions: Decisions,
    cluster: Cluster | None = None,
    devices: Sequence[int] = (),
    placements: Mapping[str, ProcessMesh] | None = None,
    exported: bool = True,
) -> Plan:
    """The plan of a completed graph.

    Args:
        serial: the graph that was completed; it includes the ops of layers that are recomputed.
        completed: the graph with all layouts; its `micro_batches` are those of the plan.
        layers: the layers of the graph, together all forward ops.
        program: the program that was traced (see `program_of`), without recomputation.
        batch: samples of a step.
        decisions: about the whole program.
        cluster: that it is for.
        devices: device of every rank.
        placements: mesh of every op of the serial graph; by default the result of `assign_meshes.place`.
        exported: whether the plan includes the module interface that exports need.
    """
    completed = flatten(completed)
    ((default, _),) = Counter(_mesh(op) for op in completed.ops).most_common(1)
    if has_loops(serial):
        serial = flat_on_meshes(serial, default)
        layers = tuple(GraphLayer(names) for names in flat_layers(serial, [layer.ops for layer in layers]))
    fused, whole = _decompose(serial, completed, default)
    mesh_of = dict(placements) if placements is not None else place(whole, default)[1]
    for op in whole.ops:
        if op.name not in mesh_of:  # an op that replaces a fused op
            mesh_of[op.name] = _mesh(completed.producers[op.name])
    stages = _stages(layers, mesh_of, completed, devices)
    spread, after = spread_over_meshes(whole, mesh_of)
    describer = _Describer(OpPositions(serial, layers), stages, mesh_of, after, completed)
    ops, rest = describer.ops(whole, spread, fused)
    return Plan(
        program=program,
        cluster="" if cluster is None else cluster.name,
        placement=() if cluster is None else placement_of(cluster, devices),
        batch=batch,
        **decisions.decided(),
        layers=tuple(
            Layer(first=layer.ops[0], scope=serial.producers[layer.ops[0]].scope) for layer in layers
        ),
        stages=stages,
        tensors=describer.tensors(),
        ops=ops,
        rest=rest,
        surface=surface_of(completed, [stage.mesh for stage in stages]) if exported else None,
    )


def lines_of(layering: Layering, completed: Graph, ops: Iterable[Op]) -> dict[str, str]:
    """Lines of a plan (see `plan_diff`) that give some ops the layouts of another completed graph.

    Args:
        layering: the layers of the serial graph.
        completed: another completion of the same graph on the same meshes.
        ops: the ops of `completed` whose lines are wanted.

    Returns:
        Name of a line -> its text. Equal layers share a line.
    """
    numbers: dict[str, tuple[int, int]] = {}
    counts: Counter[int] = Counter()
    for op in completed.ops:
        base = op.name
        while base not in layering.of:  # derived for a stage, and named after the original op
            base = base.rpartition(".")[0]
        if not is_named(op):
            numbers[op.name] = layering.of[base], counts[layering.of[base]]
            counts[layering.of[base]] += 1
    tensors: dict[str, str] = {}
    layers_with: dict[tuple[int, str], list[int]] = {}
    rest: dict[str, str] = {}
    for op in ops:
        specs = tuple(completed.attrs[value.name].spec for value in op.results)
        if is_named(op):
            tensors[str(op.attrs["name"])] = str(specs[0])
            continue
        assert op.layout is not None  # of a completed graph
        algorithm = completed.algorithms.get(op.name)
        line = str(Computed(op.kind, op.layout.axes, op.layout.partial, specs, algorithm=algorithm))
        layer, number = numbers[op.name]
        if layer == REST:
            rest[rest_line(op.name)] = line
        else:
            layers_with.setdefault((number, line), []).append(layer)
    in_layers = {layer_line(layers, number): line for (number, line), layers in layers_with.items()}
    return {**fold(tensors), **in_layers, **rest}


def estimate(plan: Plan, forecast: Forecast) -> Estimate:
    """The summary of a forecast of a plan's program."""
    peaks = {
        rank: memory.total for first, memory in forecast.memory.items() for rank in forecast.ranks[first]
    }
    return Estimate(
        seconds=forecast.step_seconds,
        memory=tuple(  # the forecast has only some of the ranks that do the same with blocks of unequal sizes
            max([peaks[rank] for rank in stage.mesh.members if rank in peaks] or peaks.values())
            for stage in plan.stages
        ),
        plan=plan.digest,
        shares={kind: round(share, 4) for kind, share in forecast.shares.items() if share >= 5e-5},
        errors=forecast.errors,
    )


@dataclass(frozen=True)
class _Describer:
    """Writes the lines of a plan.

    Attributes:
        positions: positions of the ops of the serial graph.
        stages: the stages of the plan.
        before: mesh of every op of the serial graph, after the decompositions of the completed graph.
        after: mesh of every op after `spread_over_meshes`; the completed graph may compute it on the same
            ranks in another order.
        completed: the completed graph.
    """

    positions: OpPositions
    stages: tuple[Stage, ...]
    before: Mapping[str, ProcessMesh]
    after: Mapping[str, ProcessMesh]
    completed: Graph

    @cached_property
    def stage_of(self) -> dict[ProcessMesh, int]:
        """Mesh -> number of the first stage on it."""
        return {stage.mesh: number for number, stage in reversed(list(enumerate(self.stages)))}

    def tensors(self) -> dict[str, Stored]:
        """The layouts of inputs, parameters and states, by name."""
        graph, tensors = self.completed, {}
        for kind in KINDS:
            for op in filter(is_named, graph.sources(kind)):
                attr = graph.attrs[op.name]
                tensors[str(op.attrs["name"])] = Stored(kind, self.stage_of[attr.mesh], attr.spec)
        return tensors

    def ops(
        self, whole: Graph, spread: Graph, decomposed: Sequence[str]
    ) -> tuple[tuple[LayerOps, ...], Rest]:
        """The ops of every layer, and the ops that belong to no layer.

        Args:
            whole: the serial graph after decompositions.
            spread: that graph on several meshes, from which the plan is applied: lines have the order of its
                ops. The copy of a source may stand elsewhere in the completed graph.
            decomposed: names of the fused ops that are decomposed.
        """
        fused = self._by_layer(decomposed)
        serial = self._by_layer(op.name for op in whole.ops if not is_named(op))
        order = {op.name: number for number, op in enumerate(spread.ops)}
        names = (op.name for op in self.completed.ops if not is_named(op))
        computed = self._by_layer(sorted(names, key=lambda name: order.get(name, len(order))))
        layers = []
        for stage in self.stages:
            number = self.stage_of[stage.mesh]
            for layer in range(stage.first, stage.last):
                placed = (
                    (position, self.stage_of[self.before[name]]) for name, position in serial.get(layer, ())
                )
                layers.append(
                    LayerOps(
                        tuple(position for _, position in fused.get(layer, ())),
                        tuple((position, other) for position, other in placed if other != number),
                        tuple(self._line(name) for name, _ in computed.get(layer, ())),
                    )
                )
        rest = tuple((name, self._line(name, with_stage=True)) for name, _ in computed.get(REST, ()))
        stated = {name: line.stage for name, line in rest}
        placed = ((name, self.stage_of[self.before[name]]) for name, _ in serial.get(REST, ()))
        return tuple(layers), Rest(
            tuple(position for _, position in fused.get(REST, ())),
            tuple((name, number) for name, number in placed if number != stated.get(name)),
            rest,
        )

    def _by_layer(self, names: Iterable[str]) -> dict[int, list[tuple[str, str]]]:
        """Layer -> (name, position in the layer) of its ops."""
        by_layer: dict[int, list[tuple[str, str]]] = {}
        for name in names:
            layer, position = self.positions.of(name)
            by_layer.setdefault(layer, []).append((name, position))
        return by_layer

    def _line(self, name: str, *, with_stage: bool = False) -> Computed:
        """The line of an op; it states the stage if that differs from the op's placement, or `with_stage`."""
        op = self.completed.producers[name]
        assert op.layout is not None  # of a completed graph
        mesh = op.layout.mesh
        attrs = [self.completed.attrs[value.name] for value in op.results]
        stored = tuple(None if attr.mesh == mesh else self.stage_of[attr.mesh] for attr in attrs)
        return Computed(
            op.kind,
            op.layout.axes,
            op.layout.partial,
            tuple(attr.spec for attr in attrs),
            self.stage_of[mesh] if with_stage or mesh != self.after[name] else None,
            stored if any(stage is not None for stage in stored) else (),
            self.completed.algorithms.get(name),
        )


def _decompose(serial: Graph, completed: Graph, default: ProcessMesh) -> tuple[list[str], Graph]:
    """Decompose the fused ops that completion has decomposed, those of replacements included.

    As in completion, the parts of a fused op are placed where the op itself is placed.

    Returns:
        Names of the fused ops, and the graph with their parts in their place.
    """
    names: list[str] = []
    while True:
        fused = [
            op.name
            for op in serial.ops
            if lookup(op.kind).decompose is not None
            and (op.name not in completed.producers or completed.producers[op.name].kind != op.kind)
        ]
        if not fused:
            return names, serial
        names += fused
        meshes = place(serial, default)[1]
        serial = decompose(serial, fused, meshes if len({*meshes.values()}) > 1 else None)


def _mesh(op: Op) -> ProcessMesh:
    assert op.layout is not None  # the graph is completed
    return op.layout.mesh


def layer_mesh(layer: GraphLayer, mesh_of: Mapping[str, ProcessMesh]) -> ProcessMesh:
    """The mesh of most ops of a layer."""
    ((mesh, _),) = Counter(mesh_of[name] for name in layer.ops if name in mesh_of).most_common(1)
    return mesh


def _stages(
    layers: Sequence[GraphLayer],
    mesh_of: Mapping[str, ProcessMesh],
    completed: Graph,
    devices: Sequence[int],
) -> tuple[Stage, ...]:
    """A stage for consecutive layers on one mesh; then a stage without layers for every other mesh."""
    stages: list[Stage] = []

    def stage(mesh: ProcessMesh, first: int, last: int) -> Stage:
        placed = tuple(devices[rank] for rank in mesh.members) if devices else ()
        return Stage(mesh=mesh, first=first, last=last, devices=placed)

    for number, layer in enumerate(layers):
        mesh = layer_mesh(layer, mesh_of)
        if stages and stages[-1].mesh == mesh:
            stages[-1] = replace(stages[-1], last=number + 1)
        else:
            stages.append(stage(mesh, number, number + 1))
    used = dict.fromkeys(_mesh(op) for op in completed.ops)
    used |= dict.fromkeys(attr.mesh for attr in completed.attrs.values())
    with_layers = {each.mesh for each in stages}
    return (*stages, *(stage(mesh, len(layers), len(layers)) for mesh in used if mesh not in with_layers))
