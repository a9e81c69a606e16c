"""Searches on meshes that are given: those of annotations, or one of all devices.

*In:* an `Oracle`, a number of micro-batches. *Out:* programs with their forecasts. *Invariant:* annotations
stay, and every op runs where they and `place` put it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from distgraph.engine.compile.program_forecast import plain
from distgraph.engine.search.candidate import Realized, program, rechosen
from distgraph.engine.search.layout_costs import Oracle, Traced, solved
from distgraph.errors import DistGraphError, ResourceError, ShardingError
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.assign_meshes import place
from distgraph.passes.complete import complete
from distgraph.passes.search.intra_op.apply_layouts import assign
from distgraph.passes.search.intra_op.chosen_layouts import Layouts
from distgraph.passes.search.intra_op.formulate import Formulation, formulate
from distgraph.passes.search.modes.propagation import propagate
from distgraph.passes.search.modes.recursive import recursive
from distgraph.resources import Cluster
from distgraph.resources.units import format_bytes


def annotated_meshes(graph: Graph, cluster: Cluster) -> tuple[ProcessMesh, ...]:
    """The meshes that annotations name; none where there are no annotations.

    Raises:
        ResourceError: the cluster has fewer devices than they have ranks.
    """
    found = {attr.mesh: attr.origin.where for attr in graph.attrs.values()}
    found |= {mesh: "dg.on" for mesh in graph.placements.values() if mesh not in found}
    for mesh, where in found.items():
        needed, available = max(mesh.members) + 1, len(cluster.devices)
        if needed > available:
            raise ResourceError(
                f"{mesh} ({where}) needs {needed} devices but cluster {cluster.name} has {available}; "
                f"annotate with a smaller mesh or search for a larger cluster"
            )
    return tuple(found)


def on_annotated(
    oracle: Oracle, micro_batches: int, recompute: Sequence[int], memory_share: float
) -> Realized:
    """The best layouts on the meshes of the annotations.

    Args:
        oracle: of the program.
        micro_batches: in a step.
        recompute: numbers of layers.
        memory_share: price of a rank's whole memory, in steps of the program.

    Raises:
        ShardingError: annotations contradict each other.
        ResourceError: see `annotated_meshes`.
    """
    traced = oracle.traced(micro_batches, recompute)
    graph, meshes = traced.graph, annotated_meshes(traced.graph, oracle.cluster)
    _, homes = place(graph, meshes[0])
    placements = {op.name: homes[op.name] for op in graph.ops}
    solved = {
        mesh: _solved(oracle, traced, mesh, memory_share) for mesh in dict.fromkeys(placements.values())
    }
    layouts = {mesh: found.decode(choice) for mesh, (found, choice) in solved.items()}
    return replace(_assigned(oracle, traced, placements, layouts, "1f1b", "search"), solved=solved)


def as_annotated(oracle: Oracle, micro_batches: int) -> Realized:
    """What completion makes of the annotations."""
    traced = oracle.traced(micro_batches)
    meshes = annotated_meshes(traced.graph, oracle.cluster)
    completed = replace(complete(traced.graph, meshes[0]), micro_batches=micro_batches)
    devices = tuple(range(max(rank for mesh in completed.meshes for rank in mesh.members) + 1))
    return program(oracle, completed, traced, devices, "1f1b", "annotations, completed")


def data_parallel(
    oracle: Oracle, devices: tuple[int, ...], name: str, *, hopeless: bool = False
) -> Realized | str:
    """Plain data parallelism from completion alone; or why there is none.

    Args:
        oracle: of the program.
        devices: each gets an equal share of the samples.
        name: of the program.
        hopeless: build it also where parameters and states alone are too large.
    """
    if oracle.training.size < len(devices):
        return f"the batch has {oracle.training.size} samples, fewer than {len(devices)} devices"
    traced = oracle.traced(1)
    held = sum(op.result.nbytes for op in traced.graph.sources("param", "state"))
    missing = held - min(oracle.cluster.devices[device].memory for device in devices)
    if missing > 0 and not hopeless:
        return (
            f"out of memory by at least {format_bytes(missing)}: every device would hold all parameters and "
            f"states"
        )
    mesh = ProcessMesh.grid(dp=len(devices))
    try:
        completed = replace(complete(plain(traced.graph, mesh), mesh), micro_batches=1)
        return program(oracle, completed, traced, devices, "1f1b", name)
    except DistGraphError as error:
        return f"there is none: {error}"


def formulated(oracle: Oracle, traced: Traced, mesh: ProcessMesh) -> Formulation:
    """The problem of laying everything out on one mesh; annotations on others do not count."""
    graph = traced.graph
    own = {name: attr for name, attr in graph.attrs.items() if attr.mesh == mesh}
    prices = oracle.prices(tuple(range(len(oracle.cluster.devices))))
    return formulate(replace(graph, attrs=own), mesh, prices, traced.layering)


def recomputed(found: Realized, recompute: Sequence[int], oracle: Oracle) -> Realized | None:
    """A program on one mesh with other layers computed again, its layouts as they are; None where these do
    not carry over."""
    ((mesh, known),) = found.solved.items()
    traced = oracle.traced(found.traced.graph.micro_batches, recompute)
    problem = formulated(oracle, traced, mesh)
    choice = oracle.carried_over(*known, problem, traced, found.traced)
    if choice is None:
        return None
    placed = replace(
        found, traced=traced, placements=dict.fromkeys((op.name for op in traced.graph.ops), mesh)
    )
    return rechosen(placed, {mesh: (problem, choice)}, oracle)


def _solved(
    oracle: Oracle, traced: Traced, mesh: ProcessMesh, memory_share: float
) -> tuple[Formulation, tuple[int, ...]]:
    """The problem of one mesh and its best choice."""
    found = formulated(oracle, traced, mesh)
    solution = solved(found.problem)
    if memory_share:
        memory = min(oracle.cluster.devices[rank].memory for rank in mesh.members)
        found = found.priced(memory_price=memory_share * solution.objective / memory)
        solution = solved(found.problem)
    if solution.choice is None:
        raise ShardingError(
            f"graph @{traced.graph.name}: no layouts on {mesh} meet all annotations "
            f"({solution.message or solution.status}); take one of them out"
        )
    return found, tuple(solution.choice)


def recursively(oracle: Oracle, micro_batches: int, most_axes: int | None = None) -> Realized:
    """Double recursion over all devices, or over the mesh of the annotations (see `recursive`)."""
    traced = oracle.traced(micro_batches)
    count = len(oracle.cluster.devices)
    meshes = annotated_meshes(traced.graph, oracle.cluster) or (ProcessMesh.grid(dp=count),)
    price = oracle.prices(tuple(range(count))).price
    mesh, layouts = recursive(traced.graph, _only(meshes, "recursive"), price, most_axes)
    placements = dict.fromkeys((op.name for op in traced.graph.ops), mesh)
    return _assigned(oracle, traced, placements, {mesh: layouts}, "1f1b", "double recursion")


def propagated(oracle: Oracle, micro_batches: int) -> Realized:
    """Sharding propagation from the annotations (see `propagation`).

    Raises:
        ShardingError: there are no annotations, or they name several meshes.
    """
    traced = oracle.traced(micro_batches)
    meshes = annotated_meshes(traced.graph, oracle.cluster)
    if not meshes:
        raise ShardingError(
            f"graph @{traced.graph.name} has no annotation to propagate from but the mode is "
            f"sharding_propagation; annotate with dg.shard_tensor, or search in mode auto"
        )
    mesh = _only(meshes, "sharding_propagation")
    price = oracle.prices(tuple(range(len(oracle.cluster.devices)))).price
    placements = dict.fromkeys((op.name for op in traced.graph.ops), mesh)
    layouts = propagate(traced.graph, mesh, price)
    return _assigned(oracle, traced, placements, {mesh: layouts}, "1f1b", "sharding propagation")


def _only(meshes: Sequence[ProcessMesh], mode: str) -> ProcessMesh:
    if len(meshes) > 1:
        raise ShardingError(
            f"the annotations name {len(meshes)} meshes but mode {mode} works on one; annotate with one "
            f'mesh, or search in mode "auto"'
        )
    return meshes[0]


def _assigned(
    oracle: Oracle,
    traced: Traced,
    placements: Mapping[str, ProcessMesh],
    layouts: Mapping[ProcessMesh, Layouts],
    schedule: str,
    origin: str,
) -> Realized:
    completed = assign(traced.graph, placements, layouts)
    completed = replace(completed, micro_batches=traced.graph.micro_batches)
    devices = tuple(range(max(rank for mesh in layouts for rank in mesh.members) + 1))
    return program(oracle, completed, traced, devices, schedule, origin, None, placements)


def fronts(oracle: Oracle, counts: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...], float]]:
    """(micro-batches, layers to compute again, price of memory), what is worth trying first."""
    for share in (0.0, 1.0):
        for micro_batches in counts:
            yield micro_batches, (), share
            if share:
                yield micro_batches, oracle.everything(micro_batches), share
