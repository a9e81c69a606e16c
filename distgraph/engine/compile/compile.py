"""From a recipe to a compiled program: trace, complete, reshard, place the ranks, lower, cut into tasks.

The passes are those of the strategy's pipeline; the graph after each is dumped where that is asked for.
"""

from __future__ import annotations

from dataclasses import replace

from distgraph.engine.compile.compile_request import Training
from distgraph.engine.compile.derived_programs import follow_plan, reference_of
from distgraph.engine.compile.dump import dump_directory, dump_pass, dump_stage, write
from distgraph.engine.compile.plan_apply import apply, devices_of
from distgraph.engine.compile.rank_placement import place_ranks
from distgraph.engine.compile.strategy_passes import complete_with, strategy_pipeline
from distgraph.errors import ResourceError
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.resources import Cluster, RankMapping
from distgraph.resources.mesh_communication import MeshCommunication
from distgraph.runtime.execute.process_group import is_chief
from distgraph.runtime.program.build import Build, reshard_program


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
    strategy, watch = training.recipe.strategy, dump_pass(training.mode)
    if cluster is not None:
        check_cluster(completed.meshes, cluster)
    program = reshard_program(completed, training.micro_batches, strategy_pipeline(strategy), watch)
    if cluster is None:
        mapping, built = None, program.build(strategy.schedule, watch=watch)
    else:
        mapping = place_ranks(program, cluster, devices_of(training.plan, cluster))
        price = MeshCommunication(cluster, mapping.devices).price
        built = program.build(strategy.schedule, price, watch)
    if dump_directory() is not None and is_chief():
        write(f"{training.mode}.schedule.txt", built.schedule)
    return built, mapping


def complete_program(training: Training, reference: Graph | None = None) -> tuple[Graph, Graph]:
    """The serial graph of a program, and the completed one; see `compile_program`."""
    strategy, plan = training.recipe.strategy, training.plan
    if plan is None:
        serial = replace(training.trace(), micro_batches=training.micro_batches)
        return serial, complete_with(strategy, serial)
    if training.planned:
        return apply(training, plan)
    return follow_plan(training, reference or reference_of(training, plan), plan)


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
