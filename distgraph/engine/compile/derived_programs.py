"""Derived programs: those that the plan is not for (evaluation, prediction, a short last batch).

Their parameters and inputs have the layouts of the plan. A forward op that corresponds to an op of the
planned program (the same module, kind, and index among the ops of this kind in this module) runs on the same
mesh, and its results have the same layouts. Completion decides everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.plan_apply import apply_plan, with_repeated_meshes
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.engine.data import POSITION, Field
from distgraph.ir.graph import Graph, Op
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.pass_pipeline import run_passes
from distgraph.passes.pass_registry import PassContext
from distgraph.plan.plan import Plan

_PLANNED = Origin("user", "the plan")  # completion keeps what a user wrote


def follow_plan(request: CompileRequest, reference: Graph | None, plan: Plan) -> tuple[Graph, Graph]:
    """Complete a program with the layouts of the planned program, wherever both have corresponding ops.

    Args:
        request: the program; its `layouts` are those of the plan's parameters.
        reference: the completed training program of the plan; None for an engine without optimiser.
        plan: the plan.

    Returns:
        The serial graph and the completed graph.

    Raises:
        GraphError, ShardingError: the program or its annotations do not fit.
    """
    serial = with_repeated_meshes(request.trace(), plan)
    attrs, placements = dict(serial.attrs), dict(serial.placements)
    for op in serial.sources("input"):
        stored = plan.tensors.get(str(op.attrs["name"]))
        if stored is not None and stored.kind == "input" and len(stored.spec.dims) == len(op.result.shape):
            attrs.setdefault(op.name, DistAttr(plan.stages[stored.stage].mesh, stored.spec, _PLANNED))
    reference_ops = {} if reference is None else dict(_numbered(reference))
    for key, op in _numbered(serial):
        corresponding = reference_ops.get(key)
        if corresponding is None or _dims_of(corresponding) != _dims_of(op):
            continue
        assert reference is not None
        assert corresponding.layout is not None  # of a completed graph
        placements.setdefault(op.name, corresponding.layout.mesh)
        for value, reference_value in zip(op.results, corresponding.results, strict=True):
            attr = reference.attrs[reference_value.name]
            dims = zip(attr.spec.dims, value.shape, strict=True)
            spec = ShardSpec(tuple(axes if attr.mesh.units(axes) <= n else () for axes, n in dims))
            attrs.setdefault(value.name, DistAttr(attr.mesh, spec, _PLANNED))
    pinned = replace(serial, attrs=attrs, placements=placements, micro_batches=request.micro_batches)
    context = PassContext(mesh=plan.stages[0].mesh)
    completed: Graph = run_passes(pinned, ("complete",), context, verified=False)
    return serial, completed


def reference_of(request: CompileRequest, plan: Plan) -> Graph | None:
    """The completed training program of a plan, for another program of the same engine.

    Returns:
        The graph; None if the engine has no optimiser and therefore no training program.

    Raises:
        GraphError, ShardingError: as `apply_plan`.
    """
    training_spec = request.training_spec
    if training_spec.optimizer is None:
        return None
    fields = _fields(training_spec, plan)
    batch = replace(request, mode="train", size=plan.batch, fields=fields, layouts={}, plan=plan)
    return apply_plan(batch, plan)[1]


def _fields(training_spec: TrainingSpec, plan: Plan) -> dict[str, Field]:
    """The fields of a batch with the inputs of the plan; a tuple if those are the model's arguments."""
    inputs = list(plan.program.inputs)
    positions = [f"{POSITION}{number}" for number in range(len(inputs))]
    names = positions if list(training_spec.names(positions, "train").values()) == inputs else inputs
    return {name: _sample(text) for name, text in zip(names, plan.program.inputs.values(), strict=True)}


def _sample(text: str) -> Field:
    """Shape and dtype of a sample, from the type of a micro-batch such as "f32[8, 16]"."""
    dtype, _, dims = text.removesuffix("]").partition("[")
    return tuple(int(n) for n in dims.split(",")[1:]), dtype


def _dims_of(op: Op) -> list[int]:
    """Number of dims of each result."""
    return [len(value.shape) for value in op.results]


def _numbered(graph: Graph) -> Iterator[tuple[tuple[str, str, int], Op]]:
    """Forward ops by module, kind and index among the ops of this kind in this module."""
    counts: dict[tuple[str, str], int] = {}
    for op in graph.ops:
        if op.role == "forward" and op.kind not in ("param", "state", "constant"):
            key = op.scope, op.kind
            counts[key] = counts.get(key, -1) + 1
            yield (*key, counts[key]), op
