"""Applies a plan: from `Engine(plan=...)` to a completed program.

The training program is traced with the recomputed layers of the plan, and every op gets the mesh and layout
of its line in the plan; the completion passes do not run. `distgraph.engine.compile.derived_programs` handles
the other programs of the engine.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from dataclasses import replace

from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.fingerprint import program_of
from distgraph.engine.compile.op_positions import OpPositions, decompose_ops, is_named, layers_by_first_ops
from distgraph.engine.compile.recomputed_layers import recomputing
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.errors import GraphError, ResourceError, ShardingError
from distgraph.ir.graph import Graph, Op
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin
from distgraph.ir.verifier import verify
from distgraph.passes.assign_meshes import on_other_meshes
from distgraph.passes.communication.defer_cross_mesh_sums import spread_over_meshes
from distgraph.passes.complete import check_op_axes
from distgraph.passes.redistribution.source_layout import follow
from distgraph.passes.redistribution.tiles import without_unit_axes
from distgraph.passes.search.layering.layer_sequence import REST
from distgraph.passes.serial.loops.flatten import flatten
from distgraph.passes.serial.loops.restore import restore
from distgraph.plan.plan import Computed, Plan, Program
from distgraph.plan.strategy import Strategy, with_decisions
from distgraph.resources import Cluster
from distgraph.runtime.execute.process_group import is_chief
from distgraph.tracing.tracer import user_stack_level


def with_plan_settings(training_spec: TrainingSpec, plan: Plan) -> TrainingSpec:
    """The training specification with the strategy's settings replaced by the decisions of the plan."""
    decided = with_decisions(training_spec.strategy, plan)
    return replace(training_spec, strategy=replace(decided, mesh=None, batch_axis=None))


def warn_overruled(strategy: Strategy, plan: Plan) -> None:
    """Warn, on the process that prints, of a setting of a strategy that a plan decides otherwise."""
    stages = [stage for stage in plan.stages if stage.first < stage.last]
    meshes = list(dict.fromkeys(stage.mesh for stage in plan.stages))
    borders, equal = [stage.first for stage in stages[1:]], len({mesh.shape for mesh in meshes}) == 1
    broken = strategy.constraints.broken_by(plan, borders, len(plan.layers), equal, 0)
    mesh = strategy.mesh
    if not broken and mesh is not None and not any(mesh == m or mesh.is_repeated_in(m) for m in meshes):
        broken = f"mesh={mesh}"
    if not broken and not _splits_inputs(plan, strategy.batch_axes):
        broken = f"batch_axis={strategy.batch_axis!r}"
    if not broken and strategy.split > plan.zero:
        broken = f"zero={strategy.zero}"
    searched = "" if broken else _of_search(strategy)
    if searched and is_chief():
        warnings.warn(
            f"{searched} of Strategy has no effect: a plan is given, so that nothing is searched or "
            "completed; leave one of them out",
            UserWarning,
            stacklevel=user_stack_level(),
        )
    if broken and is_chief():
        name = broken.partition("=")[0]
        made = {**plan.texts(), "stages": str(len(stages)), "mesh": " and ".join(map(str, meshes))}
        decided = f", as {made[name]}" if name in made else ""
        warnings.warn(
            f"{broken} of Strategy has no effect: the plan that is given too decides it{decided}; leave "
            f"one of them out",
            UserWarning,
            stacklevel=user_stack_level(),
        )


def _of_search(strategy: Strategy) -> str:
    """The first setting of a search or of completion, which a plan replaces; "" where none is given."""
    for name in ("memory", "devices", "layers", "seconds", "runtime", "refine_budget", "refine"):
        value, default = getattr(strategy, name), Strategy.__dataclass_fields__[name].default
        if value != default:
            return f"{name}={value!r}"
    return ""


def _splits_inputs(plan: Plan, axes: tuple[str, ...]) -> bool:
    """Whether a plan splits the first dim of every input over these axes."""
    inputs = [stored.spec.dims for stored in plan.tensors.values() if stored.kind == "input"]
    return all(set(axes) <= set(dims[0]) for dims in inputs if dims)


def _splits_stored(plan: Plan) -> bool:
    """Whether a plan splits a parameter or state over an axis that splits the first dim of an input."""
    specs = [(stored.kind, stored.spec.dims) for stored in plan.tensors.values()]
    data = {axis for kind, dims in specs if kind == "input" and dims for axis in dims[0]}
    return any(data & set(dim) for kind, dims in specs if kind != "input" for dim in dims)


def layouts_of(plan: Plan) -> dict[str, DistAttr]:
    """The layouts in which the plan stores parameters and states."""
    origin = Origin("search", f"plan of {plan.program.name}")
    return {
        name: DistAttr(plan.stages[stored.stage].mesh, stored.spec, origin)
        for name, stored in plan.tensors.items()
        if stored.kind != "input"
    }


def apply_plan(request: CompileRequest, plan: Plan) -> tuple[Graph, Graph]:
    """The training program with the meshes and layouts of a plan.

    Returns:
        The serial graph and the completed graph.

    Raises:
        GraphError: the plan is for another program, or has a layout that an op does not allow.
        ShardingError: an annotation of the model contradicts the plan.
    """
    if plan.zero and not _splits_stored(plan):
        raise GraphError(
            f"plan of {plan.program.name} has zero {plan.zero} but splits no parameter and no state over the "
            f"axes of its inputs; leave zero out, or make the plan anew"
        )
    program = with_repeated_meshes(_trace(request, plan), plan)
    serial = flatten(program)
    positions = OpPositions(serial, layers_by_first_ops(serial, [layer.first for layer in plan.layers]))
    decomposed = decompose_ops(serial, _decomposed_ops(plan, positions))
    _check_names(decomposed, plan)
    graph, meshes = _place_ops(decomposed, plan, positions)
    completed = _assemble(graph, meshes, plan, positions)
    completed = restore(_with_annotations(serial, completed, plan))
    completed = verify(completed, "completed")  # the plan may come from an edited file
    return program, replace(completed, micro_batches=plan.micro_batches)


def with_repeated_meshes(serial: Graph, plan: Plan) -> Graph:
    """The graph with annotations on the meshes of a plan that repeat theirs: what an annotation says of a few
    ranks holds for each repetition."""
    meshes = dict.fromkeys([*serial.meshes, *serial.placements.values()])
    planned = [stage.mesh for stage in plan.stages]
    other = {mesh: next((each for each in planned if mesh.is_repeated_in(each)), mesh) for mesh in meshes}
    return on_other_meshes(serial, {mesh: mesh if mesh in planned else other[mesh] for mesh in meshes})


def devices_of(plan: Plan | None, cluster: Cluster) -> tuple[int, ...] | None:
    """Device of every rank under a plan that was made for this cluster; None for any other plan.

    A rank that is in no stage gets one of the devices that no stage uses.

    Raises:
        ResourceError: the cluster of this name has fewer devices.
    """
    if plan is None or plan.cluster != cluster.name or not all(stage.devices for stage in plan.stages):
        return None
    device_of = {
        rank: device
        for stage in plan.stages
        for rank, device in zip(stage.mesh.members, stage.devices, strict=True)
    }
    count = len(cluster.devices)
    if max(device_of.values()) >= count:
        raise ResourceError(
            f"plan of {plan.program.name} uses device {max(device_of.values())} of cluster {plan.cluster} "
            f"but that has {count}; make a plan for this one"
        )
    unused = iter(sorted(set(range(count)) - set(device_of.values())))
    ranks = range(max(device_of) + 1)
    return tuple(device_of[rank] if rank in device_of else next(unused) for rank in ranks)


def check_batch(plan: Plan, size: int) -> None:
    """Raises GraphError if a plan is for batches of another size."""
    if size != plan.batch:
        raise GraphError(
            f"plan of {plan.program.name} is for batches of {plan.batch} samples but a batch has {size}; "
            f"take {plan.batch}, or make a plan for {size}"
        )


def _trace(request: CompileRequest, plan: Plan) -> Graph:
    """The serial graph of the plan's program. Raises GraphError if the plan is for another program."""
    check_batch(plan, request.size)
    serial = request.trace()
    _check_program(plan.program, program_of(request.training_spec.model, serial))
    if not plan.recompute:
        return serial
    layers = layers_by_first_ops(flatten(serial), [layer.first for layer in plan.layers])
    return recomputing(request, layers, plan.recompute)


def _check_program(planned: Program, traced: Program) -> None:
    """Raises GraphError if the program of the plan and that of the engine differ."""
    way_out = "give the engine the program of the plan, or make a plan for this one"
    for what, in_plan, in_engine in (
        ("model", planned.name, traced.name),
        ("inputs", _inputs(planned), _inputs(traced)),
        ("number of parameters", f"{planned.parameters:,}", f"{traced.parameters:,}"),
        ("fingerprint", planned.fingerprint, traced.fingerprint),
    ):
        if in_plan != in_engine:
            raise GraphError(
                f"plan of {planned.name} is for another program: its {what} is {in_plan} but that of the "
                f"engine is {in_engine}; {way_out}"
            )


def _inputs(program: Program) -> str:
    return ", ".join(f"{name} {text}" for name, text in program.inputs.items())


def _decomposed_ops(plan: Plan, positions: OpPositions) -> list[str]:
    """Names of the fused ops that are replaced by simpler ones."""
    names = list(plan.rest.decomposed)
    for number, layer in enumerate(plan.ops):
        names += [_op_name(plan, positions, number, position) for position in layer.decomposed]
    return names


def _op_name(plan: Plan, positions: OpPositions, layer: int, position: str) -> str:
    name = positions.name(layer, position)
    if name is None:
        raise GraphError(
            f"plan of {plan.program.name} has op {position} in layer {layer} but the program does not"
        )
    return name


def _place_ops(decomposed: Graph, plan: Plan, positions: OpPositions) -> tuple[Graph, dict[str, ProcessMesh]]:
    """The graph after `spread_over_meshes`, and the mesh of every op."""
    meshes = [stage.mesh for stage in plan.stages]
    stage_of_layer = [plan.stage_of(number) for number in range(len(plan.layers))]
    exceptions = {
        _op_name(plan, positions, number, position): stage
        for number, layer in enumerate(plan.ops)
        for position, stage in layer.placed
    }
    exceptions |= {name: line.stage for name, line in plan.rest.ops if line.stage is not None}
    exceptions |= dict(plan.rest.placed)
    mesh_of: dict[str, ProcessMesh] = {}
    for op in decomposed.ops:
        layer, _ = positions.of(op.name)
        stored = plan.tensors.get(str(op.attrs["name"])) if is_named(op) else None
        stage = stored.stage if stored is not None else exceptions.get(op.name)
        if stage is None and layer != REST:
            stage = stage_of_layer[layer]
        if stage is None or stage >= len(meshes):
            raise GraphError(
                f"plan of {plan.program.name} does not place {op}; layers and recompute of a plan cannot be "
                "edited, since ops are counted in them: make the plan anew with these settings"
            )
        mesh_of[op.name] = meshes[stage]
    return spread_over_meshes(decomposed, mesh_of)


def _assemble(graph: Graph, mesh_of: Mapping[str, ProcessMesh], plan: Plan, positions: OpPositions) -> Graph:
    """The graph with the layout of every op and value."""
    origin = Origin("search", f"plan of {plan.program.name}")
    meshes = [stage.mesh for stage in plan.stages]
    lines = [iter(layer.ops) for layer in plan.ops]
    rest = dict(plan.rest.ops)
    attrs: dict[str, DistAttr] = {}
    algorithms: dict[str, MatmulAlgorithm] = {}
    ops: list[Op] = []
    for op in graph.ops:
        if is_named(op):
            attr = _stored_attr(op, plan, origin)
            attrs[op.name] = attr
            ops.append(op.with_layout(follow(op, attr)))
            continue
        layer, position = positions.of(op.name)
        line = rest.pop(op.name, None) if layer == REST else next(lines[layer], None)
        _check_line(op, line, plan, layer, position)
        assert line is not None
        mesh = mesh_of[op.name] if line.stage is None else meshes[line.stage]
        stored = line.stored or (None,) * len(line.results)
        for value, spec, stage in zip(op.results, line.results, stored, strict=True):
            attrs[value.name] = DistAttr(mesh if stage is None else meshes[stage], spec, origin)
        ops.append(op.with_layout(line.layout(mesh)))
        if line.algorithm is not None:
            algorithms[op.name] = line.algorithm
    if rest or any(next(unread, None) is not None for unread in lines):
        raise GraphError(
            f"plan of {plan.program.name} has more ops than the program; make it anew with this distgraph"
        )
    return graph.with_ops(ops, attrs=attrs, algorithms=algorithms)


def _check_names(graph: Graph, plan: Plan) -> None:
    """Raises GraphError where a plan has an input, a parameter or a state that the program has not."""
    names = {str(op.attrs["name"]) for op in graph.sources("input", "param", "state")}
    for name, stored in plan.tensors.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise GraphError(
                f"plan of {plan.program.name} has {stored.kind} {name} but the program has not; "
                + (f"{near[0]} is near" if near else "take it out, or make the plan anew")
            )


def _stored_attr(op: Op, plan: Plan, origin: Origin) -> DistAttr:
    """The layout in which the plan stores an input, a parameter or a state."""
    name = str(op.attrs["name"])
    stored = plan.tensors.get(name)
    if stored is None:
        raise GraphError(
            f"plan of {plan.program.name} has no {op.kind} {name} but the program has; make it anew"
        )
    mesh = plan.stages[stored.stage].mesh
    where = f"plan of {plan.program.name}: {op.kind} {name} {op.result.type}"
    stored.spec.check(op.result.shape, mesh, where)
    if stored.spec.partial:
        raise ShardingError(
            f"{where} has the layout {stored.spec} but is stored and cannot be partial; take partial out"
        )
    return DistAttr(mesh, stored.spec, origin)


def _check_line(op: Op, line: Computed | None, plan: Plan, layer: int, position: str) -> None:
    """Raises GraphError if a line of the plan does not fit an op, which happens only in an edited file."""
    if line is not None and line.kind == op.kind and len(line.results) == len(op.results):
        return
    where = f"layer {layer}, op {position}" if layer != REST else f"op {position} of no layer"
    in_plan = f"the line {str(line)!r}" if line is not None else "no line"
    raise GraphError(
        f"plan of {plan.program.name}, {where}: {op} has {len(op.results)} result(s) but {in_plan}; make the "
        f"plan anew with this distgraph"
    )


def _with_annotations(serial: Graph, completed: Graph, plan: Plan) -> Graph:
    """The completed graph in which annotated values have the user as their origin.

    Raises:
        ShardingError: an annotation contradicts the plan.
    """
    attrs = dict(completed.attrs)
    check_op_axes(completed)
    by_axes = [(n, attr.on(attrs[n].mesh, n)) for n, attr in serial.axis_attrs.items() if n in attrs]
    for name, attr in (*serial.attrs.items(), *by_axes):
        planned = attrs.get(name)
        if planned is None:
            continue
        if not _equal(planned, attr):
            raise ShardingError(
                f"%{name} is annotated {attr} ({attr.origin.where}) but plan of {plan.program.name} has it "
                f"{planned}; remove the annotation, or make a plan that keeps it"
            )
        attrs[name] = attr
    for name, algorithm in serial.algorithms.items():
        planned_algorithm = completed.algorithms.get(name)
        if planned_algorithm != algorithm:
            raise ShardingError(
                f"%{name} is annotated to be computed by {algorithm} but in plan of {plan.program.name} by "
                f"{planned_algorithm or 'no algorithm'}; remove the annotation, or make a plan that keeps it"
            )
    return replace(completed, attrs=attrs, axis_attrs={}, op_axes={})


def _equal(first: DistAttr, second: DistAttr) -> bool:
    """Whether two layouts are equal up to axes of one rank, which split nothing."""
    return first.mesh == second.mesh and (
        without_unit_axes(first.spec, first.mesh) == without_unit_axes(second.spec, second.mesh)
    )
