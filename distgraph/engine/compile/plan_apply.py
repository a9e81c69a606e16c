"""From a plan to a completed program: what `Engine(plan=...)` does.

The training program is traced, with the layers that the plan computes again marked, and every op gets the
mesh and layout of its line in the plan; nothing is completed. For other programs of the engine see
`distgraph.engine.compile.derived_programs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distgraph.engine.compile.compile_request import Training
from distgraph.engine.compile.fingerprint import program_of
from distgraph.engine.compile.op_positions import OpPositions, cut, decomposed, is_named
from distgraph.engine.compile.training_spec import Recipe
from distgraph.errors import GraphError, ResourceError, ShardingError
from distgraph.ir.graph import Graph, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin
from distgraph.passes.complete import follow
from distgraph.passes.deferral.defer_cross_mesh_sums import spread_over_meshes
from distgraph.passes.redistribution.tiles import without_unit_axes
from distgraph.passes.search.layering.layer_sequence import REST
from distgraph.plan.plan import Computed, Plan, Program
from distgraph.resources import Cluster
from distgraph.verifier import verify


def planned(recipe: Recipe, plan: Plan) -> Recipe:
    """A recipe without what its strategy says about things that the plan decides."""
    strategy = replace(
        recipe.strategy,
        mode="semi",
        mesh=None,
        batch_axis=None,
        micro_batches=plan.micro_batches,
        schedule=plan.schedule,
    )
    return replace(recipe, strategy=strategy)


def layouts_of(plan: Plan) -> dict[str, DistAttr]:
    """Where the plan puts parameters and states."""
    return {
        name: DistAttr(plan.stages[at.stage].mesh, at.spec, Origin("search", f"plan of {plan.program.name}"))
        for name, at in plan.tensors.items()
        if at.kind != "input"
    }


def apply(training: Training, plan: Plan) -> tuple[Graph, Graph]:
    """The training program as planned.

    Args:
        training: batches of the size that the plan is for.
        plan: what is decided.

    Returns:
        the serial graph, and the completed one.

    Raises:
        GraphError: the plan is for another program, or has a layout that an op does not allow.
        ShardingError: an annotation of the model says otherwise than the plan.
    """
    serial = _traced(training, plan)
    positions = OpPositions(serial, cut(serial, [layer.first for layer in plan.layers]))
    whole = decomposed(serial, _fused(plan, positions))
    graph, homes = _placed(whole, plan, positions)
    completed = _assemble(graph, homes, plan, positions)
    completed = verify(_annotated(serial, completed, plan), "completed")  # a file says anything
    return serial, replace(completed, micro_batches=plan.micro_batches)


def devices_of(plan: Plan | None, cluster: Cluster) -> tuple[int, ...] | None:
    """Device of every rank, where a plan was made for this cluster; what no stage has gets what is left.

    Raises:
        ResourceError: the cluster of this name has fewer devices.
    """
    if plan is None or plan.cluster != cluster.name or not all(stage.devices for stage in plan.stages):
        return None
    placed = {
        rank: device
        for stage in plan.stages
        for rank, device in zip(stage.mesh.members, stage.devices, strict=True)
    }
    count = len(cluster.devices)
    if max(placed.values()) >= count:
        raise ResourceError(
            f"plan of {plan.program.name} uses device {max(placed.values())} of cluster {plan.cluster} but "
            f"that has {count}; make a plan for this one"
        )
    left = iter(sorted(set(range(count)) - set(placed.values())))
    return tuple(placed[rank] if rank in placed else next(left) for rank in range(max(placed) + 1))


def check_batch(plan: Plan, size: int) -> None:
    """Raises GraphError where a plan is for batches of another size."""
    if size != plan.batch:
        raise GraphError(
            f"plan of {plan.program.name} is for batches of {plan.batch} samples but a batch has {size}; "
            f"take {plan.batch}, or make a plan for {size}"
        )


def _traced(training: Training, plan: Plan) -> Graph:
    """The serial graph that the plan speaks of. Raises GraphError where the plan is for another program."""
    check_batch(plan, training.size)
    serial = training.trace()
    _check_program(plan.program, program_of(training.recipe.model, serial))
    if not plan.recompute:
        return serial
    layers = cut(serial, [layer.first for layer in plan.layers])
    blocks = [layers[number].ops for number in plan.recompute]
    fields = training.blocks(training.micro_batches)
    return training.recipe.trace("train", fields, training.layouts, recompute=blocks)


def _check_program(wanted: Program, found: Program) -> None:
    way_out = "give the engine the program of the plan, or make a plan for this one"
    for what, mine, yours in (
        ("model", wanted.name, found.name),
        ("inputs", _inputs(wanted), _inputs(found)),
        ("number of parameters", f"{wanted.parameters:,}", f"{found.parameters:,}"),
        ("fingerprint", wanted.fingerprint, found.fingerprint),
    ):
        if mine != yours:
            raise GraphError(
                f"plan of {wanted.name} is for another program: its {what} is {mine} but that of the engine "
                f"is {yours}; {way_out}"
            )


def _inputs(program: Program) -> str:
    return ", ".join(f"{name} {text}" for name, text in program.inputs.items())


def _fused(plan: Plan, positions: OpPositions) -> list[str]:
    """Names of the ops that are replaced by simpler ones."""
    found = list(plan.rest.decomposed)
    for number, layer in enumerate(plan.ops):
        found += [_name(plan, positions, number, position) for position in layer.decomposed]
    return found


def _name(plan: Plan, positions: OpPositions, layer: int, position: str) -> str:
    name = positions.name(layer, position)
    if name is None:
        raise GraphError(
            f"plan of {plan.program.name} has op {position} in layer {layer} but the program has not"
        )
    return name


def _placed(whole: Graph, plan: Plan, positions: OpPositions) -> tuple[Graph, dict[str, ProcessMesh]]:
    """The graph with every op on its mesh, sources cloned and sums across meshes postponed; the meshes."""
    meshes = [stage.mesh for stage in plan.stages]
    of_layer = [plan.stage_of(number) for number in range(len(plan.layers))]
    elsewhere = {
        _name(plan, positions, number, position): stage
        for number, layer in enumerate(plan.ops)
        for position, stage in layer.placed
    }
    elsewhere |= {name: line.stage for name, line in plan.rest.ops if line.stage is not None}
    elsewhere |= dict(plan.rest.placed)
    homes: dict[str, ProcessMesh] = {}
    for op in whole.ops:
        layer, _ = positions.of(op.name)
        stored = plan.tensors.get(str(op.attrs["name"])) if is_named(op) else None
        stage = stored.stage if stored is not None else elsewhere.get(op.name)
        if stage is None and layer != REST:
            stage = of_layer[layer]
        if stage is None or stage >= len(meshes):
            raise GraphError(
                f"plan of {plan.program.name} does not place {op}; make the plan anew with this distgraph"
            )
        homes[op.name] = meshes[stage]
    return spread_over_meshes(whole, homes)


def _assemble(graph: Graph, homes: Mapping[str, ProcessMesh], plan: Plan, positions: OpPositions) -> Graph:
    """Every op and value with its layout."""
    origin = Origin("search", f"plan of {plan.program.name}")
    meshes = [stage.mesh for stage in plan.stages]
    lines = [iter(layer.ops) for layer in plan.ops]
    rest = dict(plan.rest.ops)
    attrs: dict[str, DistAttr] = {}
    ops: list[Op] = []
    for op in graph.ops:
        if is_named(op):
            attr = _stored(op, plan, origin)
            attrs[op.name] = attr
            ops.append(replace(op, layout=follow(op, attr)))
            continue
        layer, position = positions.of(op.name)
        line = rest.pop(op.name, None) if layer == REST else next(lines[layer], None)
        _check_line(op, line, plan, layer, position)
        assert line is not None
        mesh = homes[op.name] if line.stage is None else meshes[line.stage]
        stored = line.stored or (None,) * len(line.results)
        for value, spec, kept in zip(op.results, line.results, stored, strict=True):
            attrs[value.name] = DistAttr(mesh if kept is None else meshes[kept], spec, origin)
        ops.append(replace(op, layout=line.layout(mesh)))
    if rest or any(next(left, None) is not None for left in lines):
        raise GraphError(
            f"plan of {plan.program.name} has more ops than the program; make it anew with this distgraph"
        )
    return graph.with_ops(ops, attrs=attrs)


def _stored(op: Op, plan: Plan, origin: Origin) -> DistAttr:
    name = str(op.attrs["name"])
    at = plan.tensors.get(name)
    if at is None:
        raise GraphError(
            f"plan of {plan.program.name} has no {op.kind} {name} but the program has; make it anew"
        )
    mesh = plan.stages[at.stage].mesh
    at.spec.check(op.result.shape, mesh, f"plan of {plan.program.name}: {op.kind} {name} {op.result.type}")
    return DistAttr(mesh, at.spec, origin)


def _check_line(op: Op, line: Computed | None, plan: Plan, layer: int, position: str) -> None:
    """Whether a line of a plan is that of an op: the fingerprint says so, unless the file was edited."""
    if line is not None and line.kind == op.kind and len(line.results) == len(op.results):
        return
    where = f"layer {layer}, op {position}" if layer != REST else f"op {position} of no layer"
    found = f"the line {str(line)!r}" if line is not None else "no line"
    raise GraphError(
        f"plan of {plan.program.name}, {where}: {op} has {len(op.results)} result(s) but {found}; make the "
        f"plan anew with this distgraph"
    )


def _annotated(serial: Graph, completed: Graph, plan: Plan) -> Graph:
    """The completed graph in which what was annotated says so.

    Raises:
        ShardingError: an annotation says otherwise than the plan.
    """
    attrs = dict(completed.attrs)
    for name, attr in serial.attrs.items():
        found = attrs.get(name)
        if found is None:
            continue
        if not _equal(found, attr):
            raise ShardingError(
                f"%{name} is annotated {attr} ({attr.origin.where}) but plan of {plan.program.name} has it "
                f"{found}; remove the annotation, or make a plan that keeps it"
            )
        attrs[name] = attr
    return replace(completed, attrs=attrs)


def _equal(first: DistAttr, second: DistAttr) -> bool:
    """Whether two layouts are the same; an axis of one rank splits nothing."""
    return first.mesh == second.mesh and (
        without_unit_axes(first.spec, first.mesh) == without_unit_axes(second.spec, second.mesh)
    )
