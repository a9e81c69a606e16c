"""Programs of an engine beside the one that its plan is for: evaluation, prediction, a short last batch.

Their parameters and inputs lie where the plan says. Forward ops that the planned program has too (of the same
module, kind and number among those of this kind in this module) run on the same mesh, and their results lie
as there; completion decides the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from distgraph.engine.compile.compile_request import Training
from distgraph.engine.compile.plan_apply import apply
from distgraph.engine.compile.training_spec import Recipe
from distgraph.engine.data import POSITION, Field
from distgraph.ir.graph import Graph, Op
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.pass_pipeline import run_passes
from distgraph.passes.pass_registry import PassContext
from distgraph.plan.plan import Plan

_PLANNED = Origin("user", "the plan")  # completion keeps what a user wrote


def follow_plan(training: Training, reference: Graph | None, plan: Plan) -> tuple[Graph, Graph]:
    """Complete a program in the layouts of the planned one, wherever it has the same ops.

    Args:
        training: with the layouts of the plan's parameters.
        reference: the planned training program, completed; None for an engine that cannot train.
        plan: its plan.

    Returns:
        the serial graph, and the completed one.

    Raises:
        GraphError, ShardingError: the program or its annotations do not fit.
    """
    serial = training.trace()
    attrs, placements = dict(serial.attrs), dict(serial.placements)
    for op in serial.sources("input"):
        at = plan.tensors.get(str(op.attrs["name"]))
        if at is not None and at.kind == "input" and len(at.spec.dims) == len(op.result.shape):
            attrs.setdefault(op.name, DistAttr(plan.stages[at.stage].mesh, at.spec, _PLANNED))
    known = {} if reference is None else dict(_numbered(reference))
    for key, op in _numbered(serial):
        like = known.get(key)
        if like is None or [len(v.shape) for v in like.results] != [len(v.shape) for v in op.results]:
            continue
        assert reference is not None
        assert like.layout is not None  # of a completed graph
        placements.setdefault(op.name, like.layout.mesh)
        for value, model in zip(op.results, like.results, strict=True):
            attr = reference.attrs[model.name]
            attrs.setdefault(value.name, DistAttr(attr.mesh, ShardSpec(attr.spec.dims), _PLANNED))
    pinned = replace(serial, attrs=attrs, placements=placements, micro_batches=training.micro_batches)
    context = PassContext(mesh=plan.stages[0].mesh)
    completed: Graph = run_passes(pinned, ("complete",), context, verified=False)
    return serial, completed


def reference_of(training: Training, plan: Plan) -> Graph | None:
    """The planned training program, completed, seen from another program of the same engine.

    Returns:
        None where the engine has no optimiser, and so no training program.

    Raises:
        GraphError, ShardingError: as `apply`.
    """
    recipe = training.recipe
    if recipe.optimizer is None:
        return None
    fields = _fields(recipe, plan)
    batch = replace(training, mode="train", size=plan.batch, fields=fields, layouts={}, plan=plan)
    return apply(batch, plan)[1]


def _fields(recipe: Recipe, plan: Plan) -> dict[str, Field]:
    """Fields of a batch that has the inputs of the plan: a tuple where its names are those of the model."""
    inputs = list(plan.program.inputs)
    positions = [f"{POSITION}{number}" for number in range(len(inputs))]
    names = positions if list(recipe.names(positions, "train").values()) == inputs else inputs
    return {name: _sample(text) for name, text in zip(names, plan.program.inputs.values(), strict=True)}


def _sample(text: str) -> Field:
    """Shape of a sample and dtype, from the type of a micro-batch such as "f32[8, 16]"."""
    dtype, _, dims = text.removesuffix("]").partition("[")
    return tuple(int(n) for n in dims.split(",")[1:]), dtype


def _numbered(graph: Graph) -> Iterator[tuple[tuple[str, str, int], Op]]:
    """Forward ops by module, kind and number among those of this kind in this module."""
    counts: dict[tuple[str, str], int] = {}
    for op in graph.ops:
        if op.role == "forward" and op.kind not in ("param", "state", "constant"):
            key = op.scope, op.kind
            counts[key] = counts.get(key, -1) + 1
            yield (*key, counts[key]), op
