"""From a recipe to a compiled program: trace, complete, price, build; each stage dumped where that is asked
for."""

from __future__ import annotations

from dataclasses import replace

from distgraph.engine.compile.compile_request import Training
from distgraph.engine.compile.derived_programs import follow_plan, reference_of
from distgraph.engine.compile.dump import dump_directory, dump_stage, write
from distgraph.engine.compile.plan_apply import apply, devices_of
from distgraph.engine.compile.rank_placement import place_ranks, placed_on
from distgraph.errors import ResourceError
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.choose_completion import arrange
from distgraph.passes.complete import complete
from distgraph.passes.layout_local_search import BUDGET
from distgraph.passes.redistribution.planner import latency_price
from distgraph.plan.strategy import Strategy
from distgraph.resources import Cluster, RankMapping
from distgraph.resources.mesh_communication import MeshCommunication
from distgraph.runtime.execute.process_group import is_chief
from distgraph.runtime.program.build import Build, build


def compile_program(
    training: Training, cluster: Cluster | None, reference: Graph | None = None
) -> tuple[Build, RankMapping | None]:
    """The program of one mode for batches of one size.

    Args:
        training: what is to be compiled.
        cluster: prices the collectives; None for bytes on the wire.
        reference: the planned training program, completed, where there is a plan and it is known already.

    Returns:
        the program, and where there is a cluster the device of every rank.

    Raises:
        GraphError, ShardingError: the program or its annotations do not fit, or not the plan.
        ResourceError: the meshes need more devices than the cluster has.
    """
    serial, completed = complete_program(training, reference)
    dump_stage(training.mode, "serial", serial)
    dump_stage(training.mode, "completed", completed)
    micro_batches, policy = training.micro_batches, training.recipe.strategy.schedule
    if cluster is not None:
        check_cluster(completed.meshes, cluster)
    built, mapping = build(completed, micro_batches=micro_batches, policy=policy), None
    if (
        cluster is not None
    ):  # placed by what it exchanges, then its changes of layout priced where it is placed
        devices = devices_of(training.plan, cluster)
        mapping = place_ranks(built, cluster) if devices is None else placed_on(built, cluster, devices)
        price = MeshCommunication(cluster, mapping.devices).price
        built = build(completed, micro_batches=micro_batches, policy=policy, price=price)
    dump_stage(training.mode, "lowered", built.lowered)
    if dump_directory() is not None and is_chief():
        write(f"{training.mode}.schedule.txt", built.schedule)
    return built, mapping


def complete_program(training: Training, reference: Graph | None = None) -> tuple[Graph, Graph]:
    """The serial graph of a program, and the completed one; see `compile_program`."""
    strategy, plan = training.recipe.strategy, training.plan
    if plan is None:
        serial = replace(training.trace(), micro_batches=training.micro_batches)
        return serial, lay_out(serial, default_mesh(strategy), strategy.refine, strategy.refine_budget)
    if training.planned:
        return apply(training, plan)
    return follow_plan(training, reference or reference_of(training, plan), plan)


def default_mesh(strategy: Strategy) -> ProcessMesh:
    """The mesh of everything that no annotation places: that of the strategy, or else one rank."""
    return strategy.mesh or ProcessMesh.grid(serial=1)


def lay_out(serial: Graph, default: ProcessMesh, refine: str, budget: int | None = None) -> Graph:
    """Complete a graph, and refine it when the strategy says so, for as much work as the budget allows."""
    if refine == "never":
        return complete(serial, default)
    search = refine == "always"
    return arrange(serial, default, price=latency_price, search=search, budget=budget or BUDGET)


def check_cluster(meshes: tuple[ProcessMesh, ...], cluster: Cluster) -> None:
    """Raises ResourceError when a mesh has more ranks, or higher ones, than the cluster has devices."""
    for mesh in meshes:
        needed = max(mesh.members) + 1
        if needed > len(cluster.devices):
            shape = " x ".join(f"{axis}={size}" for axis, size in mesh.sizes.items())
            raise ResourceError(
                f"mesh {shape} needs {needed} devices but cluster {cluster.name} has "
                f"{len(cluster.devices)}; use a smaller "
                "mesh or another resource file"
            )
