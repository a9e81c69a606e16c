"""Export to JAX: a PartitionSpec for every parameter, state, input and activation.

A `PartitionSpec` is a `ShardSpec` without its partial axes: for each dim the mesh axes that split it, major
to minor. The specs of parameters, states and inputs are for `jax.jit` or `jax.device_put`; those of
activations are for `jax.lax.with_sharding_constraint`, named by the module that computes them. XLA then
chooses the collectives, and where partial results are reduced.

JAX has no pipelines: each stage becomes a separate set of specs, on its own mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.plan.export.module_interface import in_order
from distgraph.plan.export.result import (
    Export,
    dims,
    header,
    listed,
    literal,
    mesh_data,
    owner,
    quoted,
    quoted_list,
    surface,
)

if TYPE_CHECKING:
    from distgraph.plan.plan import Plan

_TABLES = ("parameters", "states", "inputs", "activations")
_HEAD = """from difflib import get_close_matches

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

"""
_TAIL = '''

def sharding(spec):
    """The sharding of a spec on the mesh."""
    return NamedSharding(mesh, spec)


def constrain(name, x):
    """An activation laid out as planned; x itself where the plan leaves that to XLA.

    Raises KeyError for a name that is no activation of the plan.
    """
    if name in unconstrained:
        return x
    if name not in activations:
        near = get_close_matches(str(name), activations) or list(activations)
        raise KeyError(f"plan has no activation {name!r}; it has {', '.join(near) or 'none'}")
    return jax.lax.with_sharding_constraint(x, sharding(activations[name]))
'''


def export_jax(plan: Plan) -> Export:
    """Specs for JAX.

    Returns:
        the data {"stages": [{"mesh", "parameters", "states", "inputs", "activations"}], "micro_batches",
        "checkpoint"}, with the modules that have no spec as "unconstrained" of their stage; the source of a
        module with `mesh`, `parameters`, `states`, `inputs` and `activations` (dicts of PartitionSpec),
        `micro_batches`, `checkpoint` (modules for `jax.checkpoint`), or with `stages`, a tuple of objects
        that have the first five, where there are several.

    Raises:
        GraphError: the plan has no surface.
    """
    notes: list[str] = []
    stages = [_stage(plan, number, notes) for number in range(len(plan.stages))]
    if len(stages) > 1:
        notes.insert(
            0,
            f"JAX has no pipeline: the {len(stages)} stages are sets of specs on meshes of their own; what "
            f"passes between them is for jax.device_put, the order of micro-batches ({plan.schedule}) for "
            f"the training loop",
        )
    again = [path for path, part in surface(plan).modules.items() if part.again]
    data = {
        "program": plan.program.name,
        "micro_batches": plan.micro_batches,
        "checkpoint": again,
        "stages": stages,
    }
    return Export("jax", data, _source(plan, data, notes), tuple(notes))


def _stage(plan: Plan, number: int, notes: list[str]) -> dict[str, Any]:
    mesh, model = plan.stages[number].mesh, surface(plan)
    shapes: dict[str, tuple[int, ...]] = {name: read.shape for name, read in model.tensors.items()}
    tables: dict[str, dict[str, tuple[ShardSpec, tuple[int, ...] | None]]] = {t: {} for t in _TABLES}
    for name in in_order(plan.tensors):
        tensor = plan.tensors[name]
        if tensor.stage == number:
            table = {"param": "parameters", "state": "states", "input": "inputs"}[tensor.kind]
            shape = shapes.get(name, shapes.get(owner(name)))
            tables[table][name] = tensor.spec, shape
    pending, unconstrained = [], []
    for path, part in model.modules.items():
        if part.stage != number:
            continue
        if not part.leaves:
            unconstrained.append(path)
        elif part.leaves[0].spec.partial:
            pending.append(path)
            unconstrained.append(path)
        else:
            tables["activations"][path] = part.leaves[0].spec, part.leaves[0].shape
    if pending:
        notes.append(
            f"activations that the plan keeps as partial sums have no PartitionSpec and are left out: "
            f"{listed(pending)}; XLA decides where they are reduced"
        )
    uneven: dict[str, list[str]] = {}
    specs = {
        table: {name: dims(_even(name, spec, shape, mesh, uneven)) for name, (spec, shape) in entries.items()}
        for table, entries in tables.items()
    }
    notes += [
        f"{what} and is kept whole; pad it to split it: {listed(names)}" for what, names in uneven.items()
    ]
    if mesh.weights:
        notes.append(
            f"ranks share dims unevenly, by the weights of mesh {mesh.described}; a JAX array has shards of "
            f"one size: every rank gets as much"
        )
    return {"mesh": mesh_data(mesh), **specs, "unconstrained": unconstrained}


def _even(
    name: str, spec: ShardSpec, shape: tuple[int, ...] | None, mesh: ProcessMesh, uneven: dict[str, list[str]]
) -> ShardSpec:
    """The spec with dims left whole that do not divide evenly: a JAX array has shards of one size."""
    if shape is None or len(shape) != len(spec.dims):
        return spec.without_partial()
    whole = [d for d, size in enumerate(shape) if size % mesh.count(spec.dims[d])]
    for d in whole:
        parts, axes = mesh.count(spec.dims[d]), "*".join(spec.dims[d])
        what = f"dim {d} of length {shape[d]} does not divide into {parts} equal parts over {axes}"
        uneven.setdefault(what, []).append(name)
    return ShardSpec(tuple(() if d in whole else axes for d, axes in enumerate(spec.dims)))


def _source(plan: Plan, data: Mapping[str, Any], notes: list[str]) -> str:
    several = len(data["stages"]) > 1
    parts = [header(plan, "Shardings", notes), _HEAD]
    if several:
        parts.insert(1, "from types import SimpleNamespace\n")
        stages = "".join(_namespace(stage) for stage in data["stages"])
        parts.append(f"stages = (\n{stages})\n")
    else:
        (stage,) = data["stages"]
        parts.append(f"mesh = {_mesh(stage['mesh'])}\n")
        parts += [literal(table, _specs(stage[table])) + "\n" for table in _TABLES]
        parts.append(f"unconstrained = {quoted_list(stage['unconstrained'])}\n")
    parts.append(f"micro_batches = {data['micro_batches']}\ncheckpoint = {quoted_list(data['checkpoint'])}\n")
    if not several:
        parts.append(_TAIL)
    return "".join(parts)


def _namespace(stage: Mapping[str, Any]) -> str:
    tables = "".join(
        f"        {literal(table, _specs(stage[table]), ' ' * 8).replace(' = ', '=', 1)},\n"
        for table in _TABLES
    )
    return f"    SimpleNamespace(\n        mesh={_mesh(stage['mesh'])},\n{tables}    ),\n"


def _mesh(mesh: Mapping[str, Any]) -> str:
    axes = ", ".join(map(quoted, mesh["axes"]))
    comma = "," * (len(mesh["axes"]) == 1)
    return f"Mesh(np.asarray(jax.devices())[np.array({mesh['ranks']})], ({axes}{comma}))"


def _specs(table: Mapping[str, list[Any]]) -> list[tuple[str, str]]:
    return [(name, f"P({', '.join(map(_entry, spec))})") for name, spec in table.items()]


def _entry(dim: Any) -> str:
    if isinstance(dim, list):
        return f"({', '.join(map(quoted, dim))})"
    return "None" if dim is None else quoted(dim)
