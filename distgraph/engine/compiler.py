"""From a recipe to a compiled program: trace, complete, price, build; each stage dumped where that is asked
for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distgraph.data import Field
from distgraph.engine.dump import dump_directory, dump_stage, write
from distgraph.engine.price import place_ranks, price_on
from distgraph.engine.program import Recipe
from distgraph.errors import ResourceError
from distgraph.graph import Graph
from distgraph.mesh import ProcessMesh
from distgraph.passes.arrange import arrange, latency_price
from distgraph.passes.complete import complete
from distgraph.resources import Cluster, RankMapping
from distgraph.runtime.build import Build, build
from distgraph.runtime.world import is_chief
from distgraph.spec import DistAttr


def compile_program(
    recipe: Recipe,
    mode: str,
    fields: Mapping[str, Field],
    micro_batches: int,
    layouts: Mapping[str, DistAttr],
    cluster: Cluster | None,
) -> tuple[Build, RankMapping | None]:
    """The program of one mode for batches of one size.

    Args:
        recipe: model, loss, optimiser, strategy.
        mode: train, evaluate or predict.
        fields: shape and dtype of one micro-batch.
        micro_batches: how many follow each other in a step.
        layouts: where parameters lie already.
        cluster: prices the collectives; None for bytes on the wire.

    Returns:
        the program, and where there is a cluster the device of every rank.

    Raises:
        GraphError, ShardingError: the program or its annotations do not fit.
        ResourceError: the meshes need more devices than the cluster has.
    """
    serial = recipe.trace(mode, fields, layouts)
    dump_stage(mode, "serial", serial)
    default = recipe.strategy.mesh or ProcessMesh.grid(serial=1)
    completed = lay_out(replace(serial, micro_batches=micro_batches), default, recipe.strategy.refine)
    dump_stage(mode, "completed", completed)
    policy = recipe.strategy.schedule
    if cluster is not None:
        check_cluster(completed.meshes, cluster)
    built, mapping = build(completed, micro_batches=micro_batches, policy=policy), None
    if (
        cluster is not None
    ):  # placed by what it exchanges, then its changes of layout priced where it is placed
        mapping = place_ranks(built, cluster)
        price = price_on(cluster, mapping.devices)
        built = build(completed, micro_batches=micro_batches, policy=policy, price=price)
    dump_stage(mode, "lowered", built.lowered)
    if dump_directory() is not None and is_chief():
        write(f"{mode}.schedule.txt", built.schedule)
    return built, mapping


def lay_out(serial: Graph, default: ProcessMesh, refine: str) -> Graph:
    """Complete a graph, and refine it when the strategy says so."""
    if refine == "never":
        return complete(serial, default)
    return arrange(serial, default, price=latency_price, search=refine == "always")


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
