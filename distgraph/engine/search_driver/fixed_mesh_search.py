"""Searches of layouts only, on fixed meshes: the meshes that annotations name, or one mesh of all devices.

*In:* layout costs, a number of micro-batches. *Out:* programs with their forecasts. *Invariant:* annotations
stay, and every op runs where they and `place` put it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from distgraph.engine.compile.program_forecast import with_data_parallel_inputs
from distgraph.engine.compile.rank_placement import devices_in_rank_order
from distgraph.engine.compile.zero import complete_split
from distgraph.engine.search_driver.candidate import BuiltCandidate, build_program, with_layouts
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.lower_bound import least_bytes, least_seconds
from distgraph.errors import DistGraphError, InfeasibleError, ResourceError, ShardingError
from distgraph.ir.graph import Graph
from distgraph.ir.matmul_algorithm import ATTENTION, MatmulAlgorithm
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.assign_meshes import on_meshes, on_other_meshes, place
from distgraph.passes.complete import check_op_axes
from distgraph.passes.matmul_algorithms.cluster_prices import devices_of
from distgraph.passes.pass_pipeline import run_completion
from distgraph.passes.search.intra_op.apply_layouts import assign
from distgraph.passes.search.intra_op.chosen_layouts import Layouts
from distgraph.passes.search.intra_op.formulate import Formulation, formulate
from distgraph.passes.search.intra_op.restrictions import restricted
from distgraph.passes.search.intra_op.solve_layouts import solve_problem
from distgraph.passes.search.layering.layer_sequence import layering
from distgraph.passes.search.layering.layered_graph import LayeredGraph
from distgraph.passes.search.modes import mesh2d
from distgraph.passes.search.modes.propagation import propagate
from distgraph.passes.search.modes.recursive import recursive
from distgraph.plan.decisions import Decisions
from distgraph.plan.strategy import Strategy
from distgraph.resources.units import format_bytes


def annotated_meshes(graph: Graph, layout_costs: LayoutCosts) -> tuple[ProcessMesh, ...]:
    """The meshes that annotations name; none where there are no annotations.

    Raises:
        ResourceError: the cluster has fewer devices than they have ranks, or the search may use fewer.
    """
    cluster = layout_costs.cluster
    origins = {attr.mesh: attr.origin.where for attr in graph.attrs.values()}
    origins |= {mesh: "dg.on" for mesh in graph.placements.values() if mesh not in origins}
    for mesh, where in origins.items():
        needed, available = max(mesh.members) + 1, len(layout_costs.devices)
        if available < needed <= len(cluster.devices):
            raise ResourceError(
                f"{mesh} ({where}) needs {needed} devices but devices of the search is {available}; annotate "
                f"with a smaller mesh, or let the search use more"
            )
        if needed > available:
            raise ResourceError(
                f"{mesh} ({where}) needs {needed} devices but cluster {cluster.name} has {available}; "
                f"annotate with a smaller mesh or search for a larger cluster"
            )
    return tuple(origins)


def start_graph(
    layout_costs: LayoutCosts, micro_batches: int, recompute: tuple[int, ...] = ()
) -> LayeredGraph:
    """The serial graph, with the layers recomputed that constraints name, or else those that are given."""
    layered = layout_costs.layered_graph(micro_batches)
    recompute = layout_costs.constraints.recomputed(len(layered.layers)) or recompute
    return layout_costs.layered_graph(micro_batches, recompute) if recompute else layered


def repetitions(layout_costs: LayoutCosts) -> int:
    """How often the mesh of the annotations fits on the devices; 1 where they name several meshes, or one
    that cannot be repeated."""
    meshes = annotated_meshes(layout_costs.reference_graph.graph, layout_costs)
    (mesh, *more) = meshes
    if more or sorted(mesh.members) != list(range(mesh.size)) or mesh.weights:
        return 1
    most = len(layout_costs.devices) // mesh.size
    layered = layout_costs.reference_graph
    return next(n for n in range(most, 0, -1) if n == 1 or _has_devices(layout_costs, layered, n))


def _has_devices(layout_costs: LayoutCosts, layered: LayeredGraph, count: int) -> bool:
    """Whether there are the devices that the mesh of the annotations needs, repeated `count` times."""
    try:
        _rank_devices(layout_costs, with_repeated_mesh(layered, count).graph)
    except InfeasibleError:
        return False
    return True


def _rank_devices(layout_costs: LayoutCosts, graph: Graph) -> tuple[int, ...]:
    """The device of every rank of the user's meshes, as these need it (`devices_in_rank_order`)."""
    return devices_in_rank_order(graph, layout_costs.cluster, len(layout_costs.devices))


def with_repeated_mesh(layered: LayeredGraph, count: int) -> LayeredGraph:
    """A serial graph whose annotations are on their mesh repeated `count` times; those that name axes alone
    are on the meshes of their ops."""
    if count == 1 and not layered.graph.axis_attrs:
        return layered
    meshes = dict.fromkeys([*layered.graph.meshes, *layered.graph.placements.values()])
    graph = layered.graph
    if count > 1:
        graph = on_other_meshes(graph, {mesh: mesh.repeated(count) for mesh in meshes})
    graph = on_meshes(graph) if meshes else graph
    return replace(layered, graph=graph, layering=layering(graph, layered.layers), repeats=count)


def best_on_given_meshes(
    layout_costs: LayoutCosts,
    micro_batches: int,
    recompute: Sequence[int],
    memory_share: float,
    repeats: int = 1,
) -> BuiltCandidate:
    """The best layouts on the meshes of the annotations.

    Args:
        layout_costs: of the program.
        micro_batches: in a step.
        recompute: numbers of the layers that are recomputed.
        memory_share: memory multiplier: what a rank's whole memory costs, in steps of the program.
        repeats: how often the mesh of the annotations is repeated along one more axis.

    Raises:
        ShardingError: annotations contradict each other.
        ResourceError: see `annotated_meshes`.
    """
    layered = with_repeated_mesh(layout_costs.layered_graph(micro_batches, recompute), repeats)
    graph, meshes = layered.graph, annotated_meshes(layered.graph, layout_costs)
    _, homes = place(graph, meshes[0])
    placements = {op.name: homes[op.name] for op in graph.ops}
    solved = {
        mesh: _solved(layout_costs, layered, mesh, memory_share)
        for mesh in dict.fromkeys(placements.values())
    }
    layouts = {mesh: formulation.decode(choice) for mesh, (formulation, choice) in solved.items()}
    return replace(_assigned(layout_costs, layered, placements, layouts, "search"), solved=solved)


def completed_annotations(layout_costs: LayoutCosts, micro_batches: int) -> BuiltCandidate:
    """The program that completion makes of the annotations."""
    layered = start_graph(layout_costs, micro_batches)
    meshes = annotated_meshes(layered.graph, layout_costs)
    completed = replace(run_completion(layered.graph, meshes[0]), micro_batches=micro_batches)
    devices = _devices_of_meshes(layout_costs, layered.graph, completed.meshes)
    return build_program(layout_costs, completed, layered, devices, "annotations, completed")


def data_parallel(
    layout_costs: LayoutCosts,
    devices: tuple[int, ...],
    name: str,
    *,
    hopeless: bool = False,
    decisions: Decisions | None = None,
) -> BuiltCandidate | str:
    """Data parallelism from completion alone; or why there is none.

    Args:
        layout_costs: of the program.
        devices: each gets an equal share of the samples.
        name: of the program.
        hopeless: build it also where parameters and states alone are too large.
        decisions: about the program; None for those of constraints, without ZeRO.
    """
    decisions = decisions or layout_costs.constraints.start
    micro_batches = decisions.micro_batches
    samples, what = (
        layout_costs.request.size // micro_batches,
        "a micro-batch" if micro_batches > 1 else "the batch",
    )
    if samples < len(devices):
        return f"{what} has {samples} samples, fewer than {len(devices)} devices"
    layered = start_graph(layout_costs, micro_batches, decisions.recompute)
    whole = {0: ("param", "state"), 1: ("param",), 2: ("param",)}.get(decisions.zero, ())
    if not hopeless and (reason := _too_large(layout_costs, layered.graph, devices, whole)):
        return reason
    mesh = ProcessMesh.grid(dp=len(devices))
    try:
        serial, strategy = with_data_parallel_inputs(layered.graph, mesh), Strategy(zero=decisions.zero)
        if decisions.zero:
            completed = complete_split(strategy, serial, lambda graph: run_completion(graph, mesh))
        else:
            completed = run_completion(serial, mesh)
        completed = replace(completed, micro_batches=layered.graph.micro_batches)
        return build_program(layout_costs, completed, layered, devices, name, decisions=decisions)
    except DistGraphError as error:
        return f"there is none: {error}"


def _too_large(layout_costs: LayoutCosts, graph: Graph, devices: Sequence[int], whole: Sequence[str]) -> str:
    """Why sources of some kinds cannot be held whole by every device; empty where they can."""
    held = sum(op.result.nbytes for op in graph.sources(*whole)) if whole else 0
    missing = held - min(layout_costs.cluster.devices[device].memory for device in devices)
    if missing <= 0:
        return ""
    what = "parameters and states" if "state" in whole else "parameters"
    return f"out of memory by at least {format_bytes(missing)}: every device would hold all {what}"


def context_parallel(layout_costs: LayoutCosts, ranks: int, name: str) -> BuiltCandidate | str:
    """Sequences split over some ranks, attention by rings, beside data parallelism; or why there is none.

    Parameters are repeated; everything else follows by completion.
    """
    decisions = layout_costs.constraints.start
    layered = start_graph(layout_costs, decisions.micro_batches)
    devices = layout_costs.devices
    if reason := _too_large(layout_costs, layered.graph, devices, ("param", "state")):
        return reason
    mesh = ProcessMesh.grid(dp=len(devices) // ranks, sp=ranks)
    graph = replace(layered.graph, attrs={}, axis_attrs={}, op_axes={})
    attention = [op for op in graph.ops if op.kind in ATTENTION and op.role == "forward"]
    length = max((op.operands[0].shape[2] for op in attention), default=0)
    rings = {op.name: MatmulAlgorithm("ring") for op in attention if op.operands[0].shape[2] == length}
    serial = replace(with_data_parallel_inputs(graph, mesh, length), algorithms=rings)
    try:
        completed = replace(run_completion(serial, mesh), micro_batches=graph.micro_batches)
        return build_program(layout_costs, completed, layered, devices, name)
    except DistGraphError as error:
        return f"there is none: {error}"


def formulate_on_mesh(layout_costs: LayoutCosts, layered: LayeredGraph, mesh: ProcessMesh) -> Formulation:
    """The problem of laying everything out on one mesh; annotations on others do not count."""
    graph = layered.graph
    on_mesh = {name: attr for name, attr in graph.attrs.items() if attr.mesh == mesh}
    ops = {name: axes for name, axes in graph.op_axes.items() if graph.placements.get(name, mesh) == mesh}
    cost_model = layout_costs.cost_model(_rank_devices(layout_costs, graph))
    graph = replace(graph, attrs=on_mesh, op_axes=ops)
    return formulate(graph, mesh, cost_model, layered.layering)


def with_decisions(
    program: BuiltCandidate, decisions: Decisions, layout_costs: LayoutCosts, *, solve: bool = False
) -> BuiltCandidate | None:
    """A program on one mesh with other micro-batches or other layers recomputed, its layouts as they are.

    With `solve`, layouts that do not carry over are solved.

    Returns:
        None where layouts do not carry over, or there are several meshes.
    """
    if len(program.solved) != 1:
        return None
    ((mesh, (formulation, layouts)),) = program.solved.items()
    layered = layout_costs.layered_graph(decisions.micro_batches, decisions.recompute)
    layered = _on_mesh(with_repeated_mesh(layered, program.layered.repeats), mesh)
    problem = formulate_on_mesh(layout_costs, layered, mesh)
    choice = layout_costs.carried_over(formulation, layouts, problem, layered, program.layered)
    if choice is None and solve:
        choice = solve_problem(restricted(problem, layout_costs.restriction)).choice
    if choice is None:
        return None
    placed = replace(
        program, layered=layered, placements=dict.fromkeys((op.name for op in layered.graph.ops), mesh)
    )
    return with_layouts(placed, {mesh: (problem, tuple(choice))}, layout_costs)


def _solved(
    layout_costs: LayoutCosts, layered: LayeredGraph, mesh: ProcessMesh, memory_share: float
) -> tuple[Formulation, tuple[int, ...]]:
    """The problem of one mesh and its best choice."""
    formulation = formulate_on_mesh(layout_costs, layered, mesh)
    restriction = layout_costs.restriction
    solution = solve_problem(restricted(formulation, restriction))
    if memory_share:
        devices = _rank_devices(layout_costs, layered.graph)
        memory = min(layout_costs.cluster.devices[devices[rank]].memory for rank in mesh.members)
        formulation = formulation.with_memory(memory_multiplier=memory_share * solution.objective / memory)
        solution = solve_problem(restricted(formulation, restriction))
    if solution.choice is None:
        raise ShardingError(
            f"graph @{layered.graph.name}: no layouts on {mesh} meet all annotations "
            f"({solution.message or solution.status}); take one of them out"
        )
    return formulation, tuple(solution.choice)


def double_recursion(
    layout_costs: LayoutCosts, micro_batches: int, most_axes: int | None = None
) -> BuiltCandidate:
    """Double recursion over all devices, or over the mesh of the annotations (see `recursive`)."""
    layered = start_graph(layout_costs, micro_batches)
    count = len(layout_costs.devices)
    meshes = annotated_meshes(layered.graph, layout_costs) or (ProcessMesh.grid(dp=count),)
    price = layout_costs.cost_model(_rank_devices(layout_costs, layered.graph)[:count]).price
    layered = _on_mesh(layered, _only(meshes, "recursive"))
    mesh, layouts = recursive(layered.graph, _only(meshes, "recursive"), price, most_axes)
    placements = dict.fromkeys((op.name for op in layered.graph.ops), mesh)
    return _assigned(layout_costs, layered, placements, {mesh: layouts}, "double recursion")


def mesh2d_programs(
    layout_costs: LayoutCosts, micro_batches: int, algorithm: str, most: int
) -> Iterator[tuple[mesh2d.TunedMesh, Callable[[], BuiltCandidate]]]:
    """Two-dimensional tensor parallelism on the mesh of the annotations, or on all devices in the
    `most` shapes with the best estimates.

    Yields:
        the tuner's estimate for the products of a micro-batch, and a function that builds the program.

    Raises:
        ShardingError: annotations name several meshes, or one without two or three axes; no mesh divides a
            layer.
        InfeasibleError: the algorithm fits no mesh.
    """
    layered = start_graph(layout_costs, micro_batches)
    cluster = layout_costs.cluster
    annotated = annotated_meshes(layered.graph, layout_costs)
    shapes = mesh2d.shapes(cluster, len(layout_costs.devices))
    meshes = [_checked_axes(_only(annotated, "mesh2d"))] if annotated else shapes
    for tuned in mesh2d.layouts_by_tuner(layered.graph, meshes, cluster, algorithm)[:most]:
        yield tuned, partial(_mesh2d_program, layout_costs, layered, tuned)


def mesh2d_where_it_gains(
    layout_costs: LayoutCosts, micro_batches: int, seconds: float, most: int
) -> list[Callable[[], BuiltCandidate]]:
    """Programs of two-dimensional tensor parallelism that may be fastest by the tuner's model, best first.

    Their products, and what all other ops take at least, are less than `seconds`; there are at most `most`.
    None where no program on one mesh has enough memory.
    """
    if len(layout_costs.pools) > 1:
        return []
    layered, count = start_graph(layout_costs, micro_batches), len(layout_costs.devices)
    memory = min(layout_costs.cluster.devices[device].memory for device in layout_costs.devices)
    if not layered.recompute and least_bytes(layered.fold, count) > memory:
        return []
    try:
        programs = list(mesh2d_programs(layout_costs, micro_batches, "meshslice", most))
    except (ShardingError, InfeasibleError):  # no mesh of two axes divides the program
        return []
    builds = []
    for tuned, build in programs:
        rest = least_seconds(layered.fold, layout_costs.cluster, besides=tuned.graph.algorithms)
        if tuned.seconds * micro_batches + rest < seconds:
            builds.append(build)
    return builds


def _mesh2d_program(
    layout_costs: LayoutCosts, layered: LayeredGraph, tuned: mesh2d.TunedMesh
) -> BuiltCandidate:
    graph, mesh = tuned.graph, tuned.mesh
    completed = replace(run_completion(graph, mesh), micro_batches=layered.graph.micro_batches)
    whole = mesh.members == tuple(range(mesh.size))
    given = _devices_of_meshes(layout_costs, layered.graph, [mesh])
    in_order = given == tuple(range(mesh.size))
    devices = devices_of(layout_costs.cluster, mesh.shape) if whole and in_order else given
    names = {algorithm.name for algorithm in graph.algorithms.values()}
    origin = f"mesh2d: {' x '.join(map(str, mesh.shape))}, {', '.join(sorted(names))}"
    return build_program(layout_costs, completed, layered, devices, origin)


def _checked_axes(mesh: ProcessMesh) -> ProcessMesh:
    if len(mesh.axes) not in (2, 3):
        raise ShardingError(
            f"mode mesh2d needs a mesh of two axes, and maybe one for data before them, but the annotations "
            f"name {mesh}, which has {len(mesh.axes)}; annotate with one such as "
            f"ProcessMesh.grid(dp=2, rows=2, cols=4)"
        )
    return mesh


def sharding_propagation(layout_costs: LayoutCosts, micro_batches: int) -> BuiltCandidate:
    """Sharding propagation from the annotations (see `propagation`).

    Raises:
        ShardingError: there are no annotations, or they name several meshes.
    """
    layered = start_graph(layout_costs, micro_batches)
    meshes = annotated_meshes(layered.graph, layout_costs)
    if not meshes:
        raise ShardingError(
            f"graph @{layered.graph.name} has no annotation to propagate from but the mode is "
            f"sharding_propagation; annotate with dg.shard_tensor, or search in mode auto"
        )
    mesh = _only(meshes, "sharding_propagation")
    layered = _on_mesh(layered, mesh)
    price = layout_costs.cost_model(_rank_devices(layout_costs, layered.graph)).price
    placements = dict.fromkeys((op.name for op in layered.graph.ops), mesh)
    layouts = propagate(layered.graph, mesh, price)
    return _assigned(layout_costs, layered, placements, {mesh: layouts}, "sharding propagation")


def _on_mesh(layered: LayeredGraph, mesh: ProcessMesh) -> LayeredGraph:
    """A serial graph whose annotations that name axes alone are on a mesh."""
    if not layered.graph.axis_attrs:
        return layered
    graph = on_meshes(layered.graph, mesh)
    return replace(layered, graph=graph, layering=layering(graph, layered.layers))


def _only(meshes: Sequence[ProcessMesh], mode: str) -> ProcessMesh:
    if len(meshes) > 1:
        raise ShardingError(
            f"the annotations name {len(meshes)} meshes but mode {mode} works on one; annotate with one "
            f'mesh, or search in mode "auto"'
        )
    return meshes[0]


def _assigned(
    layout_costs: LayoutCosts,
    layered: LayeredGraph,
    placements: Mapping[str, ProcessMesh],
    layouts: Mapping[ProcessMesh, Layouts],
    origin: str,
) -> BuiltCandidate:
    completed = assign(layered.graph, placements, layouts)
    check_op_axes(replace(completed, op_axes=layered.graph.op_axes))
    completed = replace(completed, micro_batches=layered.graph.micro_batches)
    devices = _devices_of_meshes(layout_costs, layered.graph, layouts)
    return build_program(layout_costs, completed, layered, devices, origin, None, placements)


def _devices_of_meshes(
    layout_costs: LayoutCosts, graph: Graph, meshes: Iterable[ProcessMesh]
) -> tuple[int, ...]:
    """The devices of ranks 0 to the last one of some meshes."""
    return _rank_devices(layout_costs, graph)[: 1 + max(rank for mesh in meshes for rank in mesh.members)]


def given_mesh_trials(
    layout_costs: LayoutCosts, counts: Sequence[int]
) -> Iterator[tuple[int, tuple[int, ...], float]]:
    """Micro-batch counts, layers to recompute and memory shares, in the order in which they are tried."""
    for share in (0.0, 1.0):
        for micro_batches in counts:
            every = layout_costs.all_layers(micro_batches)
            given = layout_costs.constraints.recomputed(len(every))
            yield micro_batches, given or (), share
            if share and given is None:
                yield micro_batches, every, share
