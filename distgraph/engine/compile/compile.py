"""Compiles a program: trace, complete, reshard, place the ranks on devices, lower, split into tasks.

The passes are those of the strategy's pipeline; with DISTGRAPH_DUMP the graph after each is written to a
file.
"""

from __future__ import annotations

from dataclasses import replace

from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.derived_programs import follow_plan, reference_of
from distgraph.engine.compile.dump import dump_directory, dump_pass, dump_stage, write
from distgraph.engine.compile.plan_apply import apply_plan, devices_of
from distgraph.engine.compile.program_warnings import (
    warn_split_annotations,
    warn_unaveraged_loss,
    warn_unplaced_boundary,
)
from distgraph.engine.compile.rank_placement import needed_types, place_ranks
from distgraph.engine.compile.recomputed_layers import recomputed_program
from distgraph.engine.compile.strategy_passes import complete_with, strategy_pipeline
from distgraph.engine.compile.zero import SPLIT_PARAMETERS
from distgraph.errors import ResourceError
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.communication.narrow_gradients import check_narrowed
from distgraph.resources import Cluster, RankMapping
from distgraph.resources.mesh_communication import MeshCommunication
from distgraph.runtime.execute.process_group import is_chief
from distgraph.runtime.program.build import Build, reshard_program


def compile_program(
    request: CompileRequest, cluster: Cluster | None, reference: Graph | None = None
) -> tuple[Build, RankMapping | None]:
    """The program of one mode for batches of one size.

    Args:
        request: the program to compile.
        cluster: gives the costs of collectives; without one the bytes that are sent count.
        reference: the completed training program of the plan, if the caller has it.

    Returns:
        The program, and the device of every rank (None without a cluster).

    Raises:
        GraphError, ShardingError: the program, its annotations or its plan do not fit together.
        ResourceError: the meshes need more devices than the cluster has.
    """
    warn_unaveraged_loss(request)
    serial, completed = complete_program(request, reference)
    dump_stage(request.mode, "serial", serial)
    dump_stage(request.mode, "completed", completed)
    strategy, watch = request.training_spec.strategy, dump_pass(request.mode)
    if cluster is not None:
        check_cluster(completed.meshes, cluster)
    program = reshard_program(completed, request.micro_batches, strategy_pipeline(strategy), watch)
    if cluster is None:
        mapping, built = None, program.build(strategy.start.schedule, watch=watch)
    else:
        mapping = place_ranks(program, serial, cluster, devices_of(request.plan, cluster), strategy.device)
        price = MeshCommunication(cluster, mapping.devices).price
        built = program.build(strategy.start.schedule, price, watch)
    if strategy.gradient_precision is not None and request.plan is None:
        check_narrowed(built.lowered)
    if dump_directory() is not None and is_chief():
        write(f"{request.mode}.schedule.txt", built.schedule)
    return replace(built, device_types=needed_types(serial, built.lowered)), mapping


def complete_program(request: CompileRequest, reference: Graph | None = None) -> tuple[Graph, Graph]:
    """The serial and the completed graph of a program; see `compile_program`."""
    strategy, plan = request.training_spec.strategy, request.plan
    if plan is None:
        serial = replace(recomputed_program(request).graph, micro_batches=request.micro_batches)
        if request.mode == "generate" and strategy.split < SPLIT_PARAMETERS:
            strategy = replace(strategy, zero=None)  # its caches are no states of an optimiser
        warn_unplaced_boundary(request, serial)
        completed = complete_with(strategy, serial)
        warn_split_annotations(request, serial, completed)
        return serial, completed
    if request.planned:
        return apply_plan(request, plan)
    return follow_plan(request, reference or reference_of(request, plan), plan)


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
