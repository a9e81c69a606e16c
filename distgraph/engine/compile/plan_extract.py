"""From a compiled program to its plan: the inverse of `distgraph.engine.compile.plan_apply`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from distgraph.engine.compile.compile_request import Training
from distgraph.engine.compile.fingerprint import program_of
from distgraph.engine.compile.op_positions import OpPositions, decomposed, is_named
from distgraph.errors import GraphError
from distgraph.ir.graph import Graph, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import lookup
from distgraph.ir.range_notation import fold
from distgraph.passes.assign_meshes import place
from distgraph.passes.deferral.defer_cross_mesh_sums import spread_over_meshes
from distgraph.passes.search.layering.layer_sequence import REST, Layering, cluster_layers
from distgraph.passes.search.layering.layer_sequence import Layer as Run
from distgraph.plan.components import KINDS
from distgraph.plan.export import surface_of
from distgraph.plan.plan import Computed, Estimate, Layer, LayerOps, Plan, Program, Rest, Stage, Stored
from distgraph.plan.plan_diff import layer_line, rest_line
from distgraph.resources import Cluster, RankMapping
from distgraph.runtime.forecast.forecast import Forecast
from distgraph.runtime.program.build import Build


def extract(training: Training, build: Build, mapping: RankMapping | None, cluster: Cluster | None) -> Plan:
    """The plan of a program that was compiled from annotations and completion, or from a plan.

    Args:
        training: what was compiled.
        build: what it was compiled to.
        mapping: device of every rank, where there is a cluster.
        cluster: it was compiled for.

    Raises:
        GraphError: the program does not train.
    """
    if training.mode != "train":
        raise GraphError(
            f"plan: the program is one to {training.mode} but a plan is for training; give the engine a loss "
            f"and an optimizer, and call prepare(batch) or fit first"
        )
    if training.planned:
        assert training.plan is not None
        return training.plan
    serial = training.trace()
    layers = cluster_layers(serial)
    return describe(
        serial,
        build.planned or build.completed,
        layers,
        program=program_of(training.recipe.model, serial),
        batch=training.size,
        schedule=build.policy,
        cluster="" if cluster is None else cluster.name,
        devices=() if mapping is None else mapping.devices,
    )


def describe(
    serial: Graph,
    completed: Graph,
    layers: Sequence[Run],
    *,
    program: Program,
    batch: int,
    schedule: str,
    cluster: str = "",
    devices: Sequence[int] = (),
    recompute: Sequence[int] = (),
    placements: Mapping[str, ProcessMesh] | None = None,
    exported: bool = True,
) -> Plan:
    """The plan of a completed graph.

    Args:
        serial: the graph that was completed, with the layers of `recompute` computed again.
        completed: with all layouts; its `micro_batches` are those of the plan.
        layers: runs of its forward ops, together all of them.
        program: what it was traced from (see `program_of`), without `recompute`.
        batch: samples of a step.
        schedule: name.
        cluster: name of the cluster.
        devices: of every rank of it.
        recompute: numbers of layers.
        placements: mesh of every op of the serial graph; by default what `place` finds.
        exported: whether the plan is to have a surface.
    """
    broken = _decomposed(serial, completed)
    whole = decomposed(serial, broken)
    homes = dict(placements) if placements is not None else _homes(whole, completed)
    for op in whole.ops:
        if op.name not in homes:  # a part of a fused op
            homes[op.name] = _mesh(completed.producers[op.name])
    stages = _stages(layers, homes, completed, devices)
    _, after = spread_over_meshes(whole, homes)
    describer = _Describer(OpPositions(serial, layers), stages, homes, after, completed)
    ops, rest = describer.ops(whole, broken)
    return Plan(
        program=program,
        cluster=cluster,
        batch=batch,
        micro_batches=completed.micro_batches,
        schedule=schedule,
        layers=tuple(Layer(first=run.ops[0], scope=serial.producers[run.ops[0]].scope) for run in layers),
        stages=stages,
        recompute=tuple(recompute),
        tensors=describer.tensors(),
        ops=ops,
        rest=rest,
        surface=surface_of(completed, [stage.mesh for stage in stages]) if exported else None,
    )


def lines_of(layering: Layering, completed: Graph, ops: Iterable[Op]) -> dict[str, str]:
    """What `Plan.instead` puts into a plan of another completion of the same graph on the same meshes.

    Args:
        layering: of the serial graph.
        completed: with all layouts.
        ops: some of its ops.

    Returns:
        name of an input, parameter or state -> layout; number of an op -> how it is computed. Equal layers
        have one line.
    """
    numbers: dict[str, tuple[int, int]] = {}
    counts: Counter[int] = Counter()
    for op in completed.ops:
        base = op.name
        while base not in layering.of:  # made for the stages, and named after what it was made of
            base = base.rpartition(".")[0]
        if not is_named(op):
            numbers[op.name] = layering.of[base], counts[layering.of[base]]
            counts[layering.of[base]] += 1
    tensors: dict[str, str] = {}
    alike: dict[tuple[int, str], list[int]] = {}
    rest: dict[str, str] = {}
    for op in ops:
        specs = tuple(completed.attrs[value.name].spec for value in op.results)
        if is_named(op):
            tensors[str(op.attrs["name"])] = str(specs[0])
            continue
        assert op.layout is not None  # of a completed graph
        line = str(Computed(op.kind, op.layout.axes, op.layout.partial, specs))
        layer, number = numbers[op.name]
        if layer == REST:
            rest[rest_line(op.name)] = line
        else:
            alike.setdefault((number, line), []).append(layer)
    found = {layer_line(layers, number): line for (number, line), layers in alike.items()}
    return {**fold(tensors), **found, **rest}


def estimate(plan: Plan, found: Forecast) -> Estimate:
    """A forecast of a plan's program in short."""
    peaks = {rank: memory.total for first, memory in found.memory.items() for rank in found.ranks[first]}
    return Estimate(
        seconds=found.step_seconds,
        memory=tuple(  # of uneven meshes the forecast looks at the corners
            max(peaks[rank] for rank in stage.mesh.members if rank in peaks) for stage in plan.stages
        ),
        plan=plan.digest,
    )


@dataclass(frozen=True)
class _Describer:
    """What the lines of a plan are written from.

    Attributes:
        positions: of the ops of the serial graph.
        stages: of the plan.
        before: mesh of every op of the serial graph, fused ones decomposed where the completed graph has them
            so.
        after: mesh of every op of the completed graph; it may be computed on the same ranks in another order.
        completed: the completed graph.
    """

    positions: OpPositions
    stages: tuple[Stage, ...]
    before: Mapping[str, ProcessMesh]
    after: Mapping[str, ProcessMesh]
    completed: Graph

    @cached_property
    def number(self) -> dict[ProcessMesh, int]:
        """Mesh -> first stage on it."""
        return {stage.mesh: number for number, stage in reversed(list(enumerate(self.stages)))}

    def tensors(self) -> dict[str, Stored]:
        """Where everything with a name lies."""
        graph, found = self.completed, {}
        for kind in KINDS:
            for op in filter(is_named, graph.sources(kind)):
                attr = graph.attrs[op.name]
                found[str(op.attrs["name"])] = Stored(kind, self.number[attr.mesh], attr.spec)
        return found

    def ops(self, whole: Graph, broken: Sequence[str]) -> tuple[tuple[LayerOps, ...], Rest]:
        """How all ops are computed: of every layer, and of none."""
        fused = self._by_layer(broken)
        serial = self._by_layer(op.name for op in whole.ops if not is_named(op))
        made = self._by_layer(op.name for op in self.completed.ops if not is_named(op))
        layers = []
        for stage in self.stages:
            home = self.number[stage.mesh]
            for layer in range(stage.first, stage.last):
                placed = ((at, self.number[self.before[name]]) for name, at in serial.get(layer, ()))
                layers.append(
                    LayerOps(
                        tuple(at for _, at in fused.get(layer, ())),
                        tuple((at, number) for at, number in placed if number != home),
                        tuple(self._line(name) for name, _ in made.get(layer, ())),
                    )
                )
        rest = tuple((name, self._line(name, True)) for name, _ in made.get(REST, ()))
        computed = {name: line.stage for name, line in rest}
        placed = ((name, self.number[self.before[name]]) for name, _ in serial.get(REST, ()))
        return tuple(layers), Rest(
            tuple(at for _, at in fused.get(REST, ())),
            tuple((name, number) for name, number in placed if number != computed.get(name)),
            rest,
        )

    def _by_layer(self, names: Iterable[str]) -> dict[int, list[tuple[str, str]]]:
        """Layer -> (name, position there) of ops."""
        found: dict[int, list[tuple[str, str]]] = {}
        for name in names:
            layer, position = self.positions.of(name)
            found.setdefault(layer, []).append((name, position))
        return found

    def _line(self, name: str, everywhere: bool = False) -> Computed:
        """The line of an op; with its stage where that is not where it is placed, or `everywhere`."""
        op = self.completed.producers[name]
        assert op.layout is not None  # of a completed graph
        mesh = op.layout.mesh
        attrs = [self.completed.attrs[value.name] for value in op.results]
        stored = tuple(None if attr.mesh == mesh else self.number[attr.mesh] for attr in attrs)
        return Computed(
            op.kind,
            op.layout.axes,
            op.layout.partial,
            tuple(attr.spec for attr in attrs),
            self.number[mesh] if everywhere or mesh != self.after[name] else None,
            stored if any(kept is not None for kept in stored) else (),
        )


def _decomposed(serial: Graph, completed: Graph) -> list[str]:
    """Names of fused ops that completion replaced by simpler ones, and of parts of them."""
    found: list[str] = []
    while True:
        broken = [
            op.name
            for op in serial.ops
            if lookup(op.kind).decompose is not None
            and (op.name not in completed.producers or completed.producers[op.name].kind != op.kind)
        ]
        if not broken:
            return found
        found += broken
        serial = decomposed(serial, broken)


def _homes(whole: Graph, completed: Graph) -> dict[str, ProcessMesh]:
    """Mesh of every op as completion found it."""
    ((most, _),) = Counter(_mesh(op) for op in completed.ops).most_common(1)
    return place(whole, most)[1]


def _mesh(op: Op) -> ProcessMesh:
    assert op.layout is not None  # the graph is completed
    return op.layout.mesh


def mesh_of(layer: Run, homes: Mapping[str, ProcessMesh]) -> ProcessMesh:
    """The mesh that most ops of a layer are on."""
    ((mesh, _),) = Counter(homes[name] for name in layer.ops if name in homes).most_common(1)
    return mesh


def _stages(
    layers: Sequence[Run], homes: Mapping[str, ProcessMesh], completed: Graph, devices: Sequence[int]
) -> tuple[Stage, ...]:
    """Runs of layers whose ops lie mostly on one mesh; then the meshes that have no layer."""
    found: list[Stage] = []

    def stage(mesh: ProcessMesh, first: int, last: int) -> Stage:
        placed = tuple(devices[rank] for rank in mesh.members) if devices else ()
        return Stage(mesh=mesh, first=first, last=last, devices=placed)

    for number, run in enumerate(layers):
        mesh = mesh_of(run, homes)
        if found and found[-1].mesh == mesh:
            found[-1] = replace(found[-1], last=number + 1)
        else:
            found.append(stage(mesh, number, number + 1))
    used = dict.fromkeys(_mesh(op) for op in completed.ops)
    used |= dict.fromkeys(attr.mesh for attr in completed.attrs.values())
    known = {each.mesh for each in found}
    return (*found, *(stage(mesh, len(layers), len(layers)) for mesh in used if mesh not in known))
